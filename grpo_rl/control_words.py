"""Control words in text that no chat template wrote: `<|im_end|>` in a question stays text, and ends no turn."""

from __future__ import annotations

import copy
import itertools
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any

MARK = secrets.token_hex(12)
"""Stands inside a control word that is text, from rendering until tokenizing. Nobody can guess it."""


_BARS = re.compile(r"<[|\uff5c].*[|\uff5c]>")
"""How control tokens are written; the second bar is DeepSeek's."""
_PLAIN = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]


def outside(value: Any) -> Any:
    """As text that every file takes: NUL and halves of a surrogate pair become U+FFFD; two are joined."""
    if isinstance(value, dict):
        return {outside(key): outside(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [outside(part) for part in value]
    if not isinstance(value, str) or (value.isascii() and "\0" not in value):
        return value
    return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def opened_thought(prompt: str) -> str:
    """Return the `<think>` with which a rendered prompt ends, or nothing."""
    start = prompt.rfind("<think>")
    return prompt[start:] if start >= 0 and not prompt[start + len("<think>") :].strip() else ""


def unmarked(text: str) -> str:
    return text.replace(MARK, "")


class ControlWords:
    """Tells the control tokens that a template wrote from the same characters in the text of data, users and
    tools.

    Control words are the added tokens that `tokenizer` calls special, that stand between bars (`<|user|>`),
    or that the chat template writes around plain messages: DeepSeek's `<｜User｜>` is not called special.
    Others, such as `<think>`, are words that models write, and stay tokens. Text goes through `marked` before
    it is rendered, and through `encode` afterwards: a marked word becomes the tokens of its characters. With
    `meant` nothing is marked.
    """

    def __init__(self, tokenizer: Any, meant: bool = False, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.num_texts = 0
        added = {str(token): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        around = "" if all(added.values()) else _around_plain_messages(tokenizer, template)
        control = (
            word
            for word, special in added.items()
            if len(word) > 1 and (special or _BARS.fullmatch(word) or (word in around and not word.isalnum() and word.strip()))
        )
        self._words = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._words))) if self._words and not meant else None

    def marked(self, value: Any) -> Any:
        """Return a text, or all texts in lists and dicts, with the mark inside of every control word."""
        if isinstance(value, dict):
            return {key: self.marked(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(part) for part in value]
        if self._pattern is None or not isinstance(value, str) or not self._pattern.search(value):
            return value
        self.num_texts += 1
        while self._pattern.search(value):  # words may overlap
            value = self._pattern.sub(lambda word: f"{word[0][0]}{MARK}{word[0][1:]}", value)
        return value

    def encode(self, text: str | Sequence[str], **options: Any) -> Any:
        """Return the encoding of rendered texts; offsets are places in the marked text."""
        return self.tokenizer_of(text)(text if isinstance(text, str) else list(text), **options)

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self.encode(text, add_special_tokens=add_special_tokens)["input_ids"])

    def tokenizer_of(self, texts: str | Sequence[str]) -> Any:
        has_marks = MARK in texts if isinstance(texts, str) else any(MARK in text for text in texts)
        return self._of_marked if has_marks else self.tokenizer

    @cached_property
    def _of_marked(self) -> Any:
        """The tokenizer with a first step that takes the marks away, behind the search for control words."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:  # one written in Python: a space breaks the words
            return lambda text, **options: self.tokenizer(
                text.replace(MARK, " ") if isinstance(text, str) else [entry.replace(MARK, " ") for entry in text], **options
            )
        exact = self._normalizing("")
        special = set(exact.convert_tokens_to_ids(self._words)) - {exact.unk_token_id}
        plain = exact([f"a{word[0]}{MARK}{word[1:]}" for word in self._words], add_special_tokens=False)["input_ids"]
        # A vocabulary may have the word among its pieces of text.
        return exact if special.isdisjoint(itertools.chain(*plain)) else self._normalizing(" ")

    def _normalizing(self, replacement: str) -> Any:
        from tokenizers import normalizers

        tokenizer = copy.deepcopy(self.tokenizer)
        backend = tokenizer.backend_tokenizer
        first = normalizers.Replace(MARK, replacement)
        backend.normalizer = normalizers.Sequence([first, *([backend.normalizer] if backend.normalizer else [])])
        return tokenizer


def _around_plain_messages(tokenizer: Any, template: str | None) -> str:
    """Return what the chat template writes for a conversation without control words; nothing if it fails."""
    try:
        return str(tokenizer.apply_chat_template(_PLAIN, tokenize=False, chat_template=template))
    except Exception:  # a template is a program: one that does not like this conversation says so when it meets the rows
        return ""
