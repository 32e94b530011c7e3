"""Contexts between turns: exactly the template's own conversation if it appends, and refused if it does not."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FAMILIES, QWEN25, REWRITING, tokenizer_of

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.tool_formats import parse
from grpo_rl.errors import ConfigError

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}}
]


def deltas_of(family: str, *, tools: bool = False) -> tuple[ChatDeltas, Any]:
    template, end, kwargs = FAMILIES[family]
    tokenizer = tokenizer_of(template, end)
    options = {**kwargs, **({"tools": TOOLS} if tools else {})}
    renderer = Renderer(DataConfig(apply_chat_template_kwargs=options), tokenizer)
    stops = frozenset(tokenizer.convert_tokens_to_ids([end, "<|endoftext|>", "<|eom_id|>"]))
    return ChatDeltas(renderer, tokenizer, stops), tokenizer


@pytest.mark.parametrize(
    ("family", "role", "notes"),
    [
        ("qwen25", "user", 0),
        ("qwen25", "tool", 0),
        ("qwen3", "user", 1),
        ("qwen3", "tool", 0),
        ("qwen3, no thinking", "user", 1),
        ("qwen3, no thinking", "tool", 1),
        ("llama3", "user", 0),
        ("llama3", "tool", 0),
        ("mistral", "user", 0),
        ("mistral", "tool", 0),
        ("gemma", "user", 0),
    ],
)
def test_templates_that_append_are_taken_and_dropped_thoughts_are_noted(family: str, role: str, notes: int) -> None:
    deltas, _ = deltas_of(family, tools=role == "tool")
    assert len(deltas.check([role], ["add"])) == notes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_conversation_put_together_from_tokens_is_the_templates_own(family: str, role: str) -> None:
    if (family, role) == ("gemma", "tool"):
        pytest.skip("Gemma's template has no answers of tools")
    deltas, tokenizer = deltas_of(family)
    end = tokenizer.eos_token_id
    messages: list[dict[str, Any]] = [{"role": "user", "content": "say 11\n\n"}]
    ids = deltas.prompt(messages).token_ids.tolist()
    texts = ["one\n", "\n two 11 ", "as"]
    for number, text in enumerate(texts):
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        answer = {"role": role, "content": f"answer {number}"}
        if role == "tool":
            answer |= {"name": "add", "tool_call_id": f"call{number:05d}"}
        ids += deltas.between([answer], ended=True).token_ids.tolist()
        messages += [{"role": "assistant", "content": text}, answer]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **FAMILIES[family][2])
    spoken = [one.strip() for one in texts]
    for one in spoken:
        assert one in text
    if family in ("qwen25", "mistral"):  # the others trim what was said, or leave thoughts out
        assert text == expected.replace("[/INST] ", "[/INST]").replace("[/TOOL_RESULTS] ", "[/TOOL_RESULTS]")


def test_the_token_that_ended_a_turn_takes_the_place_of_the_templates() -> None:
    deltas, tokenizer = deltas_of("llama3")
    answer = [{"role": "user", "content": "on"}]
    tail = "<|start_header_id|>user<|end_header_id|>\n\non<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert tokenizer.decode(deltas.between(answer, ended=True).token_ids) == tail
    assert tokenizer.decode(deltas.between(answer, ended=False).token_ids) == "<|eot_id|>" + tail


def test_a_prompt_of_plain_text_goes_on_with_plain_text() -> None:
    deltas, tokenizer = deltas_of("qwen25")
    found = deltas.between([{"role": "user", "content": "1 2"}, {"role": "user", "content": " 3\n"}], ended=True, plain=True)
    assert tokenizer.decode(found.token_ids) == found.text == "1 2 3\n"


def test_a_template_that_rewrites_the_conversation_is_refused_with_the_place() -> None:
    tokenizer = tokenizer_of(REWRITING, "<|im_end|>")
    deltas = ChatDeltas(Renderer(DataConfig(), tokenizer), tokenizer, frozenset())
    with pytest.raises(ConfigError, match=r"(?s)does not only append.*becomes"):
        deltas.check(["user"])


def test_a_template_without_a_role_for_tools_is_refused() -> None:
    deltas, _ = deltas_of("gemma")
    with pytest.raises(ConfigError, match=r"cannot render answers of tools.*roles are user and assistant"):
        deltas.check(["tool"], ["add"])


def test_a_call_inside_of_a_thought_that_the_template_opened_is_none() -> None:
    call = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    for template, opened in (
        (QWEN25, ""),
        (QWEN25.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"), "<think>\n"),
    ):
        tokenizer = tokenizer_of(template, "<|im_end|>")
        deltas = ChatDeltas(Renderer(DataConfig(), tokenizer), tokenizer, frozenset())
        assert deltas.opened_thought == opened
        assert len(parse("hermes", deltas.opened_thought + f"I may say {call}")[0]) == (not opened)
        assert len(parse("hermes", deltas.opened_thought + f"so</think>{call}")[0]) == 1
