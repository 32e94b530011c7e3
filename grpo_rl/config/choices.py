"""Groups of choices: the folders of conf/ and of a user's own, each file of which sets keys together (`algorithm=dapo`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_rl.config import recipes
from grpo_rl.errors import did_you_mean

RECIPE = "recipe"
HIDDEN = ("base", "verl", "hydra")  # no plain word chooses among their files


def groups(folders: Sequence[Path]) -> list[str]:
    names = {path.parent.name for folder in folders for path in folder.glob("*/*.yaml")}
    return sorted((names | {RECIPE}) - set(HIDDEN))


def options(folders: Sequence[Path], group: str) -> list[str]:
    if group == RECIPE:
        return recipes.known_recipes()
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def problem(folders: Sequence[Path], group: str, name: str) -> str | None:
    if group == RECIPE:
        return recipes.problem(name)
    known = options(folders, group)
    if name in known:
        return None
    return f"{group}={name}: unknown choice.{did_you_mean(name, known, most=1)} There are: {', '.join(known)}"
