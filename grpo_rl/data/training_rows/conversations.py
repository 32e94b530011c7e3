"""Demonstrations: conversations to learn from, and which of their tokens the assistant wrote.

A row has chat `messages` (as for verl's MultiTurnSFTDataset), or a prompt and a response, or is a line of the
rollouts of a run. Trained are exactly the tokens that the chat template makes of the assistant's turns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.control_words import unmarked
from grpo_rl.data.prompts import Renderer, truncate
from grpo_rl.data.row_set import TrainingSet, batch_of_sequences
from grpo_rl.data.rows import (
    BadRow,
    Message,
    Row,
    at,
    at_difference,
    check_row,
    column,
    expect,
    from_json,
    messages_of,
    prompt_of,
    wrong,
)
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.frozen import frozen
from grpo_rl.types import Batch

ASSISTANT = "assistant"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OF_ROLLOUTS = ("prompt_length", "response_length", "finish_reason")
"""Columns of <run>/rollouts/step_N.jsonl beside prompt and response."""


@frozen
class Chat:
    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict)
    """The row's own arguments of the chat template: `tools`, `enable_thinking`."""
    of_strings: bool = False
    """Prompt and response are plain strings."""


@frozen
class Rendered:
    """A sampled response as a run logged it; `prompt` is the text that the model saw."""

    prompt: str
    response: str
    prompt_length: int
    """Tokens of the prompt in that run."""
    ends: bool
    """With an end token that the text does not show."""
    response_ids: Any = None


@frozen
class Demonstration:
    token_ids: np.ndarray
    """int32 [tokens]"""
    positions: np.ndarray
    """int64 [trained tokens]: places in `token_ids`, ascending, none of them 0."""


def conversation(row: Row, config: DataConfig) -> Chat | Rendered:
    check_row(row)
    if config.messages_key in row:
        return Chat(_messages(row[config.messages_key], config.messages_key), _options(row, config))
    try:
        prompt, response = column(row, config.prompt_key), column(row, config.response_key)
    except BadRow as error:
        raise BadRow(f"{error}. A row to learn from has {config.messages_key!r}, or a prompt and a response: "
                     "data.messages_key, or data.prompt_key and data.response_key") from None  # fmt: skip
    if not isinstance(response, str) or not response.strip():
        raise wrong(config.response_key, response, "the answer to learn, a string that is not empty")
    prompt = prompt_of(prompt, config.prompt_key)
    if isinstance(prompt, str) and all(name in row for name in _OF_ROLLOUTS):
        return Rendered(prompt, response, int(row["prompt_length"]), row["finish_reason"] == "stop", row.get("token_ids"))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _messages([*turns, {"role": ASSISTANT, "content": response}], config.prompt_key)
    return Chat(messages, _options(row, config), of_strings=isinstance(prompt, str))


def _messages(value: Any, key: str) -> list[Message]:
    messages = messages_of(value, key)
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT and not message["content"].strip() and not message.get("tool_calls"):
            raise wrong(f"{key}[{number}].content", message["content"], "the answer to learn, a string that is not empty")
    if messages[0]["role"] == ASSISTANT:
        raise BadRow(f"column {key!r} begins with the assistant's turn; expected a message that it answers before it")
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRow(f"column {key!r} has no assistant turn to learn, only {roles}")
    return messages


def _options(row: Row, config: DataConfig) -> dict[str, Any]:
    tools = from_json(column(row, config.tools_key, optional=True) or None, config.tools_key)
    expect(tools, list | None, config.tools_key, "a list of tools, or nothing")
    thinking = column(row, config.enable_thinking_key, optional=True)
    expect(thinking, bool | None, config.enable_thinking_key, "true, false or nothing")
    return ({"tools": tools} if tools else {}) | ({} if thinking is None else {"enable_thinking": thinking})


