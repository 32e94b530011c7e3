"""The same training however the work is cut: ranks, micro-batches, recomputation, sharding, slices of sequences. Real FSDP2 over gloo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import (
    ALONE,
    WHOLE,
    Layout,
    RankProcesses,
    Trained,
    actor_group,
    assert_close,
    assert_equal_bits,
    assert_same,
    largest,
    make_batch,
    make_pairs,
    spec_for,
    train,
)
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.types import Batch

# ---- layouts -----------------------------------------------------------------------------------------

TWO = Layout(2, MicroBatchRule(None, 2))
PLAIN = {
    "1 rank, 12 micro-batches": Layout(rule=MicroBatchRule(None, 1), chunk_tokens=4),
    "1 rank, recomputed": Layout(checkpointing=True),
    "2 ranks, 3 micro-batches each": TWO,
    "2 ranks, by tokens, recomputed, in chunks": Layout(2, MicroBatchRule(40, None), checkpointing=True, chunk_tokens=7),
    "2 ranks, layers kept whole": Layout(2, MicroBatchRule(None, 3), reshard=False),
}
TOGETHER = {
    "2 together, one pass": Layout(2, replace(WHOLE, sequence_ranks=2)),
    "2 together, by tokens, recomputed, in chunks": Layout(
        2, MicroBatchRule(60, None, sequence_ranks=2), checkpointing=True, chunk_tokens=7
    ),
    "4 together, more than key heads": Layout(4, MicroBatchRule(None, 5, sequence_ranks=4)),
    "2 x 2 together, single rollouts": Layout(4, MicroBatchRule(None, 1, sequence_ranks=2), checkpointing=True),
}
"""Ranks that compute a pass together, a slice of its tokens each."""
ONE_PASS, BY_TOKENS, FOUR, TWO_BY_TWO = TOGETHER
PLACED = {
    "2 x 2 replicas": Layout(4, TWO.rule, checkpointing=True, shard_ranks=2),
    "4 replicas": Layout(4, TWO.rule, shard_ranks=1),
    "2 x 2 replicas, sequences split": Layout(4, replace(TWO.rule, sequence_ranks=2), shard_ranks=2),
    "host memory": Layout(2, TWO.rule, in_host_memory=True, checkpointing=True),
    "2 x 2 replicas in host memory, gathered early": Layout(4, TWO.rule, in_host_memory=True, shard_ranks=2, prefetch=True),
}
"""If parameters lie: replicas of shards, host memory."""
SHARED = {
    "1 rank, whole": ALONE,
    "1 rank, groups cut by tokens": Layout(rule=MicroBatchRule(45, None)),
    **{name: PLAIN[name] for name in list(PLAIN)[2:4]},
    **{name: TOGETHER[name] for name in (BY_TOKENS, FOUR)},
}
PAIRED = {
    "1 rank, a pair at a time": Layout(rule=MicroBatchRule(None, 1), chunk_tokens=4),
    "1 rank, 2 micro-batches": Layout(rule=MicroBatchRule(None, 6), checkpointing=True),
    "2 ranks, a pair at a time": TWO,
    "2 ranks, by tokens": Layout(2, MicroBatchRule(70, None), chunk_tokens=7),
}
ADAPTED = {
    **{name: PLAIN[name] for name in list(PLAIN)[:2]},
    "2 ranks, 3 micro-batches each": replace(TWO, share=True),
    "2 ranks, a replica each": replace(TWO, shard_ranks=1),
    "2 ranks, each sequence over both": Layout(2, MicroBatchRule(None, 3, sequence_ranks=2)),
    "2 ranks, by tokens, recomputed": Layout(2, MicroBatchRule(60, None), checkpointing=True, share=True),
}

# ---- batches -----------------------------------------------------------------------------------------

BATCHES = [make_batch(seed) for seed in (1, 2, 3)]
ONE_PROMPT = [make_batch(seed, one_prompt=True) for seed in (1, 2, 3)]
PAIRS = [make_pairs(seed, 5).replace(margins_N=None) for seed in (1, 2)]


def with_reference_states(batch: Batch) -> Batch:
    """The batch with hidden states of a reference, from which the exact KL is computed."""
    generator = torch.Generator().manual_seed(0)
    return batch.replace(ref_hidden_TD=torch.randn(batch.num_trained_tokens, 48, generator=generator))


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


def corrected(batch: Batch) -> Batch:
    """The batch with weights, of which only likely tokens are trained."""
    kept_T = batch.rollout_logprobs_T > -2.0
    assert 0 < int(kept_T.sum()) < batch.num_trained_tokens
    return batch.replace(weights_T=1.0 + 0.5 * torch.sin(batch.rollout_logprobs_T * 7.0)).keep(kept_T)


# ---- what is trained ---------------------------------------------------------------------------------


def grpo(mode: str) -> Objective:
    return Objective(loss_agg_mode=mode, entropy_coeff=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1)


@dataclass(frozen=True)
class Case:
    """A training that must not depend on its layout."""

    objective: Objective
    batches: Sequence[Batch]
    layouts: dict[str, Layout]
    config: ActorConfig | None = None
    choose: Callable[[Batch], Batch] = lambda batch: batch
    clip_grad: float = 1e6
    model: dict[str, Any] = field(default_factory=dict)
    campaign: Collection[str] = ()
    """Layouts that are left to the campaign, as the lane has each of them with something like this."""

    def train(self, ranks: dict[int, RankProcesses], path: Path, layout: Layout) -> Trained:
        spec = spec_for(path, layout, self.objective, self.clip_grad, **self.model)
        return train(ranks, spec, layout, self.batches, self.config, self.choose)


def shared(layouts: dict[str, Layout]) -> dict[str, Layout]:
    return {name: replace(layout, share=True) for name, layout in layouts.items()}


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"]
LOSSES = {
    "dpo": Objective("dpo", "seq-mean-token-mean", loss_options=(("beta", 0.5), ("label_smoothing", 0.1))),
    "ipo": Objective("ipo", "prompt-mean", loss_options=(("length_normalised", True),)),
    "dpo_hinge": Objective("dpo_hinge", "prompt-mean"),
    "simpo": Objective("simpo", "seq-mean-token-mean"),
    "orpo": Objective("orpo", "seq-mean-token-mean"),
    "kto": Objective("kto", "seq-mean-token-mean", loss_options=(("beta", 0.5), ("undesirable_weight", 2.0))),
}
"""Of pairs."""
COVARIANCE = Objective(
    "kl_cov",
    "prompt-mean",
    kl_loss_type="k3_unbiased",
    kl_loss_coef=0.1,
    loss_options=(("kl_cov_ratio", 0.1), ("ppo_kl_coef", 2.0)),
)
SHUFFLED = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
CASES = {
    # Every objective has every second layout in the lane.
    **{mode: Case(grpo(mode), BATCHES, PLAIN, campaign=list(PLAIN)[1 - i % 2 :: 2]) for i, mode in enumerate(MODES)},
    **{name: Case(loss, PAIRS, PAIRED, campaign=list(PAIRED)[1 - i % 2 :: 2]) for i, (name, loss) in enumerate(LOSSES.items())},
    "ranks together": Case(grpo("seq-mean-token-mean"), BATCHES[:2], TOGETHER),
    "clipped": Case(
        grpo("token-mean"), BATCHES[:1], {"1 rank": PLAIN["1 rank, 12 micro-batches"], "2 ranks": TWO}, clip_grad=0.01
    ),
    # Entropies and the exact KL, whose reference states each rank gets for all tokens and reads for its own.
    "columns of the whole vocabulary": Case(
        Objective(kl_loss_type="full", kl_loss_coef=0.1, entropy_coeff=0.01),
        [with_reference_states(batch) for batch in BATCHES[:2]],
        {"2 ranks, in chunks": replace(TWO, chunk_tokens=5), BY_TOKENS: TOGETHER[BY_TOKENS]},
    ),
    # Five tokens over four ranks, one of which has only what fills up; the second share of two has no rollout at all.
    "ranks without a rollout": Case(
        grpo("token-mean"), [three_tokens(1)] * 2, {"2 ranks": TWO, **{name: TOGETHER[name] for name in (FOUR, TWO_BY_TWO)}}
    ),
    "mini-batches and epochs": Case(
        grpo("seq-mean-token-mean"), BATCHES[:1], {"2 ranks": Layout(2, MicroBatchRule(30, None))}, SHUFFLED
    ),
    "mini-batches of pairs": Case(LOSSES["dpo"], PAIRS[:1], {"2 ranks": TWO}, SHUFFLED),
    "weights, rejections and chosen tokens": Case(
        COVARIANCE, BATCHES[:2], {"2 ranks": TWO}, ActorConfig(ppo_epochs=2), corrected
    ),
    # Slices begin in turns and in the contexts between them, which have no states for the head and no columns.
    "turns": Case(
        grpo("prompt-mean"),
        [several_turns(seed) for seed in (1, 2)],
        PLAIN | TOGETHER | PLACED,
        campaign=(ONE_PASS, FOUR, TWO_BY_TWO),
    ),
    "shared prompts": Case(grpo("seq-mean-token-mean"), ONE_PROMPT, shared(SHARED)),
    "shared prompts of turns": Case(
        grpo("prompt-mean"),
        [several_turns(seed, one_prompt=True) for seed in (1, 2)],
        shared(TOGETHER),
        campaign=(ONE_PASS, FOUR, TWO_BY_TWO),
    ),
    # Rank 3 over 2 ranks: their rows of an A are uneven.
    "adapters": Case(
        Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.01),
        [make_batch(seed, one_prompt=True) for seed in (0, 1)],
        ADAPTED,
        ActorConfig(ppo_mini_batch_size=2, shuffle=True),
        model={"lora_rank": 3, "lora_alpha": 6},
    ),
}


class Alone(dict[str, Trained]):
    """Each case by one rank in one micro-batch with nothing recomputed: what all layouts are compared with."""

    def __init__(self, ranks: dict[int, RankProcesses], path: Path) -> None:
        self.place = ranks, path

    def __missing__(self, case: str) -> Trained:
        return self.setdefault(case, CASES[case].train(*self.place, ALONE))


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], path: Path) -> Alone:
    return Alone(ranks, path)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.campaign] * (layout in case.campaign))
        for name, case in CASES.items()
        for layout in case.layouts
    ],
)
def test_gradients_parameters_and_metrics_do_not_depend_on_the_layout(ranks, path, alone, case, layout):
    trained = CASES[case].train(ranks, path, CASES[case].layouts[layout])
    # In the first step of adapters B is 0: A has no gradient, and B a smaller one than later.
    scale = -1 if case == "adapters" else 0
    assert_same(alone[case], trained, smallest=1e-6 if case == "clipped" else 1e-3, scale=scale)


def test_what_is_compared_is_there(alone):
    clipped = alone["clipped"]
    norm = torch.cat([gradient.flatten() for gradient in clipped.gradients[0].values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4) and clipped.metrics[0]["actor/grad_norm"] > 0.1
    assert len(alone["mini-batches and epochs"].gradients) == 4 and len(alone["mini-batches of pairs"].gradients) == 6
    assert alone["mini-batches and epochs"].metrics[0]["actor/ppo_kl"] != 0.0
    assert alone["weights, rejections and chosen tokens"].metrics[0]["actor/cov_selected"] > 0
    turns, whole = alone["turns"].gradients[0], alone["prompt-mean"].gradients[0]
    assert largest({name: turns[name] - whole[name] for name in whole}) > 1e-3
    pairs = alone["dpo"].metrics[0]
    assert pairs["actor/reward_margin"] == pytest.approx(pairs["actor/reward_chosen"] - pairs["actor/reward_rejected"])
    assert 0 <= pairs["actor/reward_accuracy"] <= 1 and pairs["actor/logprob_chosen"] < 0


def test_the_first_gradient_of_pairs_is_that_of_a_plain_loop(path, alone):
    """The model in one process, a forward pass per response, log-softmax, and DPO's loss as the paper writes it."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = PAIRS[0]
    assert batch.chosen_N is not None and batch.ref_logprobs_T is not None
    ids = batch.token_ids_S.split(batch.sequence_lengths_N.tolist())
    ref = batch.ref_logprobs_T.double().split(batch.trained_lengths_N.tolist())
    ratios = []
    for n, tokens in enumerate(ids):
        start = int(batch.prompt_lengths_N[n])
        logits = lm(tokens[None]).logits[0, start - 1 : -1] / 0.9
        own = torch.log_softmax(logits, dim=-1).gather(1, tokens[start:, None])[:, 0]
        ratios.append((own.double() - ref[n]).sum())
    losses = []
    for group in batch.group_N.unique().tolist():
        first, second = (batch.group_N == group).nonzero()[:, 0].tolist()
        better, worse = (first, second) if bool(batch.chosen_N[first]) else (second, first)
        h = 0.5 * (ratios[better] - ratios[worse])
        losses.append(-0.9 * torch.log(torch.sigmoid(h)) - 0.1 * torch.log(torch.sigmoid(-h)))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert alone["dpo"].metrics[0]["actor/loss"] == pytest.approx(loss.item(), rel=1e-6)
    gradients = {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}
    assert_close(alone["dpo"].gradients[0], gradients, 1e-6 * largest(gradients))


