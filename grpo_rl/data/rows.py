"""verl's row format, checked. What is wrong with a row is a BadRow, with its place."""

from __future__ import annotations

import datetime
import difflib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Any

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.errors import DataError, did_you_mean
from grpo_rl.frozen import frozen

Row = dict[str, Any]
Message = dict[str, Any]
Call = dict[str, Any]  # of a tool
Asked = list[Message] | str
"""Chat messages, or a plain string that is used as it is."""
LARGEST_ROW = 8 * 2**20
"""Bytes, or characters of a text. A longer row is a mistake, and would hold up the whole run."""
DEEPEST_ROW = 64


class BadRow(DataError):
    """What `data.on_bad_row=skip` leaves out."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put the place before what an error says of data; the functions that read a row do not know it."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{place}: {error}") from error


@frozen
class Example:
    prompt: Asked
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def example(row: Row, config: DataConfig) -> Example:
    check_row(row)
    keys = {"data.prompt_key": config.prompt_key, "data.ground_truth_key": config.ground_truth_key}
    if config.data_source is None:
        keys["data.reward_fn_key"] = config.reward_fn_key
    top_level_columns = {key: name.split(".")[0] for key, name in keys.items()}
    if missing := {key: column for key, column in top_level_columns.items() if column not in row and keys[key] not in row}:
        raise _missing_columns(row, missing, keys.values())
    data_source: Any = config.data_source or column(row, config.reward_fn_key)
    if not isinstance(data_source, str) or not data_source:
        raise wrong(config.reward_fn_key, data_source, "a non-empty string")
    ground_truth = column(row, config.ground_truth_key)
    extra_info = column(row, config.extra_info_key, optional=True)
    expect(extra_info, dict | None, config.extra_info_key, "an object or nothing")
    _check_sendable(ground_truth, config.ground_truth_key)
    _check_sendable(extra_info, config.extra_info_key)
    prompt = prompt_of(column(row, config.prompt_key), config.prompt_key)
    return Example(prompt, data_source, ground_truth, extra_info or {})


def _check_sendable(value: Any, key: str) -> None:
    """Raise BadRow for a value that cannot be sent to another process."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_sendable(part, f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]")
    elif not isinstance(value, str | int | float | None):
        raise wrong(key, value, "text, a number, true, false, null, or lists and objects of these")


def _missing_columns(row: Row, missing: dict[str, str], names: Collection[str]) -> BadRow:
    unused_columns = [column for column in map(str, row) if column not in names]
    named = []
    for key, name in missing.items():
        if key == "data.reward_fn_key":
            answer = next((str(row[column]) for column in _USUAL["data.ground_truth_key"] if column in unused_columns), "")
            source = next((source for sign, source in _RULES if sign in answer), "NAME")
            named.append(
                f"data.data_source={source} (of all rows; reward.functions=[auto] finds a rule by it: gsm8k, math, ...)"
            )
            continue
        usual = [column for column in _USUAL[key] if column in unused_columns]
        candidates = [*usual, *difflib.get_close_matches(name, unused_columns, n=1), "COLUMN"]
        named.append(f"{key}={candidates[0]}")
    problem = f"is no column {name!r}" if len(missing) == 1 else f"are no columns {', '.join(map(repr, missing.values()))}"
    has = ", ".join(sorted(map(str, row))) or "no columns"
    return BadRow(f"there {problem}. The row has {has}: name them, as {' '.join(named)}")


_USUAL = {
    "data.prompt_key": ("question", "problem", "query", "instruction", "input", "prompt", "text", "messages"),
    "data.ground_truth_key": ("answer", "solution", "target", "output", "label", "completion", "ground_truth"),
}
_RULES = (("####", "gsm8k"), ("\\boxed", "math"))
"""Marks before the answer in a solution, and the rule that finds it."""


def column(row: Row, key: str, optional: bool = False) -> Any:
    """A column called as the whole dotted path is taken first."""
    if key in row:
        return row[key]
    value: Any = row
    parts = key.split(".")
    for number, part in enumerate(parts):
        path = ".".join(parts[:number])
        if not isinstance(value, dict):
            if optional and value is None:
                return None
            raise wrong(path, value, f"an object with {part}")
        if part not in value:
            if optional:
                return None
            names = sorted(map(str, value))
            listed = ", ".join(names) or "no columns"
            if number == 0:
                raise BadRow(f"there is no column {part!r}.{did_you_mean(part, names, most=5)} The row has {listed}")
            raise BadRow(f"column {path!r} has no {part}; it has {listed}")
        value = value[part]
    return value


def prompt_of(value: Any, key: str) -> Asked:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise wrong(key, value, "a list of {role, content} messages, or a non-empty string")
    return messages_of(value, key)


