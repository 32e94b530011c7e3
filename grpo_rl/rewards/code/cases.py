"""The test cases of a code task, from the forms in which data sets hold them.

- `{"inputs": [...], "outputs": [...]}` (APPS, TACO, verl's prime_code): standard input and expected output of a program; with
  `fn_name`, arguments of that function and the value it returns.
- Assertions (MBPP's `test_list`, HumanEval's `test` with `check(candidate)`): a list, or the text of some.

An expected output never meets the candidate's code: a test has a `case`, which is run, and `holds`, which judges here what
came out. So an assertion must be one call of the function with literal arguments, compared with literals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rl.errors import RewardError
from grpo_rl.rewards.code.assertions import assertions, short
from grpo_rl.rewards.sandbox.returned_values import decode
from grpo_rl.rewards.sandbox.sandbox import Case, Outcome

ASSERTIONS = ("assert_case", "asserts", "test_list", "test")
"""Keys under which data sets hold assertions."""
FUNCTION_NAMES = ("fn_name", "entry_point")
SETUPS = ("test_setup_code", "setup")
FORMS = (
    'expected {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called, or assertions under '
    f"{', '.join(map(repr, ASSERTIONS))}; as a dict or as its JSON text"
)


@dataclass(frozen=True, slots=True)
class Test:
    """A case to run, and the judgement on what it gave."""

    __test__ = False  # not one of pytest's

    case: Case
    judge: Callable[[Any], bool]
    """The judgement: it gets standard output where the case is a program, the returned value where it is a call."""

    def holds(self, outcome: Outcome) -> bool:
        """Return whether the outcome is what the test asks for; an error or a forged value is not."""
        if not outcome.succeeded:
            return False
        try:
            if self.case.function is None:
                return self.judge(outcome.stdout.decode(errors="replace"))
            return self.judge(decode(outcome.value))
        except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
            return False


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> tuple[str, list[Test]]:
    """Code that goes before the candidate's, and the tests.

    They are read from the ground truth, or from `extra_info["test_cases"]` where that is empty; the name of the function also
    from `extra_info`. Raises RewardError, with the reason, for another form, none, and assertions that cannot be judged apart.
    """
    extra = extra_info or {}
    given = ground_truth if ground_truth not in (None, "") else extra.get("test_cases")
    if isinstance(given, str):
        given = _parsed(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        given = {"asserts": given}
    if not isinstance(given, Mapping):
        raise RewardError(f"the ground truth of a code task is {short(given)}; {FORMS}")
    named = next((source[key] for source in (given, extra) for key in FUNCTION_NAMES if source.get(key)), None)
    setup = "".join(f"{given[key]}\n" for key in SETUPS if given.get(key))
    key = next((key for key in ASSERTIONS if given.get(key)), None)
    if key is not None:
        tests = [Test(case, judge) for text in _texts(given[key]) for case, judge in assertions(text, named)]
    elif "inputs" in given and "outputs" in given:
        tests = _pairs(given["inputs"], given["outputs"], named)
    else:
        raise RewardError(f"the ground truth of a code task has the keys {', '.join(map(str, given)) or 'none'}; {FORMS}")
    if not tests:
        raise RewardError("the ground truth of a code task holds no test case")
    return setup, tests


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if "assert" in text:
            return {"test": text}
        raise RewardError(f"the ground truth of a code task is neither JSON nor assertions: {short(text)}; {FORMS}") from None


def _texts(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


# ---- inputs and outputs -----------------------------------------------------------------------------------


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> list[Test]:
    if len(inputs) != len(outputs):
        raise RewardError(f"the ground truth of a code task has {len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return [_program_pair(_lines(given), _lines(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    return [_call_pair(function, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]


def _program_pair(given: str, wanted: str) -> Test:
    return Test(Case(stdin=given), lambda text: same_output(text, wanted))


def _lines(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, Sequence) else str(text)


def _call_pair(function: str, given: Any, wanted: Any) -> Test:
    if isinstance(given, str):  # a JSON value on each line, and the output as JSON
        try:
            given, wanted = [json.loads(line) for line in given.split("\n") if line.strip()], json.loads(wanted)
        except (ValueError, TypeError) as error:
            raise RewardError(f"arguments of {function} are not JSON, a value on each line: {short(given)}: {error}") from None
    case = Case(function=function, arguments=tuple(given))
    return Test(case, lambda value: same_value(value, wanted))


def same_value(value: Any, wanted: Any) -> bool:
    """Return whether a value is the JSON value that is expected, or the one element of the list that is (APPS wraps them)."""
    plain = _as_json(value)
    return _equal(plain, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(plain, wanted[0]))


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(item) for key, item in value.items()}
    return value


def _equal(value: Any, wanted: Any) -> bool:
    """Equality, but True is not 1, as it is not in JSON."""
    if isinstance(value, bool) != isinstance(wanted, bool):
        return False
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    if isinstance(value, float) and isinstance(wanted, float):
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == wanted)


def same_output(text: str, wanted: str) -> bool:
    """Return whether two outputs have the same words on the same lines; expected numbers with a point within 1e-6."""
    lines, wanted_lines = _words(text), _words(wanted)
    return len(lines) == len(wanted_lines) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted_lines, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted or not (_is_number(wanted) and _is_number(word)):
        return False
    return math.isclose(float(word), float(wanted), rel_tol=1e-6, abs_tol=1e-6)


def _is_number(word: str) -> bool:
    """Digits with a sign, a point, an exponent: no `nan`, no underscores, and not too long."""
    if len(word) > 400 or set(word) - set("0123456789+-.eE"):
        return False
    try:
        float(word)
    except ValueError:
        return False
    return True
