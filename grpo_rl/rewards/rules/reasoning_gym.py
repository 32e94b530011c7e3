"""The reasoning-gym package: its data sets by name and options, and a reward by each one's own scorer, kept from harmful text.

Rows are made in `data/tasks/reasoning_gym.py`. The package is loaded when a data set is asked for.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import difflib
import io
import re
import typing
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.rules.answers import last_tagged
from grpo_rl.rewards.rules.expressions import NotAnExpression, arithmetic_value, formula

SOURCE_PREFIX = "reasoning_gym/"
"""The beginning of a row's data_source; the name of the data set follows."""
ONE_ROW_EACH = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""Data sets that lay out or count all their rows beforehand: each row comes from a data set of its own, with a seed of its own."""

Options = tuple[tuple[str, str], ...]
Entry = dict[str, Any]


def names() -> list[str]:
    """The data sets that can be used, sorted. Raises ConfigError when the package is not installed."""
    return sorted(set(_registered()) - {"composite"})


def _one_row(name: str, options: Options, seed: int) -> Any:
    """Return the data set `name` with these options; its size, which only its len() uses, is 1.

    Raises ConfigError for an unknown name or option, with the nearest ones, and for values that it refuses.
    """
    if name == "composite":
        raise ConfigError("reasoning_gym:composite only mixes other data sets; list these in data.train_files instead")
    known = _registered()
    if name not in known:
        raise ConfigError(f"reasoning_gym has no data set {name!r}.{_hint(name, known)} Known: {', '.join(names())}")
    dataset_class, config_class = known[name]
    values = _values(name, config_class, options)
    try:
        return dataset_class(config_class(**values, seed=seed, size=1))
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        shown = ", ".join(f"{key}={text}" for key, text in options) or "its defaults"
        raise ConfigError(f"reasoning_gym:{name} refuses {shown}: {error}") from error


build = lru_cache(maxsize=64)(_one_row)


def make_entry(name: str, options: Options, seed: int, index: int) -> Entry:
    """Entry `index`: question, answer and metadata, as the package makes them."""
    # The others make an entry from seed and index when it is asked for, whatever their size.
    dataset = _one_row(name, options, seed + index) if name in ONE_ROW_EACH else build(name, options, seed)
    # The compiler of one data set prints a dot for each program.
    with contextlib.redirect_stdout(io.StringIO()) if name == "bf" else contextlib.nullcontext():
        return dataset[0 if name in ONE_ROW_EACH else index]


_made_again = lru_cache(maxsize=4096)(make_entry)


def category(name: str) -> str:
    """`algebra`, `games`, `graphs`, ...: the package's folder that the data set lies in."""
    return _registered()[name][0].__module__.split(".")[1]


@lru_cache(maxsize=1)
def _registered() -> dict[str, tuple[Any, Any]]:
    try:
        with warnings.catch_warnings():
            # A dependency of the package has a comparison that newer compilers warn of.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym  # noqa: F401
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning_gym: the package reasoning-gym cannot be imported ({error}); "
            f"install the extra: pip install 'grpo_rl[data]' (it needs a C compiler)"
        ) from error
    return DATASETS


