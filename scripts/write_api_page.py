"""Write docs/api.md, the reference of what is used from Python, from signatures and docstrings.

python scripts/write_api_page.py            # --check: exit code 1 where the page is not what it would be
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
# The Python interface

Generated from the docstrings by `python scripts/write_api_page.py`. The names on this page are the public ones; whatever
else is imported may change. [examples/](../examples/README.md) has a script for each of them, and
[the tutorial](tutorial.md) uses them in their order; `help(grpo_rl.Run)` says what each raises. The package is typed (`py.typed`).

```python
import grpo_rl

run = grpo_rl.train(["recipe=arithmetic/grpo", "trainer.total_training_steps=20", "trainer.experiment_name=first"])
run.metrics("reward/mean").tail()
run.rollouts(20).sort_values("reward").head()
run.plot("reward/mean", "actor/kl_loss").savefig("curves.png")
```
"""
SECTIONS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "Training": ("", {"grpo_rl.api": ["train"]}),
    "Reading a run": ("", {"grpo_rl.run_folder": ["Run"]}),
    "Errors": (
        "Below it are `ConfigError`, `DataError`, `CheckpointError`, `RewardError`, `FunctionError`, `ClusterError` and "
        "`DivergedError`, and beside it `Preempted`, after a signal; [operations.md](operations.md#exit-codes) says when each is raised. "
        "`exit_code` is that of the command, `where` names step and phase, and `advice` the remedy, where there is one.",
        {"grpo_rl.errors": ["GrpoRlError"]},
    ),
    "Functions of your own": (
        "An estimator, a loss, a reward or a task is a function in a file, named `path/to/file.py:function` "
        "([CONTRIBUTING.md](../CONTRIBUTING.md#add-a-function)). These are the values that it takes and returns.",
        {
            "grpo_rl.algos.advantages.contract": ["AdvantageInput", "AdvantageOutput"],
            "grpo_rl.algos.losses.contract": ["LossInput", "TokenLoss"],
        },
    ),
}


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for title, (text, modules) in SECTIONS.items():
        parts.append(f"## {title}\n" + (f"\n{text}\n" if text else ""))
        for module, names in modules.items():
            loaded = importlib.import_module(module)
            parts += [entry(module, getattr(loaded, name)) for name in names]
    return "\n".join(parts)


def entry(module: str, thing: Any) -> str:
    """Return the section of a function or a class with its members."""
    public = f"grpo_rl.{thing.__name__}" if module in ("grpo_rl.api", "grpo_rl.run_folder") else f"{module}.{thing.__name__}"
    if inspect.isfunction(thing):
        return f"### `{public}{signature(thing)}`\n\n{text_of(thing)}\n"
    if issubclass(thing, BaseException):
        return f"### `{public}`\n\n{text_of(thing)} Exit code {thing.exit_code}.\n"
    shown = f"({', '.join(field.name for field in dataclasses.fields(thing))})" if dataclasses.is_dataclass(thing) else ""
    if not shown:
        shown = f"({', '.join(thing._fields)})" if hasattr(thing, "_fields") else signature(thing.__init__, skip_self=True)
    lines = [f"### `{public}{shown.removesuffix(' -> None')}`", "", text_of(thing), ""]
    rows = [f"| `{escaped(name)}` | {meaning} |" for name, meaning in members(thing) if meaning]
    return "\n".join([*lines, "| | |", "|---|---|", *rows, ""] if rows else lines)


def members(thing: type) -> Iterator[tuple[str, str]]:
    """Yield the fields, properties and methods of a class with their docstrings on one line, in the order of the source."""
    source = ast.parse(inspect.getsource(thing).lstrip()).body[0]
    assert isinstance(source, ast.ClassDef)
    for node, following in zip(source.body, [*source.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            yield node.target.id, one_line(str(following.value.value)) if has_text else ""  # type: ignore[union-attr]
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for statement, text in zip(node.body, node.body[1:], strict=False):
                target = statement.targets[0] if isinstance(statement, ast.Assign) else None
                if isinstance(target, ast.Attribute) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    yield target.attr, one_line(str(text.value.value))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            member = inspect.getattr_static(thing, node.name)
            is_value = isinstance(member, property | functools.cached_property)
            function = member.fget if isinstance(member, property) else getattr(member, "func", getattr(thing, node.name))
            kind = f": {function.__annotations__.get('return', '')}" if is_value else signature(function, skip_self=True)
            yield f"{node.name}{kind}", one_line(inspect.getdoc(function) or "")


def signature(function: Any, *, skip_self: bool = False) -> str:
    """Return the parameters and the result as they are written, without `self`."""
    found = inspect.signature(function)
    parameters = [parameter for name, parameter in found.parameters.items() if not (skip_self and name == "self")]
    return str(found.replace(parameters=parameters)).replace("'", "").replace("pathlib.Path", "Path")


def text_of(thing: Any) -> str:
    """Return the docstring, its lines filled into paragraphs of the page."""
    return inspect.getdoc(thing) or ""


def escaped(text: str) -> str:
    """Return text for a cell of a table, in which a bar would end the cell."""
    return text.replace("|", "\\|")


def one_line(text: str) -> str:
    """Return the first sentence of a docstring for a cell of a table; `help()` shows the whole."""
    return escaped(re.split(r"(?<=[.])\s(?=[A-Z])", re.sub(r"\s+", " ", text).strip())[0])


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
