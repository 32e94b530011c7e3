"""Rules for structured output, and for instructions that a program can check."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_rl.config.schema.kinds import Count, Fraction
from grpo_rl.rewards.rules.answers import ExtraInfo, after_thought, verdict

MAX_TEXT = 20_000
"""Characters of a response that may be right."""
MAX_STARTS = 8
"""Braces at which an object is looked for among other text."""


def json_fields(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    bare: Fraction = 0.2,
) -> dict[str, float]:
    """Share of the fields that are right, in an object that should stand alone.

    Formula: score = f (1 - bare + bare b)

    f is the number of keys whose values equal the ground truth's, divided by the number of keys in either object: a key too many
    costs as much as one that is missing. b is 1 if the response is the object and nothing else, else 0; the first object in the
    text counts then. `acc` is 1 if all is right and stands alone. Values are equal as JSON has them: "34" is not 34, and
    " Oslo" is not "Oslo" (a policy learns such a space: behind it a word is a single token). The ground truth is an object,
    or JSON text of one.
    """
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(gold, Mapping):
        raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} is no JSON object")
    text = after_thought(solution_str, extra_info).strip()
    is_bare, fields_of_answer = _object(text)
    right = sum(key in fields_of_answer and _same(fields_of_answer[key], value) for key, value in gold.items())
    fields = right / max(1, len(gold.keys() | fields_of_answer.keys()))
    score = fields * (1.0 - bare + bare * is_bare)
    return {"score": score, "acc": float(is_bare and fields == 1.0), "fields": fields, "alone": float(is_bare)}


def json_schema(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    schema: Any = None,
) -> dict[str, float]:
    """1 if the response is JSON that the schema takes, and nothing else; else 0. `json` is 1 for any JSON
    that stands alone.

    The schema (draft 2020-12, or that of its `$schema`) is the option `schema`, else the row's
    `extra_info.json_schema`, else the ground truth; each an object or JSON text. References to other
    documents are not fetched. Raises ValueError for a bad schema.
    """
    rules = schema if schema is not None else (extra_info or {}).get("json_schema", ground_truth)
    validator = schema_validator(rules if isinstance(rules, str) else json.dumps(rules, sort_keys=True))
    value, is_json = _parsed(after_thought(solution_str, extra_info).strip())
    valid = is_json and validator.is_valid(value)
    return verdict(valid, json=float(is_json))


@functools.lru_cache(maxsize=256)
def schema_validator(text: str) -> Any:
    """The validator of a schema; no other document is fetched. Raises ValueError for a bad schema."""
    # A third of a second, for those who use it.
    from jsonschema import SchemaError, validators
    from referencing import Registry

    try:
        schema = json.loads(text)
        kind = validators.validator_for(schema, default=validators.Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{text[:100]!r} is no JSON schema: {str(error).splitlines()[0]}") from None
    return kind(schema, registry=Registry())


def first_problem(validator: Any, value: Any) -> str | None:
    """The gravest way in which the value is not what the schema asks for, after its place.

    Raises ValueError for a reference to another document.
    """
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        problem = best_match(validator.iter_errors(value))
    except Unresolvable as error:
        raise ValueError(f"a reference in a JSON schema leads out of it: {error}") from None
    if problem is None:
        return None
    return f"{problem.json_path.removeprefix('$.')}: {problem.message}" if problem.path else str(problem.message)


def _parsed(text: str) -> tuple[Any, bool]:
    if len(text) > MAX_TEXT:
        return None, False
    try:
        return json.loads(text, parse_constant=_no_constant), True
    except (ValueError, RecursionError):
        return None, False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(text: str) -> tuple[bool, dict[str, Any]]:
    """Whether the text is an object and nothing else; and the first object in it, empty if there is none."""
    value, is_json = _parsed(text)
    if is_json and isinstance(value, dict):
        return True, value
    decoder, start = json.JSONDecoder(parse_constant=_no_constant), -1
    for _ in range(MAX_STARTS if len(text) <= MAX_TEXT else 0):
        start = text.find("{", start + 1)
        if start < 0:
            break
        try:
            return False, decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
    return False, {}


def _same(value: Any, gold: Any) -> bool:
    if isinstance(value, bool) != isinstance(gold, bool):  # Python's True equals 1
        return False
    if isinstance(value, list) and isinstance(gold, list):
        return len(value) == len(gold) and all(map(_same, value, gold))
    if isinstance(value, Mapping) and isinstance(gold, Mapping):
        return value.keys() == gold.keys() and all(_same(value[key], gold[key]) for key in gold)
    return bool(value == gold)


_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_CHECKS: dict[str, Callable[[str, list[str], Any], bool]] = {
    "at_most_words": lambda text, words, value: len(words) <= value,
    "at_least_words": lambda text, words, value: len(words) >= value,
    "lowercase": lambda text, words, value: text == text.lower(),
    "uppercase": lambda text, words, value: text == text.upper(),
    "bullets": lambda text, words, value: (
        sum(line.startswith("- ") for line in text.splitlines()) == value
        and all(line.startswith("- ") or not line.strip() for line in text.splitlines())
    ),
    "without_word": lambda text, words, value: value.casefold() not in words,
    "with_word": lambda text, words, value: value.casefold() in words,
    "first_word": lambda text, words, value: words[0] == value.casefold(),
    "no_commas": lambda text, words, value: "," not in text,
}
"""Words are in small letters here."""


def instructions(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    least_words: Count = 5,
) -> dict[str, float]:
    """Share of the constraints that the response keeps; `acc` is 1 if it keeps all. Below `least_words` words it keeps none.

    The ground truth is a list of pairs (kind, value), or JSON text of one: `at_most_words`, `at_least_words`, `lowercase`,
    `uppercase`, `bullets` (lines that begin with "- ", and no others), `without_word`, `with_word`, `first_word`, `no_commas`.
    Words are compared in any case. After IFEval's strict accuracy (arXiv 2311.07911, section 2.2): of instructions, and of prompts.
    """
    constraints = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not (
        isinstance(constraints, list | tuple)
        and constraints
        and all(isinstance(pair, list | tuple) and len(pair) == 2 and pair[0] in _CHECKS for pair in constraints)
    ):
        raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} is no list of constraints; known: {', '.join(_CHECKS)}")
    text = after_thought(solution_str, extra_info).strip()
    words = [word.casefold() for word in _WORD.findall(text)] if len(text) <= MAX_TEXT else []
    if len(words) < least_words:
        return verdict(0.0)
    num_kept = sum(_CHECKS[kind](text, words, value) for kind, value in constraints)
    return {"score": num_kept / len(constraints), "acc": float(num_kept == len(constraints))}
