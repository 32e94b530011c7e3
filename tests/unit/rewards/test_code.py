"""The reward of programs: which program of a response counts, which tests a row holds, and what they are worth."""

import json
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
from machine_lacks import needs_sandbox, take_namespaces_away

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.sandbox.code_rule import (
    code,
    code_problems,
    decode,
    last_program,
    read_tests,
    same_output,
    same_value,
)
from grpo_rl.rewards.sandbox.inside import encode
from grpo_rl.rewards.sandbox.sandbox import Case, ForkServer, Sandbox, SandboxUnavailable, check_available

SQUARE = "```python\ndef f(x):\n    return x * x\n```"
ADD = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nThat is it."


def score(response: str, tests: Any, **options: Any) -> float:
    return code("code", response, tests, **options)["score"]


@needs_sandbox
def test_a_program_is_worth_the_share_of_its_cases_or_all_or_nothing() -> None:
    tests = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "0 0\n"], "outputs": ["3\n", "7\n", "12\n", "0\n"]}
    result = code("code", ADD, tests)
    assert (result["score"], result["acc"], result["num_passed"], result["num_cases"]) == (0.75, 0.0, 3.0, 4.0)
    strict = code("code", ADD, tests, continuous=False)
    assert (strict["score"], strict["num_failed"], strict["not_run"]) == (0.0, 1.0, 1.0)


METHOD = "```python\nclass Solution:\n    def f(self, x):\n        return (x, x)\n```"


@pytest.mark.parametrize(
    ("tests", "worth"),
    [
        ({"fn_name": "f", "inputs": [[3], [4]], "outputs": [9, [16]]}, 1.0),
        (json.dumps({"fn_name": "f", "inputs": ["3", "-2"], "outputs": ["9", "5"]}), 0.5),
        (["assert f(3) == 9", "assert f(4) == 17"], 0.5),
        ({"test_list": ["assert f(2) == 4", "assert f(0) is not None"], "test_setup_code": "import math"}, 1.0),
        (
            {
                "entry_point": "f",
                "test": "METADATA = {'a': 1}\ndef check(candidate):\n    assert True, 'x'\n    assert abs(candidate(0.5) - 0.25) < 1e-6\n"
                "    assert candidate(-3) == 9, 'no'\n    assert not candidate(0)\n",
            },
            1.0,
        ),
    ],
)
@needs_sandbox
def test_a_function_is_called_with_the_arguments_of_every_form(tests: Any, worth: float) -> None:
    assert score(SQUARE, tests) == worth
    assert score(METHOD, {"fn_name": "f", "inputs": [["a"]], "outputs": [["a", "a"]]}) == 1.0


@needs_sandbox
def test_of_many_cases_some_are_used_evenly_spread() -> None:
    tests = {"fn_name": "f", "inputs": [[x] for x in range(10)], "outputs": [0, 0, 0, 0, 0, 25, 0, 0, 0, 0]}
    result = code("code", SQUARE, tests, max_cases=2)  # cases 0 and 5
    assert (result["num_cases"], result["num_passed"]) == (2.0, 2.0)


@needs_sandbox
def test_what_went_wrong_is_counted() -> None:
    program = "```python\nimport time\nn = input()\nif n == 'slow': time.sleep(9)\nif n == 'bad': 1 / 0\nprint('x' * (10**6 if n == 'much' else 1))\n```"
    tests = {"inputs": ["slow", "bad", "much", "fine"], "outputs": ["x"] * 4}
    result = code("code", program, tests, time_s=1.0, output_kb=100)
    assert (result["timed_out"], result["crashed"], result["too_much"], result["num_passed"]) == (1.0, 1.0, 1.0, 1.0)
    assert code("code", "```bash\nls\n```", tests)["no_code"] == 1.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```python\nb\n```\n", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("```python\na\n```\n```python\nunfinished", "a\n"),
        ("say ```python in a line\n``` x\n", None),
        ("print(1)", "print(1)"),
        ("- list\n  ```Py\n  a\n  ```", "a\n"),
        ("", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text) == program


@pytest.mark.parametrize("unit", ["```", "```python\n", "```\n", " ``` ", "`", "\n```", "    ```"])
def test_the_search_for_the_program_takes_time_linear_in_the_text(unit: str) -> None:
    started = time.process_time()
    last_program(unit * 50_000)
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("text", "wanted", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "0.5", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_by_words_on_lines(text: str, wanted: str, same: bool) -> None:
    assert same_output(text, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: "a"}, {"1": "a"}, True),
        (True, 1, False),
        (3, [3], True),
        ([3], 3, False),
        (0.1 + 0.2, 0.3, True),
        ({1}, [1], False),
        (None, 0, False),
    ],
)
def test_values_are_compared_as_json_has_them(value: Any, wanted: Any, same: bool) -> None:
    assert same_value(value, wanted) is same


