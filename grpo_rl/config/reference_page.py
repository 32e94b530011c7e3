"""The reference page of all keys: `python -m grpo_rl.config.reference_page > docs/configuration.md`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from functools import cache

from grpo_rl.config.convert import show
from grpo_rl.config.schema import tree
from grpo_rl.config.schema.fields import annotations_of, kind_of
from grpo_rl.config.schema.tree import Config

_INTRODUCTION = """\
# Configuration

Generated from `grpo_rl/config/schema/*.py` by `python -m grpo_rl.config.reference_page > docs/configuration.md`.

A key is set on the command line (`trainer.save_freq=10`) or in a recipe, which is a YAML file with the same
keys (`recipe=arithmetic/grpo`, or `recipe=path/to/my.yaml`). Later ones win: defaults, the recipe, the command
line. `~trainer.save_freq` goes back to the default, `${trainer.project_name}` is the value
of another key, `${oc.env:NAME}` that of an environment variable (which is not written into the run's folder).
A recipe builds on another with `defaults: [/recipe/arithmetic/grpo]`.

A relative path on the command line starts at the current folder. In a recipe file that you name
(`recipe=./my.yaml`) paths of data, models, rewards, losses and templates start at the file's own folder, so that it
means the same from anywhere; `trainer.default_local_dir`, where runs are made, starts at the current folder always.
In the package's own recipes paths such as `data/gsm8k/train.parquet` start at the current folder. The `config.yaml`
of a run has absolute ones.

Keys and meanings are verl's. A key that is not here is refused, with the nearest ones. A key of verl's that has no
meaning here is refused with what to use instead where it changes what is learned; where it bears on speed, memory
or logs only, it is taken, and the plan has a line for it. A setting that another one switches off is refused, or,
where people set it by habit (sizes of passes that do not exist), named in the plan.
`--cfg` prints the whole configuration, `trainer.dry_run=true` what a run would do.
"""


def reference() -> str:
    """Return the page as Markdown: a table per group, one row per key with its values, default and meaning."""
    tables = [_table(prefix, section) for prefix, section in _groups(Config, "") if _own_keys(section)]
    return "\n".join([_INTRODUCTION, *tables])


def _groups(section: type, prefix: str) -> Iterator[tuple[str, type]]:
    """Yield each group of keys with its dotted prefix, outer ones first."""
    yield prefix, section
    for name, annotation in annotations_of(section).items():
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from _groups(annotation, f"{prefix}{name}.")


def _own_keys(section: type) -> list[str]:
    return [name for name, annotation in annotations_of(section).items() if not dataclasses.is_dataclass(annotation)]


def _table(prefix: str, section: type) -> str:
    defaults = section()
    lines = [f"## {prefix[:-1]}\n", "| Key | Takes | Default | Meaning |", "|---|---|---|---|"]
    for name in _own_keys(section):
        takes = kind_of(annotations_of(section)[name]).describe()
        default = getattr(defaults, name)
        shown = f"`{show(default)}`" if default != "" else ""
        cells = (f"`{name}`", takes, shown, meanings()[section.__name__][name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


@cache
def meanings() -> dict[str, dict[str, str]]:
    """Return the doc string under each field, by class and field, on one line."""
    found: dict[str, dict[str, str]] = {}
    modules = {sys.modules[section.__module__] for name, section in vars(tree).items() if name.endswith("Config")}
    nodes = [node for module in modules for node in ast.parse(inspect.getsource(module)).body]
    # What a class inherits has to be found before it.
    for node in sorted(nodes, key=lambda node: isinstance(node, ast.ClassDef) and bool(node.bases)):
        if isinstance(node, ast.ClassDef):
            inherited = [found[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in found]
            found[node.name] = {name: text for group in (*inherited, dict(_documented(node))) for name, text in group.items()}
    return found


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        yield statement.target.id, text


if __name__ == "__main__":
    print(reference(), end="")
