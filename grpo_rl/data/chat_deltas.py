"""Token-exact conversations: what a chat template writes between two assistant turns.

An assistant turn stays the tokens that were sampled; what the template writes behind it is tokenized by
itself. That is the template's own conversation only if it does nothing but append, which is checked at the
start.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from grpo_rl.control_words import MARK, ControlWords, opened_thought, unmarked
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.rows import BadRow, Call, Message, at, at_difference
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.frozen import frozen

_ANSWER = f"Zq7{secrets.token_hex(8)}Xk"
"""Stands for an assistant's turn."""
_TURNS: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_WHERE = "a conversation of several turns"


@frozen
class Delta:
    token_ids: np.ndarray
    """int32 [tokens]"""
    text: str
    control_words: bool
    """Its messages had control words in their text."""


class ChatDeltas:
    """Renders what stands between assistant turns, which `stop_ids` end."""

    def __init__(self, renderer: Renderer, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._renderer, self._tokenizer, self._stop_ids = renderer, tokenizer, stop_ids
        # Control words of data may be meant; those of an environment never are.
        self._words = ControlWords(tokenizer, template=renderer.options.get("chat_template"))
        self.shown_tools = ""
        """The tools that `with_tools` shows, as text."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatDeltas:
        """Raises ConfigError if the template rewrites conversations with these tools."""
        shown = copy(self._renderer)
        shown.options = {**self._renderer.options, "tools": [dict(tool) for tool in tools]}
        deltas = ChatDeltas(shown, self._tokenizer, self._stop_ids)
        deltas.shown_tools = repr(tools)
        deltas.check(("tool",), [str(tool["function"]["name"]) for tool in tools])
        return deltas

    def prompt(self, messages: Sequence[Message], added: Sequence[Message] = ()) -> Delta:
        """With the beginning of the first assistant turn; `added` messages are an environment's."""
        text = self._rendered([*messages, *self._words.marked(list(added))])
        with at(_WHERE):
            self._renderer.check_shown([*messages, *added])
        return self._delta(text)

    def between(self, messages: Sequence[Message], *, ended: bool, plain: bool = False) -> Delta:
        """What follows an assistant turn: its end, the messages, and the beginning of the next turn.

        With `ended` the turn's last token takes the place of the template's own end. With `plain` the prompt
        and the messages are plain strings. Raises DataError for messages that the template refuses.
        """
        if plain:
            return self._delta(self._words.marked("".join(str(message["content"]) for message in messages)))
        text = self._tail(self._words.marked(list(messages)))
        with at(_WHERE):
            self._renderer.check_shown([*_TURNS, *messages])
        delta = self._delta(text)
        is_ended_twice = ended and not self._stop_ids.isdisjoint(delta.token_ids[:1].tolist())
        return replace(delta, token_ids=delta.token_ids[1:]) if is_ended_twice else delta

    @cached_property
    def opened_thought(self) -> str:
        """The `<think>` that the template writes before each turn."""
        return opened_thought(self._rendered(_TURNS[:1])) if self._renderer.has_template else ""

    def turn_text(self, token_ids: np.ndarray, *, special: bool) -> str:
        """Without the token that ends the turn."""
        ids = token_ids.tolist()
        if ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def check(self, roles: Sequence[str], tools: Sequence[str] = ()) -> list[str]:
        """Notes about the template. Raises ConfigError if it rewrites the conversation.

        `roles` are those between turns. A template may leave out thoughts of earlier turns: what was sampled
        stays in the context. Any other difference is refused.
        """
        keeps = True
        for role in roles:
            for thinks in (False, True):
                try:
                    keeps &= self._appends(role, thinks, tools[0] if tools else "look_up")
                except DataError as error:
                    what = "answers of tools" if role == "tool" else f"messages of the role {role!r} behind an assistant's turn"
                    raise ConfigError(
                        f"data.chat_template: the chat template cannot render {what}: {error}; give another one as data.chat_template"
                    ) from None
        note = (
            "the chat template leaves thoughts of earlier turns out of a conversation; in training they stay in the context, as "
            "they were sampled"
        )
        return [] if keeps else [note]

    def _appends(self, role: str, thinks: bool, tool: str) -> bool:
        """Whether a conversation of three turns only grows; false if it does but for thoughts."""
        messages: list[Message] = [{"role": "user", "content": "What is it?"}]
        before, keeps = self._rendered(messages), True
        for number in range(3):
            thought, turn = f"thought {number}", f"turn {number}"
            said: Message = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{turn}" if thinks else turn}
            answer: Message = {"role": role, "content": f"answer {number}"}
            if role == "tool":
                call = {"name": tool, "arguments": {"question": "?"}}
                said |= {"tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": call}]}
                answer |= {"name": tool, "tool_call_id": f"call{number:05d}"}
            messages += [said, answer]
            after, tail = self._rendered(messages), self._tail([answer])
            if answer["content"] not in after:
                raise ConfigError(
                    f"data.chat_template: the chat template leaves out messages of the role {role!r} behind an assistant's turn; "
                    "give another one as data.chat_template"
                )
            if not (after.startswith(before) and after.endswith(tail)):
                keeps = False
                plain, grown = _without_thoughts(before), _without_thoughts(after)
                if not grown.startswith(plain):
                    raise ConfigError(f"data.chat_template: {_rewritten(before, after, role)}")
                if not grown.endswith(_without_thoughts(tail)):
                    raise ConfigError(f"data.chat_template: {_rewritten(after[: -len(tail)] + tail, after, role)}")
            if thinks and turn in after and thought not in after:
                keeps = False
            before = after
        return keeps

    def _tail(self, messages: Sequence[Message]) -> str:
        question, answer = _TURNS
        try:
            text = self._rendered([*_TURNS, *messages])
        except DataError:
            # Some templates want a call before its answer.
            called = [_call_of(message) for message in messages if message["role"] == "tool"]
            if not called:
                raise
            text = self._rendered([question, answer | {"tool_calls": called}, *messages])
            if _ANSWER not in text:
                return self._behind_calls([question, {"role": "assistant", "content": "", "tool_calls": called}], messages)
        head, mark, tail = text.rpartition(_ANSWER)
        if not mark or _ANSWER in head:
            raise DataError(f"{_WHERE}: the chat template does not write an assistant's turn once, as it is")
        return tail

    def _behind_calls(self, turns: list[Message], messages: Sequence[Message]) -> str:
        """If the template writes the calls in place of the turn's text."""
        called_text, text = self._rendered(turns, begins=False), self._rendered([*turns, *messages])
        end = self._rendered(_TURNS, begins=False).partition(_ANSWER)[2]
        if not text.startswith(called_text) or not end or not called_text.endswith(end):
            raise DataError(f"{_WHERE}: the chat template does not append a tool's answer to the turn that called it")
        return text[len(called_text) - len(end) :]

    def _rendered(self, messages: list[Message], *, begins: bool = True) -> str:
        try:
            return self._renderer.text(messages, add_generation_prompt=begins)
        except BadRow as error:
            raise DataError(f"{_WHERE}: {error}") from None

    def _delta(self, text: str) -> Delta:
        return Delta(np.asarray(self._words.ids(text), dtype=np.int32), unmarked(text), MARK in text)


def _call_of(message: Message) -> Call:
    function = {"name": message.get("name", "tool"), "arguments": {}}
    return {"id": message.get("tool_call_id", "call00000"), "type": "function", "function": function}


def _without_thoughts(text: str) -> str:
    return _THOUGHTS.sub("", text)


def _rewritten(expected: str, actual: str, role: str) -> str:
    expected_part, actual_part = at_difference(expected, actual)
    what = "tools answer" if role == "tool" else f"the {role} writes again"
    return (
        f"the chat template does not only append where {what}: the conversation so far, {expected_part!r}, "
        f"becomes {actual_part!r}. Then the tokens that are trained would not be those that were sampled. Give a "
        "template that appends as data.chat_template"
    )
