"""Ranks that compute a pass together, a slice of its tokens each, against one rank that computes it alone. Real FSDP2 over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import actor_group, make_batch
from test_layout_invariance import (
    ALONE,
    EXACT_KL,
    WHOLE,
    Layout,
    assert_same,
    grpo,
    several_turns,
    spec_for,
    three_tokens,
    train,
    trained_tokens_of,
    with_reference_states,
)

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.types import Batch

RAGGED = [make_batch(seed) for seed in (1, 2)]
ONE_PROMPT = [make_batch(seed, one_prompt=True) for seed in (1, 2)]
TURNS = {share: [several_turns(seed, one_prompt=share) for seed in (1, 2)] for share in (False, True)}
TOGETHER = {
    "2 together, one pass": Layout(2, replace(WHOLE, sequence_ranks=2)),
    "2 together, by tokens, recomputed, in chunks": Layout(
        2, MicroBatchRule(60, None, sequence_ranks=2), checkpointing=True, chunk_tokens=7
    ),
    "4 together, more than key heads": Layout(4, MicroBatchRule(None, 5, sequence_ranks=4)),
    "2 x 2 together, single rollouts": Layout(4, MicroBatchRule(None, 1, sequence_ranks=2), checkpointing=True),
}


BY_TOKENS, FOUR, TWO_BY_TWO = list(TOGETHER)[1:]
CASES = {
    **{f"ragged, {name}": (one, grpo("seq-mean-token-mean"), RAGGED) for name, one in TOGETHER.items()},
    **{
        f"one prompt, {name}": (replace(TOGETHER[name], share=True), grpo("token-mean"), ONE_PROMPT)
        for name in (BY_TOKENS, FOUR)
    },
    # Entropies and the exact KL, whose reference states each rank gets for all tokens and reads for its own.
    "columns of the whole vocabulary": (TOGETHER[BY_TOKENS], EXACT_KL, with_reference_states(RAGGED)),
    # Five tokens over four ranks, one of which has only what fills up; the second share of two has no rollout at all.
    **{f"few tokens, {name}": (TOGETHER[name], grpo("token-mean"), [three_tokens(1)] * 2) for name in (FOUR, TWO_BY_TWO)},
    # Slices begin in turns and in the contexts between them, which have no states for the head and no columns.
    **{
        f"turns{', one prompt' * share}, {name}": (replace(one, share=share), grpo("prompt-mean"), TURNS[share])
        for name, one in TOGETHER.items()
        for share in (False, True)
    },
}


def is_long(case: str) -> bool:
    return case.startswith("turns") and BY_TOKENS not in case


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.campaign] * is_long(one)) for one in CASES])
def test_gradients_and_parameters_are_those_of_one_rank(ranks, path, case):
    layout, objective, batches = CASES[case]
    alone = replace(ALONE, share=case.startswith("one prompt"))
    assert_same(train(ranks, path, alone, objective, batches), train(ranks, path, layout, objective, batches))


def with_supports(batch: Batch) -> Batch:
    """The batch whose trained tokens were sampled from a few others each."""
    generator = torch.Generator().manual_seed(4)
    counts_T = torch.randint(1, 6, (batch.num_trained_tokens,), generator=generator)
    ids = [
        torch.cat([token[None], (token + 1 + torch.arange(int(count) - 1)) % 60])
        for token, count in zip(batch.token_ids_S[batch.positions()], counts_T, strict=True)
    ]
    return batch.replace(support_counts_T=counts_T.int(), support_ids_M=torch.cat(ids).int())


def test_log_probs_over_the_tokens_that_could_be_sampled_are_those_of_one_rank(ranks, path):
    batch = with_supports(make_batch(5))
    whole, split = (
        logprobs_of(ranks, path, layout, batch) for layout in (ALONE, TOGETHER["2 together, by tokens, recomputed, in chunks"])
    )
    assert len(whole) == batch.num_trained_tokens
    torch.testing.assert_close(split, whole, atol=2e-6, rtol=0)
    plain = logprobs_of(ranks, path, ALONE, make_batch(5))
    assert float((plain - whole).abs().max()) > 0.1, "the supports have to matter"


def logprobs_of(ranks, path: Path, layout: Layout, batch: Batch) -> torch.Tensor:
    processes = ranks[layout.ranks]
    processes.build(spec_for(path, layout, Objective(), 1e6))
    return actor_group(processes, ActorConfig(), layout.rule, Objective()).logprobs(batch)


def test_each_rank_computes_its_slice_of_the_tokens_only(ranks, path, monkeypatch):
    """What the axis is for: of one pass over all rollouts, two ranks run half of the tokens each through the body."""
    layouts = (ALONE, TOGETHER["2 together, one pass"])
    tokens = [trained_tokens_of(ranks, monkeypatch, path, layout, grpo("token-mean"), make_batch(1)) for layout in layouts]
    (whole,), (first, second) = tokens
    assert first == second == -(-whole // 2)
