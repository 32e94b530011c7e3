"""Dispatching a batch to ranks and putting their answers together again, over a worker group that runs in this process."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.role_specs import critic_spec
from grpo_rl.cluster.roles.trained_roles import ActorRole, CriticRole, Dispatched, combine_stats
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, AdaptiveEntropyConfig, PolicyLossConfig
from grpo_rl.errors import CheckpointError
from grpo_rl.plan.decisions import OldLogprobs, decide
from grpo_rl.rollout.requests import sample_seed, sampling_of
from grpo_rl.types import GREEDY, LOSS_COLUMNS, Batch, Counts, Sampling
from grpo_rl.workers.specs import OptimizerStep, PolicySpec, Rows, Update


def make_batch(lengths: Sequence[tuple[int, int]], groups: Sequence[int] | None = None) -> Batch:
    """Token ids count up over the flat axis, so that every token is recognised."""
    prompts, responses = torch.tensor([p for p, _ in lengths]), torch.tensor([r for _, r in lengths])
    return Batch(
        prompt_lengths_N=prompts,
        response_lengths_N=responses,
        group_N=torch.tensor(list(groups) if groups is not None else list(range(len(lengths)))),
        token_ids_S=torch.arange(int((prompts + responses).sum())),
        rewards_N=torch.zeros(len(lengths)),
        rollout_logprobs_T=torch.arange(int(responses.sum()), dtype=torch.float32),
    )


class Ranks(WorkerGroup):
    """A worker group without processes, which records each rank's calls."""

    def __init__(self, size: int, answer: Any = None, role: str = "actor") -> None:
        self.size, self.role = size, role
        self.answer = answer
        self.asked: list[tuple[str, Sequence[tuple[Any, ...]]]] = []
        self.sent: list[Sequence[Batch]] = []

    def store(self, values: Sequence[Batch]) -> Sequence[Batch]:
        self.sent.append(values)
        return values

    def __len__(self) -> int:
        return self.size

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert len(arguments) == self.size
        self.asked.append((method, arguments))
        return [self.answer(*args) for args in arguments]

    call_for_two = call_each


def echo(shard: Batch, micro_batches: Sequence[Rows], *_: Any) -> tuple[bool, dict[str, torch.Tensor]]:
    """A rank whose log-probs are the rollout's own, negated."""
    return True, {"logprobs_T": torch.cat([-shard.select(list(rows)).rollout_logprobs_T for rows in micro_batches])}


def logprobs(rule: MicroBatchRule, dispatched: Dispatched) -> torch.Tensor:
    return dispatched.compute(rule, "logprobs", {"": "logprobs_T"})[""].read()


def actor(ranks: Ranks, old_logprobs: OldLogprobs = "none", **config: Any) -> ActorRole:
    rule = MicroBatchRule(None, 2)
    settings = ActorConfig(**config)
    objective = Objective.from_config(settings)
    return ActorRole(ranks, settings, train_rule=rule, forward_rule=rule, old_logprobs=old_logprobs, objective=objective)


def empty_stats(shard: Batch, update: Update) -> list[dict[str, float]]:
    return [{} for _ in update.steps]


@dataclasses.dataclass(frozen=True)
class Step:
    """An optimizer step as a rank takes it: its micro-batches with all their columns."""

    counts: Counts
    entropy_coeff: float | None
    micro_batches: list[Batch | None]

    @staticmethod
    def of(step: OptimizerStep, batch: Batch) -> Step:
        batch = batch.replace(selected_T=step.selected_T)
        parts = [batch.select(list(rows)) if rows else None for rows in step.micro_batches]
        return Step(step.counts, step.entropy_coeff, parts)


# ---- gathering --------------------------------------------------------------------------------------

rollouts = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=20)


@given(rollouts, st.integers(1, 4), st.booleans())
def test_answers_of_all_ranks_come_back_in_the_batchs_order(lengths, num_ranks, by_tokens):
    batch = make_batch(lengths)
    rule = MicroBatchRule(12, None) if by_tokens else MicroBatchRule(None, 3)
    ranks = Ranks(num_ranks, echo)
    assert torch.equal(logprobs(rule, Dispatched.to(ranks, batch, rule)), -batch.rollout_logprobs_T)
    assert len(ranks.sent) == 1


