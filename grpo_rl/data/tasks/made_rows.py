from __future__ import annotations

import hashlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpo_rl.data.rows import Row
from grpo_rl.errors import ConfigError
from grpo_rl.registry import out_of_bounds

Split = Literal["train", "val"]
VALIDATION_SHARE = 5


def row_of(data_source: str, prompt: str, ground_truth: Any, extra_info: dict[str, Any], ability: str = "math") -> Row:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


class LazyRows(Sequence[Row]):
    """`make(index)` must depend on nothing but its index. Nothing is kept."""

    def __init__(self, num_rows: int, make: Callable[[int], Row]) -> None:
        self._numbers, self._make = range(num_rows), make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        numbers = self._numbers[index]
        return list(map(self._make, numbers)) if isinstance(numbers, range) else self._make(numbers)


def refuse(name: str, *rules: tuple[bool, str]) -> None:
    """Raise ConfigError with the texts of all `rules` that do not hold."""
    problems = [f"task {name}: {text}" for holds, text in rules if not holds]
    if problems:
        raise ConfigError(problems)


def split_of_text(text: str) -> Split:
    """`text` distinguishes a problem from others."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else "train"


def typed_options(what: str, function: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Values of the types in the function's signature. Raises ConfigError."""
    kinds = typing.get_type_hints(function)
    known = inspect.signature(function).parameters
    options = {key: _value(f"{what}: {key}", text, kinds.get(key, str)) for key, text in texts.items() if key in known}
    if problems := out_of_bounds(what, function, options):
        raise ConfigError(problems)
    return options


def _value(what: str, text: str, kind: Any) -> Any:
    literals = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    choices = {"true": True, "false": False} if kind is bool else {choice: choice for choice in literals}
    if choices and text not in choices:
        raise ConfigError(f"{what}={text} must be one of {', '.join(choices)}")
    if choices:
        return choices[text]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{what}={text} must be {'a whole number' if kind is int else f'of type {kind.__name__}'}") from None
