"""Ranks that compute a pass together, a slice of its tokens each, against one rank that computes it alone. Real FSDP2 over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses, actor_group, make_batch
from test_layout_invariance import ALONE, WHOLE, Layout, assert_same, grpo, replace_empty, several_turns, spec_for, train

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.roles.trained_roles import CriticRole
from grpo_rl.columns import values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.types import Batch
from grpo_rl.workers.specs import CriticSpec, PolicySpec

RAGGED = [make_batch(seed) for seed in (1, 2)]
ONE_PROMPT = [make_batch(seed, one_prompt=True) for seed in (1, 2)]
TOGETHER = {
    "2 together, one pass": Layout(2, replace(WHOLE, sequence_ranks=2)),
    "2 together, by tokens, recomputed, in chunks": Layout(
        2, MicroBatchRule(60, None, sequence_ranks=2), checkpointing=True, chunk_tokens=7
    ),
    "4 together, more than key heads": Layout(4, MicroBatchRule(None, 5, sequence_ranks=4)),
    "2 x 2 together, single rollouts": Layout(4, MicroBatchRule(None, 1, sequence_ranks=2), checkpointing=True),
}


@pytest.mark.parametrize("layout", TOGETHER)
def test_gradients_and_parameters_are_those_of_one_rank(ranks, path, layout):
    objective = grpo("seq-mean-token-mean")
    alone = train(ranks, path, ALONE, objective, RAGGED)
    assert_same(alone, train(ranks, path, TOGETHER[layout], objective, RAGGED))


@pytest.mark.parametrize("layout", ["2 together, by tokens, recomputed, in chunks", "4 together, more than key heads"])
def test_shared_prompts_are_split_like_any_tokens(ranks, path, layout):
    objective = grpo("token-mean")
    alone = train(ranks, path, replace(ALONE, share=True), objective, ONE_PROMPT)
    assert_same(alone, train(ranks, path, replace(TOGETHER[layout], share=True), objective, ONE_PROMPT))


@pytest.mark.parametrize("share", [False, True], ids=["each with its prompt", "one prompt"])
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if number == 1 else pytest.mark.campaign) for number, one in enumerate(TOGETHER)]
)
def test_contexts_between_the_turns_of_an_episode_lie_in_any_slice(ranks, path, layout, share):
    """Slices begin in turns and in the contexts between them, which have no states for the head and no columns."""
    batches = [several_turns(seed, one_prompt=share) for seed in (1, 2)]
    alone = train(ranks, path, ALONE, grpo("prompt-mean"), batches)
    assert_same(alone, train(ranks, path, replace(TOGETHER[layout], share=share), grpo("prompt-mean"), batches))


def test_columns_of_the_whole_vocabulary_are_those_of_one_rank(ranks, path):
    """Entropies and the exact KL, whose reference states each rank gets for all tokens and reads for its own."""
    objective = Objective(kl_loss_type="full", kl_loss_coef=0.1, entropy_coeff=0.01)
    generator = torch.Generator().manual_seed(0)
    batches = [batch.replace(ref_hidden_TD=torch.randn(batch.num_trained_tokens, 48, generator=generator)) for batch in RAGGED]
    alone = train(ranks, path, ALONE, objective, batches)
    assert_same(alone, train(ranks, path, TOGETHER["2 together, by tokens, recomputed, in chunks"], objective, batches))


def test_ranks_with_fewer_tokens_than_there_are_slices_keep_step(ranks, path):
    """Five tokens over four ranks, one of which has only what fills up; the second share of two has no rollout at all."""
    batches = [replace_empty(make_batch(seed, num_groups=1, group_size=1)) for seed in (1, 2)]
    alone = train(ranks, path, ALONE, grpo("token-mean"), batches)
    for layout in ("4 together, more than key heads", "2 x 2 together, single rollouts"):
        assert_same(alone, train(ranks, path, TOGETHER[layout], grpo("token-mean"), batches))


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


def test_the_critic_learns_the_same(ranks, path):
    batch = several_turns(7)
    generator = torch.Generator().manual_seed(2)
    batch = batch.replace(returns_T=torch.randn(batch.num_trained_tokens, generator=generator))
    seen = []
    for size, together in ((1, 1), (2, 2), (4, 2)):
        model = PolicySpec(ModelConfig(path=str(path)), temperature=1.0, dtype="float32", train=True, sequence_ranks=together)
        ranks[size].build(CriticSpec(model, OptimConfig(lr=1e-3, clip_grad=1e6), 100, seed=1, cliprange_value=0.5))
        rule = MicroBatchRule(None, 4, sequence_ranks=together)
        critic = CriticRole(ranks[size], rule=rule, mini_batch_size=2, epochs=1)
        critic.update(critic.values(batch))
        seen.append((values(critic.values(batch).values_T), ranks[size].call("gradients")[0]))
    (values_T, gradients), *others = seen
    assert float(values_T.abs().max()) > 1e-3
    for other_T, other in others:
        torch.testing.assert_close(other_T, values_T, atol=1e-5, rtol=0)
        for first, same in zip(gradients[:1], other[:1], strict=True):
            largest = max(float(gradient.abs().max()) for gradient in first.values())
            for name, gradient in first.items():
                torch.testing.assert_close(same[name], gradient, atol=1e-6 * largest, rtol=0, msg=name)


def test_each_rank_computes_its_slice_of_the_tokens_only(ranks, path):
    """What the axis is for: of one pass over all rollouts, two ranks run half of the tokens each through the body."""
    tokens = []
    for layout in (ALONE, TOGETHER["2 together, one pass"]):
        processes = ranks[layout.ranks]
        processes.build(spec_for(path, layout, grpo("token-mean"), 1e6))
        actor = actor_group(processes, ActorConfig(), layout.rule, grpo("token-mean"))
        counted: list[int] = []

        def call_each(
            method: str, arguments: list[tuple], processes=processes, counted=counted
        ) -> list[list[dict[str, float]]]:
            counted.extend(RankProcesses.call_each(processes, "update_counting_tokens", arguments))
            return [[{}]] * len(processes)

        processes.call_each = call_each
        try:
            actor.update(make_batch(1))
        finally:
            del processes.call_each
        tokens.append(counted)
    (whole,), (first, second) = tokens
    assert first == second == -(-whole // 2)
