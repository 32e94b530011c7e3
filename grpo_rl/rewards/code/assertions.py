"""Assertions of a code task, taken apart: a call to be run in the sandbox, and a judgement on its value outside of it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from grpo_rl.errors import RewardError
from grpo_rl.rewards.sandbox.returned_values import check_hashes
from grpo_rl.rewards.sandbox.sandbox import Case

Judged = tuple[Case, Callable[[Any], bool]]


def assertions(text: str, function: str | None) -> list[Judged]:
    """The call and the judgement of each assertion. Raises RewardError for one that cannot be judged apart from the call."""
    try:
        body: list[ast.stmt] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"an assertion of a code task is not Python: {short(text)}: {error}") from None
    checks = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    aliases: set[str] = set()
    if checks:
        if function is None:
            raise RewardError("check(candidate) needs the function's name: give fn_name or entry_point")
        aliases = {argument.arg for argument in checks[0].args.args}
        body = [node for node in checks[0].body if not _is_idle(node)]
    else:
        body = [node for node in body if not _is_idle(node)]
    return [_assertion(node, aliases, function) for node in body]


def _is_idle(node: ast.stmt) -> bool:
    """Return whether a statement tests nothing: a doc string, an import, HumanEval's METADATA and `assert True`."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and node.test.value is True
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "METADATA" for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _assertion(node: ast.stmt, aliases: set[str], function: str | None) -> Judged:
    if not isinstance(node, ast.Assert):
        raise _refused(node, "only assertions can be judged outside of the sandbox")
    calls = [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Call) and not _is_wrapper(inner)]
    if len(calls) != 1 or not isinstance(calls[0].func, ast.Name) or calls[0].keywords:
        raise _refused(node, "it must call the function once, with arguments by position")
    call, called = calls[0], calls[0].func.id
    try:
        arguments = tuple(map(ast.literal_eval, call.args))
    except (ValueError, TypeError):
        raise _refused(node, "the arguments must be literals") from None
    unknown = next((inner for inner in ast.walk(node.test) if not _is_known(inner, call)), None)
    if unknown is not None:
        raise _refused(node, f"{ast.unparse(unknown)!r} is none of the operations that are judged here")
    name = function if called in aliases and function is not None else called
    return Case(function=name, arguments=arguments), lambda value: bool(_result(node.test, call, value))


def _refused(node: ast.stmt, reason: str) -> RewardError:
    return RewardError(
        f"an assertion of a code task cannot be used: {reason}: {short(ast.unparse(node))}; expected values stay outside "
        f"of the sandbox, so write `assert f(1, [2]) == 3`, or use inputs and outputs"
    )


def _set(values: Any = ()) -> set[Any]:
    if isinstance(values, list | tuple):
        check_hashes(values)
    return set(values)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "set": _set,
    "sorted": sorted,
    "list": list,
    "tuple": tuple,
    "len": len,
    "abs": abs,
    "round": round,
    "isclose": math.isclose,
    "math.isclose": math.isclose,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Attribute, ast.expr_context)
_OPERATORS = (ast.Not, ast.USub, ast.UAdd, ast.Sub, ast.And, ast.Or)
_SHAPES = (ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.keyword)


def _is_wrapper(call: ast.Call) -> bool:
    return ast.unparse(call.func) in WRAPPERS


def _is_known(node: ast.AST, call: ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return node is call or _is_wrapper(node)
    return isinstance(node, (*_LITERALS, *_OPERATORS, *_SHAPES, *COMPARISONS))


def _result(node: ast.expr, call: ast.Call, value: Any) -> Any:
    """The value of an assertion's expression with `value` in the place of the call. Raises ValueError for what is not known."""
    if node is call:
        return value
    if isinstance(node, ast.Compare):
        terms = [_result(term, call, value) for term in (node.left, *node.comparators)]
        compared = zip(node.ops, terms, terms[1:], strict=False)
        return all(COMPARISONS[type(operator)](left, right) for operator, left, right in compared)
    if isinstance(node, ast.BoolOp):
        terms = [_result(term, call, value) for term in node.values]
        return all(terms) if isinstance(node.op, ast.And) else any(terms)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _result(node.operand, call, value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return _result(node.left, call, value) - _result(node.right, call, value)
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: _result(keyword.value, call, value) for keyword in node.keywords if keyword.arg}
        return WRAPPERS[ast.unparse(node.func)](*(_result(term, call, value) for term in node.args), **keywords)
    return ast.literal_eval(node)


def short(value: Any) -> str:
    """The value in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
