"""Chat: the prompt that a conversation makes, with and without a template, and when it no longer fits."""

from __future__ import annotations

import io

import pytest

from grpo_rl.commands.chat import Conversation, _lines
from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build_tokenizer


def conversation(longest: int = 200, *, template: bool = True) -> Conversation:
    tokenizer = build_tokenizer(128)
    if not template:
        tokenizer.chat_template = None
    return Conversation(Renderer(DataConfig(), tokenizer), longest)


def test_turns_are_rendered_by_the_template() -> None:
    talk = conversation()
    talk.system = "add"
    assert talk.ask("1+1=", "a").text == "<|system|>add<|user|>1+1=<|assistant|>"
    talk.answered("2")
    prompt = talk.ask("2+2=", "b")
    assert prompt.text == "<|system|>add<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"
    assert len(prompt.token_ids) == 1 + 3 + 1 + 4 + 1 + 1 + 1 + 1 + 4 + 1
    talk.turns.clear()
    assert talk.ask("3+3=", "c").text == "<|system|>add<|user|>3+3=<|assistant|>"


def test_without_a_template_the_text_is_continued() -> None:
    talk = conversation(template=False)
    assert talk.ask("1+1=", "a").text == "1+1="
    talk.answered("2")
    assert talk.ask(" 2+2=", "b").text == "1+1=2 2+2="


def test_a_turn_for_which_there_is_no_room_is_refused_and_forgotten() -> None:
    talk = conversation(longest=16)
    talk.ask("1+1=", "a")
    talk.answered("2")
    with pytest.raises(ConfigError, match=r"room for 1 to 16: /reset"):
        talk.ask("9" * 40, "d")
    assert talk.ask("2+2=", "b").text.startswith("<|user|>1+1=")


def test_a_pipe_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n/quit\n"))
    assert list(_lines()) == ["1+1=", "/quit"]