VALUES = [None, True, 0, -(10**400), 0.1, -0.0, float("inf"), "ü\ud800\n", b"\0a", 1 + 2j, [1, (2, {3})], {"a": {(1,): []}}, ()]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = decode(encode(value).encode())
    assert (again, type(again)) == (value, type(value))


@pytest.mark.parametrize(
    "forged",
    [b"", b"{}", b"[]", b"[1]", b'["x"]', b'["i","0x"]', b'["i",1]', b'["d",1]', b"[" * 10**5, b'["s",["l"]]', b"\xff"],
)
def test_a_forged_value_is_refused(forged: bytes) -> None:
    with pytest.raises(ValueError):
        decode(forged)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "expected"),
        ("42", "expected"),
        ("hello", "neither JSON nor assertions"),
        ({"inputs": [1]}, "has the keys inputs"),
        ({"inputs": [], "outputs": []}, "no test case"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "f", "inputs": ["a b"], "outputs": ["1"]}, "not JSON"),
        (["assert f(1) == g(1)"], "call the function once"),
        (["assert f(x) == 1"], "arguments must be literals"),
        (["assert f(1) == 2 ** 9"], "none of the operations"),
        (["x = f(1)"], "only assertions"),
        (["for i in range(3): assert f(i) == i"], "only assertions"),
        (["assert f(1"], "not Python"),
        ({"test": "def check(candidate): assert candidate(1) == 1"}, "function's name"),
    ],
)
def test_tests_that_cannot_be_judged_outside_are_refused_with_the_reason(tests: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        read_tests(tests)


def test_no_expected_output_is_in_what_a_sandbox_gets() -> None:
    _, tests = read_tests({"inputs": ["5"], "outputs": ["secret"]})
    assert tests[0].case == Case(stdin="5")
    _, tests = read_tests(["assert f(5) == 'secret'"])
    assert tests[0].case == Case(function="f", arguments=(5,))


# ---- if there is no sandbox ----------------------------------------------------------------------------


def test_without_namespaces_nothing_runs_and_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    take_namespaces_away(monkeypatch)
    words = r"make the namespaces: unshare: Invalid argument.*(sysctl|--security-opt).*docs/rewards.md"
    with pytest.raises(SandboxUnavailable, match=words):
        code("code", SQUARE, ["assert f(1) == 1"])
    with pytest.raises(SandboxUnavailable):
        check_available()


@needs_sandbox
def test_a_sandbox_that_fails_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox("print(1)") as sandbox:
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="ended in the middle of a case"):
            sandbox.run(Case())
    monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.call_filter", lambda machine: b"no filter")
    with Sandbox("print(1)") as sandbox, pytest.raises(SandboxUnavailable, match="start the candidate: filter system calls"):
        sandbox.run(Case())


@needs_sandbox
def test_programs_print_sets_in_one_order_whatever_process_forks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> bytes:
        with Sandbox("print({str(number) for number in range(100)})") as sandbox:
            return sandbox.run(Case()).stdout

    first = printed()
    monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.FORK_SERVER", ForkServer())
    assert printed() == first != b""


