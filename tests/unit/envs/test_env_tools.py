"""Tools that come with it: the calculator, the Python interpreter in its sandbox, and search."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_lacks import needs_sandbox

from grpo_rl.envs.contract import Start, ToolResult
from grpo_rl.envs.environments import TOOLS, Named, made
from grpo_rl.envs.tools.number_tools import Calculator
from grpo_rl.envs.tools.python_interpreter import PythonInterpreter
from grpo_rl.envs.tools.retrieval import Search, index_of
from grpo_rl.errors import ConfigError

START = Start(uid="row", data_source="test", messages=())


def called(tool: Any, *calls: dict[str, Any]) -> list[ToolResult]:
    """The results of the calls of one episode."""

    async def episode() -> list[ToolResult]:
        await tool.begin(START)
        try:
            return [await tool.call(arguments) for arguments in calls]
        finally:
            await tool.close()

    return asyncio.run(episode())


# ---- calculator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 7) * 3", "57"),
        ("1/3", "0.333333333333"),
        ("2**64", "18446744073709551616"),
        ("1.5*2", "3"),
        ("-7 / 2", "-3.5"),
        ("2**-1", "0.5"),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert called(Calculator(), {"expression": expression}) == [ToolResult(value)]


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "9**9**9",
        "(-8)**0.5",
        "__import__('os').system('ls')",
        "(" * 500,
        "9" * 500,
        "1 if 1 else 2",
        "1e-1000000",
    ],
)
def test_the_calculator_refuses_what_is_no_expression(expression: str) -> None:
    [result] = called(Calculator(), {"expression": expression})
    assert result.failed and result.text.startswith("not an expression: ")


# ---- the Python interpreter ----------------------------------------------------------------------------------


def cells(*codes: str, **options: Any) -> list[ToolResult]:
    return called(PythonInterpreter(**options), *({"code": code} for code in codes))


@needs_sandbox
def test_variables_stay_from_call_to_call() -> None:
    results = cells("x = 3", "def double(n):\n    return 2 * n", "print('so'); double(x)", "x")
    assert [(result.text, result.failed) for result in results] == [
        ("", False),
        ("", False),
        ("so\n6\n", False),
        ("3\n", False),
    ]


@needs_sandbox
def test_a_call_that_runs_too_long_ends_the_interpreter_and_the_next_one_begins_anew() -> None:
    results = cells("x = 1", "while True: pass", "x", "40 + 2", time_s=1.0)
    assert results[1] == ToolResult(
        "The interpreter was ended: the code ran longer than 1 s. Its variables are gone.", failed=True
    )
    assert "NameError" in results[2].text and results[3].text == "42\n"


HOSTILE = {  # what the sandbox itself forbids is tried in tests/integration/test_sandbox_escapes.py
    "takes all memory": "b = bytearray(1 << 30)",
    "leaves": "import os; os._exit(0)",
    "kills itself": "import os; os.kill(os.getpid(), 9)",
    "closes its line": "import os; os.close(0)",
    "answers in a wrong form": "import os; os.write(0, b'1' + b'\\xff' * 400)",
    "floods the standard output": "import os\nwhile True: os.write(1, b'x' * 65536)",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
@needs_sandbox
def test_hostile_code_fails_and_the_interpreter_is_there_for_the_next_call(code: str) -> None:
    results = cells(code, "40 + 2", time_s=3.0)
    assert results[0].failed, results[0].text
    assert results[1] == ToolResult("42\n")


# ---- search --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rivers").mkdir()
    (tmp_path / "rivers" / "danube.md").write_text("The Danube rises in the Black Forest.\n\nIt ends in the Black Sea.\n")
    (tmp_path / "rivers" / "rhine.txt").write_text("The Rhine rises in the Alps.")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    yield tmp_path
    index_of.cache_clear()


def test_search_finds_the_passage_that_has_the_words(folder: Path) -> None:
    tool = Search(folder=str(folder), top_k=1)
    results = called(
        tool, {"query": "Where does the Rhine rise? Alps"}, {"query": "black sea"}, {"query": "volcano"}, {"query": " "}, {}
    )
    assert results[0].text == "[rivers/rhine.txt] The Rhine rises in the Alps."
    assert results[1].text == "[rivers/danube.md#2] It ends in the Black Sea."
    assert results[2] == ToolResult("No passage has any of these words.")
    assert results[3].failed and results[4].failed


def test_search_refuses_folders_without_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        Search(folder=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"has no \.txt or \.md file"):
        Search(folder=str(tmp_path))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        Search(folder=str(tmp_path))
    for options, said in (({"top_k": 0}, "top_k=0"), ({"folder": str(tmp_path), "top_k": "3"}, "type of its default, 3")):
        with pytest.raises(ConfigError, match=said):
            made(Named("search", options), TOOLS, "tool")
