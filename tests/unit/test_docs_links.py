"""The documents: links and anchors that lead somewhere, an index that names all, and the page of the Python interface."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import grpo_rl

ROOT = Path(grpo_rl.__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(path for folder in ("docs", "recipes", "examples") for path in (ROOT / folder).rglob("*.md"))]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_python_interface_is_what_the_docstrings_say() -> None:
    api = script("write_api_page")
    assert (ROOT / "docs/api.md").read_text() == api.page(), "python scripts/write_api_page.py"
    assert set(grpo_rl.__all__) - {"__version__"} <= set(re.findall(r"### `grpo_rl\.(\w+)", api.page()))


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "code", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_of_every_page_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", without_code(page)):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            place = (page.parent / target).resolve() if target else page
            if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


def test_the_index_names_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name}" not in index
    ] == []
