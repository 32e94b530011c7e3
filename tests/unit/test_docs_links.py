"""The documents: links and anchors that lead somewhere, an index that names all, and the page of the Python interface."""

from __future__ import annotations

import re
from pathlib import Path

import grpo_rl
from grpo_rl.errors import EXIT_CODES

ROOT = Path(grpo_rl.__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(path for folder in ("docs", "recipes", "examples") for path in (ROOT / folder).rglob("*.md"))]


def test_the_page_of_the_python_interface_has_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text()
    public = [f"grpo_rl.{name}" for name in grpo_rl.__all__ if not name.startswith("_")]
    public += [name for name in vars(grpo_rl.Run) if not name.startswith("_")]
    assert [name for name in public if f"`{name}" not in page] == []


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


def test_the_page_of_operations_has_every_exit_code_with_its_meaning() -> None:
    section = (ROOT / "docs/operations.md").read_text().split("## Exit codes\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert rows[2:] == [[str(code), *texts] for code, texts in EXIT_CODES.items()]