@needs_sandbox
def test_a_fork_server_that_is_killed_is_replaced_and_a_forked_process_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer()
    monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.FORK_SERVER", server)

    def answers() -> int:
        assert score(ADD, {"inputs": ["1 2\n"], "outputs": ["3\n"]}) == 1.0
        assert server._process is not None
        return server._process.pid

    first = answers()
    os.kill(first, signal.SIGKILL)
    second = answers()
    if not (child := os.fork()):
        os._exit(0 if answers() not in (first, second) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert answers() == second != first


def test_an_interpreter_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.FORK_SERVER", ForkServer())
    for program in ("/no/such/python", "/bin/false"):
        monkeypatch.setattr("grpo_rl.rewards.sandbox.sandbox.interpreter", lambda program=program: program)
        with pytest.raises(SandboxUnavailable, match=f"start the launcher with {program}"):
            check_available()


def test_options_out_of_range_are_refused_before_a_run() -> None:
    wrong, large, small = code_problems(partial(code, time_s=1e9, memory_mb=1, continuous="yes"), 60.0)
    assert "continuous='yes'" in wrong and "time_s" in large and "memory_mb=1 is out of range" in small
    assert "reward.timeout_s=30" in code_problems(code, 30.0)[0]
    assert code_problems(code, 60.0) == [] and code_problems(len, 1.0) == []
    with pytest.raises(ConfigError, match="total_s"):
        RewardFunction.from_config(RewardConfig(functions=["code"], timeout_s=10.0))


# ---- what right programs do, and what data sets hold -------------------------------------------------------------


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "print(2 * int(input())); exit()",
        "print(2 * int(input())); quit(0)",
        "import sys\nprint(2 * int(open('/dev/stdin').read())); sys.exit()",
        "with open(0) as file:\n    print(2 * int(file.readline()))\nexit(0)",
        "for line in open('/dev/stdin'):\n    print(2 * int(line))",
    ],
)
def test_programs_may_leave_and_read_their_input_as_they_do_elsewhere(program: str) -> None:
    tests = {"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]}
    assert score(f"```python\n{program}\n```", tests) == 1


@needs_sandbox
def test_a_program_that_leaves_with_an_error_has_failed() -> None:
    assert score("```python\nprint(42); exit(1)\n```", {"inputs": [""], "outputs": ["42"]}) == 0


@needs_sandbox
@pytest.mark.parametrize("as_text", [False, True])
def test_the_tests_of_livecodebench_are_read(as_text: bool) -> None:
    programs = [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in (1, 2)]
    calls = [{"input": f"{n}", "output": f"{n * n}", "testtype": "functional"} for n in (3, 4)]
    given = [json.dumps(tests) if as_text else tests for tests in (programs, calls)]
    assert score("```python\nprint(2 * int(input()))\n```", given[0]) == 1
    assert code("code", SQUARE, given[1], {"func_name": "f"})["score"] == 1
    with pytest.raises(RewardError, match=r"need the function's name as extra_info\.func_name"):
        code("code", SQUARE, given[1])


@pytest.mark.parametrize(
    ("output", "wanted", "expected"),
    [
        ("0", "0.000000001", False),
        ("0.0", "1.0e-9", False),
        ("0.00123456", "0.001235", True),
        ("0.0012", "0.001235", False),
        ("1e-10", "0.0", True),
        ("3.3333333", "3.333333333", True),
        ("0", "0.0", True),
    ],
)
def test_a_small_expected_number_is_not_nothing(output: str, wanted: str, expected: bool) -> None:
    assert same_output(output, wanted) == expected


def test_small_values_are_not_nothing_either() -> None:
    assert not same_value(0.0, 1e-9) and same_value(1e-9, 0.0) and same_value(1e-9 * (1 + 1e-8), 1e-9)


def test_megabytes_of_line_breaks_are_told_from_one_line_at_once() -> None:
    started = time.process_time()
    assert not same_output("\n" * 4_000_000 + "42", "42") and same_output("42" + "\n" * 4_000_000, "42")
    assert time.process_time() - started < 0.2
