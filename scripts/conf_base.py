"""Writes conf/base, every key with default and meaning: `python scripts/conf_base.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from grpo_rl.config import recipes
from grpo_rl.config.schema import tree
from grpo_rl.config.schema.fields import annotations_of, kind_of, leaves
from grpo_rl.config.schema.tree import Config

_COLUMNS = 120
_HEADER = """\
# @package _global_
# Generated from {source} by `python scripts/conf_base.py`.
# Defaults of a team belong into conf/config.yaml. Below each meaning: the key, and the values that it takes.
"""


def base_files() -> dict[str, str]:
    return {f"{name}.yaml": _file(name, section) for name, section in annotations_of(Config).items()}


def _file(name: str, section: type) -> str:
    source = Path(inspect.getfile(section)).relative_to(Path(tree.__file__).parents[3])
    return "\n".join([_HEADER.format(source=source) + f"{name}:", *_lines(section, f"{name}.", "  ")]) + "\n"


def _lines(section: type, prefix: str, indent: str) -> Iterator[str]:
    for name, annotation in annotations_of(section).items():
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield f"{indent}{name}:"
            yield from _lines(annotation, f"{prefix}{name}.", f"{indent}  ")
            continue
        key = f"{prefix}{name}"
        for text in (meanings()[section.__name__][name], f"{key}: {kind_of(annotation).describe()}"):
            yield from textwrap.wrap(
                text, _COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
            )
        yield f"{indent}{_entry(name, leaves()[key].default)}"


def _entry(name: str, value: object) -> str:
    if isinstance(value, list | dict):
        return f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()}"
    return yaml.safe_dump({name: value}, width=10_000, allow_unicode=True).strip()


@cache
def meanings() -> dict[str, dict[str, str]]:
    """Return the docstring under each field, on one line, by class and field."""
    texts: dict[str, dict[str, str]] = {}
    modules = {sys.modules[section.__module__] for name, section in vars(tree).items() if name.endswith("Config")}
    nodes = [node for module in modules for node in ast.parse(inspect.getsource(module)).body]
    # Base classes first.
    for node in sorted(nodes, key=lambda node: isinstance(node, ast.ClassDef) and bool(node.bases)):
        if isinstance(node, ast.ClassDef):
            inherited = [texts[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in texts]
            texts[node.name] = {name: text for group in (*inherited, dict(_documented(node))) for name, text in group.items()}
    return texts


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        yield statement.target.id, text


def main() -> None:
    folder = recipes.conf() / "base"
    folder.mkdir(exist_ok=True)
    files = base_files()
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
