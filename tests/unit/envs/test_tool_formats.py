"""Tool calls as models write them: read if they are right, and said what is wrong if they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.tool_formats import FORMATS, argument_problem, parse

CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "names", "wrong"),
    [
        ("hermes", "nothing to call", [], 0),
        ("hermes", f"so\n<tool_call>\n{CALL}\n</tool_call>", ["add"], 0),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{CALL.replace('add', 'sub')}</tool_call>", ["add", "sub"], 0),
        ("hermes", "<think><tool_call>{}</tool_call></think>done", [], 0),
        ("hermes", "<think><tool_call>", [], 0),
        ("hermes", f"<tool_call>{CALL}", [], 1),
        ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", ["add"], 1),
        ("hermes", "<tool_call>add(1)</tool_call>", [], 1),
        ("hermes", "<tool_call>[1]</tool_call>", [], 1),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', [], 1),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [], 1),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ["add"], 0),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", [], 1),
        ("llama3_json", "It is 3.", [], 0),
        ("llama3_json", CALL.replace("arguments", "parameters") + "<|eom_id|>", ["add"], 0),
        ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", ["add", "add"], 0),
        ("llama3_json", "<|python_tag|>print(1)", [], 1),
        ("llama3_json", '{"name": "add"', [], 1),
    ],
)
def test_calls_are_read_and_broken_ones_are_counted(form: str, text: str, names: list[str], wrong: int) -> None:
    calls, malformed = parse(form, text)
    assert [call.name for call in calls] == names
    assert len(malformed) == wrong and all(malformed)
    assert len({call.call_id for call in calls}) == len(names) and all(len(call.call_id) == 9 for call in calls)


@pytest.mark.parametrize("form", list(FORMATS))
@given(
    text=st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<|python_tag|>", CALL, "{", "["])).map("".join)
)
def test_no_text_makes_a_format_fail(form: str, text: str) -> None:
    assert all(isinstance(call.name, str) for call in parse(form, text)[0])


def test_a_parser_of_the_users_own_is_taken_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def calls(text):\n"
        "    if '!' in text: raise ValueError('no shouting')\n"
        "    return [{'name': word[1:], 'arguments': {}} for word in text.split() if word[0] == '@']\n"
    )
    assert [call.name for call in parse(f"{path}:calls", "use @one and @two")[0]] == ["one", "two"]
    assert parse(f"{path}:calls", "@one!")[1] == ("no shouting",)


SCHEMA = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "c": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"a": 1}, None),
        ({"a": 1, "b": None, "c": "x"}, None),
        ({"a": 1, "b": 0.5}, None),
        ({}, "add: 'a' is a required property"),
        ({"a": "1"}, "add: a: '1' is not of type 'integer'"),
        ({"a": True}, "not of type 'integer'"),
        ({"a": 1, "d": 2}, "'d' was unexpected"),
    ],
)
def test_arguments_are_compared_with_the_schema(arguments: dict[str, object], said: str | None) -> None:
    problem = argument_problem(SCHEMA, arguments)
    assert (problem is None) if said is None else (problem is not None and said in problem)
