"""Scripts: each is named somewhere and what it imports from the package is there."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


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
    unnamed = [file.name for file in SCRIPTS.glob("*.*") if file.stem not in texts]
    assert not unnamed, f"nobody would find {unnamed}"
