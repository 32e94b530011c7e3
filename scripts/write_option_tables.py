"""Write grpo_rl/config/checks/option_tables.py: the options of tasks, data sets and rewards, for checks that load none of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import textwrap
import typing
from pathlib import Path
from typing import Any, Literal

from grpo_rl import gym
from grpo_rl.data.tasks.reasoning_gym import OWN_OPTIONS
from grpo_rl.data.tasks.registry import TASKS
from grpo_rl.rewards.contract import ARGUMENTS
from grpo_rl.rewards.registry import REWARDS

FILE = Path(__file__).resolve().parents[1] / "grpo_rl/config/checks/option_tables.py"
_HEAD = '''"""The options of tasks, data sets and rewards by name, as plain data, so that a misspelt one is reported at once.

Written by scripts/write_option_tables.py; a test compares it with the functions themselves.
"""

from __future__ import annotations

'''


def task_options() -> dict[str, str]:
    """The options of each task as `name:type`, or `name:one|another`."""
    return {name: " ".join(f"{key}:{kind}" for key, kind in _kinds(TASKS.get(name))) for name in sorted(TASKS)}


def reward_options() -> dict[str, str]:
    """The options of each reward function."""
    return {
        name: " ".join(key for key in inspect.signature(REWARDS.get(name)).parameters if key not in ARGUMENTS)
        for name in sorted(REWARDS)
    }


def gym_options() -> dict[str, str]:
    """The options of each data set of the installed reasoning-gym."""
    options = {}
    for name in gym.names():
        fields = [field.name for field in dataclasses.fields(gym.config_class(name))]
        options[name] = " ".join(sorted(set(fields) - {"seed", "size"}))
    return options


def text() -> str:
    """The whole file."""
    version = importlib.metadata.version("reasoning-gym")
    return (
        _HEAD
        + _table("TASK_OPTIONS", task_options())
        + _table("REWARD_OPTIONS", reward_options())
        + f"GYM_VERSION = {version!r}\n"
        + '"""The version of reasoning-gym that the tables are of; another version is asked for its own names."""\n'
        + f"GYM_REFUSED = {gym.REFUSED!r}\n"
        + f"GYM_OWN_OPTIONS = {' '.join(OWN_OPTIONS)!r}\n"
        + _table("GYM_OPTIONS", gym_options())
    ).replace("'", '"')


def _kinds(function: Any) -> list[tuple[str, str]]:
    hints = typing.get_type_hints(function)
    return [
        (key, "|".join(typing.get_args(kind)) if typing.get_origin(kind) is Literal else kind.__name__)
        for key, kind in ((key, hints[key]) for key in inspect.signature(function).parameters)
    ]


def _table(name: str, entries: dict[str, str]) -> str:
    lines = [f"{name}: dict[str, str] = {{\n"]
    for key, value in entries.items():
        pieces = [repr(piece + " ") for piece in textwrap.wrap(value, 100)] or ["''"]
        pieces[-1] = pieces[-1].replace(" '", "'")
        lines.append(f"    {key!r}: {pieces[0]},\n" if len(pieces) == 1 else f"    {key!r}: ({' '.join(pieces)}),\n")
    return "".join([*lines, "}\n"])


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
