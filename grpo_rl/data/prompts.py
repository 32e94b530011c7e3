"""The way from a checked row to tokens: system prompt, chat template, tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.control_words import ControlWords
from grpo_rl.data.rows import LARGEST_ROW, Asked, BadRow, Message, irregular
from grpo_rl.errors import ConfigError, DataError

SET_BY_US = ("conversation", "tokenize", "add_generation_prompt", "return_dict", "return_tensors")


class Renderer:
    """Turns rows into the text and the tokens that the model sees, as `data` of the configuration says.

    Texts that it returns are marked (`control_words.py`): `words.encode` makes tokens of them, `unmarked` what can be shown.
    """

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.system_prompt, self.prompt_key = config.system_prompt, config.prompt_key
        self.options = dict(config.apply_chat_template_kwargs)
        taken = sorted(set(self.options) & {*SET_BY_US, *(["chat_template"] if config.chat_template else [])})
        if taken:
            raise ConfigError(f"data.apply_chat_template_kwargs: {', '.join(taken)} is set by the program")
        self._template = "the tokenizer's chat template"
        if config.chat_template is not None:
            self.options["chat_template"] = text = template_text(config.chat_template)
            self._template = "the chat template in data.chat_template"
            if text is not config.chat_template:
                self._template = f"the chat template {config.chat_template}"
        self.words = ControlWords(tokenizer, config.control_tokens_in_text, self.options.get("chat_template"))

    @property
    def has_template(self) -> bool:
        """True where there is a chat template at all."""
        return self.options.get("chat_template") is not None or getattr(self.tokenizer, "chat_template", None) is not None

    def render(self, asked: Asked, where: str) -> str:
        """The prompt as text. Raises BadRow for messages that the template refuses, DataError where there is no template."""
        if isinstance(asked, str):
            if self.system_prompt is not None:
                raise BadRow(
                    f"{where}: column {self.prompt_key!r} is plain text, which data.system_prompt cannot be put before; "
                    "expected a list of {role, content} messages"
                )
            return str(self.words.marked(asked))
        if not self.has_template:
            raise DataError(
                f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template; "
                f"take an instruction-tuned model, give one as data.chat_template, or plain strings as prompts"
            )
        return self.text(self.with_system(asked), where)

    def answer(self, asked: Asked, prompt: str, answer: str, where: str) -> str:
        """Return what follows the rendered `prompt` where the assistant gives this answer; a plain string's answer is itself.

        Raises BadRow where the template does not make a conversation that begins with its own prompt.
        """
        if isinstance(asked, str):
            return str(self.words.marked(answer))
        answered = [*self.with_system(asked), {"role": "assistant", "content": answer}]
        text = self.text(answered, where, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise BadRow(
                f"{where}: {self._template} makes a text of prompt and answer that does not begin with the prompt's; give prompt "
                "and answer as plain texts, or another template as data.chat_template"
            )
        return text[len(prompt) :]

    def tokenize_answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of answers as the policy would sample them: up to the end-of-sequence token, which is added.

        What a template writes after that token is never sampled.
        """
        end, ids = self.tokenizer.eos_token_id, self.words.encode(texts, add_special_tokens=False)["input_ids"]
        return [[*(answer[: answer.index(end)] if end in answer else answer), end] for answer in ids]

    def messages(self, asked: Asked) -> tuple[Message, ...] | None:
        """The chat messages that a prompt's text is rendered from; None for a plain string."""
        return None if isinstance(asked, str) else tuple(self.with_system(asked))

    def with_system(self, messages: list[Any]) -> list[Any]:
        """Return the messages after `data.system_prompt`, unless they begin with a system message."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def text(self, messages: list[Any], where: str, **options: Any) -> str:
        """Return the rendered messages, with the beginning of an answer unless `add_generation_prompt` is false."""
        options = {"add_generation_prompt": True} | options
        text = self.apply(messages, where, tokenize=False, **options)
        assert isinstance(text, str)
        if len(text) > LARGEST_ROW:
            raise BadRow(f"{where}: {self._template} makes {len(text)} characters of it; expected at most {LARGEST_ROW}")
        return text

    def apply(self, messages: list[Any], where: str, **options: Any) -> Any:
        """Return what `apply_chat_template` makes of the messages.

        A template is a program that came with a model: it may fail in any way.
        """
        try:
            options = {**self.options, **options}
            shown = {key: self.words.marked(options[key]) for key in ("tools", "documents") if options.get(key)}
            marked = self.words.marked(messages)
            return self.words.tokenizer_of([marked, shown]).apply_chat_template(marked, **{**options, **shown})
        except Exception as error:
            raise BadRow(f"{where}: {self._template} refuses the messages: {_cause(error)}") from error

    def tokenize(self, asked: Sequence[Asked], texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts; a template brings its own special tokens, a plain string gets the tokenizer's."""
        ids: list[list[int]] = [[] for _ in texts]
        for is_plain in (False, True):
            chosen = [index for index, one in enumerate(asked) if isinstance(one, str) == is_plain]
            if chosen:
                encoded = self.words.encode([texts[index] for index in chosen], add_special_tokens=is_plain)["input_ids"]
                for index, token_ids in zip(chosen, encoded, strict=True):
                    ids[index] = token_ids
        return ids


def _cause(error: Exception) -> str:
    from jinja2 import TemplateError

    return str(error) if isinstance(error, (TemplateError, ValueError)) else f"{type(error).__name__}: {error}"


def template_text(given: str) -> str:
    """The template that `data.chat_template` gives: itself where it has Jinja's braces, else what the file of that name holds."""
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    if kind := irregular(path):
        raise ConfigError(f"data.chat_template={given}: is {kind}; give a Jinja template ({{{{ ... }}}}) or a regular file")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template={given}: neither a Jinja template ({{{{ ... }}}}) nor a readable file: {error}"
        ) from error


def truncate(token_ids: np.ndarray, limit: int, side: str) -> np.ndarray:
    """Return `limit` of the tokens: `left` and `right` cut off that side, `middle` keeps both ends (the right one longer if odd)."""
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    head = limit // 2
    return np.concatenate([token_ids[:head], token_ids[head - limit :]])