class Tokenizing:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.tokenizer, self._ids = renderer, renderer.tokenizer, renderer.words.ids
        self.num_from_text = 0
        """Sampled responses whose rows have no tokens."""

    def __call__(self, chat: Chat | Rendered) -> Demonstration:
        """Raises BadRow if the trained tokens cannot be found exactly."""
        if isinstance(chat, Rendered):
            return self._rendered(chat)
        messages = self.renderer.with_system(chat.messages)
        if "enable_thinking" in chat.options and not self.renderer.reads("enable_thinking"):
            raise BadRow(
                f"the row has enable_thinking={chat.options['enable_thinking']}, which the chat template does not read; "
                "take the column out, or give another template as data.chat_template"
            )
        if not self.renderer.has_template:
            if chat.of_strings and len(messages) == 2:
                return self._plain(messages[0]["content"], messages[1]["content"])
            raise BadRow(
                "these are chat messages, but the tokenizer has no chat template; take an instruction-tuned model, "
                "give one as data.chat_template, or plain strings as prompt and response"
            )
        self.renderer.check_shown(messages, **chat.options)
        return self._by_marks(messages, chat) if self._has_marks else self._by_growth(messages, chat)

    def _rendered(self, rendered: Rendered) -> Demonstration:
        words = self.renderer.words
        # A template wrote its control words into the prompt; a plain one got the tokenizer's special tokens.
        for prompt, plain in itertools.product((rendered.prompt, words.marked(rendered.prompt)), (False, True)):
            prompt_ids = words.ids(prompt, add_special_tokens=plain)
            if len(prompt_ids) == rendered.prompt_length:
                break
        else:
            raise BadRow(
                f"this tokenizer makes {len(self._ids(rendered.prompt))} tokens of the prompt, and the run that sampled the response had "
                f"{rendered.prompt_length}: it was another one; expected rollouts of a model with the same tokenizer"
            )
        response_ids = self.renderer.sampled(rendered.response_ids, rendered.response)
        if response_ids is None:
            self.num_from_text += 1
            of_template = self.renderer.has_template and words.marked(rendered.prompt) != rendered.prompt
            end = self.renderer.turn_end if of_template else self.tokenizer.eos_token_id
            response_ids = [*self._ids(words.marked(rendered.response)), *([end] if rendered.ends else [])]
        return _answer(prompt_ids, response_ids)

    def _plain(self, prompt: str, response: str) -> Demonstration:
        """Without a template a response ends with the end-of-sequence token."""
        words = self.renderer.words
        prompt_ids = words.ids(words.marked(prompt), add_special_tokens=True)
        return _predictable(_answer(prompt_ids, [*self._ids(words.marked(response)), self.tokenizer.eos_token_id]))

    @cached_property
    def _has_marks(self) -> bool:
        template = self.renderer.options.get("chat_template") or self.tokenizer.get_chat_template()
        return _GENERATION_MARK.search(template) is not None

    def _by_marks(self, messages: list[Message], chat: Chat) -> Demonstration:
        out = self.renderer.apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **chat.options)
        token_ids, mask = np.asarray(out["input_ids"], dtype=np.int32), np.asarray(out["assistant_masks"])
        positions = np.flatnonzero(mask)
        if not len(positions):
            raise BadRow("the chat template marks no token as the assistant's ({% generation %})")
        return _predictable(Demonstration(token_ids[: positions[-1] + 1], positions))

    def _by_growth(self, messages: list[Message], chat: Chat) -> Demonstration:
        """Trained is what a turn of the assistant adds, if the template does nothing but add."""
        texts = self._growing(messages, chat)
        ids = self.renderer.words.encode(texts, add_special_tokens=False)["input_ids"]
        if any(longer[: len(shorter)] != shorter for shorter, longer in itertools.pairwise(ids)):
            ids = self._in_pieces(texts)
        token_ids, lengths = np.asarray(ids[-1], dtype=np.int32), [len(piece) for piece in ids]
        spans = [np.arange(begin, end) for begin, end in zip(lengths[0::2], lengths[1::2], strict=True)]
        return _predictable(Demonstration(token_ids, np.concatenate(spans)))

    def _growing(self, messages: list[Message], chat: Chat) -> list[str]:
        """The text before and after every assistant turn, each a continuation of the one before it."""
        texts: list[str] = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prefix = self.renderer.text(messages[:number], **chat.options)
            extended = self.renderer.text(messages[: number + 1], add_generation_prompt=False, **chat.options)
            for text, what in ((prefix, f"message {number - 1}"), (extended, f"message {number}, the assistant's,")):
                if texts and not text.startswith(texts[-1]):
                    raise BadRow(_rewritten(texts[-1], text, what))
                texts.append(text)
            if extended == prefix:
                raise BadRow(f"the chat template makes nothing of message {number}, the assistant's")
        return texts

    def _in_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Each piece is tokenized by itself if a token would reach from the prompt into the answer.

        The model answers after the prompt's own tokens. Raises BadRow if that makes another text.
        """
        pieces = [self._ids(text.removeprefix(before)) for before, text in itertools.pairwise(["", *texts])]
        ids = list(itertools.accumulate(pieces))
        decoded = self.tokenizer.decode(ids[-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != unmarked(texts[-1]):
            raise BadRow(
                "a token reaches from a prompt into the assistant's answer, and this tokenizer makes another text of the "
                "two apart; expected an answer that begins with a token of its own"
            )
        return ids


def _answer(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Demonstration:
    token_ids = np.asarray([*prompt_ids, *answer_ids], dtype=np.int32)
    return Demonstration(token_ids, np.arange(len(prompt_ids), len(token_ids)))


def _predictable(demonstration: Demonstration) -> Demonstration:
    if demonstration.positions[0] == 0:
        raise BadRow("the assistant's first token has nothing before it, so no model can predict it")
    return demonstration


def _rewritten(old: str, new: str, what: str) -> str:
    before, after = at_difference(unmarked(old), unmarked(new))
    return (
        f"the chat template does not only append: with {what} the text before it is another one, "
        f"{before!r} became {after!r}; so the assistant's tokens cannot be found exactly. "
        "Give a data.chat_template that appends, or marks them by {% generation %}, or rows of one assistant turn"
    )


class DemonstrationSet(TrainingSet[Demonstration]):
    ways_out = (
        "Raise data.max_length, drop such rows with data.filter_overlong_prompts=true, or cut them with "
        "data.truncation=left, right or middle"
    )

    @cached_property
    def _tokenizing(self) -> Tokenizing:
        return Tokenizing(self.renderer)

    def batch(self, rows: Sequence[int]) -> Batch:
        return supervised_batch([self.row(row) for row in rows])

    def _tokenized(self, row: Row) -> Demonstration:
        tokenized = self._tokenizing(conversation(row, self.config))
        self.report.num_from_text = self._tokenizing.num_from_text
        return tokenized

    def _cut(self, row: Demonstration) -> Demonstration:
        cut = cut_to(row, self.longest, self.config.truncation)
        if not len(cut.positions):
            raise BadRow(
                f"has {len(row.token_ids)} tokens, and no trained one is left in the {self.longest} that "
                f"data.truncation={self.config.truncation} keeps"
            )
        return cut


def cut_to(demonstration: Demonstration, limit: int, side: str) -> Demonstration:
    places = truncate(np.arange(len(demonstration.token_ids)), limit, side)
    positions = np.flatnonzero(np.isin(places, demonstration.positions))
    return Demonstration(demonstration.token_ids[places], positions[positions > 0])


def supervised_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    prompt_lengths = [int(demonstration.positions[0]) for demonstration in demonstrations]
    positions = [demonstration.positions for demonstration in demonstrations]
    return batch_of_sequences([demonstration.token_ids for demonstration in demonstrations], prompt_lengths, 1.0, positions)


def task_demonstrations(task: str, tokenizer: Any) -> list[Demonstration]:
    """Demonstrations for the supervised warm start of an embedded model."""
    made, truth = (DataConfig(response_key=key) for key in ("extra_info.demonstration", "reward_model.ground_truth"))
    tokenizing = Tokenizing(Renderer(truth, tokenizer))
    demonstrations = []
    for number, row in enumerate(task_rows(task)):
        with at(f"{task}, row {number}"):
            demonstrations.append(tokenizing(conversation(row, made if "demonstration" in row["extra_info"] else truth)))
    return demonstrations
