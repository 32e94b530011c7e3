"""Documents whose links lead somewhere and whose lists are whole, and scripts that somebody names and that import what is there."""

from __future__ import annotations

import ast
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


# ---- scripts -----------------------------------------------------------------------------------------------------


def names_in(source: Path) -> set[str]:
    """Return what a module defines or imports, whatever the place."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom) and "*" in found:
                found |= names_in((ROOT / str(node.module).replace(".", "/")).with_suffix(".py")) - {"*"}
    return found


def test_what_scripts_examples_and_recipes_import_from_the_package_is_there() -> None:
    lacking = []
    for path in sorted(file for folder in ("scripts", "examples", "recipes") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("grpo_rl"):
                continue
            place = ROOT / str(node.module).replace(".", "/")
            module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            inside = names_in(module) if module.is_file() else set()
            wanted = {alias.name for alias in node.names if not (place / alias.name).with_suffix(".py").is_file()}
            lacking += [
                f"{path.name}: {node.module} has no {name}" for name in sorted(wanted - inside) if not (place / name).is_dir()
            ]
    assert not lacking, lacking


def test_every_script_is_named_by_a_document_or_a_test() -> None:
    readers = [*ROOT.glob("*.md"), *(ROOT / "scripts").glob("*.sh"), ROOT / "pyproject.toml"]
    readers += [file for folder in ("docs", "recipes", "tests", "docker") for file in (ROOT / folder).rglob("*.*")]
    texts = "\n".join(
        file.read_text(errors="ignore") for file in readers if file.suffix in (".md", ".py", ".sh", ".toml", ".cpu")
    )
    unnamed = [file.name for file in (ROOT / "scripts").glob("*.*") if file.stem not in texts]
    assert not unnamed, f"nobody would find {unnamed}"


def test_the_walkthrough_names_what_is_in_its_files_and_their_lines() -> None:
    page = (ROOT / "docs/walkthrough.md").read_text()
    table = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| [`")]
    sources = [[(ROOT / "docs" / target).read_text() for target in re.findall(r"\]\((\S+?\.py)\)", cell)] for cell, _ in table]
    assert len(table) == 6
    for texts, (_, said) in zip(sources, table, strict=True):
        counts = re.findall(r"^ (\d+)(?: and (\d+))? $", said)
        for text, count in zip(texts, counts[0] if counts else (), strict=False):
            assert abs(len(text.splitlines()) - int(count)) <= 0.1 * int(count) + 5, said
    whole = "\n".join(text for texts in sources for text in texts)
    names = re.findall(r"`(\w+(?:\.\w+)?)`", "".join(re.findall(r"^## .*$", page, flags=re.MULTILINE)))
    assert names and [name for name in names if not re.search(rf"(def|class) {name.rpartition('.')[2]}\b", whole)] == []
