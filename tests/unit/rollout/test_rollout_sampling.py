from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_rl.rollout.hf.token_sampling import keep_min_p, keep_top_k, keep_top_p, sample, support_of
from grpo_rl.types import Sampling

LOGITS_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(sampling: Sampling, seed: int = 0) -> tuple[int, float]:
    tokens_B, logprobs_B, _ = sample(LOGITS_V[None], [sampling], [seed], [0])
    return int(tokens_B[0]), float(logprobs_B[0])


def test_temperature_zero_takes_the_likeliest_token_with_its_probability_at_temperature_one() -> None:
    assert draw(Sampling(1, temperature=0.0)) == (0, pytest.approx(math.log(0.5)))


@pytest.mark.parametrize(
    ("keep", "limit", "kept"),
    [
        (keep_top_k, 2, [0.625, 0.375, 0, 0]),
        (keep_top_k, 9, [0.5, 0.3, 0.15, 0.05]),
        # The smallest set that reaches p.
        (keep_top_p, 0.4, [1, 0, 0, 0]),
        (keep_top_p, 0.6, [0.625, 0.375, 0, 0]),
        (keep_top_p, 0.9, [0.5263158, 0.3157895, 0.1578947, 0]),
        # What has that share of the largest probability.
        (keep_min_p, 0.2, [0.5263158, 0.3157895, 0.1578947, 0]),
        (keep_min_p, 0.5, [0.625, 0.375, 0, 0]),
        (keep_min_p, 1.0, [1, 0, 0, 0]),
    ],
)
def test_a_limit_keeps_the_likeliest(keep: Callable[[Tensor, float], Tensor], limit: float, kept: list[float]) -> None:
    assert keep(LOGITS_V, limit).softmax(-1).tolist() == pytest.approx(kept, abs=1e-6)


def test_the_tokens_left_are_told_where_the_settings_ask_and_leave_some_out() -> None:
    settings = [
        Sampling(1, top_k=3, top_p=0.7, keep_support=True),
        Sampling(1, min_p=0.2, keep_support=True),
        Sampling(1, min_p=0.2),
        Sampling(1, keep_support=True),
        Sampling(1, temperature=0.0, top_k=2, keep_support=True),
    ]
    _, _, left = sample(LOGITS_V.repeat(5, 1), settings, [0] * 5, [0] * 5)
    assert [None if ids is None else ids.tolist() for ids in left] == [[0, 1], [0, 1, 2], None, None, None]
    support = support_of([left[0], left[1]])
    assert support.counts.tolist() == [2, 3] and support.token_ids.tolist() == [0, 1, 0, 1, 2]


def test_a_row_is_drawn_the_same_whatever_the_other_rows_are() -> None:
    alone = [draw(Sampling(1, temperature=0.9), seed) for seed in range(8)]
    settings = [Sampling(1, temperature=0.9)] * 8 + [Sampling(1, temperature=0.0, top_k=1)]
    tokens_B, logprobs_B, _ = sample(LOGITS_V.repeat(9, 1), settings, [*range(8), 99], [0] * 9)
    together = list(zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True))[:8]
    assert together == alone


@pytest.mark.parametrize("of_one_request", [False, True])
def test_tokens_are_drawn_as_often_as_their_probability_says(of_one_request: bool) -> None:
    count = 4000
    seeds, positions = ([7] * count, range(count)) if of_one_request else (range(count), [0] * count)
    tokens_B, _, _ = sample(LOGITS_V.repeat(count, 1), [Sampling(1)] * count, seeds, positions)
    shares = torch.bincount(tokens_B, minlength=4) / count
    # Five standard deviations of a share of 4000 draws are at most 0.04.
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
