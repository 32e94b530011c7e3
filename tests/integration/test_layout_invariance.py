"""The same training however the work is cut: ranks, micro-batches, recomputation, sharding. Real FSDP2 over gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses, actor_group, make_batch, make_model
from torch import Tensor

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import ActorSpec, PolicySpec

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"]


WHOLE = MicroBatchRule(None, 1000)


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    rule: MicroBatchRule = WHOLE
    checkpointing: bool = False
    chunk_tokens: int = 10_000
    reshard: bool = True
    share: bool = False
    """Prompts are computed once for all their responses in a micro-batch."""
    shard_ranks: int = -1
    in_host_memory: bool = False
    prefetch: bool = False


ALONE = Layout()
LAYOUTS = {
    "1 rank, 12 micro-batches": Layout(rule=MicroBatchRule(None, 1), chunk_tokens=4),
    "1 rank, recomputed": Layout(checkpointing=True),
    "2 ranks, 3 micro-batches each": Layout(2, MicroBatchRule(None, 2)),
    "2 ranks, by tokens, recomputed, in chunks": Layout(2, MicroBatchRule(40, None), checkpointing=True, chunk_tokens=7),
    "2 ranks, layers kept whole": Layout(2, MicroBatchRule(None, 3), reshard=False),
}

EVERY_SECOND = [
    pytest.param(mode, layout, marks=() if (i + j) % 2 == 0 else pytest.mark.campaign)
    for i, mode in enumerate(MODES)
    for j, layout in enumerate(LAYOUTS)
]
"""Every mode and every layout several times; the other half of the product is in the campaign."""


@dataclass(frozen=True)
class Trained:
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    metrics: list[Metrics]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {tied: make_model(tmp_path_factory.mktemp("model"), tied=tied) for tied in (True, False)}


def spec_for(path: Path, layout: Layout, objective: Objective, clip_grad: float) -> ActorSpec:
    model = ModelConfig(
        path=str(path), enable_gradient_checkpointing=layout.checkpointing, lm_head_chunk_tokens=layout.chunk_tokens
    )
    # AdamW divides by the root of the squared gradient: where a gradient is 0 up to rounding, its noise still makes
    # a step of the size of lr. With lr = 1e-5 a layout that is right stays within 1e-6 where the gradient is not 0.
    return ActorSpec(
        PolicySpec(
            model,
            temperature=0.9,
            dtype="float32",
            reshard_after_forward=layout.reshard,
            train=True,
            share_prompts=layout.share,
            sequence_ranks=layout.rule.sequence_ranks,
            shard_ranks=layout.shard_ranks,
            in_host_memory=layout.in_host_memory,
            forward_prefetch=layout.prefetch,
        ),
        objective,
        OptimConfig(lr=1e-5, clip_grad=clip_grad),
        total_optimizer_steps=100,
        seed=1,
    )


def train(
    ranks: dict[int, RankProcesses],
    path: Path,
    layout: Layout,
    objective: Objective,
    batches: list[Batch],
    config: ActorConfig | None = None,
    clip_grad: float = 1e6,
    choose: Callable[[Batch], Batch] = lambda batch: batch,
    **changes: Any,
) -> Trained:
    """Train on the batches. `changes` are fields of the actor's spec."""
    processes = ranks[layout.ranks]
    processes.build(replace(spec_for(path, layout, objective, clip_grad), **changes))
    config = config or ActorConfig()
    updates = config.ppo_epochs * -(-batches[0].group_N.unique().numel() // config.ppo_mini_batch_size)
    rule = replace(layout.rule, shares_prompts=layout.share)
    actor = actor_group(processes, config, rule, objective, updates_per_step=updates)
    metrics = [actor.update(choose(actor.old_logprobs(batch))) for batch in batches]
    return Trained(processes.call("gradients")[0], processes.call("parameters")[0], metrics)


def assert_same(one: Trained, other: Trained, smallest: float = 1e-3) -> None:
    """First gradients to 1e-6 of the largest entry, parameters after all steps to 1e-6, metrics alike."""
    assert one.parameters.keys() == other.parameters.keys()
    largest = max(float(gradient.abs().max()) for gradient in one.gradients[0].values())
    assert largest > smallest, "without gradients this comparison would see nothing"
    for name, gradient in one.gradients[0].items():
        torch.testing.assert_close(other.gradients[0][name], gradient, atol=1e-6 * largest, rtol=0, msg=name)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(other.parameters[name], parameter, atol=1e-6, rtol=0, msg=name)
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)