def test_each_step_of_an_update_begins_with_no_gradient(ranks, path):
    spec = spec_for(path, ALONE, grpo("token-mean"))
    spec = replace(spec, optim=replace(spec.optim, lr=1e-12))
    first, second = train(ranks, spec, ALONE, BATCHES[:1], ActorConfig(ppo_epochs=2)).gradients
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def test_old_logprobs_that_are_the_engines_are_those_of_the_ratio(ranks, path):
    def gradients(batch: Batch, old_from_engine: bool) -> dict[str, Tensor]:
        spec = replace(spec_for(path, ALONE, Objective("cispo")), old_from_engine=old_from_engine)
        return train(ranks, spec, ALONE, [batch]).gradients[0]

    batch = BATCHES[0]
    found, on_policy = gradients(batch, True), gradients(batch, False)
    for name, gradient in gradients(batch.replace(old_logprobs_T=batch.rollout_logprobs_T), False).items():
        assert torch.equal(found[name], gradient) and not torch.equal(on_policy[name], gradient), name


# ---- what runs through the model -----------------------------------------------------------------------


def counted(
    ranks, monkeypatch, path, layout: Layout, objective: Objective, batch: Batch, what: str, config: ActorConfig | None = None
) -> list[int]:
    """How many `head_rows` or `tokens` run through the model with a gradient in an update of this batch, on each rank."""
    processes, config = ranks[layout.ranks], config or ActorConfig()
    processes.build(spec_for(path, layout, objective))
    actor = actor_group(processes, config, replace(layout.rule, shares_prompts=layout.share), objective)
    steps = -(-batch.group_N.unique().numel() // config.ppo_mini_batch_size)
    numbers: list[int] = []

    def call_each(method: str, arguments: object) -> list[list[dict[str, float]]]:
        assert method == "update"
        numbers.extend(type(processes).call_each(processes, f"update_counting_{what}", arguments))
        return [[{}] * steps] * len(processes)

    with monkeypatch.context() as patched:
        patched.setattr(processes, "call_each", call_each)
        actor.update(batch)
    return numbers


@pytest.mark.parametrize("layout", ["1 rank, 12 micro-batches", "2 ranks, 3 micro-batches each"])
def test_the_head_never_runs_on_a_token_that_is_not_trained(ranks, path, layout, monkeypatch):
    """A batch in which whole responses are left out as well: neither they nor ranks without work cost the head anything."""
    batch = several_turns(3)
    batch = batch.keep((batch.group_N != 1).repeat_interleave(batch.trained_lengths_N))
    laid_out = replace(PLAIN[layout], chunk_tokens=10_000)
    config = ActorConfig(ppo_mini_batch_size=1)
    rows = counted(ranks, monkeypatch, path, laid_out, grpo("token-mean"), batch, "head_rows", config)
    assert len(rows) == laid_out.ranks and sum(rows) == batch.num_trained_tokens


def test_each_rank_of_a_pass_computes_its_slice_of_the_tokens_only(ranks, path, monkeypatch):
    """What the axis is for: of one pass over all rollouts, two ranks run half of the tokens each through the body."""
    (whole,), (first, second) = (
        counted(ranks, monkeypatch, path, layout, grpo("token-mean"), make_batch(1), "tokens")
        for layout in (ALONE, TOGETHER[ONE_PASS])
    )
    assert first == second == -(-whole // 2)


def without_signal(batch: Batch, groups: list[int]) -> Batch:
    """The batch in which all rollouts of these groups have the advantage 0."""
    zero_T = torch.isin(batch.group_N, torch.tensor(groups)).repeat_interleave(batch.trained_lengths_N)
    return batch.replace(advantages_T=batch.advantages_T.masked_fill(zero_T, 0.0))


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("1 rank, 12 micro-batches", [0, 2, 3]),
        ("2 ranks, by tokens, recomputed, in chunks", [1]),
        ("2 ranks, by tokens, recomputed, in chunks", [0, 1, 2, 3]),
    ],
)
def test_rollouts_without_advantage_need_no_backward_pass(ranks, path, layout, groups, monkeypatch):
    """The same gradients, parameters and statistics, and tokens with a gradient only if there is a signal."""
    objective = Objective(loss_agg_mode="seq-mean-token-mean")
    case = Case(objective, [without_signal(make_batch(1), groups), make_batch(2)], {})
    skipping = case.train(ranks, path, PLAIN[layout])
    with monkeypatch.context() as patched:
        patched.setattr(Objective, "skips_zero_advantage", False)
        whole = case.train(ranks, path, PLAIN[layout])
    for ours, theirs in zip(skipping.gradients, whole.gradients, strict=True):
        assert_close(ours, theirs, 1e-6 * largest(whole.gradients[1]))
    assert_close(skipping.parameters, whole.parameters, 1e-6)
    for found, expected in zip(skipping.metrics, whole.metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    batch = case.batches[0]
    tokens = sum(counted(ranks, monkeypatch, path, PLAIN[layout], objective, batch, "tokens"))
    signal_N = (batch.trained_lengths_N > 0) & ~torch.isin(batch.group_N, torch.tensor(groups))
    dummies = tokens - int(batch.sequence_lengths_N[signal_N].sum())
    # Ranks without work run two tokens.
    assert 0 <= dummies <= 8 and dummies % 2 == 0


def test_with_a_kl_term_every_rollout_counts(ranks, path, monkeypatch):
    batch = without_signal(make_batch(1), [0, 1])
    (tokens,) = counted(ranks, monkeypatch, path, ALONE, grpo("token-mean"), batch, "tokens")
    assert tokens == int(batch.sequence_lengths_N[batch.trained_lengths_N > 0].sum())


def test_log_probs_over_the_tokens_that_could_be_sampled_are_those_of_one_rank(ranks, path):
    def logprobs_of(layout: Layout, batch: Batch) -> Tensor:
        ranks[layout.ranks].build(spec_for(path, layout, Objective()))
        return actor_group(ranks[layout.ranks], ActorConfig(), layout.rule, Objective()).logprobs(batch)

    plain, generator = make_batch(5), torch.Generator().manual_seed(4)
    counts_T = torch.randint(1, 6, (plain.num_trained_tokens,), generator=generator)
    ids = [
        torch.cat([token[None], (token + 1 + torch.arange(int(count) - 1)) % 60])
        for token, count in zip(plain.token_ids_S[plain.positions()], counts_T, strict=True)
    ]
    batch = plain.replace(support_counts_T=counts_T.int(), support_ids_M=torch.cat(ids).int())
    whole = logprobs_of(ALONE, batch)
    assert len(whole) == batch.num_trained_tokens
    torch.testing.assert_close(logprobs_of(TOGETHER[BY_TOKENS], batch), whole, atol=2e-6, rtol=0)
    assert float((logprobs_of(ALONE, plain) - whole).abs().max()) > 0.1, "the supports have to matter"


# ---- an update in parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_parts_of_a_mini_batch_add_up_to_the_gradient_of_one_update(ranks, path, mode):
    objective, batch = grpo(mode), BATCHES[0]
    batch = batch.replace(group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N))
    rollouts = list(range(batch.num_rollouts))

    def in_parts(layout: Layout, parts: Sequence[Sequence[int]]) -> Trained:
        processes = ranks[layout.ranks]
        processes.build(spec_for(path, layout, objective))
        actor = actor_group(processes, ActorConfig(), layout.rule, objective)
        for part in parts:
            actor.forward_backward(batch.select(list(part)), batch.counts())
        metrics = [actor.optim_step(batch.counts())]
        assert actor.version == 1
        return Trained(processes.call("gradients")[0], processes.call("parameters")[0], metrics)

    at_once = train(ranks, spec_for(path, ALONE, objective), ALONE, [batch])
    # The same micro-batches: equal to the last digit. Others, also parts that cut groups: equal up to rounding.
    whole = in_parts(ALONE, [rollouts])
    assert_equal_bits(whole.parameters, at_once.parameters)
    assert whole.metrics == at_once.metrics
    assert_same(at_once, in_parts(ALONE, [rollouts[:4], rollouts[4:5], rollouts[5:]]))
    assert_same(at_once, in_parts(TWO, [rollouts[::2], rollouts[1::2]]))
