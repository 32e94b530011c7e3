"""Everything that a row says is in the prompt that the template makes of it, or the row is refused: roles, tools, answers, keywords."""

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.rows import BadRow, example
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.training_rows.conversations import Tokenizing, conversation
from grpo_rl.data.training_rows.pairs import pair_texts, tokenized_pair
from grpo_rl.errors import ConfigError, DataError
from tests.unit.envs.chat_templates import GEMMA, LLAMA3, MISTRAL, QWEN3, QWEN25, tokenizer_of

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KNOWN_ROLES = """{% if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Roles that it does not know, and a system message that is not the first, vanish, as in the templates of Qwen, Phi and DeepSeek."""


def user(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def renderer(template: str = KNOWN_ROLES, **options: Any) -> Renderer:
    return Renderer(DataConfig(**options), tokenizer_of(template, "<|im_end|>"))


@pytest.mark.parametrize("role", ["human", "User", "developer", "tool", "system"])
@pytest.mark.parametrize("kind", ["prompts", "conversations", "pairs"])
def test_a_message_that_the_template_leaves_out_is_a_bad_row(role: str, kind: str) -> None:
    asked = [user("Be brief."), user("What is 6*7?", role)]
    answer = {"role": "assistant", "content": "42"}
    config = DataConfig()
    pair = {"prompt": asked, "chosen": [answer], "rejected": [user("41", "assistant")]}
    render: dict[str, Callable[[Renderer], Any]] = {
        "prompts": lambda by: by.render(asked),
        "conversations": lambda by: Tokenizing(by)(conversation({"messages": [*asked, answer]}, config)),
        "pairs": lambda by: tokenized_pair(pair_texts(pair, config), by),
    }
    with pytest.raises(BadRow) as error:
        render[kind](renderer())
    assert f"leaves out the content of message 1, of the role '{role}': 'What is 6*7?'" in str(error.value)
    assert ("often called 'user'" in str(error.value)) == (role in ("human", "User"))
    render[kind](renderer(CHATML))


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA3, MISTRAL, GEMMA])
def test_templates_that_write_a_text_in_another_way_show_it_all_the_same(template: str) -> None:
    asked = [
        user('  <think>so</think> What "is" 6*7?\n'),
        user("<think>\n6*7\n</think>\n\n42", "assistant"),
        user('é\n"And" 7*7? '),
    ]
    text = renderer(template).render(asked)
    assert "6*7?" in text and "7*7?" in text