def _hint(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _values(name: str, config_class: Any, options: Options) -> dict[str, Any]:
    """The options, given as text, as values of the types of the data set's own configuration."""
    kinds = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")}
    problems, values = [], {}
    for key, text in options:
        if key not in fields:
            hint = _hint(key, fields)
            problems.append(f"reasoning_gym:{name} has no option {key!r}.{hint} It takes {', '.join(sorted(fields))}")
            continue
        try:
            values[key] = _value(text, kinds[key])
        except (ValueError, TypeError):
            kind = getattr(kinds[key], "__name__", kinds[key]) if isinstance(kinds[key], type) else kinds[key]
            problems.append(f"reasoning_gym:{name}: {key}={text} must be of type {str(kind).replace('typing.', '')}")
    if problems:
        raise ConfigError(problems)
    return values


def _value(text: str, kind: Any) -> Any:
    """`text` as a value of the annotated type. Raises ValueError or TypeError where it is none, or the type has no plain text."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if type(None) in arguments:
        return None if text.lower() in ("none", "null") else _value(text, arguments[0])
    if kind is bool or origin is typing.Literal:
        choices = {"true": True, "false": False} if kind is bool else {choice: choice for choice in arguments}
        if text not in choices:
            raise ValueError
        return choices[text]
    if kind is tuple or origin is not None:
        items = [_value(part.strip(), arguments[0] if arguments else str) for part in text.split(",")]
        return tuple(items) if tuple in (kind, origin) else items
    if dataclasses.is_dataclass(kind):
        raise TypeError
    # Enumerations are named by their values, dates as 2024-12-31.
    return getattr(kind, "fromisoformat", kind)(text)


# ---- metadata as text ----------------------------------------------------------------------------


def written(metadata: Any) -> str | None:
    """Python's own way to write metadata down; None for what it cannot read back, and the entry is made again to be scored."""
    text = repr(metadata)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return text


# ---- the reward ----------------------------------------------------------------------------------


LONGEST_ANSWER = 4096
LONGEST_NUMBER = 100
"""Digits in a row; a data set whose own answer has more allows twice as many as that."""
LONGEST_REPEAT = 2
"""Digits of a number that is a count of repetitions."""
REPEATS = frozenset({"rubiks_cube", "rush_hour"})
"""Data sets whose scorer makes as many moves as a number demands: R99999999 is one of their moves."""
SHORT_ANSWERS = {"codeio": 1000, "propositional_logic": 400}
"""Data sets whose scorer takes more than linear time; the longest answer, or three times the right one."""
DIGITS = re.compile(r"\d+")
"""Digits of any script: Python reads them all as numbers."""
HUGE_EXPONENT = re.compile(r"[\d.][eE][+-]?\d{4,}")
MAX_OPERATIONS = 400
"""Operations of a derivative that is simplified."""


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is what the data set's own scorer gives, from 0 to 1; `acc` is 1 for full marks.

    The answer is the text between the last <answer> tags (`tagged` 1), or else the whole response. `refused` is 1
    where the answer was not shown to the scorer, or could not be read by it, and scored 0: too long, numbers too
    large, or text that the scorer fails on. Raises RewardError for a row without `extra_info.gym`.
    """
    carried = (extra_info or {}).get("gym")
    if not data_source.startswith(SOURCE_PREFIX) or not isinstance(carried, dict):
        raise RewardError(
            f"reasoning_gym scores rows of data.train_files=reasoning_gym:NAME, which have extra_info.gym; "
            f"this row is from {data_source!r}"
        )
    name, tagged = data_source.removeprefix(SOURCE_PREFIX), last_tagged(solution_str)
    answer = (solution_str if tagged is None else tagged).strip()
    score, refused = 0.0, not _may_be_read(name, answer, ground_truth)
    if not refused:
        options = tuple(sorted((str(key), str(text)) for key, text in carried["options"].items()))
        if carried.get("metadata") is None:
            entry = copy.deepcopy(_made_again(name, options, carried["seed"], carried["entry"]))
        else:
            entry = {"answer": ground_truth, "metadata": ast.literal_eval(carried["metadata"])}
        dataset = build(name, options, 0)
        try:
            score = float(SCORERS[name](answer, entry) if name in SCORERS else dataset.score_answer(answer, entry))
        except Exception:  # a scorer raises for text that it did not expect, each something else
            refused = True
    return {"score": score, "acc": float(score >= 1), "tagged": float(tagged is not None), "refused": float(refused)}


def _may_be_read(name: str, answer: str, truth: Any) -> bool:
    """Return whether the scorer's work on this answer is bounded."""
    right = truth if isinstance(truth, str) else ""
    if answer == right:
        return True
    if len(answer) > max(LONGEST_ANSWER, 2 * len(right)):
        return False
    if name in SHORT_ANSWERS and len(answer) > max(SHORT_ANSWERS[name], 3 * len(right)):
        return False
    answer = answer.replace("_", "")  # which Python allows between digits
    longest = max(map(len, DIGITS.findall(answer)), default=0)
    if name in REPEATS and longest > LONGEST_REPEAT:
        return False
    allowed = max(LONGEST_NUMBER, 2 * max(map(len, DIGITS.findall(right)), default=0))
    return longest <= allowed and not HUGE_EXPONENT.search(answer)


# Instead of those scorers of the package that run what they read, or take what is not right.


def _from_numbers(answer: str, numbers: list[int], target: int, wrong: float) -> float:
    """1 for the target from all the numbers, each once; `wrong` for another expression, 0.01 for none. Exact, without floats."""
    try:
        value, used = arithmetic_value(answer)
    except NotAnExpression:
        return 0.01
    return 1.0 if sorted(used) == sorted(numbers) and value == target else wrong


def _exact(answer: str, entry: Entry) -> float:
    return float(answer == entry["answer"].strip())


def _polynomial(answer: str, entry: Entry) -> float:
    """1 for the expanded polynomial, its terms in any order."""
    import sympy

    right = sympy.parse_expr(entry["answer"])
    return float(_formula(answer, right.free_symbols) == right)


def _integral(answer: str, entry: Entry) -> float:
    """1 for a formula whose derivative is the integrand."""
    import sympy

    variable = sympy.Symbol(entry["metadata"]["variable"])
    derivative = sympy.diff(_formula(answer, [variable, sympy.Symbol("C")]), variable)
    if derivative.count_ops() > MAX_OPERATIONS:
        raise NotAnExpression(f"its derivative has more than {MAX_OPERATIONS} operations")
    difference = derivative - sympy.parse_expr(entry["metadata"]["integrand"])
    return float(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


def _formula(text: str, symbols: Any) -> Any:
    import sympy

    known = "sin cos tan cot sec csc exp log ln sqrt asin acos atan sinh cosh tanh asinh acosh atanh Abs"
    functions = {name: getattr(sympy, name) for name in known.split()} | {"abs": sympy.Abs}
    variables = {str(symbol): symbol for symbol in symbols} | {"E": sympy.E, "pi": sympy.pi}

    def number(literal: str) -> Any:
        return sympy.Integer(int(literal)) if literal.isdigit() else sympy.Float(literal)

    value = formula(text, number, variables, functions)
    if value.has(sympy.zoo, sympy.oo, sympy.nan):
        raise NotAnExpression("infinite or undefined")
    return value


SCORERS: dict[str, Callable[[str, Entry], float]] = {
    **dict.fromkeys(("binary_matrix", "spiral_matrix", "string_insertion"), _exact),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), _integral),
    "countdown": lambda answer, entry: _from_numbers(answer, entry["metadata"]["numbers"], entry["metadata"]["target"], 0.05),
    "game_of_life_halting": lambda answer, entry: float(answer.lower() == str(entry["answer"]).strip().lower()),
    "n_queens": lambda answer, entry: float(answer in entry["metadata"]["valid_answers"]),
    "polynomial_multiplication": _polynomial,
    "puzzle24": lambda answer, entry: _from_numbers(answer, entry["metadata"]["numbers"], 24, 0.01),
}