@given(rollouts, st.integers(1, 3), st.integers(2, 3))
def test_ranks_that_compute_a_pass_together_get_one_shard_and_answer_once(lengths, num_groups, together):
    batch = make_batch(lengths)
    rule = MicroBatchRule(None, 3, sequence_ranks=together)
    ranks = Ranks(num_groups * together, echo)
    dispatched = Dispatched.to(ranks, batch, rule)
    assert len(dispatched.shards) == num_groups
    assert torch.equal(logprobs(rule, dispatched), -batch.rollout_logprobs_T)
    ((_, asked),) = ranks.asked
    for first in range(0, len(ranks), together):
        assert all(arguments == asked[first] for arguments in asked[first : first + together])


def test_a_rank_without_rollouts_is_asked_for_an_empty_pass():
    batch = make_batch([(2, 3)])
    ranks = Ranks(3, echo)
    logprobs(rule := MicroBatchRule(None, 4), Dispatched.to(ranks, batch, rule))
    assert [rows for _, rows in ranks.asked[0][1]] == [[(0,)], [()], [()]]


# ---- mini-batches -----------------------------------------------------------------------------------


def gathered(steps: Sequence[Sequence[Step]], step: int) -> list[Batch]:
    return [batch for rank in steps for batch in rank[step].micro_batches if batch is not None]


def groups_of(steps: Sequence[Sequence[Step]]) -> list[list[int]]:
    """The prompt groups of each optimizer step, over all ranks."""
    return [sorted({int(g) for b in gathered(steps, step) for g in b.group_N}) for step in range(len(steps[0]))]


INTERLEAVED = make_batch([(1, 1 + n % 4) for n in range(15)], groups=[n % 5 for n in range(15)])


def run_update(batch: Batch, num_ranks: int = 2, times: int = 1, **config: Any) -> list[list[list[Step]]]:
    ranks = Ranks(num_ranks, empty_stats)
    group = actor(ranks, **config)
    for _ in range(times):
        group.update(batch)
    return [
        [[Step.of(step, update.complete(shard)) for step in update.steps] for shard, update in arguments]
        for _, arguments in ranks.asked
    ]


def test_mini_batches_are_whole_groups_in_order_and_the_last_may_be_smaller():
    [steps] = run_update(INTERLEAVED, num_ranks=3, ppo_mini_batch_size=2)
    assert groups_of(steps) == [[0, 1], [2, 3], [4]]
    assert len({tuple(len(step.micro_batches) for step in rank) for rank in steps}) == 1, "all ranks make as many passes"
    for step, groups in enumerate([[0, 1], [2, 3], [4]]):
        tokens = sorted(token for b in gathered(steps, step) for token in b.token_ids_S.tolist())
        chosen = INTERLEAVED.select([n for n in range(15) if n % 5 in groups])
        assert tokens == sorted(chosen.token_ids_S.tolist())
        assert {rank[step].counts for rank in steps} == {chosen.counts()}