def test_a_conversation_with_tools_has_to_show_them_their_calls_and_their_answers() -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    messages = [
        user("Warm?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"degrees": 31}', "tool_call_id": "call00000"},
        user("Yes.", "assistant"),
    ]  # fmt: skip
    for template in (QWEN25, QWEN3, LLAMA3, MISTRAL):
        by = renderer(template)
        by.check_shown(messages, tools=tools)
    with pytest.raises(BadRow, match=r"leaves out the tool calls of message 1, of the role 'assistant'"):
        renderer(CHATML).check_shown(messages)
    with pytest.raises(BadRow, match=r"leaves out the content of message 2, of the role 'tool'"):
        renderer(KNOWN_ROLES.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")).check_shown(messages)
    with pytest.raises(BadRow, match="leaves the tools out"):
        renderer(CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")).check_shown(messages, tools=tools)


def test_the_arguments_of_a_call_are_written_as_json_text_for_templates_that_want_it() -> None:
    wants_text = CHATML.replace(
        "{{ m.content }}", "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}{{ m.content }}"
    )
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
    row = {"messages": [user("Warm?"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
    chat = conversation(row, DataConfig())
    by = renderer(wants_text.replace("c.function.arguments", "c.function.name + c.function.arguments"))
    assert 'call w{"city": "Rome"}' in by.text(chat.messages)
    assert '{"name": "w", "arguments": {"city": "Rome"}}' in renderer(QWEN25).text(chat.messages)


def test_a_keyword_that_the_template_does_not_read_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"apply_chat_template_kwargs\.enable_thinkin: .* does not read it\. Did you mean enable_thinking"
    ):
        renderer(QWEN3, apply_chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="the tokenizer's chat template shows no tools"):
        renderer(CHATML, apply_chat_template_kwargs={"tools": [{"type": "function", "function": {"name": "w"}}]})
    chat = conversation({"messages": [user("a"), user("b", "assistant")], "enable_thinking": False}, DataConfig())
    with pytest.raises(BadRow, match="enable_thinking=False, which the chat template does not read"):
        Tokenizing(renderer(CHATML))(chat)
    Tokenizing(renderer(QWEN3))(chat)


def test_a_prompt_that_ends_with_the_assistant_is_refused_or_gone_on_with() -> None:
    asked = [user("6*7?"), user("It is", "assistant")]
    with pytest.raises(
        BadRow, match=r"ends with a message of the assistant, which may be the answer.*continue_final_message=true"
    ):
        renderer(QWEN25).render(asked)
    goes_on = renderer(QWEN25, continue_final_message=True)
    assert goes_on.render(asked).endswith("<|im_start|>assistant\nIt is")
    assert goes_on.render(asked[:1]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("column", ["images", "videos"])
def test_pictures_are_not_dropped_in_silence(column: str) -> None:
    row = {"data_source": "a", "prompt": "<image>?", "reward_model": {"ground_truth": "2"}}
    for read in (example, pair_texts, conversation):
        with pytest.raises(BadRow, match=f"column '{column}' is not empty"):
            read(row | {column: [{"path": "a.png"}]}, DataConfig())
    assert example(row | {column: []}, DataConfig()).ground_truth == "2"


def test_parquet_rows_have_the_parts_of_tool_calls_that_were_written_and_no_others(tmp_path: Path) -> None:
    def called(name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}

    talk = [user("?"), called("weather", city="Rome"), called("search", query="x", limit=3), user("ok", "assistant")]
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {"enum": ["x"]}}}}},
    ]
    pq.write_table(
        pa.Table.from_pylist([{"messages": talk, "tools": tools, "extra_info": {"a": None}}]), tmp_path / "a.parquet"
    )
    row = open_source(str(tmp_path / "a.parquet")).row(0)
    chat = conversation(row, DataConfig())
    print(json.dumps(chat.messages[1]["tool_calls"]))
    assert [m.get("tool_calls") for m in chat.messages] == [m.get("tool_calls") for m in talk]
    assert chat.options["tools"] == tools and row["extra_info"] == {"a": None}
    as_text = conversation({"messages": talk, "tools": json.dumps(tools)}, DataConfig())
    assert as_text.options == chat.options
    with pytest.raises(BadRow, match=r"tool_calls\[0\]\.function\.arguments' is '\{city'.*JSON text"):
        broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": "{city"}}]}
        conversation({"messages": [user("?"), broken]}, DataConfig())


def test_dates_and_decimals_become_text_and_bytes_are_a_bad_row(tmp_path: Path) -> None:
    def loaded(gold: Any, **extra: Any) -> PromptDataset:
        row = {"data_source": "a", "prompt": "?", "reward_model": {"ground_truth": gold}, "extra_info": extra}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
        return PromptDataset([str(tmp_path / "a.parquet")], DataConfig(), tokenizer_of(CHATML, "<|im_end|>")).checked()

    day = datetime.date(2026, 11, 26)
    prompt = loaded(Decimal("1.50"), day=day, at=[datetime.datetime(2026, 1, 2, 3)], took=datetime.timedelta(seconds=3)).prompt(
        0, "u"
    )
    assert (prompt.ground_truth, prompt.extra_info) == (
        "1.50",
        {"day": "2026-11-26", "at": ["2026-01-02T03:00:00"], "took": "0:00:03"},
    )
    json.dumps(prompt.extra_info)
    with pytest.raises(DataError, match=r"row 0: column 'extra_info\.x\[0\]' is b'\\x00' \(bytes\); expected text"):
        loaded("2", x=[b"\0"])
    with pytest.raises(DataError, match=r"column 'reward_model\.ground_truth' is b'2' \(bytes\)"):
        loaded(b"2", a=1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")
def test_qwens_own_template_leaves_out_a_role_that_it_does_not_know() -> None:
    from transformers import AutoTokenizer

    by = Renderer(DataConfig(), AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5"))
    for role, message in (("human", user("What is 6*7?", "human")), ("developer", user("x", "developer"))):
        with pytest.raises(BadRow, match=f"leaves out the content of message 0, of the role '{role}'"):
            by.render([message])
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    by.check_shown([user("system", "system"), user("?"), said, user("31", "tool")], tools=tools)
