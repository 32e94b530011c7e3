"""Old and reference log-probs that stay in the store: the controller has their places, and each rank gets its own values."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes import worker_host
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.processes.worker_host import WorkerHost
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.reference_role import ReferenceRole
from grpo_rl.cluster.roles.shares import UpdateOfLeft
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.errors import DivergedError
from grpo_rl.trainer.sampled.advantage import check_finite
from grpo_rl.types import Batch
from grpo_rl.workers.instruments import Instruments
from grpo_rl.workers.sharded_policy import left_columns
from grpo_rl.workers.specs import Rows, Update

RULE = MicroBatchRule(None, 2)


class Ref:
    """A reference to a value of the store; what is pickled of it is a number."""

    values: ClassVar[list[Any]] = []

    def __init__(self, value: Any) -> None:
        Ref.values.append(value)
        self.number = len(Ref.values) - 1

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return _ref_of, (self.number,)


def _ref_of(number: int) -> Ref:
    ref = Ref.__new__(Ref)
    ref.number = number
    return ref


def fetch(refs: Sequence[Ref]) -> list[Any]:
    return [Ref.values[ref.number] for ref in refs]


class Ranks(WorkerGroup):
    """As much of a worker group as the roles call; its ranks answer in this process."""

    role = "actor"

    def __init__(self, size: int, factor: float, hidden: int = 0) -> None:
        self.size, self.factor, self.hidden = size, factor, hidden
        self.updates: list[Any] = []
        self.shares: list[Batch] = []

    def __len__(self) -> int:
        return self.size

    def store(self, values: Sequence[Batch]) -> Sequence[Batch]:
        self.shares = list(values)
        return values

    def columns(self, share: Batch, rows: Sequence[Rows]) -> dict[str, torch.Tensor]:
        parts = [share.select(list(some)).rollout_logprobs_T for some in rows if some]
        column = torch.cat([torch.empty(0), *(part for part in parts if part is not None)]) * self.factor
        found = {"logprobs_T": column}
        if self.hidden:
            found["hidden_TD"] = (column[:, None] * torch.arange(1, self.hidden + 1)).bfloat16()
        return found

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method == "update":
            self.updates = [update for _, update in arguments]
            return [[{} for _ in (u.update if isinstance(u, UpdateOfLeft) else u).steps] for u in self.updates]
        found = [self.columns(share, rows) for share, rows, *_ in arguments]
        return found if len(arguments[0]) > 2 else [one["logprobs_T"] for one in found]

    def call_for_two(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[bool, Ref]]:
        assert method == "left_logprobs"
        answers = [left_columns(self.columns(share, rows)) for share, rows, *_ in arguments]
        return [(finite, Ref(columns)) for finite, columns in answers]


def a_batch(lengths: Sequence[int]) -> Batch:
    """Rollouts of these lengths; every log-prob is another number."""
    total = sum(lengths)
    return Batch(
        prompt_lengths_N=torch.full((len(lengths),), 2),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.arange(len(lengths)) // 2,
        token_ids_S=torch.arange(total + 2 * len(lengths)),
        rewards_N=torch.zeros(len(lengths)),
        rollout_logprobs_T=-torch.arange(1.0, total + 1.0),
        advantages_T=torch.arange(total, dtype=torch.float32),
    )


def roles(num_ranks: int, num_reference: int, hidden: int, leaves: bool) -> tuple[Ranks, ActorRole, ReferenceRole]:
    settings = ActorConfig(ppo_mini_batch_size=1)
    ranks: Any = Ranks(num_ranks, 2.0)
    reference: Any = Ranks(num_reference, 3.0, hidden)
    actor = ActorRole(
        ranks,
        settings,
        train_rule=RULE,
        forward_rule=MicroBatchRule(None, 3),
        old_logprobs="actor",
        objective=Objective.from_config(settings),
        leaves_logprobs=leaves,
    )
    return ranks, actor, ReferenceRole(reference, rule=RULE, want_hidden=hidden > 0, leaves_logprobs=leaves)


def updates_of(lengths: Sequence[int], num_ranks: int, num_reference: int, hidden: int, leaves: bool) -> list[Batch]:
    """Return what each rank trains on, whether its columns came in the call or were left in the store."""
    ranks, actor, reference = roles(num_ranks, num_reference, hidden, leaves)
    batch = reference.logprobs(actor.old_logprobs(a_batch(lengths)))
    actor.update(batch)
    whole = [u.whole(fetch) if isinstance(u, UpdateOfLeft) else u for u in pickle.loads(pickle.dumps(ranks.updates))]
    assert all(isinstance(u, UpdateOfLeft) for u in ranks.updates) == leaves
    return [update.complete(share) for update, share in zip(whole, ranks.shares, strict=True)]


lengths_of = st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any)


@given(lengths_of, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 2]))
def test_each_rank_trains_on_the_same_numbers_whether_they_stay_in_the_store_or_not(lengths, num_ranks, num_reference, hidden):
    left = updates_of(lengths, num_ranks, num_reference, hidden, leaves=True)
    sent = updates_of(lengths, num_ranks, num_reference, hidden, leaves=False)
    for one, other in zip(left, sent, strict=True):
        for name in ("old_logprobs_T", "ref_logprobs_T", "ref_hidden_TD"):
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            if ours is not None and one.num_trained_tokens:
                assert torch.equal(ours, theirs)


def test_no_log_prob_crosses_the_controller_when_they_stay_in_the_store():
    ranks, actor, reference = roles(2, 2, 0, leaves=True)
    batch = reference.logprobs(actor.old_logprobs(a_batch([400, 300, 500, 200])))
    assert batch.old_logprobs_T is not None and batch.old_logprobs_T.is_meta
    assert batch.ref_logprobs_T is not None and batch.ref_logprobs_T.is_meta
    check_finite(batch)
    actor.update(batch)
    for update in ranks.updates:
        # A column of all 1,400 tokens has 5,600 bytes; the advantages alone are sent per token, to each rank its own.
        assert len(pickle.dumps(update)) < 5600 + 4000
        assert set(update.update.columns) == {"advantages_T"}


def test_a_rank_fetches_the_results_only_that_hold_its_own_rollouts():
    ranks, actor, _ = roles(2, 1, 0, leaves=True)
    batch = actor.old_logprobs(a_batch([3, 3, 3, 3]))
    actor.update(batch)
    for update in ranks.updates:
        [column] = update.columns.values()
        assert len(column.refs) == 1, "old log-probs come from the rank itself"


def test_a_number_that_is_not_finite_is_named_as_ever():
    _, _, reference = roles(1, 2, 0, leaves=True)
    reference.worker_group.factor = float("nan")
    batch = reference.logprobs(a_batch([2, 1, 3]))
    assert batch.elsewhere is None
    with pytest.raises(DivergedError, match="the reference's log-probs are not finite at 6 of 6 tokens"):
        check_finite(batch)


def test_columns_that_lie_elsewhere_are_never_cut_by_mistake():
    _, actor, _ = roles(1, 1, 0, leaves=True)
    batch = actor.old_logprobs(a_batch([2, 1]))
    with pytest.raises(AssertionError, match="elsewhere"):
        batch.keep(torch.ones(3, dtype=torch.bool))
    with pytest.raises(AssertionError, match="elsewhere"):
        batch.select([0])


def test_the_process_of_a_rank_puts_the_update_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, actor, _ = roles(1, 1, 0, leaves=True)
    batch = actor.old_logprobs(a_batch([2, 1]))
    actor.update(batch)
    monkeypatch.setattr(worker_host, "_get", fetch)
    host, seen = WorkerHost.__new__(WorkerHost), []
    host._instruments = Instruments("host")
    host._worker = type("Worker", (), {"update": lambda self, share, update: seen.append(update)})()
    host._fetched = ("", None)
    host.call("update", ranks.shares[0], ranks.updates[0])
    assert isinstance(seen[0], Update)
    assert np.array_equal(seen[0].columns["old_logprobs_T"].numpy(), [-2.0, -4.0, -6.0])
