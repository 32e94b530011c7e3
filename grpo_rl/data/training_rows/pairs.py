"""Preference pairs, from files or from groups of scored rollouts.

The formats are TRL's and OpenRLHF's: columns `chosen` and `rejected`, and mostly `prompt`, each a plain text
or a list of chat messages. Without a prompt column it is what both answers begin with. `margin` says by how
much the chosen answer is better. A labelled row, for `kto`, has `completion` and `label` (TRL's unpaired
preferences).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.row_set import TrainingSet, batch_of_sequences
from grpo_rl.data.rows import (
    Asked,
    BadRow,
    Row,
    check_row,
    column,
    expect,
    finite,
    messages_of,
    prompt_of,
    shared_length,
    wrong,
)
from grpo_rl.frozen import frozen
from grpo_rl.types import Batch, Rollout

T = TypeVar("T")


PairTexts = tuple[Asked, str, str, float | None]
"""Prompt, chosen and rejected answer, margin."""


@frozen
class Pair:
    """Tokens (int32), each answer with the end-of-sequence token."""

    prompt_ids: np.ndarray
    chosen_ids: np.ndarray
    rejected_ids: np.ndarray
    margin: float | None = None


def pair_texts(row: Row, config: DataConfig, *, with_margin: bool = False) -> PairTexts:
    """Raises BadRow, also for two equal sides, and sides that are no answer to one prompt."""
    check_row(row)
    keys = config.chosen_key, config.rejected_key
    sides = [column(row, key) for key in keys]
    read = _of_messages if any(isinstance(side, list) for side in sides) else _of_texts
    prompt, *answers = read(column(row, config.prompt_key, optional=True), sides, keys, config.prompt_key)
    for key, text in zip(keys, answers, strict=True):
        if not text.strip():
            raise BadRow(f"column {key!r} has an empty answer; expected one with text")
    if answers[0] == answers[1]:
        raise BadRow(f"columns {keys[0]!r} and {keys[1]!r} have the same answer; expected two that differ")
    margin = row.get("margin") if with_margin else None
    if margin is not None and math.isnan(margin := finite(margin)):
        raise wrong("margin", row["margin"], "a finite number or nothing")
    return prompt, answers[0], answers[1], margin


def _of_texts(prompt: Any, sides: list[Any], keys: Sequence[str], prompt_key: str) -> tuple[Asked, str, str]:
    for key, text in zip(keys, sides, strict=True):
        expect(text, str, key, "a text, or a list of {role, content} messages")
    chosen, rejected = sides
    if prompt is not None:
        return prompt_of(prompt, prompt_key), chosen, rejected
    # What both begin with, up to a space: where exactly it ends changes no difference of their log-probs, and a word
    # that is cut in two would be made of other tokens.
    shared = shared_length(chosen, rejected)
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    shared_text = chosen[:shared].rstrip()
    if not shared_text:
        raise BadRow(
            f"there is no column {prompt_key!r}, and {keys[0]!r} and {keys[1]!r} do not begin with the "
            "same words, which would be the prompt"
        )
    return shared_text, chosen[len(shared_text) :], rejected[len(shared_text) :]


def _of_messages(prompt: Any, sides: list[Any], keys: Sequence[str], prompt_key: str) -> tuple[Asked, str, str]:
    """Answers are one message from the assistant, or a conversation that ends with it."""
    for key, side in zip(keys, sides, strict=True):
        expect(side, list, key, "a list of {role, content} messages, as the other side has")
    start = prompt_of(prompt, prompt_key) if isinstance(prompt, list) else []
    assert isinstance(start, list)
    # A conversation may be given whole although its prompt has a column.
    conversations = [messages_of(side, key) for key, side in zip(keys, sides, strict=True)]
    chosen, rejected = (side[len(start) :] if side[: len(start)] == start else side for side in conversations)
    shared = shared_length(chosen[:-1], rejected[:-1])
    messages = [*start, *chosen[:shared]]
    if isinstance(prompt, str):
        if not messages:
            messages = [{"role": "user", "content": prompt}]
        elif prompt not in [message["content"] for message in messages if message["role"] == "user"]:
            raise wrong(prompt_key, prompt, f"what the user says in {keys[0]!r} and {keys[1]!r}")
    if not messages:
        raise BadRow(f"there is no prompt: neither a column {prompt_key!r} nor messages that both sides begin with")
    for key, side in zip(keys, (chosen, rejected), strict=True):
        if len(side) != shared + 1 or side[-1]["role"] != "assistant":
            roles = ", ".join(message["role"] for message in side[shared:])
            raise BadRow(f"column {key!r} goes on with messages of {roles}; expected one of the assistant")
    return messages, chosen[-1]["content"], rejected[-1]["content"]


class PairSet(TrainingSet[Pair]):
    ways_out = (
        "Raise data.max_length, or drop such rows with data.filter_overlong_prompts=true: a cut answer would be another one"
    )

    def batch(self, rows: Sequence[int]) -> Batch:
        return pair_batch([self.row(row) for row in rows])

    def _length(self, row: Pair) -> int:
        return len(row.prompt_ids) + max(len(row.chosen_ids), len(row.rejected_ids))

    def _tokenized(self, row: Row) -> Pair:
        # Only reward models' loss reads margins.
        texts = pair_texts(row, self.config, with_margin=self.run.trains_only_reward_model)
        return tokenized_pair(texts, self.renderer, [row.get(name) for name in IDS_OF_PAIR])


IDS_OF_PAIR = ("chosen_ids", "rejected_ids")
"""Columns with the tokens of sampled answers."""


def tokenized_pair(texts: PairTexts, renderer: Renderer, sampled: Sequence[Any] = (None, None)) -> Pair:
    """Answers that a run `sampled` keep their tokens. Raises BadRow."""
    prompt, *answers, margin = texts
    prompt_ids, made = _tokens(prompt, answers, renderer)
    chosen_ids, rejected_ids = (
        np.asarray(renderer.sampled(ids, answer) or made_ids, np.int32)
        for ids, answer, made_ids in zip(sampled, answers, made, strict=True)
    )
    if np.array_equal(chosen_ids, rejected_ids):
        raise BadRow("the two answers have the same tokens")
    return Pair(prompt_ids, chosen_ids, rejected_ids, margin)


def _tokens(prompt: Asked, answers: Sequence[str], renderer: Renderer) -> tuple[np.ndarray, list[list[int]]]:
    rendered = renderer.render(prompt)
    texts = [renderer.answer(prompt, rendered, answer) for answer in answers]
    prompt_ids = np.asarray(renderer.prompt_ids(prompt, rendered), np.int32)
    return prompt_ids, renderer.tokenize_answers(texts, isinstance(prompt, str))


@frozen
class Labelled:
    """A prompt and an answer in tokens (int32), and whether it is desirable."""

    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    label: bool


def labelled_texts(row: Row, config: DataConfig) -> tuple[Asked, str, bool]:
    check_row(row)
    prompt = prompt_of(column(row, config.prompt_key), config.prompt_key)
    answer, label = column(row, "completion"), column(row, "label")
    if isinstance(answer, list):
        answer = messages_of(answer, "completion")
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            raise wrong("completion", answer, "a text, or one message of the assistant")
        answer = answer[0]["content"]
    expect(answer, str, "completion", "a text, or one message of the assistant")
    if not answer.strip():
        raise BadRow("column 'completion' has an empty answer; expected one with text")
    expect(label, bool, "label", "true where the answer is desirable, else false")
    return prompt, answer, label


class LabelledSet(TrainingSet[Labelled]):
    """A row is trained beside a mismatched one: its prompt with the next row's answer."""

    ways_out = PairSet.ways_out

    def batch(self, rows: Sequence[int]) -> Batch:
        labelled = [self.row(row) for row in rows]
        batch = pair_batch(
            [Pair(entry.prompt_ids, entry.answer_ids, self._mismatched(row)) for row, entry in zip(rows, labelled, strict=True)]
        )
        chosen_N = torch.tensor([entry.label for entry in labelled]).repeat_interleave(2)
        return batch.replace(chosen_N=chosen_N, rewards_N=chosen_N.float())

    def _mismatched(self, row: int) -> np.ndarray:
        following = (row + 1) % len(self)
        while not self.usable(following):
            following = (following + 1) % len(self)
        return self.row(following).answer_ids[: self.longest - len(self.row(row).prompt_ids)]

    def _length(self, row: Labelled) -> int:
        return len(row.prompt_ids) + len(row.answer_ids)

    def _tokenized(self, row: Row) -> Labelled:
        prompt, text, label = labelled_texts(row, self.config)
        prompt_ids, (answer_ids,) = _tokens(prompt, [text], self.renderer)
        return Labelled(prompt_ids, np.asarray(answer_ids, np.int32), label)


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """The chosen one of each pair is first: pair p is group p."""
    sides = [(pair.prompt_ids, ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    batch = batch_of_sequences([np.concatenate(side) for side in sides], [len(prompt) for prompt, _ in sides], 0.0)
    margins_N = torch.tensor([pair.margin or 0.0 for pair in pairs]).repeat_interleave(2)
    return with_sides(
        batch.replace(
            group_N=torch.arange(len(pairs)).repeat_interleave(2),
            rewards_N=torch.tensor([1.0, 0.0]).repeat(len(pairs)),
            margins_N=margins_N if any(pair.margin is not None for pair in pairs) else None,
        )
    )


def pairs_of_groups(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Rollout]]:
    """The best and the worst rollout of each group by reward, of those with tokens; equal responses are no pair."""
    trained = [rollout for rollout in rollouts if len(rollout.response_ids)]
    pairs = best_and_worst(trained, attrgetter("prompt.uid"), attrgetter("reward"), attrgetter("sample_index"))
    return [(best, worst) for best, worst in pairs if not best.same_response(worst)]


def best_and_worst(
    members: Iterable[T], group: Callable[[T], str], reward: Callable[[T], Any], sample: Callable[[T], int]
) -> Iterator[tuple[T, T]]:
    """Of each group whose rewards differ, without members that have no finite reward; ties go to the smaller sample index."""
    groups: dict[str, list[T]] = {}
    for member in members:
        if reward(member) is not None and math.isfinite(reward(member)):
            groups.setdefault(group(member), []).append(member)
    for in_order in (sorted(scored, key=sample) for scored in groups.values()):
        best, worst = max(in_order, key=reward), min(in_order, key=reward)
        if reward(best) != reward(worst):
            yield best, worst


def with_sides(batch: Batch) -> Batch:
    """Advantages are 1 and -1: the way each side is pushed."""
    chosen_N: Tensor = torch.arange(batch.num_rollouts) % 2 == 0
    advantages_T = torch.where(chosen_N, 1.0, -1.0).repeat_interleave(batch.trained_lengths_N)
    return batch.replace(chosen_N=chosen_N, advantages_T=advantages_T)
