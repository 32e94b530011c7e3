"""Reward of the reasoning-gym data sets: each one's own scorer, kept away from text that could harm it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from grpo_rl import gym
from grpo_rl.errors import RewardError
from grpo_rl.rewards.rules.expressions import NotAnExpression, arithmetic_value, formula

Entry = dict[str, Any]
LIST_CHARACTERS = re.compile(r"[\[\](),'\"\w\s.+-]*")
LONGEST_LIST = 4096
DEEPEST_LIST = 4
MAX_OPERATIONS = 400
"""Operations of a derivative that is simplified."""


class Unreadable(ValueError):
    """An error: the answer is not of the form that the scorer reads."""


def countdown(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the target from all the numbers, each once; 0.05 for another expression, 0.01 for none. Exact, without floats."""
    return _from_numbers(answer, entry["metadata"]["numbers"], entry["metadata"]["target"], wrong=0.05)


def puzzle24(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for 24 from the four numbers, each once; else 0.01.

    The package's takes any four numbers in range, and 24.5 for 24.
    """
    return _from_numbers(answer, entry["metadata"]["numbers"], 24, wrong=0.01)


def _from_numbers(answer: str, numbers: list[int], target: int, wrong: float) -> float:
    try:
        value, used = arithmetic_value(answer)
    except NotAnExpression:
        return 0.01
    return 1.0 if sorted(used) == sorted(numbers) and value == target else wrong


def binary_matrix(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the matrix, 0.1 for it as a Python list."""
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if _same(lambda: _lines(_literal(answer)), entry["answer"]) else 0.0


def n_queens(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for one of the boards that solve the puzzle, 0.5 for one as a Python list."""
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    return 0.5 if any(_same(lambda: _lines(_literal(answer)), board) for board in boards) else 0.0


def spiral_matrix(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the numbers in order, 0.1 for them as a Python list."""
    right = entry["answer"].strip()
    if answer == right:
        return 1.0
    return 0.1 if _same(lambda: " ".join(map(str, _literal(answer))), right) else 0.0


def string_insertion(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the string, 0.1 for its characters as a Python list."""
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if _same(lambda: "".join(_literal(answer)), entry["answer"]) else 0.0


def exact(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the answer itself, in capitals or not; the package's takes any text for True."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def polynomial_multiplication(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for the expanded polynomial, its terms in any order."""
    right = _trusted(entry["answer"])
    return float(_formula(answer, {str(symbol): symbol for symbol in right.free_symbols} | _constants()) == right)


def integral(dataset: Any, answer: str, entry: Entry) -> float:
    """1 for a formula whose derivative is the integrand."""
    import sympy

    variable = sympy.Symbol(entry["metadata"]["variable"])
    given = _formula(answer, {str(variable): variable, "C": sympy.Symbol("C")} | _constants())
    derivative = sympy.diff(given, variable)
    if derivative.count_ops() > MAX_OPERATIONS:
        raise Unreadable(f"its derivative has more than {MAX_OPERATIONS} operations")
    difference = derivative - _trusted(entry["metadata"]["integrand"])
    return float(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


SCORERS: dict[str, Callable[[Any, str, Entry], float]] = {
    "binary_matrix": binary_matrix,
    "countdown": countdown,
    "game_of_life_halting": exact,
    "intermediate_integration": integral,
    "n_queens": n_queens,
    "polynomial_multiplication": polynomial_multiplication,
    "puzzle24": puzzle24,
    "simple_integration": integral,
    "spiral_matrix": spiral_matrix,
    "string_insertion": string_insertion,
}


def _same(written: Callable[[], str], right: str) -> bool:
    """Return whether the text that is made of a list is the right one; no when there is no such list."""
    try:
        return written() == right
    except (Unreadable, TypeError):
        return False


def _lines(rows: Any) -> str:
    return "\n".join(" ".join(map(str, row)) for row in rows)


def _literal(text: str) -> Any:
    """The Python list that the text spells, of numbers and strings; raises Unreadable for anything else."""
    if len(text) > LONGEST_LIST or not LIST_CHARACTERS.fullmatch(text):
        raise Unreadable("not a list of numbers or words")
    depth = deepest = 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        deepest = max(deepest, depth)
    if not 1 <= deepest <= DEEPEST_LIST:
        raise Unreadable("not a list of numbers or words")
    try:
        value = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise Unreadable("not a list of numbers or words") from error
    if not isinstance(value, list | tuple):
        raise Unreadable("not a list")
    return value


@lru_cache(maxsize=512)
def _trusted(text: str) -> Any:
    """An expression that the package itself wrote, read by sympy's own parser."""
    import sympy

    return sympy.parse_expr(text)


def _constants() -> dict[str, Any]:
    import sympy

    return {"E": sympy.E, "pi": sympy.pi}


def _formula(text: str, names: dict[str, Any]) -> Any:
    import sympy

    known = "sin cos tan cot sec csc exp log ln sqrt asin acos atan sinh cosh tanh asinh acosh atanh"
    functions = {name: getattr(sympy, name) for name in known.split()} | {"abs": sympy.Abs, "Abs": sympy.Abs}

    def number(literal: str) -> Any:
        return sympy.Integer(int(literal)) if literal.isdigit() else sympy.Float(literal)

    value = formula(text, number, names, functions)
    if value.has(sympy.zoo, sympy.oo, sympy.nan):
        raise Unreadable("infinite or undefined")
    return value


OPEN, CLOSE = "<answer>", "</answer>"
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


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is what the data set's own scorer gives, from 0 to 1; `acc` is 1 for full marks.

    The answer is the text between the last <answer> tags (`tagged` 1), or else the whole response. `refused` is 1
    where the answer was not shown to the scorer, or could not be read by it, and scored 0: too long, numbers too
    large, or text that the scorer fails on. Raises RewardError for a row without `extra_info.gym`.
    """
    carried = (extra_info or {}).get("gym")
    if not data_source.startswith(gym.SOURCE_PREFIX) or not isinstance(carried, dict):
        raise RewardError(
            f"reasoning_gym scores rows of data.train_files=reasoning_gym:NAME, which have extra_info.gym; "
            f"this row is from {data_source!r}"
        )
    name = data_source.removeprefix(gym.SOURCE_PREFIX)
    answer, tagged = extract_answer(solution_str)
    options = tuple(sorted((str(key), str(text)) for key, text in carried["options"].items()))
    score, refused = 0.0, not _may_be_read(name, answer, ground_truth)
    if not refused:
        entry = _entry(name, options, carried, ground_truth)
        dataset = gym.build(name, options, 0)
        score, refused = _score(name, dataset, answer, entry)
    return {"score": score, "acc": float(score >= 1), "tagged": float(tagged), "refused": float(refused)}


def extract_answer(response: str) -> tuple[str, bool]:
    """The text between the last <answer> and the </answer> after it, stripped, and True; else the whole response and False."""
    end = response.rfind(CLOSE)
    start = response.rfind(OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return response.strip(), False
    return response[start + len(OPEN) : end].strip(), True


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


def _entry(name: str, options: gym.Options, carried: dict[str, Any], truth: Any) -> dict[str, Any]:
    if "metadata" in carried:
        return {"answer": truth, "metadata": gym.decode(carried["metadata"])}
    return gym.remade_entry(name, options, carried["seed"], carried["entry"])


def _score(name: str, dataset: Any, answer: str, entry: dict[str, Any]) -> tuple[float, bool]:
    """The score, and whether the scorer could not read the answer."""
    scorer: Callable[[Any, str, dict[str, Any]], float] = SCORERS.get(name, _own_scorer)
    try:
        return float(scorer(dataset, answer, entry)), False
    except (Unreadable, NotAnExpression):
        return 0.0, True
    except Exception:  # the package's scorers raise for text they did not expect, each something else
        return 0.0, True


def _own_scorer(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    return dataset.score_answer(answer, entry)
