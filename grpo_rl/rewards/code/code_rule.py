"""Reward of code tasks: a response's program against test cases, in a sandbox."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpo_rl.config.schema.kinds import Count, ProcessMegabytes, Seconds
from grpo_rl.errors import ConfigError
from grpo_rl.registry import check_options
from grpo_rl.rewards.code.cases import read_tests
from grpo_rl.rewards.sandbox.sandbox import START_S, Limits, Sandbox, check_available

KEY = "reward.function_kwargs.code"
FENCE = "```"
MOST_INDENT = 20
PYTHON = ("python", "py", "python3")
TOTAL_S = 30.0
LONGEST_CODE = 100_000
"""Characters of a program; a longer one earns nothing."""


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
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
    wrote `too_much`, were `not_run`; `no_code` is 1 where the response has no program. Raises RewardError for a ground truth
    that holds no usable test, and where there is no sandbox: code is never run without one.
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
            left = deadline - time.monotonic()
            if left <= 0 or (result["num_failed"] and not continuous):
                result["not_run"] += 1
                continue
            outcome = sandbox.run(test.case, left)
            result["num_passed" if test.holds(outcome) else "num_failed"] += 1
            result["timed_out"] += outcome.status == "timeout"
            result["too_much"] += outcome.status == "output"
            result["crashed"] += outcome.status == "ended" and outcome.exit_code != 0
    result["acc"] = float(result["num_passed"] == len(tests))
    result["score"] = result["num_passed"] / len(tests) if continuous else result["acc"]
    return result


def code_problems(function: Callable[..., Any], timeout_s: float) -> list[str]:
    """Return what is wrong with the options with which `code` is bound in `function`; nothing where that is another reward."""
    options = _options(function)
    if options is None:
        return []
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


def check_code(function: Callable[..., Any]) -> None:
    """Raise SandboxUnavailable, before a run starts, where `function` is `code` and its programs could not be run here."""
    if _options(function) is not None:
        check_available()


def _options(function: Callable[..., Any]) -> dict[str, Any] | None:
    """The options that are bound to `code`; None for another function."""
    if getattr(function, "func", function) is not code:
        return None
    return dict(getattr(function, "keywords", {}))


def last_program(text: str) -> str | None:
    """The content of the last closed ```python block, or, where there is none, of the last closed block without a language.

    A text without any fence is a program as a whole, as base models write them; None where the only blocks are others.
    One pass from fence to fence; a fence begins its line, spaces aside, and those are taken off the block's lines.
    """
    best: str | None = None
    other: str | None = None
    fence = _fence(text, 0)
    if fence is None:
        return text or None
    while fence is not None:
        start, indent = fence
        line_end = text.find("\n", start)
        end = _fence(text, line_end) if line_end >= 0 else None
        if end is None:
            break
        language = text[start + len(FENCE) : line_end].strip().lower() if line_end - start < 40 else "?"
        if language in PYTHON or not language:
            lines = text[line_end + 1 : end[0] - end[1]].splitlines(keepends=True)
            block = (
                "".join(line[indent:] if not line[:indent].strip() else line for line in lines) if indent else "".join(lines)
            )
            best, other = (block, other) if language else (best, block)
        fence = _fence(text, end[0] + len(FENCE))
    return best if best is not None else other


def _fence(text: str, start: int) -> tuple[int, int] | None:
    """Return where the next fence begins that has only spaces before it on its line, and how many; None without one."""
    while (found := text.find(FENCE, start)) >= 0:
        before = max(0, found - MOST_INDENT - 1)
        indent = found - 1 - text.rfind("\n", before, found) if "\n" in text[before:found] or not before else None
        if indent is not None and not text[found - indent : found].strip():
            return found, indent
        start = found + len(FENCE)
    return None