def grpo(mode: str) -> Objective:
    return Objective(loss_agg_mode=mode, entropy_coeff=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1)


BATCHES = [make_batch(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], models: dict[bool, Path]) -> dict[str, Trained]:
    """One rank, one micro-batch, nothing recomputed: what all others are compared with."""
    return {mode: train(ranks, models[True], ALONE, grpo(mode), BATCHES) for mode in MODES}


@pytest.mark.parametrize(("mode", "layout"), EVERY_SECOND)
def test_gradients_and_parameters_do_not_depend_on_the_layout(ranks, models, alone, mode, layout):
    assert_same(alone[mode], train(ranks, models[True], LAYOUTS[layout], grpo(mode), BATCHES))


def test_each_step_of_an_update_begins_with_no_gradient(ranks, models):
    objective, config = grpo("token-mean"), ActorConfig(ppo_epochs=2)
    spec = spec_for(models[True], ALONE, objective, 1e6)
    ranks[1].build(replace(spec, optim=replace(spec.optim, lr=1e-12)))
    actor = actor_group(ranks[1], config, ALONE.rule, objective, updates_per_step=2)
    actor.update(actor.old_logprobs(BATCHES[0]))
    first, second = ranks[1].call("gradients")[0]
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_old_logprobs_that_are_the_engines_are_those_of_the_ratio(ranks, models):
    objective, batch = Objective("cispo"), BATCHES[0]

    def gradients(batch: Batch, old_from_engine: bool) -> dict[str, Tensor]:
        ranks[1].build(replace(spec_for(models[True], ALONE, objective, 1e6), old_from_engine=old_from_engine))
        actor_group(ranks[1], ActorConfig(), ALONE.rule, objective, updates_per_step=1).update(batch)
        return ranks[1].call("gradients")[0][0]

    found = gradients(batch, True)
    expected = gradients(batch.replace(old_logprobs_T=batch.rollout_logprobs_T), False)
    on_policy = gradients(batch, False)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient) and not torch.equal(on_policy[name], gradient), name


