from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.control_words import ControlWords
from grpo_rl.data.rows import LARGEST_ROW, Asked, BadRow, Call, Message, changed_call, irregular
from grpo_rl.errors import ConfigError, DataError, did_you_mean

SET_BY_US = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
USUAL_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
"""Roles of many data sets, and what most chat templates call them."""
_STAND_IN = "Zq{}Xk7"
"""For text number {} of a conversation, to see whether a template shows it."""


class Renderer:
    """Its texts are marked (`control_words.py`): `words.encode` makes tokens, `unmarked` what is shown."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.system_prompt, self.prompt_key = config.system_prompt, config.prompt_key
        self.continue_final_message = config.continue_final_message
        self.options = dict(config.apply_chat_template_kwargs)
        if taken := sorted(self.options.keys() & (SET_BY_US | ({"chat_template"} if config.chat_template else set()))):
            raise ConfigError(f"data.apply_chat_template_kwargs: {', '.join(taken)} is set by the program")
        self._template = "the tokenizer's chat template"
        if config.chat_template is not None:
            self.options["chat_template"] = text = template_text(config.chat_template)
            self._template = "the chat template in data.chat_template"
            if text is not config.chat_template:
                self._template = f"the chat template {config.chat_template}"
        if unread := [name for name in self.options if name != "chat_template" and not self.reads(name)]:
            names = set(re.findall(r"[a-z_]{4,}", self._template_text()))
            raise ConfigError(
                [
                    f"{self._template} shows no tools, of which the run has some: the model would never see them. Give a "
                    "data.chat_template that reads `tools`, or a model that was trained with tools"
                    if name == "tools"
                    else f"data.apply_chat_template_kwargs.{name}: {self._template} does not read it.{did_you_mean(name, names)}"
                    for name in unread
                ]
            )
        self.words = ControlWords(tokenizer, config.control_tokens_in_text, self.options.get("chat_template"))
        self._left_out: dict[tuple[Any, ...], tuple[int, str] | None] = {}

    def reads(self, name: str) -> bool:
        """True also if there is no template to look at."""
        text = self._template_text()
        return not text or re.search(rf"\b{re.escape(name)}\b", text) is not None

    def _template_text(self) -> str:
        """Empty also for a tokenizer that renders without Jinja."""
        if not self.has_template or not hasattr(self.tokenizer, "get_chat_template"):
            return ""
        return str(self.tokenizer.get_chat_template(self.options.get("chat_template"), tools=self.options.get("tools")))

    @property
    def has_template(self) -> bool:
        return self.options.get("chat_template") is not None or getattr(self.tokenizer, "chat_template", None) is not None

    def render(self, prompt: Asked) -> str:
        """Raises BadRow for messages that the template refuses."""
        if isinstance(prompt, str):
            if self.system_prompt is not None:
                raise BadRow(
                    f"column {self.prompt_key!r} is plain text, which data.system_prompt cannot be put before; "
                    "expected a list of {role, content} messages"
                )
            return str(self.words.marked(prompt))
        if not self.has_template:
            raise DataError(
                "the prompt is a list of chat messages, but the tokenizer has no chat template; "
                "take an instruction-tuned model, give one as data.chat_template, or plain strings as prompts"
            )
        messages = self.with_system(prompt)
        continues = messages[-1]["role"] == "assistant"
        if continues and not self.continue_final_message:
            raise BadRow(
                f"column {self.prompt_key!r} ends with a message of the assistant, which may be the answer; expected "
                "messages up to the question, or data.continue_final_message=true, where the policy goes on with that message"
            )
        ending = {"continue_final_message": True, "add_generation_prompt": False} if continues else {}
        text = self.text(messages, **ending)
        self.check_shown(messages)
        return text

    def check_shown(self, messages: list[Any], **options: Any) -> None:
        """Raise BadRow for a message, a tool call or tools that the template leaves out of the prompt.

        Templates pass over unknown roles without a word. Tried once for all conversations of one form, with
        stand-ins for the texts, which a template may write in another way.
        """
        options = {**self.options, **options}
        form = (*map(_form, messages), bool(options.get("tools")))
        if form not in self._left_out:
            self._left_out[form] = self._tried(messages, options)
        if (left_out := self._left_out[form]) is None:
            return
        number, part = left_out
        if part == "tools":
            raise BadRow(f"{self._template} leaves the tools out; expected a template with tools as data.chat_template")
        role, what = messages[number]["role"], part.replace("_", " ")
        usual = USUAL_ROLES.get(role.casefold(), role.casefold())
        hint = f"; the role is often called {usual!r}" if usual != role else ""
        raise BadRow(
            f"{self._template} leaves out the {what} of message {number}, of the role {role!r}: "
            f"{str(messages[number][part])[:60]!r}; expected roles that the template knows, or another data.chat_template{hint}"
        )

    def _tried(self, messages: list[Any], options: dict[str, Any]) -> tuple[int, str] | None:
        """The first message, and its `content` or `tool_calls`, that is left out; (-1, `tools`); None if all are refused."""
        places: list[tuple[int, str]] = []

        def stand_in(number: int, part: str) -> str:
            places.append((number, part))
            return _STAND_IN.format(len(places) - 1)

        if options.get("tools"):
            function = {"name": stand_in(-1, "tools"), "description": "", "parameters": {"type": "object", "properties": {}}}
            options = options | {"tools": [{"type": "function", "function": function}]}
        marked_messages = []
        for number, message in enumerate(messages):
            copied = dict(message)
            if message["content"].strip():
                copied["content"] = stand_in(number, "content")
            if calls := message.get("tool_calls"):
                copied["tool_calls"] = [_call_like(call, partial(stand_in, number, "tool_calls")) for call in calls]
            marked_messages.append(copied)
        try:
            text = self.apply(marked_messages, **{**options, "tokenize": False, "add_generation_prompt": False})
        except BadRow:  # these words do not suit the template; the row's own may
            return None
        return next((place for number, place in enumerate(places) if _STAND_IN.format(number) not in text), None)

    def answer(self, asked: Asked, prompt: str, answer: str) -> str:
        """What follows the rendered `prompt`; a plain string's answer is itself.

        Raises BadRow if the template does not make a conversation that begins with its own prompt.
        """
        if isinstance(asked, str):
            return str(self.words.marked(answer))
        answered = [*self.with_system(asked), {"role": "assistant", "content": answer}]
        text = self.text(answered, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise BadRow(
                f"{self._template} makes a text of prompt and answer that does not begin with the prompt's; give prompt "
                "and answer as plain texts, or another template as data.chat_template"
            )
        return text[len(prompt) :]

    def tokenize_answers(self, texts: Sequence[str], plain: bool) -> list[list[int]]:
        """As the policy samples: up to the token that ends a turn or, if `plain`, the sequence.

        What a template writes after that token is never sampled. An answer without it gets it.
        """
        end = self.tokenizer.eos_token_id if plain else self.turn_end
        ids = self.words.encode(texts, add_special_tokens=False)["input_ids"]
        return [[*(answer[: answer.index(end)] if end in answer else answer), end] for answer in ids]

    @cached_property
    def turn_end(self) -> int:
        """The first control token that the template writes behind an assistant's turn."""
        end = int(self.tokenizer.eos_token_id)
        if not self.has_template:
            return end
        stand_in = _STAND_IN.format(0)
        try:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": stand_in}]
            text = self.text(messages, add_generation_prompt=False)
        except BadRow:  # a template that does not like this conversation says so when it meets the rows
            return end
        behind = self.words.ids(text.rpartition(stand_in)[2])
        control = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return next((number for number in behind if number in control), end)

    def sampled(self, ids: Any, text: str) -> list[int] | None:
        """None if the ids are missing or another tokenizer's."""
        size = len(self.tokenizer)
        if not isinstance(ids, list) or not ids or not all(type(number) is int and 0 <= number < size for number in ids):
            return None
        # Engines and tokenizers differ in spaces around special tokens.
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return ids if "".join(decoded.split()) == "".join(text.split()) else None

    def messages(self, prompt: Asked) -> tuple[Message, ...] | None:
        """None for a plain string."""
        return None if isinstance(prompt, str) else tuple(self.with_system(prompt))

    def with_system(self, messages: list[Any]) -> list[Any]:
        """`data.system_prompt` comes first unless the messages have a system message."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def text(self, messages: list[Any], **options: Any) -> str:
        text: str = self.apply(messages, tokenize=False, **{"add_generation_prompt": True} | options)
        if len(text) > LARGEST_ROW:
            raise BadRow(f"{self._template} makes {len(text)} characters of it; expected at most {LARGEST_ROW}")
        return text

    def apply(self, messages: list[Any], **options: Any) -> Any:
        options = {**self.options, **options}
        try:
            return self._apply(messages, options)
        except Exception as error:
            if any(message.get("tool_calls") for message in messages):
                with suppress(Exception):  # some templates want the arguments of a call as JSON text
                    return self._apply([_with_json_arguments(message) for message in messages], options)
            raise BadRow(f"{self._template} refuses the messages: {_cause(error)}") from error

    def _apply(self, messages: list[Any], options: dict[str, Any]) -> Any:
        marked_options = {key: self.words.marked(options[key]) for key in ("tools", "documents") if options.get(key)}
        marked = self.words.marked(messages)
        return self.words.tokenizer_of(str([marked, marked_options])).apply_chat_template(
            marked, **{**options, **marked_options}
        )

    def prompt_ids(self, prompt: Asked, text: str) -> list[int]:
        (ids,) = self.tokenize([prompt], [text])
        if not ids:
            raise BadRow("the prompt has no tokens")
        return ids

    def tokenize(self, prompts: Sequence[Asked], texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in texts]
        for is_plain in (False, True):
            chosen = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str) == is_plain]
            if chosen:
                encoded = self.words.encode([texts[index] for index in chosen], add_special_tokens=is_plain)["input_ids"]
                for index, token_ids in zip(chosen, encoded, strict=True):
                    ids[index] = token_ids
        return ids


def _form(message: Message) -> tuple[Any, ...]:
    """What a template may tell two messages apart by, beside their words."""
    calls = tuple(bool(_function_of(call).get("arguments")) for call in message.get("tool_calls") or ())
    return message["role"], bool(message["content"].strip()), calls, *sorted(name for name in message if message[name])


def _function_of(call: Call) -> dict[str, Any]:
    return call.get("function", call)


def _call_like(call: Call, stand_in: Callable[[], str]) -> Call:
    arguments = {"arguments": {"argument": stand_in()}} if _function_of(call).get("arguments") else {}
    return changed_call(call, name=stand_in(), **arguments)


def _with_json_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [(call, _function_of(call).get("arguments", {})) for call in message["tool_calls"]]
    return message | {
        "tool_calls": [changed_call(call, arguments=json.dumps(value, ensure_ascii=False)) for call, value in calls]
    }


def _cause(error: Exception) -> str:
    from jinja2 import TemplateError

    return str(error) if isinstance(error, (TemplateError, ValueError)) else f"{type(error).__name__}: {error}"


def template_text(template: str) -> str:
    """A text with Jinja's braces is the template itself, others name a file."""
    if "{{" in template or "{%" in template:
        return template
    path = Path(template).expanduser()
    if kind := irregular(path):
        raise ConfigError(f"data.chat_template={template}: is {kind}; give a Jinja template ({{{{ ... }}}}) or a regular file")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template={template}: neither a Jinja template ({{{{ ... }}}}) nor a readable file: {error}"
        ) from error


def truncate(token_ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """`left` and `right` cut off that side, `middle` keeps both ends."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    head = limit // 2
    return np.concatenate([token_ids[:head], token_ids[head - limit :]])