def messages_of(value: Any, key: str) -> list[Message]:
    """Without empty parts; arguments of tool calls that are JSON text are parsed."""
    if not isinstance(value, list) or not value:
        raise wrong(key, value, "a list of {role, content} messages")
    messages = []
    for number, entry in enumerate(value):
        expect(entry, dict, f"{key}[{number}]", "a message {role, content}")
        # Tables have every part in every message.
        message = {part: content for part, content in entry.items() if content is not None}
        if calls := message.get("tool_calls"):
            message = {"content": ""} | message | {"tool_calls": _calls_of(calls, f"{key}[{number}].tool_calls")}
        for part in ("role", "content"):
            expect(message.get(part), str, f"{key}[{number}].{part}", "a string")
        messages.append(message)
    return messages


def _calls_of(calls: Any, key: str) -> list[Call]:
    expect(calls, list, key, "a list of calls {function: {name, arguments}}")
    parsed = []
    for number, call in enumerate(calls):
        expect(call, dict, f"{key}[{number}]", "a call {function: {name, arguments}}")
        function = call.get("function", call)
        expect(function, dict, f"{key}[{number}].function", "an object {name, arguments}")
        expect(function.get("name"), str, f"{key}[{number}].function.name", "a string")
        if "arguments" in function:
            arguments = from_json(function["arguments"], f"{key}[{number}].function.arguments")
            call = changed_call(call, arguments=arguments)
        parsed.append(call)
    return parsed


def changed_call(call: Call, **parts: Any) -> Call:
    """Return a tool's call with other parts of its function, which stands in `function` or is the call itself."""
    return call | {"function": call["function"] | parts} if "function" in call else call | parts


def from_json(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError) as error:
        raise wrong(key, value, f"an object, or the JSON text of one ({error})") from error
    check_values(parsed, key)
    return parsed


def finite(value: Any) -> float:
    """NaN for whatever is no finite number."""
    # Not isinstance: true is no number here.
    if type(value) not in (int, float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def plain(value: Any) -> Any:
    """Without numpy types; NaN is None, dates, times and decimals are exact text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime.timedelta):
        return str(value)
    return None if isinstance(value, float) and math.isnan(value) else value


@frozen
class NotJson:
    """Something in a parsed row that JSON does not have or that has no single meaning."""

    found: str
    advice: str


def check_row(row: Row) -> None:
    check_values(row)
    for name in ("images", "videos"):
        if row.get(name):
            raise BadRow(f"column {name!r} is not empty, and models are trained on text alone here; expected rows without it")


def check_values(value: Any, column: str = "", depth: int = 0) -> None:
    """Raise BadRow for lone surrogates, NUL, infinity, deep nesting, a huge text."""
    if isinstance(value, str):
        _check_text(value, column)
    elif isinstance(value, NotJson):
        raise BadRow(f"broken JSON: {value.found}, in column {column!r}; {value.advice}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"column {column!r} is {value} (float); expected a finite number")
    elif isinstance(value, (dict, list)):
        if depth == DEEPEST_ROW:
            raise BadRow(f"column {column[:40]!r}... is nested deeper than {DEEPEST_ROW} lists and objects")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(key, str):
                _check_text(key, column or "(its name)")
            inside = f"{column}[{key}]" if isinstance(value, list) else f"{column}.{key}" if column else str(key)
            check_values(item, inside, depth + 1)


def _check_text(text: str, column: str) -> None:
    if len(text) > LARGEST_ROW:
        raise BadRow(f"column {column!r} has {len(text)} characters; expected at most {LARGEST_ROW}")
    if "\0" in text:
        raise BadRow(f"column {column!r} has a NUL character at {text.index(chr(0))}; expected text without")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow(
                f"column {column!r} has the lone surrogate \\u{ord(text[error.start]):04x} at {error.start}; "
                "expected whole characters (half of a pair was cut off)"
            ) from error


def wrong(column: str, value: Any, expected: str) -> BadRow:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return BadRow(f"column {column!r} is {text} ({type(value).__name__}); expected {expected}")


def expect(value: Any, kind: type | UnionType, column: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise wrong(column, value, expected)


def at_difference(old: str, new: str) -> tuple[str, str]:
    """Return 30 characters of each before the place where they begin to differ, and as many behind it."""
    place = shared_length(old, new)
    shown = slice(max(0, place - 30), place + 30)
    return old[shown], new[shown]


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of entries with which both begin."""
    differ = (place for place, (entry, other) in enumerate(zip(first, second, strict=False)) if entry != other)
    return next(differ, min(len(first), len(second)))


def irregular(path: Path) -> str | None:
    """Return what a path is that is neither a file nor a folder."""
    if path.is_fifo():
        return "a FIFO"
    if path.is_socket():
        return "a socket"
    return "a device" if path.is_block_device() or path.is_char_device() else None
