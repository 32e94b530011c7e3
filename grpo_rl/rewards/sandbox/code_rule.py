"""Reward of code tasks: a response's program against test cases, in a sandbox.

- `{"inputs": [...], "outputs": [...]}` (APPS, TACO, verl's prime_code): standard input and expected output of
  a program; with `fn_name`, arguments of that function and the value it returns.
- Assertions (MBPP's `test_list`, HumanEval's `test` with `check(candidate)`): a list, or the text of some.

An expected output never meets the candidate's code. So an assertion must be one call of the function with
literal arguments, compared with literals.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from grpo_rl.config.schema.kinds import Count, ProcessMegabytes, Seconds
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.frozen import frozen
from grpo_rl.registry import check_options
from grpo_rl.rewards.rules.answers import ExtraInfo
from grpo_rl.rewards.sandbox.sandbox import START_S, Case, CaseOutcome, Limits, Sandbox

KEY = "reward.function_kwargs.code"
_SPACE = r"[^\S\n]*"
FENCE = re.compile(rf"^{_SPACE}```", re.MULTILINE)
BLOCK = re.compile(rf"^({_SPACE})```(.*)\n((?:(?!{_SPACE}```).*\n)*){_SPACE}```", re.MULTILINE)
"""Spaces before the fence, what stands behind it, and the lines up to the next fence."""
PYTHON = ("python", "py", "python3")
TOTAL_S = 30.0
LONGEST_CODE = 100_000


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    *,
    continuous: bool = True,
    time_s: Seconds = 5.0,
    total_s: Seconds = TOTAL_S,
    memory_mb: ProcessMegabytes = 512,
    output_kb: Count = 4096,
    max_cases: Count | None = None,
) -> dict[str, float]:
    """`score` is the share of test cases that the last ```python block passes; without `continuous`, 1 for all of them, else 0.

    `time_s` is for one case, `total_s` for all: cases that it leaves no time for are failed. Of more than `max_cases` cases,
    so many are used, evenly spread.

    Beside it: `acc` (all passed), `num_passed`, `num_failed`, `num_cases`, and how many `timed_out`, `crashed` (ended with an error),
    wrote `too_much`, were `not_run`; `no_code` is 1 if the response has no program. Raises RewardError for a ground truth
    that holds no usable test, and if there is no sandbox: code is never run without one.
    """
    setup, tests = read_tests(ground_truth, extra_info)
    if max_cases is not None and len(tests) > max_cases:
        tests = [tests[index * len(tests) // max_cases] for index in range(max_cases)]
    program = last_program(solution_str)
    result = dict.fromkeys(
        ("score", "acc", "num_passed", "num_failed", "timed_out", "crashed", "too_much", "not_run", "no_code"), 0.0
    )
    result["num_cases"] = float(len(tests))
    if program is None or len(program) > LONGEST_CODE:
        return result | {"no_code": 1.0}
    limits = Limits(time_s=time_s, memory_mb=memory_mb, output_kb=output_kb)
    deadline = time.monotonic() + total_s
    with Sandbox(setup + program, limits) as sandbox:
        for test in tests:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or (result["num_failed"] and not continuous):
                result["not_run"] += 1
                continue
            outcome = sandbox.run(test.case, remaining_s)
            result["num_passed" if test.holds(outcome) else "num_failed"] += 1
            if not outcome.succeeded:
                result["crashed" if outcome.status == "ended" else outcome.status] += 1
    result["acc"] = float(result["num_passed"] == len(tests))
    result["score"] = result["num_passed"] / len(tests) if continuous else result["acc"]
    return result


def code_problems(function: Callable[..., Any], timeout_s: float) -> list[str]:
    if not is_code(function):
        return []
    options = getattr(function, "keywords", {})
    try:
        check_options(KEY, code, options)
    except ConfigError as error:
        return error.problems
    total_s = options.get("total_s", TOTAL_S)
    if total_s + START_S < timeout_s:
        return []
    return [
        f"{KEY}.total_s={total_s:g} leaves less than {START_S:g} s of reward.timeout_s={timeout_s:g}, after which a "
        f"response counts as failed instead of scored; set reward.timeout_s={total_s + 1.5 * START_S:g}, or lower the first"
    ]


def is_code(function: Callable[..., Any]) -> bool:
    return getattr(function, "func", function) is code


def last_program(text: str) -> str | None:
    """The last closed ```python block, else the last closed block without a language.

    A text without any fence is a program as a whole, as base models write them.
    """
    if not FENCE.search(text):
        return text or None
    blocks: dict[bool, str] = {}
    for indent, language, code_lines in BLOCK.findall(text):
        if (language := language.strip().lower()) in ("", *PYTHON):
            margin = len(indent)
            lines = [line if line[:margin].strip() else line[margin:] for line in code_lines.split("\n")]
            blocks[bool(language)] = "\n".join(lines)
    return blocks.get(True, blocks.get(False))


MOST_ALIKE = 50
"""Values of a set with the same hash."""


def decode(value: bytes) -> Any:
    """What `inside.encode` wrote, in exact built-in types. Raises ValueError for anything else."""
    try:
        return _decode(json.loads(value.decode("ascii")))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from error


def _decode(node: Any) -> Any:
    if not isinstance(node, list | dict):
        return node
    if isinstance(node, dict):
        raise ValueError("an object")
    tag, *items = node
    if tag in _PLAIN:
        (text,) = items
        return _PLAIN[tag](text)
    return _CONTAINERS[tag]([_decode(item) for item in items])


def check_hashes(values: Sequence[Any]) -> None:
    """Raise ValueError if a set of the values would take quadratic time."""
    hashes = sorted(map(hash, values))
    if any(first == later for first, later in zip(hashes, hashes[MOST_ALIKE:], strict=False)):
        raise ValueError(f"more than {MOST_ALIKE} values with one hash")


def _set(values: Any = ()) -> set[Any]:
    if isinstance(values, list | tuple):
        check_hashes(values)
    return set(values)


def _dict(items: list[Any]) -> dict[Any, Any]:
    check_hashes(items[::2])
    return dict(zip(items[::2], items[1::2], strict=True))


_PLAIN: dict[str, Callable[[Any], Any]] = {"i": lambda text: int(text, 16), "f": float, "b": bytes.fromhex}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    **{"l": list, "t": tuple, "s": _set, "d": _dict},
    "c": lambda parts: complex(*parts),
}


@frozen
class JudgedCase:
    case: Case
    judge: Callable[[Any], bool]
    """Gets standard output of a program, the returned value of a call."""

    def holds(self, outcome: CaseOutcome) -> bool:
        if not outcome.succeeded:
            return False
        try:
            is_program = self.case.function is None
            return self.judge(outcome.stdout.decode(errors="replace") if is_program else decode(outcome.value))
        except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
            return False


def assertions(text: str, function: str | None) -> list[JudgedCase]:
    try:
        body: list[ast.stmt] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"an assertion of a code task is not Python: {text!r:.80}: {error}") from None
    aliases: set[str] = set()
    if check := next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"), None):
        if function is None:
            raise RewardError("check(candidate) needs the function's name: give fn_name or entry_point")
        aliases, body = {argument.arg for argument in check.args.args}, check.body
    return [_assertion(node, aliases, function) for node in body if not _is_idle(node)]


def _is_idle(node: ast.stmt) -> bool:
    """A doc string, an import, HumanEval's METADATA and `assert True` test nothing."""
    match node:
        case ast.Expr(ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Assert(ast.Constant(True)) | ast.Assign([ast.Name("METADATA")]):
            return True
    return False


def _assertion(node: ast.stmt, aliases: set[str], function: str | None) -> JudgedCase:
    def refused(reason: str) -> RewardError:
        return RewardError(
            f"an assertion of a code task cannot be used: {reason}: {ast.unparse(node)!r:.80}; expected values stay outside "
            f"of the sandbox, so write `assert f(1, [2]) == 3`, or use inputs and outputs"
        )

    if not isinstance(node, ast.Assert):
        raise refused("only assertions can be judged outside of the sandbox")
    parts = list(ast.walk(node.test))
    calls = [part for part in parts if isinstance(part, ast.Call) and ast.unparse(part.func) not in WRAPPERS]
    if len(calls) != 1 or not isinstance(calls[0].func, ast.Name) or calls[0].keywords:
        raise refused("it must call the function once, with arguments by position")
    call, called = calls[0], calls[0].func.id
    try:
        arguments = tuple(map(ast.literal_eval, call.args))
    except (ValueError, TypeError):
        raise refused("the arguments must be literals") from None
    if unknown := next((part for part in parts if not isinstance(part, (*KNOWN, *COMPARISONS))), None):
        raise refused(f"{ast.unparse(unknown)!r} is none of the operations that are judged here")
    name = function if called in aliases and function is not None else called
    return JudgedCase(Case(function=name, arguments=arguments), lambda value: bool(_result(node.test, call, value)))


WRAPPERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (sorted, list, tuple, len, abs, round, math.isclose)
} | {"set": _set, "math.isclose": math.isclose}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, values: item in values,
    ast.NotIn: lambda item, values: item not in values,
}
KNOWN = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Attribute, ast.expr_context, ast.Call, ast.keyword),
    *(ast.Not, ast.USub, ast.UAdd, ast.Sub, ast.And, ast.Or, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp),
)