def test_shuffling_orders_groups_anew_in_every_epoch_and_by_the_seed_alone():
    settings = {"ppo_mini_batch_size": 1, "ppo_epochs": 3, "shuffle": True}
    first, again = (run_update(INTERLEAVED, times=2, **settings) for _ in range(2))
    orders = [groups_of(steps) for steps in first]
    assert orders == [groups_of(steps) for steps in again]
    epochs = [order[i : i + 5] for order in orders for i in (0, 5, 10)]
    assert all(sorted(epoch) == [[0], [1], [2], [3], [4]] for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 3
    other = run_update(INTERLEAVED, times=2, data_loader_seed=43, **settings)
    assert [groups_of(steps) for steps in other] != orders


# ---- what the objective knows of a whole mini-batch ---------------------------------------------------


def with_advantages(batch: Batch) -> Batch:
    values = torch.sin(torch.arange(batch.num_trained_tokens, dtype=torch.float32))
    return batch.replace(advantages_T=values, old_logprobs_T=-values.abs())


@pytest.mark.parametrize("loss_mode", ["kl_cov", "clip_cov"])
def test_the_tokens_that_a_loss_chooses_are_chosen_once_for_the_mini_batch(loss_mode):
    options = {"kl_cov": {"kl_cov_ratio": 0.2}, "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}}[loss_mode]
    loss = PolicyLossConfig(loss_mode=loss_mode, options=options)

    def chosen(num_ranks: int, times: int = 1) -> list[set[float]]:
        runs = run_update(with_advantages(INTERLEAVED), num_ranks, times, ppo_mini_batch_size=5, policy_loss=loss)
        return [
            {float(token) for batch in gathered(steps, 0) for token in batch.rollout_logprobs_T[batch.selected_T]}
            for steps in runs
        ]

    [alone] = chosen(1)
    number = int(0.2 * INTERLEAVED.num_trained_tokens)
    assert len(alone) == number
    assert chosen(3) == [alone]
    first, second = chosen(2, times=2)
    # The same data in a later step: a new draw, if there is one.
    assert first == alone and (second == alone) == (loss_mode == "kl_cov")


@pytest.mark.parametrize("rejects", [False, True])
def test_tokens_are_counted_over_all_ranks_and_micro_batches_and_rejected_ones_nowhere(rejects):
    trained_T = torch.ones(INTERLEAVED.num_trained_tokens, dtype=torch.bool)
    if rejects:
        trained_T = INTERLEAVED.rollout_logprobs_T % 2 == 0
        trained_T[: int(INTERLEAVED.response_lengths_N[0])] = False
    batch = INTERLEAVED.keep(trained_T)
    kept_N = torch.tensor([int(part.sum()) for part in trained_T.split(batch.response_lengths_N.tolist())])
    [steps] = run_update(batch, ppo_mini_batch_size=2, loss_agg_mode="prompt-mean")
    for step, groups in enumerate(([0, 1], [2, 3], [4])):
        counts, own_N = steps[0][step].counts, kept_N[torch.isin(batch.group_N, torch.tensor(groups))]
        assert (counts.num_tokens, counts.num_sequences) == (int(own_N.sum()), int((own_N > 0).sum()))
        for part in gathered(steps, step):
            for group, tokens in zip(part.group_N.tolist(), part.group_tokens_N.tolist(), strict=True):
                assert tokens == int(kept_N[batch.group_N == group].sum())


# ---- statistics -------------------------------------------------------------------------------------


def test_statistics_of_ranks_and_steps_are_combined_by_their_prefixes():
    rank0 = [
        {"sum/clipped": 3.0, "shard/loss": 0.25, "max/ratio": 1.5, "same/lr": 0.1},
        {"sum/clipped": 0.0, "shard/loss": 1.0},
    ]
    rank1 = [
        {"sum/clipped": 1.0, "shard/loss": 0.5, "max/ratio": 1.25, "same/lr": 0.1},
        {"sum/clipped": 5.0, "shard/loss": -2.0},
    ]
    rank1[1] |= {"max/ratio": 3.0, "same/lr": 0.3}
    metrics = combine_stats([rank0, rank1], [Counts(8, 2, 1), Counts(10, 2, 1)], "actor")
    assert metrics == pytest.approx(
        {
            "actor/clipped": (4 / 8 + 5 / 10) / 2,
            "actor/loss": (0.75 - 1.0) / 2,
            "actor/ratio": 3.0,
            "actor/lr": (0.1 + 0.3) / 2,
        }
    )


# ---- seeds of sampling ------------------------------------------------------------------------------


def test_every_response_has_a_seed_of_its_own_that_never_changes():
    seeds = {(s, uid, n): sample_seed(s, uid, n) for s in (0, 1) for uid in ("e0-r1", "e0-r11", "e1-r1") for n in range(8)}
    assert len(set(seeds.values())) == len(seeds)
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds.values())
    assert seeds[0, "e0-r1", 0] == sample_seed(0, "e0-r1", 0)
    # "e0-r1" with sample 11 and "e0-r11" with sample 1 are not the same words.
    assert sample_seed(0, "e0-r1", 11) != sample_seed(0, "e0-r11", 1)


def test_a_greedy_response_is_sampled_without_chance_and_the_others_as_without_it():
    sampling = Sampling(
        max_tokens=8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, keep_support=True, ignore_eos=True, seed=3
    )
    assert sampling_of(sampling, "e0-r1", GREEDY) == Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert sampling_of(sampling, "e0-r1", 2) == dataclasses.replace(sampling, seed=sample_seed(3, "e0-r1", 2))


def test_the_weight_of_the_entropy_bonus_follows_the_entropy_and_is_saved(tmp_path: Path):
    entropies = iter([0.1, 0.1, 0.3, 0.1])
    batch = make_batch([(1, 2), (1, 2)]).replace(advantages_T=torch.zeros(4))
    settings = AdaptiveEntropyConfig(enable=True, target=0.2, delta=0.01)

    class WithFiles(Ranks):
        def call(self, method: str, folder: str, *saved: Any) -> list[None]:
            """Saving and loading is the ranks' own affair; the first one writes what the role hands over."""
            for name, text in saved[-1].items() if saved else ():
                (Path(folder) / name).write_text(text)
            return [None]

    def answer(shard: Batch, update: Update) -> list[dict[str, float]]:
        sent.extend(step.entropy_coeff for step in update.steps)
        return [{"sum/entropy": next(entropies) * 4}]

    def make() -> ActorRole:
        return actor(WithFiles(1, answer), adaptive_entropy=settings, entropy_coeff=0.05)

    sent: list[float | None] = []
    first = make()
    logged = [first.update(batch)["actor/entropy_coeff"] for _ in range(3)]
    # 0.05, then up by 0.01 twice; after a step above the target it falls to 0.06 and does not act.
    assert sent == logged == pytest.approx([0.05, 0.06, 0.07])
    first.save(tmp_path)
    second = make()
    second.load(tmp_path)
    assert second.update(batch)["actor/entropy_coeff"] == 0.0
    # Below the target again: the weight that was saved has risen.
    assert second.entropy is not None and second.entropy.value == pytest.approx(0.07)


# ---- what is sent ---------------------------------------------------------------------------------------


def test_token_ids_go_to_a_rank_once_per_step_and_later_calls_carry_new_columns_only():
    def answer(shard: Batch, *rest: Any) -> Any:
        return empty_stats(shard, *rest) if isinstance(rest[0], Update) else echo(shard, *rest)

    ranks = Ranks(2, answer)
    group = actor(ranks, old_logprobs="actor", ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    batch = group.old_logprobs(INTERLEAVED)
    batch = with_advantages(batch).keep(batch.rollout_logprobs_T % 3 != 0)
    group.update(batch)
    [shards] = ranks.sent
    assert sorted(torch.cat([shard.token_ids_S for shard in shards]).tolist()) == INTERLEAVED.token_ids_S.tolist()
    assert [method for method, _ in ranks.asked] == ["logprobs", "update"]
    for _, arguments in ranks.asked:
        assert all(args[0] is shard for args, shard in zip(arguments, shards, strict=True))
    for shard, update in ranks.asked[1][1]:
        assert set(update.columns) == {"advantages_T", "old_logprobs_T"}
        assert len(update.columns["advantages_T"]) == int(update.trained_T.sum()) < shard.num_trained_tokens
        complete = update.complete(shard)
        assert torch.equal(complete.rollout_logprobs_T % 3 != 0, torch.ones(complete.num_trained_tokens, dtype=torch.bool))
    group.update(with_advantages(INTERLEAVED))
    assert len(ranks.sent) == 2, "another step is another batch"
    assert group.version == 2, "every update makes new weights"
    assert actor(Ranks(2, echo), "none").old_logprobs(INTERLEAVED).old_logprobs_T is None, "where the plan has none"


def test_every_column_that_a_loss_can_read_reaches_it_by_its_declaration_alone():
    total, size = INTERLEAVED.num_trained_tokens, INTERLEAVED.num_rollouts
    # Number i stands for trained token i, or for rollout i.
    marks = {"T": torch.arange(total), "TK": torch.arange(total)[:, None].expand(-1, 2), "N": torch.arange(size)}
    columns = {name: marks[name.rpartition("_")[2]] for name in LOSS_COLUMNS if name != "selected_T"}
    ranks = Ranks(2, empty_stats)
    actor(ranks).update(with_advantages(INTERLEAVED).replace(**columns))
    seen: dict[str, list[int]] = defaultdict(list)
    for shard, update in ranks.asked[-1][1]:
        batch = update.complete(shard)
        for name, column in batch.loss_columns().items():
            seen[name] += [] if column is None else column.flatten().tolist()
            if column is not None and "T" in name.rpartition("_")[2]:
                assert column.flatten()[:: column[0].numel()].tolist() == batch.rollout_logprobs_T.tolist()
    assert {name: sorted(seen[name]) for name in columns} == {name: sorted(x.flatten().tolist()) for name, x in columns.items()}


def test_rollouts_without_a_trained_token_are_not_passed_through_the_model():
    batch = INTERLEAVED.keep(INTERLEAVED.token_ids_S[INTERLEAVED.positions()] > 20)
    [steps] = run_update(batch, ppo_mini_batch_size=5)
    trained = torch.cat([part.trained_lengths_N for part in gathered(steps, 0)])
    assert int(trained.min()) > 0 and len(trained) == int((batch.trained_lengths_N > 0).sum()) < 15


@pytest.mark.parametrize("rule", [MicroBatchRule(None, 1), MicroBatchRule(None, 4), MicroBatchRule(30, None)])
def test_rollouts_that_stay_together_shard_a_micro_batch_whatever_the_rule(rule):
    units = [n // 3 for n in range(15)]
    ranks = Ranks(2, empty_stats)
    dispatched = Dispatched.to(ranks, INTERLEAVED, rule, units=units)
    planned = dispatched.micro_batches(range(15), rule)
    together = [{shard[row] for row in rows} for shard, rank in zip(dispatched.shards, planned, strict=True) for rows in rank]
    for unit in range(5):
        assert sum({3 * unit, 3 * unit + 1, 3 * unit + 2} <= rows for rows in together) == 1


def test_the_two_sides_of_a_pair_meet_in_one_micro_batch():
    lengths = [(1, 1 + 3 * (n % 4) + n) for n in range(12)]
    batch = make_batch(lengths, groups=[n // 2 for n in range(12)]).replace(chosen_N=torch.arange(12) % 2 == 0)
    loss = PolicyLossConfig(loss_mode="dpo")
    [steps] = run_update(batch, ppo_mini_batch_size=6, policy_loss=loss, loss_agg_mode="seq-mean-token-mean")
    for part in gathered(steps, 0):
        assert all(int((part.group_N == group).sum()) == 2 for group in part.group_N)


# ---- the critic ------------------------------------------------------------------------------------------


def critic(ranks: Ranks, size: int = 1, epochs: int = 1) -> CriticRole:
    return CriticRole(ranks, rule=MicroBatchRule(None, 1), mini_batch_size=size, epochs=epochs)


def test_a_critic_takes_whole_groups_in_every_pass_and_counts_trained_tokens_only():
    steps: list[Sequence[OptimizerStep]] = []

    def answer(share: Batch, update: Update) -> list[dict[str, float]]:
        steps.append(update.steps)
        assert update.complete(share).values_T.shape == update.complete(share).returns_T.shape
        return [{"share/vf_loss": 0.5, "sum/vf_clipfrac": 3.0, "same/lr": 0.1} for _ in update.steps]

    keep = torch.tensor([True, False] * 7 + [True])
    values_T = torch.arange(15.0)
    returns_T, values_T[~keep] = values_T.clone(), 1000.0
    batch = make_batch([(1, n) for n in (2, 3, 1, 3, 4, 2)], groups=[0, 0, 1, 1, 2, 2])
    batch = batch.replace(values_T=values_T, returns_T=returns_T)
    whole = critic(Ranks(2, answer, "critic"), size=2, epochs=2).update(batch)
    assert [[step.counts.num_tokens for step in rank] for rank in steps] == [[9, 6, 9, 6]] * 2
    # Two ranks: shares add up; counts are divided by the tokens of their step, and steps are averaged.
    assert (whole["critic/vf_loss"], whole["critic/lr"]) == (1.0, 0.1)
    assert whole["critic/vf_clipfrac"] == pytest.approx((6 / 9 + 6 / 6) / 2)
    metrics = critic(Ranks(1, answer, "critic"), size=3).update(batch.keep(keep))
    assert steps[-1][0].counts.num_tokens == 8
    assert metrics["critic/vf_explained_var"] == 1.0
    assert metrics["critic/values/mean"] == metrics["critic/returns/mean"] == 7.0


def test_a_critics_state_lies_in_a_folder_of_its_own_and_is_missed_where_there_is_none(tmp_path: Path):
    class WithFiles(Ranks):
        def call(self, method: str, *arguments: Any) -> list[Any]:
            calls.append((method, arguments))
            return [None]

    calls: list[tuple[str, Any]] = []
    role = critic(WithFiles(1))
    with pytest.raises(CheckpointError, match="has no critic"):
        role.load(tmp_path)
    role.save(tmp_path)
    role.load(tmp_path)
    folder = str(tmp_path / "critic")
    assert Path(folder).is_dir() and calls == [("save", (folder, False)), ("load", (folder,))]


def test_the_critic_starts_from_the_actors_model_unless_it_has_its_own():
    words = ["recipe=arithmetic/ppo", "trainer.total_training_steps=10"]
    words.append("actor_rollout_ref.model.override_config={attention_dropout: 0.1}")
    cpu, config = Machine(num_gpus=0, num_cpus=2, device="cpu"), compose(words).config
    policy = PolicySpec(config.actor_rollout_ref.model, temperature=1.0, dtype="auto")
    spec = critic_spec(decide(config, cpu), policy)
    assert (spec.model.model.path, spec.model.model.override_config) == (policy.model.path, {"attention_dropout": 0.1})
    assert spec.model.train
    config = compose([*words, "critic.model.path=/other", "critic.ppo_epochs=3", "critic.ppo_mini_batch_size=32"]).config
    spec = critic_spec(decide(config, cpu), policy)
    assert (spec.model.model.path, spec.model.model.override_config) == ("/other", {})
    assert spec.total_optimizer_steps == 10 * 2 * 3
