"""Checks that a checkpoint's files contain what their names promise, whatever their digests are.

The manifest's digests find damage after the commit. They cannot find a file that was wrong when it was written, or one
that was changed together with the manifest. So before a run goes on from a checkpoint, each JSON file must be an object
whose counters are counters, each tensor file must be in the safetensors format with finite values, and the ranks' files
must be complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_rl.errors import CheckpointError, DataError
from grpo_rl.run_files import read_bytes

MOST_JSON_BYTES = 1 << 30
"""The largest JSON file that is read: a trainer's state of a hundred million rows' pass rates stays below."""
MOST_DEPTH = 24
"""The deepest nesting of lists and objects that is accepted; what this program writes has at most 5."""
MOST_COUNT = 10**15
"""The largest step, row, seed offset or version: far above every real one, and exact in JSON readers with float64."""
_RANK_FILE = re.compile(r"(weights|optimizer|rng)_rank(0|[1-9][0-9]{0,8})\.safetensors")
_PARTS = ("weights", "optimizer", "rng")
_TRAINING = "training.json"

Rule = tuple[str, Callable[[Any], bool]]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(is_right, values))


_COUNT: Rule = ("a whole number from 0", _is_count)
_AT_LEAST_ONE: Rule = ("a whole number from 1", lambda value: _is_count(value) and value >= 1)
_NUMBER: Rule = ("a finite number", _is_number)
_OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))
_COUNTS: Rule = ("a list of whole numbers from 0", _are(_is_count))

RULES: dict[str, Rule] = {
    **dict.fromkeys(("step", "epoch", "first_epoch", "position", "num_draws", "num_drawn", "in_a_row"), _COUNT),
    **dict.fromkeys(("num_optimizer_steps", "version", "num_shuffles"), _COUNT),
    **dict.fromkeys(("num_rows", "world_size"), _AT_LEAST_ONE),
    **dict.fromkeys(("value", "coefficient"), _NUMBER),
    **dict.fromkeys(("sampler", "advantage", "nonfinite", "pass_rates", "entropy", "lora"), _OBJECT),
    **dict.fromkeys(("rank", "alpha"), _AT_LEAST_ONE),
    "targets": ("a list of names", _are(lambda value: isinstance(value, str))),
    **dict.fromkeys(("passes", "places"), _COUNTS),
    "credits": ("a list of finite numbers", _are(_is_number)),
    **dict.fromkeys(("shuffle", "frozen"), ("true or false", lambda value: isinstance(value, bool))),
    "unlogged": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "rates": ("a list", lambda value: isinstance(value, list)),
    "retired": ("a list", lambda value: isinstance(value, list)),
}
"""The form that a field must have, by its name, wherever it stands in a JSON file of a checkpoint."""
FREE = frozenset({"unlogged", "data"})
"""Fields whose content other code names: metrics, and the description of the data."""


def check_content(folder: Path, names: Collection[str], state_name: str, step: int) -> dict[str, Any]:
    """Return the controller's state in `folder`, whose files are `names`, after looking into all of them.

    Raises CheckpointError with the first file and field that cannot be what this program wrote.
    """
    state = _read(folder, state_name)
    if state.get("step", step) != step:
        raise CheckpointError(f"{folder}: {state_name} is of step {state['step']}, the checkpoint of step {step}")
    for name in sorted(names):
        if name != state_name and name.endswith(".json") and _is_ours(name, names):
            _read(folder, name)
    for place in sorted({name.rpartition("/")[0] for name in names if _RANK_FILE.fullmatch(Path(name).name)}):
        _check_ranks(folder, place, names)
    for name in sorted(names):
        if _RANK_FILE.fullmatch(Path(name).name):
            _check_tensors(folder, name)
    return state


def _is_ours(name: str, names: Collection[str]) -> bool:
    """Return whether the file lies beside ranks' files: a model's own JSON files follow other rules."""
    place = name.rpartition("/")[0]
    return any(other.rpartition("/")[0] == place and _RANK_FILE.fullmatch(Path(other).name) for other in names)


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file, its fields checked against `RULES`."""
    path = folder / name
    try:
        content = json.loads(read_bytes(path, MOST_JSON_BYTES).decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} where an object belongs")
        for problem in _problems(content, "", 1):
            raise ValueError(problem)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; nesting without end is a RecursionError.
    except (DataError, ValueError, RecursionError) as error:
        reason = "its nesting is too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{folder}: {name} cannot be used: {reason}") from error
    return content


def _problems(content: Any, where: str, depth: int) -> Iterator[str]:
    """Yield what is wrong with a value and everything in it; `where` is its place in the file."""
    if depth > MOST_DEPTH:
        yield f"{where} is nested more than {MOST_DEPTH} deep"
    elif isinstance(content, dict):
        for key, value in content.items():
            place = f"{where}.{key}" if where else key
            expected, is_right = RULES.get(key, ("", None))
            if is_right is not None and not is_right(value):
                yield f"its field {place} is {_shown(value)}, expected {expected}"
            elif key not in FREE:
                yield from _problems(value, place, depth + 1)
        position, num_rows = content.get("position"), content.get("num_rows")
        if isinstance(position, int) and isinstance(num_rows, int) and position > num_rows:
            yield f"its field {where}.position is {position}, and there are {num_rows} rows"
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from _problems(value, f"{where}[{index}]", depth + 1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _check_ranks(folder: Path, place: str, names: Collection[str]) -> None:
    """Raise CheckpointError unless `place` holds each kind of file of every rank that wrote it, and no other."""
    prefix = f"{place}/" if place else ""
    if prefix + _TRAINING not in names:
        raise CheckpointError(f"{folder}: {prefix}{_TRAINING} is missing")
    training = _read(folder, prefix + _TRAINING)
    missing_fields = [field for field in ("world_size", "num_optimizer_steps") if field not in training]
    if missing_fields:
        raise CheckpointError(f"{folder}: {prefix}{_TRAINING} cannot be used: its field {missing_fields[0]} is missing")
    ranks = range(training["world_size"])
    parts = _PARTS[:1] if training.get("frozen") else _PARTS
    expected = {f"{prefix}{part}_rank{rank}.safetensors" for part in parts for rank in ranks[: len(names)]}
    present = {name for name in names if name.rpartition("/")[0] == place and _RANK_FILE.fullmatch(Path(name).name)}
    if expected - present:
        raise CheckpointError(f"{folder}: {min(expected - present)} is missing: {len(ranks)} ranks wrote the checkpoint")
    if present - expected:
        raise CheckpointError(f"{folder}: {min(present - expected)} is of a rank beyond the {len(ranks)} that wrote it")


def _check_tensors(folder: Path, name: str) -> None:
    """Raise CheckpointError for a file that is not in the safetensors format, or has a value that is not finite."""
    try:
        with safe_open(folder / name, framework="pt") as file:
            layout = json.loads((file.metadata() or {}).get("layout", "null"))
            keys = list(file.keys())
            if not isinstance(layout, dict) or sorted(layout) != sorted(keys):
                raise CheckpointError(f"{folder}: {name} cannot be used: its layout does not list its tensors")
            for key in keys:
                tensor = file.get_tensor(key)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{folder}: {name} cannot be used: {key} has values that are not finite")
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {name} cannot be used: it is no safetensors file ({error})") from error
