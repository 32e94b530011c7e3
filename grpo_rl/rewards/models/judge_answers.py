from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeGuard

import yaml

from grpo_rl.config.schema.reward import JudgeConfig
from grpo_rl.errors import ConfigError
from grpo_rl.registry import load_function

Parser = Callable[[str], float]
"""Raises ValueError for an answer without a score."""
LONGEST_NUMBER = 40
LONGEST_READ = 100_000
# Possessive quantifiers keep these linear; a longer run of digits is no score.
_NUMBER = re.compile(r"[-+]?+(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?![eE]|,[0-9])")
_SCORE = re.compile(r"score[ *_`\"']{0,40}+[:=][ *_`\"']{0,40}+", re.IGNORECASE)


def parser_for(name: str) -> Parser:
    kind, _, key = name.partition(":")
    if kind == "json":
        return lambda text: json_score(text, key)
    if name != "score" and not key:
        raise ConfigError(f"reward.judge.parser={name}: one of score, json:KEY, or path.py:function")
    return marked_score if name == "score" else load_function(name, "reward.judge.parser")


def marked_score(text: str) -> float:
    """The number after the last `score:` (or `score =`, in any case, bold or not)."""
    text = text[-LONGEST_READ:]
    for mark in reversed(list(_SCORE.finditer(text))):
        if (number := _number(text, mark.end())) is not None:
            return number
    raise ValueError("it has no `score: x`")


def json_score(text: str, key: str) -> float:
    for _, _, value in _objects(text):
        if key in value:
            return _marked(value[key], key)
    raise ValueError(f"it has no JSON object with {key!r}")


def json_marks(text: str, keys: Sequence[str]) -> dict[str, float]:
    """Of the last JSON object of the text, or of an object inside of it.

    None may stand behind it: JSON that the judge quotes from the response gives no mark.
    """
    objects = list(_objects(text))
    last_end = objects[0][1] if objects else 0
    begins = [begin for begin, end, _ in objects if end >= last_end]
    inside = [value for begin, _, value in objects if begin >= min(begins)]
    for value in inside:
        if all(key in value for key in keys):
            return {key: _marked(value[key], key) for key in keys}
    missing = [key for key in keys if not any(key in value for value in inside)]
    raise ValueError(f"its last JSON object has no {', '.join(map(repr, missing or keys))}")


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Begin, end and value of JSON objects from the last one on, those inside of others first."""
    # Integers of thousands of digits take long to read.
    decoder = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= LONGEST_NUMBER else math.inf)
    text = text[-LONGEST_READ:]
    begin = len(text)
    # Few are tried: a text of nothing but braces costs no more than others.
    for _ in range(64):
        begin = text.rfind("{", 0, max(0, begin))
        if begin < 0:
            return
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        yield begin, end, value


def mark_of(name: str, names: Sequence[str], text: str) -> float:
    return json_marks(text, names)[name]


def _marked(value: Any, key: str) -> float:
    number = _number(value.strip()) if isinstance(value, str) else value
    if not is_finite(number):
        raise ValueError(f"{key} is {str(value)[:80]!r}, not a number")
    return float(number)


def is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _number(text: str, start: int = 0) -> float | None:
    """None for what is no plain finite decimal."""
    match = _NUMBER.match(text, start)
    return None if match is None or len(match[0]) > LONGEST_NUMBER else float(match[0])


MOST_CRITERIA = 100


class Criterion(NamedTuple):
    name: str
    text: str
    weight: float = 1.0
    """A negative one is of a fault, which lowers the score."""


def read_rubric(rubric: str, aggregation: str) -> tuple[Criterion, ...]:
    """`rubric`: a file, YAML or JSON, or such a text."""
    try:
        text = rubric if "\n" in rubric else Path(rubric).expanduser().read_text(encoding="utf-8")
        return criteria_of(yaml.safe_load(text), aggregation)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"reward.judge.rubric={rubric[:80]!r}: {error}") from error


def criteria_of(rubric: Any, aggregation: str) -> tuple[Criterion, ...]:
    """`criterion` (or `text`, `description`) is the text, `weight` (or `points`) its weight, 1 if there is
    none, and `name` what the mark is logged as, else `criterion_1` and so on."""
    if hasattr(rubric, "tolist"):
        rubric = rubric.tolist()
    if not isinstance(rubric, list | tuple) or not 1 <= len(rubric) <= MOST_CRITERIA:
        raise ValueError(f"a rubric is a list of 1 to {MOST_CRITERIA} criteria, and this is {str(rubric)[:80]!r}")
    criteria = []
    for number, entry in enumerate(rubric, 1):
        entry = {"criterion": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            raise ValueError(f"criterion {number} is neither a text nor a mapping with `criterion`")
        text, weight = (next((entry[key] for key in keys if entry.get(key) is not None), default) for default, *keys in _KEYS)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"criterion {number} has no text under `criterion`")
        if not is_finite(weight) or weight == 0:
            raise ValueError(f"criterion {number} has the weight {weight!r}; give a number other than 0")
        if weight < 0 and aggregation != "weighted":
            raise ValueError(f"criterion {number} has a negative weight, which needs rubric_aggregation=weighted")
        name = str(entry.get("name") or f"criterion_{number}").strip()
        criteria.append(Criterion(name, " ".join(text.split()), float(weight)))
    names = [criterion.name for criterion in criteria]
    if twice := sorted({name for name in names if names.count(name) > 1 or "/" in name}):
        raise ValueError(f"names of criteria are there once each, and without a slash: {', '.join(twice)}")
    if all(criterion.weight < 0 for criterion in criteria):
        raise ValueError("some criterion must have a weight above 0")
    return tuple(criteria)


_KEYS = ((None, "criterion", "text", "description"), (1.0, "weight", "points"))
"""What a criterion has by default, and the names of each field."""


def aggregated(criteria: Sequence[Criterion], marks: Mapping[str, float], config: JudgeConfig) -> float:
    """Formulas: mean = sum_i m_i / n; weighted = sum_i w_i m_i / sum_{w_i > 0} w_i, as HealthBench has it
    (arXiv 2505.08775, section 3), which faults (w < 0) may bring below 0; all = 1 if every m_i is at least
    `rubric_pass`, else 0.
    """
    if config.rubric_aggregation == "all":
        return float(all(mark >= config.rubric_pass for mark in marks.values()))
    if config.rubric_aggregation == "mean":
        return fmean(marks.values())
    return sum(criterion.weight * marks[criterion.name] for criterion in criteria) / sum(
        max(0.0, criterion.weight) for criterion in criteria
    )
