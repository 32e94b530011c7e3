"""verl's row format, checked: one row of a file becomes one `Example`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from grpo_rl.data.files import Source
from grpo_rl.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """A row before its prompt is rendered: chat messages, or a plain string that is used as it is."""

    prompt: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def example(source: Source, index: int, prompt_key: str, data_source_key: str) -> Example:
    """Row `index` of the source with its columns checked.

    Raises DataError with file, row, column, what was found and what was expected.
    """
    row, where = source.rows[index], source.where(index)
    data_source = _column(row, data_source_key, where)
    if not isinstance(data_source, str) or not data_source:
        raise _wrong(where, data_source_key, data_source, "a non-empty string")
    reward_model = _column(row, "reward_model", where)
    if not isinstance(reward_model, dict):
        raise _wrong(where, "reward_model", reward_model, "an object with ground_truth")
    if "ground_truth" not in reward_model:
        raise DataError(f"{where}: column 'reward_model' has no ground_truth; it has {_listed(reward_model)}")
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise _wrong(where, "extra_info", extra_info, "an object or nothing")
    return Example(
        prompt=_prompt(_column(row, prompt_key, where), where, prompt_key),
        data_source=data_source,
        ground_truth=reward_model["ground_truth"],
        extra_info=extra_info or {},
    )


def _column(row: dict[str, Any], key: str, where: str) -> Any:
    if key in row:
        return row[key]
    near = difflib.get_close_matches(key, row, n=5, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise DataError(f"{where}: there is no column {key!r}.{hint} The row has {_listed(row)}")


def _prompt(value: Any, where: str, key: str) -> list[Message] | str:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise _wrong(where, key, value, "a list of {role, content} messages, or a non-empty string")
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise _wrong(where, f"{key}[{number}]", message, "a message {role, content}")
        for part in ("role", "content"):
            if not isinstance(message.get(part), str):
                raise _wrong(where, f"{key}[{number}].{part}", message.get(part), "a string")
    return value


def _wrong(where: str, column: str, found: Any, expected: str) -> DataError:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return DataError(f"{where}: column {column!r} is {shown} ({type(found).__name__}); expected {expected}")


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "no columns"