@pytest.mark.parametrize("layout", ["1 rank, 12 micro-batches", "2 ranks, 3 micro-batches each"])
def test_gradients_are_clipped_by_their_norm_over_all_ranks_and_micro_batches(ranks, models, layout):
    one = train(ranks, models[True], ALONE, grpo("token-mean"), BATCHES[:1], clip_grad=0.01)
    assert_same(one, train(ranks, models[True], LAYOUTS[layout], grpo("token-mean"), BATCHES[:1], clip_grad=0.01), 1e-6)
    norm = torch.cat([gradient.flatten() for gradient in one.gradients[0].values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4)
    assert one.metrics[0]["actor/grad_norm"] > 0.1


def with_reference_states(batches: list[Batch]) -> list[Batch]:
    """The batches with hidden states of a reference, from which the exact KL is computed."""
    generator = torch.Generator().manual_seed(0)
    return [batch.replace(ref_hidden_TD=torch.randn(batch.num_trained_tokens, 48, generator=generator)) for batch in batches]


def three_tokens(seed: int) -> Batch:
    """A batch of one rollout with three trained tokens."""
    return replace(
        make_batch(seed, num_groups=1, group_size=1),
        prompt_lengths_N=torch.tensor([2]),
        response_lengths_N=torch.tensor([3]),
        positions_T=None,
        trained_lengths_N=None,
        token_ids_S=torch.tensor([7, 8, 9, 10, 11]),
        rollout_logprobs_T=torch.tensor([-1.0, -2.0, -0.5]),
        ref_logprobs_T=torch.tensor([-1.5, -2.5, -0.6]),
        advantages_T=torch.ones(3),
    )


SHUFFLED = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
EXACT_KL = Objective(kl_loss_type="full", kl_loss_coef=0.1, entropy_coeff=0.01)
CASES = {
    "the exact KL": (Layout(2, MicroBatchRule(None, 2), chunk_tokens=5), EXACT_KL, with_reference_states(BATCHES), None),
    "a rank without any rollout": (Layout(2, MicroBatchRule(None, 2)), grpo("token-mean"), [three_tokens(1)] * 2, None),
    "mini-batches and epochs": (Layout(2, MicroBatchRule(30, None)), grpo("seq-mean-token-mean"), BATCHES[:1], SHUFFLED),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one(ranks, models, case):
    layout, objective, batches, config = CASES[case]
    one = train(ranks, models[True], ALONE, objective, batches, config)
    if config is SHUFFLED:
        assert len(one.gradients) == 4 and one.metrics[0]["actor/ppo_kl"] != 0.0
    assert_same(one, train(ranks, models[True], layout, objective, batches, config))


def test_weights_rejections_and_chosen_tokens_train_alike_in_every_layout(ranks, models):
    def corrected(batch: Batch) -> Batch:
        kept_T = batch.rollout_logprobs_T > -2.0
        assert 0 < int(kept_T.sum()) < batch.num_trained_tokens
        return batch.replace(weights_T=1.0 + 0.5 * torch.sin(batch.rollout_logprobs_T * 7.0)).keep(kept_T)

    options = (("kl_cov_ratio", 0.1), ("ppo_kl_coef", 2.0))
    objective = Objective("kl_cov", "prompt-mean", kl_loss_type="k3_unbiased", kl_loss_coef=0.1, loss_options=options)
    batches, config = BATCHES[:2], ActorConfig(ppo_epochs=2)
    one = train(ranks, models[True], ALONE, objective, batches, config, choose=corrected)
    two = train(ranks, models[True], Layout(2, MicroBatchRule(None, 2)), objective, batches, config, choose=corrected)
    assert_same(one, two)
    assert one.metrics[0]["actor/cov_selected"] > 0


def several_turns(seed: int, *, one_prompt: bool = False) -> Batch:
    """Rollouts of up to a dozen turns: stretches of 1 to 4 trained tokens, and between them contexts of as many."""
    batch = make_batch(seed, one_prompt=one_prompt)
    generator = torch.Generator().manual_seed(seed)
    sampled, most_turns = [], 0
    for length in batch.response_lengths_N.tolist():
        stretches = torch.randint(1, 5, (length,), generator=generator)
        stretch_T = torch.arange(length).repeat_interleave(stretches)[:length]
        sampled.append(stretch_T % 2 == 0)
        most_turns = max(most_turns, len(stretch_T[sampled[-1]].unique()))
    assert most_turns >= 4
    return batch.keep(torch.cat(sampled))


def test_rollouts_of_several_turns_train_alike_in_every_layout(ranks, models, alone):
    batches = [several_turns(seed) for seed in (1, 2)]
    one = train(ranks, models[True], ALONE, grpo("prompt-mean"), batches)
    for layout in LAYOUTS.values():
        assert_same(one, train(ranks, models[True], layout, grpo("prompt-mean"), batches))
    first, whole = one.gradients[0], alone["prompt-mean"].gradients[0]
    assert max(float((first[name] - whole[name]).abs().max()) for name in first) > 1e-3


@pytest.mark.parametrize("layout", ["1 rank, 12 micro-batches", "2 ranks, 3 micro-batches each"])
def test_the_head_never_runs_on_a_token_that_is_not_trained(ranks, models, layout, monkeypatch):
    """A batch in which whole responses are left out as well: neither they nor ranks without work cost the head anything."""
    layout = replace(LAYOUTS[layout], chunk_tokens=10_000)
    batch = several_turns(3)
    batch = batch.keep((batch.group_N != 1).repeat_interleave(batch.trained_lengths_N))
    processes = ranks[layout.ranks]
    processes.build(spec_for(models[True], layout, grpo("token-mean"), 1e6))
    actor = actor_group(processes, ActorConfig(ppo_mini_batch_size=1), layout.rule, grpo("token-mean"))
    rows: list[int] = []

    def call_each(method: str, arguments: object) -> list[list[dict[str, float]]]:
        assert method == "update"
        rows.extend(type(processes).call_each(processes, "update_counting_head_rows", arguments))
        return [[{}] * 4] * len(processes)

    monkeypatch.setattr(processes, "call_each", call_each)
    actor.update(batch)
    assert len(rows) == layout.ranks and sum(rows) == batch.num_trained_tokens


ONE_PROMPT = [make_batch(seed, one_prompt=True) for seed in (1, 2, 3)]
SHARED = {
    "1 rank, whole": ALONE,
    "1 rank, groups cut by tokens": Layout(rule=MicroBatchRule(45, None)),
    "2 ranks, by tokens, recomputed, in chunks": LAYOUTS["2 ranks, by tokens, recomputed, in chunks"],
    "2 ranks, 3 micro-batches each": LAYOUTS["2 ranks, 3 micro-batches each"],
}


@pytest.fixture(scope="module")
def unshared(ranks: dict[int, RankProcesses], models: dict[bool, Path]) -> Trained:
    return train(ranks, models[True], ALONE, grpo("seq-mean-token-mean"), ONE_PROMPT)


@pytest.mark.parametrize("layout", SHARED)
def test_shared_prompts_train_as_unshared_ones_in_every_layout(ranks, models, unshared, layout):
    shared = replace(SHARED[layout], share=True)
    assert_same(unshared, train(ranks, models[True], shared, grpo("seq-mean-token-mean"), ONE_PROMPT))


def trained_tokens_of(ranks, monkeypatch, path, layout: Layout, objective: Objective, batch: Batch) -> list[int]:
    """The tokens that run through the body with a gradient in an update of this batch, on each rank."""
    processes = ranks[layout.ranks]
    processes.build(spec_for(path, layout, objective, 1e6))
    actor = actor_group(processes, ActorConfig(), replace(layout.rule, shares_prompts=layout.share), objective)
    tokens: list[int] = []

    def call_each(method: str, arguments: object) -> list[list[dict[str, float]]]:
        assert method == "update"
        tokens.extend(type(processes).call_each(processes, "update_counting_tokens", arguments))
        return [[{}]] * len(processes)

    with monkeypatch.context() as patched:
        patched.setattr(processes, "call_each", call_each)
        actor.update(batch)
    return tokens


# ---- rollouts that add nothing to the gradient -----------------------------------------------------------


def without_signal(batch: Batch, groups: list[int]) -> Batch:
    """The batch in which all rollouts of these groups have the advantage 0."""
    zero_N = torch.isin(batch.group_N, torch.tensor(groups))
    zero_T = zero_N.repeat_interleave(batch.trained_lengths_N)
    return batch.replace(advantages_T=batch.advantages_T.masked_fill(zero_T, 0.0))


@pytest.mark.parametrize("layout", ["1 rank, 12 micro-batches", "2 ranks, by tokens, recomputed, in chunks"])
@pytest.mark.parametrize("groups", [[1], [0, 2, 3], [0, 1, 2, 3]], ids=["one", "three", "all"])
def test_rollouts_without_advantage_need_no_backward_pass(ranks, models, layout, groups, monkeypatch):
    """The same gradients, parameters and statistics, and tokens with a gradient only where there is a signal."""
    objective, laid_out = Objective(loss_agg_mode="seq-mean-token-mean"), LAYOUTS[layout]
    batches = [without_signal(make_batch(1), groups), make_batch(2)]
    skipping = train(ranks, models[True], laid_out, objective, batches)
    with monkeypatch.context() as patched:
        patched.setattr(Objective, "skips_zero_advantage", False)
        whole = train(ranks, models[True], laid_out, objective, batches)
    largest = max(float(gradient.abs().max()) for gradient in whole.gradients[1].values())
    for ours, theirs in zip(skipping.gradients, whole.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, atol=1e-6 * largest, rtol=0, msg=name)
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(skipping.parameters[name], parameter, atol=1e-6, rtol=0, msg=name)
    for ours, theirs in zip(skipping.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    counted = sum(trained_tokens_of(ranks, monkeypatch, models[True], laid_out, objective, batches[0]))
    signal_N = (batches[0].trained_lengths_N > 0) & ~torch.isin(batches[0].group_N, torch.tensor(groups))
    dummies = counted - int(batches[0].sequence_lengths_N[signal_N].sum())
    # Ranks without work run two tokens.
    assert 0 <= dummies <= 8 and dummies % 2 == 0


def test_with_a_kl_term_every_rollout_counts(ranks, models, monkeypatch):
    batch = without_signal(make_batch(1), [0, 1])
    (counted,) = trained_tokens_of(ranks, monkeypatch, models[True], ALONE, grpo("token-mean"), batch)
    assert counted == int(batch.sequence_lengths_N[batch.trained_lengths_N > 0].sum())
