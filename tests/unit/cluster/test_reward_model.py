"""The reward model's role: batches beside the sampling, scores in place, failures by kind."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from grpo_rl.cluster.roles.reward_model_role import RewardModelRole
from grpo_rl.errors import ClusterError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.rewards.contract import RewardResult
from grpo_rl.rewards.models.rendering import ScorableRenderer
from grpo_rl.types import Batch, Prompt, Rollout

TOKENIZER = build_tokenizer(128)
PROMPT = tuple(TOKENIZER("ab")["input_ids"])


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


class Ranks:
    """Ranks whose score is 100 * the token's place in its sequence + the token."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.call_timeout_s = 20.0
        self.calls: list[list[list[Batch | None]]] = []
        self.called = threading.Event()
        self.error: Exception | None = None

    def __len__(self) -> int:
        return self.size

    def store(self, values: Sequence[Batch]) -> Sequence[Batch]:
        return values

    def call_for_two(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[bool, dict[str, Any]]]:
        assert method == "scores" and len(arguments) == self.size
        passes = [[shard.select(list(rows)) if rows else None for rows in parts] for shard, parts in arguments]
        self.calls.append(passes)
        self.called.set()
        if self.error is not None:
            raise self.error
        none = torch.zeros(0)
        scores = [torch.cat([none if part is None else self.scores(part) for part in parts]) for parts in passes]
        return [(bool(scores_T.isfinite().all()), {"scores_T": scores_T.numpy()}) for scores_T in scores]

    def scores(self, batch: Batch) -> torch.Tensor:
        lengths_N = batch.sequence_lengths_N
        starts = lengths_N.cumsum(0) - lengths_N
        place_S = torch.arange(len(batch.token_ids_S)) - torch.repeat_interleave(starts, lengths_N)
        return (100 * place_S + batch.token_ids_S)[batch.positions()].float()


def rollout(sample: int, text: str) -> Rollout:
    ids = tuple(TOKENIZER(text)["input_ids"])
    return Rollout(Prompt("p", PROMPT, "ab", "test"), sample, ids, (0.0,) * len(ids), "length", ((0, len(ids)),), text=text)


def expected(text: str) -> float:
    return 100.0 * (len(text) + 1) + TOKENIZER("ab" + text)["input_ids"][-1]


def make(ranks: Ranks, *, separator: str | None = None, **more: Any) -> RewardModelRole:
    options = {"weight": 1.0, "pass_tokens": 20, "max_length": 20} | more
    return RewardModelRole(ranks, ScorableRenderer(decode, separator=separator), **options)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rollout_gets_its_own_score_whatever_the_number_of_ranks_and_passes(size):
    ranks = Ranks(size)
    group = make(ranks)
    texts = ["3", "12345", "", "98", "7777", "12", "1234567890", "5"]
    results = group.wait([rollout(i, text) for i, text in enumerate(texts)])
    group.close()
    assert results == [RewardResult(expected(text)) for text in texts]
    for call in ranks.calls:
        assert len({len(parts) for parts in call}) == 1, "ranks meet in every pass"
        assert all(len(part.token_ids_S) <= 20 for parts in call for part in parts if part is not None)


def test_scoring_begins_when_a_pass_is_full_and_the_rest_waits_for_somebody_who_waits():
    ranks = Ranks()
    group = make(ranks, pass_tokens=10)
    first, second, third = rollout(0, "123"), rollout(1, "4567"), rollout(2, "8")
    group.submit(first)
    assert not ranks.called.is_set()
    # 5 + 6 tokens fill a pass of 10.
    group.submit(second)
    assert ranks.called.wait(120)
    group.submit(third)
    assert group.wait([first, second, third]) == [RewardResult(expected(text)) for text in ("123", "4567", "8")]
    assert len(ranks.calls) == 2
    group.close()


def test_steps_are_scored_at_their_last_token_and_the_response_by_their_mean():
    ranks = Ranks()
    group = make(ranks, separator="\n\n")
    result, empty = group.wait([rollout(0, "1\n\n23"), rollout(1, "")])
    group.close()
    end, three = TOKENIZER("\n")["input_ids"][0], TOKENIZER("3")["input_ids"][0]
    # "ab1\n\n23": the first step ends at place 4, the second at 6; in the response these are 2 and 4.
    assert isinstance(result, RewardResult)
    assert result.steps == ((2, 400.0 + end), (4, 600.0 + three))
    assert result.score == pytest.approx((1000 + end + three) / 2)
    assert result.values == {"min_step": 400.0 + end, "num_steps": 2.0}
    assert empty == RewardResult(0.0, steps=())


def test_a_score_that_is_no_number_an_unknown_token_and_a_rollout_that_is_too_long_fail_alone():
    class Broken(Ranks):
        def scores(self, batch: Batch) -> torch.Tensor:
            return torch.where(batch.sequence_lengths_N == 3, math.nan, super().scores(batch))

    group = make(Broken(), max_length=8, vocab_size=max(*PROMPT, *TOKENIZER("1234567")["input_ids"]) + 1)
    unknown = dataclasses.replace(rollout(3, "1"), response_ids=(group.vocab_size,))
    invalid, fine, too_long, strange = group.wait([rollout(0, "1"), rollout(1, "12"), rollout(2, "1234567"), unknown])
    group.close()
    assert invalid.kind == "reward_model_invalid" and "nan" in invalid.cause
    assert fine == RewardResult(expected("12"))
    assert too_long.kind == "reward_model_error" and too_long.cause == "too long for it: 9 tokens, and it takes 8"
    assert strange.kind == "reward_model_error" and f"token {group.vocab_size} is none of its" in strange.cause


def test_what_a_worker_raised_is_raised_to_whoever_waits_and_the_next_batch_is_scored():
    ranks = Ranks()
    ranks.error = ClusterError("reward_model.scores failed")
    group = make(ranks)
    with pytest.raises(ClusterError, match="scores failed"):
        group.wait([rollout(0, "1")])
    ranks.error = None
    assert group.wait([rollout(0, "1")]) == [RewardResult(expected("1"))]
    group.close()
    with pytest.raises(RuntimeError):
        group.wait([rollout(2, "1")])