def _result(node: ast.expr, call: ast.Call, value: Any) -> Any:
    """The value of an assertion's expression with `value` in the place of the call."""

    def of(part: ast.expr) -> Any:
        return _result(part, call, value)

    if node is call:
        return value
    if isinstance(node, ast.Compare):
        terms = [of(term) for term in (node.left, *node.comparators)]
        compared = zip(node.ops, terms, terms[1:], strict=False)
        return all(COMPARISONS[type(sign)](lhs, rhs) for sign, lhs, rhs in compared)
    if isinstance(node, ast.BoolOp):
        return (all if isinstance(node.op, ast.And) else any)([of(term) for term in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not of(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return of(node.left) - of(node.right)
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: of(keyword.value) for keyword in node.keywords if keyword.arg}
        return WRAPPERS[ast.unparse(node.func)](*map(of, node.args), **keywords)
    return ast.literal_eval(node)


ASSERTIONS = ("assert_case", "asserts", "test_list", "test")
FUNCTION_NAMES = ("fn_name", "entry_point")
SETUPS = ("test_setup_code", "setup")
FORMS = (
    'expected {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called, or assertions under '
    f"{', '.join(map(repr, ASSERTIONS))}; as a dict or as its JSON text"
)


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> tuple[str, list[JudgedCase]]:
    """Code that goes before the candidate's, and the tests.

    They are read from the ground truth, or `extra_info["test_cases"]` if that is empty. Raises RewardError.
    """
    extra = extra_info or {}
    stored = ground_truth if ground_truth not in (None, "") else extra.get("test_cases")
    if isinstance(stored, str):
        try:
            stored = json.loads(stored)
        except ValueError:
            if "assert" not in stored:
                raise RewardError(
                    f"the ground truth of a code task is neither JSON nor assertions: {stored!r:.80}; {FORMS}"
                ) from None
            stored = {"test": stored}
    if isinstance(stored, Sequence) and not isinstance(stored, str):
        stored = _listed(stored, extra)
    if not isinstance(stored, Mapping):
        raise RewardError(f"the ground truth of a code task is {stored!r:.80}; {FORMS}")
    named = _first(FUNCTION_NAMES, stored, extra)
    setup = "".join(f"{stored[key]}\n" for key in SETUPS if stored.get(key))
    if (texts := _first(ASSERTIONS, stored)) is not None:
        tests = [test for text in ([texts] if isinstance(texts, str) else texts) for test in assertions(text, named)]
    elif "inputs" in stored and "outputs" in stored:
        inputs, outputs = stored["inputs"], stored["outputs"]
        if len(inputs) != len(outputs):
            raise RewardError(f"the ground truth of a code task has {len(inputs)} inputs and {len(outputs)} outputs")
        tests = [_pair(named, test_input, output) for test_input, output in zip(inputs, outputs, strict=True)]
    else:
        raise RewardError(f"the ground truth of a code task has the keys {', '.join(map(str, stored)) or 'none'}; {FORMS}")
    if not tests:
        raise RewardError("the ground truth of a code task holds no test case")
    return setup, tests


def _first(keys: Sequence[str], *sources: Mapping[str, Any]) -> Any:
    return next((source[key] for source in sources for key in keys if source.get(key)), None)


def _listed(tests: Sequence[Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """LiveCodeBench's tests of {input, output, testtype}, else assertions."""
    if not tests or not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
        return {"asserts": tests}
    name = _first(("func_name", *FUNCTION_NAMES), extra)
    calls = [test.get("testtype") == "functional" for test in tests]
    if any(calls) and (not all(calls) or name is None):
        raise RewardError(
            "functional tests of a code task need the function's name as extra_info.func_name, and no others beside them"
        )
    pairs = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    return pairs | ({"fn_name": name} if any(calls) else {})


def _lines(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, Sequence) else str(text)


def _pair(function: str | None, stdin: Any, expected: Any) -> JudgedCase:
    if function is None:
        output = _lines(expected)
        return JudgedCase(Case(stdin=_lines(stdin)), lambda text: same_output(text, output))
    if isinstance(stdin, str):  # a JSON value on each line, and the output as JSON
        try:
            stdin, expected = [json.loads(line) for line in stdin.split("\n") if line.strip()], json.loads(expected)
        except (ValueError, TypeError) as error:
            raise RewardError(f"arguments of {function} are not JSON, a value on each line: {stdin!r:.80}: {error}") from None
    case = Case(function=function, arguments=tuple(stdin))
    return JudgedCase(case, lambda value: same_value(value, expected))


def same_value(value: Any, expected: Any) -> bool:
    """Also equal to the one element of a list (APPS wraps them)."""
    plain = _as_json(value)
    return _equal(plain, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(plain, expected[0]))


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def _equal(value: Any, expected: Any) -> bool:
    """True is not 1, as in JSON."""
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, float) and isinstance(expected, float):
        return _near(value, expected, repr(expected))
    return bool(value == expected)


def same_output(text: str, expected: str) -> bool:
    """Expected numbers with a point are within 1e-6."""
    text, expected = text.rstrip(), expected.rstrip()
    if text.count("\n") != expected.count("\n"):  # before millions of lines are made of an output
        return False
    lines, wanted_lines = ([line.split() for line in output.split("\n")] for output in (text, expected))
    return list(map(len, lines)) == list(map(len, wanted_lines)) and all(
        map(_same_word, itertools.chain(*lines), itertools.chain(*wanted_lines))
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected or max(len(word), len(expected)) > 400 or set(word + expected) - set("0123456789+-.eE"):
        return False
    try:
        return _near(float(word), float(expected), expected)
    except (ValueError, ArithmeticError):
        return False


def _near(value: float, expected: float, text: str) -> bool:
    """Within 1e-6, or the rounding of the expected number: 0 is not 1e-9."""
    last_place = Decimal(text).as_tuple().exponent
    half = 0.5 * 10.0**last_place if isinstance(last_place, int) else 0.0
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=min(1e-6, half))
