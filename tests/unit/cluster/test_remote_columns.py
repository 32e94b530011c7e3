"""Tokens, log-probs and texts stay where they were made: the controller has their places, and each rank gets its own values."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes import worker_group
from grpo_rl.cluster.processes.worker_group import Stored, WorkerGroup, WorkerHost
from grpo_rl.cluster.roles.reference_role import ReferenceRole
from grpo_rl.cluster.roles.trained_roles import ActorRole, Dispatched
from grpo_rl.columns import Block, RemoteColumn, View, values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig
from grpo_rl.data.collate import collate
from grpo_rl.errors import DivergedError
from grpo_rl.plan.decisions import OldLogprobs
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.trainer.metrics import batch_metrics
from grpo_rl.trainer.sampled.trained import check_finite, trained_tokens
from grpo_rl.types import Batch, Completion, Prompt, Rollout, Support
from grpo_rl.workers.instruments import Instruments
from grpo_rl.workers.sharded_policy import as_block

BLOCKS: dict[str, Block] = {}
READS: list[str] = []
MARK = 0x5EADBE00
"""Response ids begin here: no length, index or prompt id is like them."""
LENGTHS = (5, 0, 3, 9, 1, 4, 7, 2)


class Away:
    """A block of another process: what is pickled of it is its name, and every look at it is noted."""

    def __init__(self, name: str) -> None:
        self.ref = name

    def read(self) -> Block:
        READS.append(self.ref)
        return BLOCKS[self.ref]

    def __reduce__(self) -> tuple[Callable[[str], Away], tuple[str]]:
        return Away, (self.ref,)


def stored(block: Block) -> Away:
    """What a rank returned, as it lies in the store."""
    BLOCKS[f"result {len(BLOCKS)}"] = block
    return Away(f"result {len(BLOCKS) - 1}")


@pytest.fixture(autouse=True)
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    BLOCKS.clear()
    READS.clear()

    def get(ref: Any) -> Any:
        if isinstance(ref, list):
            return [BLOCKS[name] for name in ref]
        return pickle.loads(ref) if isinstance(ref, bytes) else ref

    monkeypatch.setattr(worker_group, "_get", get)


def completions(support: bool = False) -> list[Completion]:
    """Response ids count up from MARK; the log-probs are as unlikely to meet by chance."""
    made, start = [], MARK
    for number, length in enumerate(LENGTHS):
        ids = np.arange(start, start + length, dtype=np.int32)
        start += length
        sets = [[int(one), *range(k % 3)] for k, one in enumerate(ids)]
        counts, flat = [len(one) for one in sets], [token for one in sets for token in one]
        sampled_from = Support(np.array(counts, dtype=np.int32), np.array(flat, dtype=np.int32)) if support and length else None
        logprobs = -np.float32(1.2345678) * (1 + np.arange(length, dtype=np.float32) + number)
        made.append(Completion(f"r{number}", ids, logprobs, "stop", ((1, length),) if length else (), sampled_from))
    return made


def rollouts(given: Sequence[tuple[Any, Any, Support | None]]) -> list[Rollout]:
    """Two responses to each prompt, which are told apart by their prompts' ids and lengths."""
    prompts = [Prompt(f"p{i}", np.arange(900_000 + 50 * i, 900_003 + 51 * i), "?", "test") for i in range(len(given) // 2)]
    return [
        Rollout(prompts[n // 2], n % 2, ids, logprobs, "stop", (), reward=float(n % 2), support=support)
        for n, (ids, logprobs, support) in enumerate(given)
    ]


def here(support: bool = False) -> list[Rollout]:
    return rollouts([(one.response_ids, one.logprobs, one.support) for one in completions(support)])


def away(support: bool = False) -> list[Rollout]:
    """The same rollouts as three replies of rollout processes."""
    made = completions(support)
    given = []
    for name, part in (("a", made[:3]), ("b", made[3:4]), ("c", made[4:])):
        reports, BLOCKS[name] = pack(part)
        given += [(one.response_ids, one.logprobs, one.support) for one in unpack(reports, Away(name))]
    return rollouts(given)


def fetch(blocks: Sequence[Any]) -> list[Block]:
    return [block.read() for block in blocks]


def assert_equal(ours: Batch, theirs: Batch) -> None:
    for column in dataclasses.fields(Batch):
        mine, other = getattr(ours, column.name), getattr(theirs, column.name)
        assert (mine is None) == (other is None), column.name
        assert mine is None or (torch.equal(mine, other) and mine.dtype == other.dtype), column.name


# ---- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", [False, True])
def test_tokens_that_are_read_later_are_those_that_were_packed(support: bool) -> None:
    for mine, theirs in zip(away(support), here(support), strict=True):
        assert isinstance(mine.response_ids, View) and mine == theirs and mine.same_response(theirs)
    READS.clear()
    one = away(support)[0]
    assert one.same_response(dataclasses.replace(one, reward=0.5)), "recognised without a look at it"
    batch = collate(away(support))
    assert isinstance(batch.token_ids_S, RemoteColumn) and isinstance(batch.rollout_logprobs_T, RemoteColumn) and READS == []
    assert (len(batch.token_ids_S), batch.num_trained_tokens) == (sum(LENGTHS) + 36, sum(LENGTHS))
    metrics = batch_metrics(batch, 1.0)
    assert metrics == batch_metrics(collate(here(support)), 1.0) and (metrics.get("rollout/support_mean", 0) > 1) == support
    assert READS == [], "counted without a look"
    assert_equal(batch.local(fetch), collate(here(support)))
    assert sorted(READS) == ["a", "b", "c"], "each block is fetched once for all columns"


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("by_rollout", [False, True])
def test_what_is_done_to_remote_columns_is_what_is_done_to_their_values(support: bool, by_rollout: bool) -> None:
    kept_T = torch.arange(sum(LENGTHS)) % 3 != 1
    if by_rollout:
        kept_T = (torch.arange(len(LENGTHS)) % 3 != 0).repeat_interleave(torch.tensor(LENGTHS))
    remote, read = collate(away(support)), collate(here(support))
    assert_equal(remote.keep(kept_T).local(fetch), read.keep(kept_T))
    assert_equal(remote.keep(kept_T).select([5, 0, 1, 3]).local(fetch), read.keep(kept_T).select([5, 0, 1, 3]))
    assert_equal(remote.select([7, 2, 6]).local(fetch), read.select([7, 2, 6]))
    assert_equal(remote.select([]).local(fetch), read.select([]))


def test_texts_are_decoded_where_something_asks_for_them() -> None:
    texts = ["", "né, ok", "\U0001f600", "half a pair: \ud83d"]
    made = [Completion(str(n), (1, 2), (-0.5, -1.0), "stop", ((1, 2),), text=text) for n, text in enumerate(texts)]
    reports, BLOCKS["a"] = pack(made)
    places = list(unpack(pickle.loads(pickle.dumps(reports)), Away("a")))
    rollouts = [
        Rollout(Prompt("p", (1,), "?", "s"), n, at.response_ids, at.logprobs, "stop", ((1, 2),), text=at.text)
        for n, at in enumerate(places)
    ]
    assert READS == [] and "text" not in repr(reports).replace("text_bytes", "")
    assert [str(rollout.text) for rollout in rollouts] == texts
    assert READS == ["a"] * 4
    assert str(pickle.loads(pickle.dumps(rollouts[3])).text) == texts[3]
    written = Rollout(Prompt("p", (1,), "?", "s"), 1, (1, 2), (-0.5, -1.0), "stop", ((1, 2),), text=texts[1])
    assert written == rollouts[1] and written != dataclasses.replace(written, text="other")


# ---- sending --------------------------------------------------------------------------------------------


class Rank:
    """A rank that keeps what it was asked to train on; its log-probs are the engine's, minus 3/8."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def logprobs(self, shard: Batch, micro_batches: Sequence[Sequence[int]], want_hidden: bool = False) -> Any:
        parts = [torch.empty(0), *(shard.select(list(rows)).rollout_logprobs_T for rows in micro_batches)]
        column = torch.cat(parts) * self.factor - 0.375
        hidden = {"hidden_TD": (column[:, None] * torch.arange(1, 3)).bfloat16()} if want_hidden else {}
        return as_block({"logprobs_T": column} | hidden)

    def update(self, shard: Batch, update: Any) -> list[dict[str, float]]:
        self.trained = update.complete(shard)
        return [{"share/entropy": 0.5} for _ in update.steps]


class Ranks(WorkerGroup):
    """A worker group in this process, to which everything is sent as bytes."""

    role = "actor"

    def __init__(self, size: int, factor: float = 1.0) -> None:
        self.hosts = [WorkerHost.__new__(WorkerHost) for _ in range(size)]
        self.workers = [Rank(factor) for _ in range(size)]
        for host, worker in zip(self.hosts, self.workers, strict=True):
            host._instruments, host._worker, host._fetched, host._calls = Instruments("host"), worker, ("", None), {}
        self.sent, self.num_stored, self.updates = b"", 0, []

    def __len__(self) -> int:
        return len(self.hosts)

    def store(self, values: Sequence[Any]) -> list[Stored]:
        self.num_stored += len(values)
        return [Stored(self._send(value)) for value in values]

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method == "update":
            self.updates = [update for _, update in arguments]
        sent = [self._send(rank) for rank in arguments]
        return [host.call(method, *pickle.loads(rank)) for host, rank in zip(self.hosts, sent, strict=True)]

    def call_for_two(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[bool, Away]]:
        return [(finite, stored(block)) for finite, block in self.call_each(method, arguments)]

    def _send(self, value: Any) -> bytes:
        data = pickle.dumps(value)
        self.sent += data
        return data


RULE = MicroBatchRule(None, 2)


def actor(ranks: Any, old_logprobs: OldLogprobs, mini_batch: int = 2) -> ActorRole:
    config = ActorConfig(ppo_mini_batch_size=mini_batch)
    objective = Objective.from_config(config)
    return ActorRole(ranks, config, train_rule=RULE, forward_rule=RULE, old_logprobs=old_logprobs, objective=objective)


def number_sent(ranks: Ranks, values: np.ndarray) -> int:
    """How many of the values are among the bytes that were sent to the ranks."""
    return sum(one.tobytes() in ranks.sent for one in values)


def trained(old_logprobs: OldLogprobs, ranks: Ranks, made: list[Rollout]) -> tuple[Batch, list[Batch]]:
    """One step's calls: the batch of the controller, and what each rank trained on."""
    role, batch = actor(ranks, old_logprobs), collate(made)
    batch = role.old_logprobs(batch)
    check_finite(batch)
    batch_metrics(batch, 1.0)
    batch = batch.replace(advantages_T=0.25 + torch.arange(batch.num_trained_tokens, dtype=torch.float32))
    batch, _ = trained_tokens(batch, AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=True)))
    role.update(batch)
    return batch, [worker.trained for worker in ranks.workers]


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("old_logprobs", ["none", "actor", "engine"])
def test_no_token_of_a_response_is_sent_to_the_ranks_and_they_train_on_the_same(
    old_logprobs: OldLogprobs, support: bool
) -> None:
    ranks, other = Ranks(3), Ranks(3)
    batch, shards = trained(old_logprobs, ranks, away(support))
    assert READS == [], "the controller reads no block on the way"
    packed = [block for name, block in BLOCKS.items() if name in "abc"]
    all_ids, logprobs = (np.concatenate([block[name] for block in packed]) for name in ("token_ids", "logprobs"))
    assert number_sent(ranks, all_ids) == 0, "ids of responses stay where they are"
    assert number_sent(ranks, logprobs) == 0, "and so do their log-probs"
    prompt_ids = np.concatenate([np.arange(900_000 + 50 * i, 900_003 + 51 * i, dtype=np.int32) for i in range(4)])
    assert number_sent(ranks, prompt_ids) == len(prompt_ids), "the test finds what is sent"
    expected, theirs = trained(old_logprobs, other, here(support))
    assert number_sent(other, all_ids) == len(all_ids), "responses that lie here are sent"
    for mine, shard in zip(shards, theirs, strict=True):
        assert_equal(mine, shard)
    assert (batch.old_logprobs_T is None) == (expected.old_logprobs_T is None)
    assert batch.old_logprobs_T is None or torch.equal(values(batch.old_logprobs_T), values(expected.old_logprobs_T))


def test_a_prompt_is_sent_once_to_a_rank_however_many_responses_it_has() -> None:
    prompt, ranks = Prompt("p", np.arange(900_000, 900_040), "?", "test"), Ranks(3)
    Dispatched.to(ranks, collate([dataclasses.replace(one, prompt=prompt) for one in away()]), RULE)
    for number in range(900_000, 900_040):
        assert ranks.sent.count(np.int32(number).tobytes()) == len(ranks)


def test_a_batch_of_which_some_responses_lie_here_is_sent_as_well() -> None:
    made = [mine if number % 3 else theirs for number, (mine, theirs) in enumerate(zip(away(), here(), strict=True))]
    assert_equal(pickle.loads(pickle.dumps(collate(made))).local(fetch), collate(here()))


lengths_of = st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths_of, st.integers(1, 4), st.integers(1, 3))
def test_each_rank_trains_on_the_values_that_the_ranks_computed(lengths, num_ranks, num_reference):
    total, ranks, reference = sum(lengths), Ranks(num_ranks, 2.0), Ranks(num_reference, 3.0)
    batch = Batch(
        prompt_lengths_N=torch.full((len(lengths),), 2),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.arange(len(lengths)) // 2,
        token_ids_S=torch.arange(total + 2 * len(lengths)),
        rewards_N=torch.zeros(len(lengths)),
        rollout_logprobs_T=-torch.arange(1.0, total + 1.0),
        advantages_T=torch.arange(total, dtype=torch.float32),
    )
    role = actor(ranks, "actor", mini_batch=1)
    batch = ReferenceRole(reference, rule=RULE, want_hidden=True).logprobs(role.old_logprobs(batch))
    assert isinstance(batch.old_logprobs_T, RemoteColumn) and isinstance(batch.ref_hidden_TD, RemoteColumn)
    role.update(batch)
    for worker, update in zip(ranks.workers, ranks.updates, strict=True):
        found, own = worker.trained, update.columns["old_logprobs_T"]
        assert len(own.blocks) <= 1, "old log-probs come from the rank itself"
        assert torch.equal(found.old_logprobs_T, found.rollout_logprobs_T * 2.0 - 0.375)
        assert torch.equal(found.ref_logprobs_T, found.rollout_logprobs_T * 3.0 - 0.375)
        if found.num_trained_tokens:
            assert torch.equal(found.ref_hidden_TD, (found.ref_logprobs_T[:, None] * torch.arange(1, 3)).bfloat16())


def test_advantages_of_whole_rollouts_are_sent_as_one_number_for_each() -> None:
    advantages_N, sizes, results = torch.linspace(-1.2345, 2.3456, len(LENGTHS)), [], []
    for made in (away(), here()):
        ranks, batch = Ranks(3), collate(made)
        batch = batch.replace(advantages_N=advantages_N).keep(torch.arange(sum(LENGTHS)) % 4 != 2)
        actor(ranks, "none").update(batch)
        sizes += [ranks.sent.count(one.tobytes()) for one in advantages_N.numpy()]
        results.append([worker.trained for worker in ranks.workers])
    assert set(sizes) == {1}
    for mine, theirs in zip(*results, strict=True):
        assert_equal(mine, theirs)
        assert mine.advantages_T is None and len(mine.advantages_N) == mine.num_rollouts


# ---- what the controller needs of the values -----------------------------------------------------------------


def test_log_probs_that_are_not_finite_are_named_wherever_they_lie() -> None:
    one = completions()
    one[3].logprobs[2] = np.nan
    reports, BLOCKS["a"] = pack(one)
    lazy = rollouts([(u.response_ids, u.logprobs, None) for u in unpack(reports, Away("a"))])
    read = rollouts([(c.response_ids, c.logprobs, None) for c in one])
    messages = []
    for made in (lazy, read):
        with pytest.raises(DivergedError) as error:
            check_finite(collate(made))
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "at 1 of 31 tokens, the first nan at token 10, in rollouts [3] of 8" in messages[0]
    reference: Any = Ranks(2, float("nan"))
    batch = ReferenceRole(reference, rule=RULE, want_hidden=False).logprobs(collate(here()))
    with pytest.raises(DivergedError, match="the reference's log-probs are not finite at 31 of 31 tokens"):
        check_finite(batch)


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_corrections_weigh_tokens_by_the_engines_log_probs_wherever_they_lie(mask_truncated: bool) -> None:
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    algorithm = AlgorithmConfig(rollout_correction=correction, mask_truncated=mask_truncated)
    results = []
    for made in (away(), here()):
        made[3].finish_reason = "length"
        batch = collate(made)
        old_T = -1.3 * (1 + torch.arange(batch.num_trained_tokens) % 7)
        results.append(trained_tokens(batch.replace(old_logprobs_T=old_T), algorithm))
    (ours, our_metrics), (theirs, their_metrics) = results
    assert our_metrics == their_metrics and len(our_metrics) > 3
    assert_equal(ours.local(fetch), theirs)


def test_completions_whose_tokens_and_log_probs_differ_in_number_are_refused_where_they_are_packed() -> None:
    with pytest.raises(ValueError, match="completion r has 2 tokens and 1 log-probs"):
        pack([Completion("r", (1, 2), (-0.5,), "stop", ((1, 2),))])
