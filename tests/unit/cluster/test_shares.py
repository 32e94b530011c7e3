"""Tokens stay where the rollout process packed them: what the controller sends to the ranks names their places."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes import worker_host
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.processes.worker_host import Stored, WorkerHost
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.critic_role import CriticRole
from grpo_rl.cluster.roles.dealing import deal, per_rollout_values
from grpo_rl.cluster.roles.shares import Share
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig
from grpo_rl.data.collate import collate, with_rollout_logprobs, with_tokens
from grpo_rl.errors import DivergedError
from grpo_rl.plan.decisions import OldLogprobs
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.tokens import Stretch, TokenBlock
from grpo_rl.trainer.metrics import batch_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.advantage import check_finite
from grpo_rl.trainer.sampled.trained_tokens import TrainedTokens
from grpo_rl.types import Batch, Completion, Prompt, Rollout, Support
from grpo_rl.workers.instruments import Instruments

BLOCKS: dict[str, TokenBlock] = {}
READS: list[str] = []
MARK = 0x5EADBE00
"""Response ids begin here: no length, index or prompt id is like them."""


class Elsewhere:
    """A block of another process: what is pickled of it is its name, and every look at it is noted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> TokenBlock:
        READS.append(self.name)
        return BLOCKS[self.name]

    def __reduce__(self) -> tuple[Callable[[str], Elsewhere], tuple[str]]:
        return Elsewhere, (self.name,)


@pytest.fixture(autouse=True)
def nothing_read() -> None:
    BLOCKS.clear()
    READS.clear()


LENGTHS = (5, 0, 3, 9, 1, 4, 7, 2)


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


def elsewhere(support: bool = False) -> list[Rollout]:
    """The same rollouts as three replies of rollout processes."""
    made = completions(support)
    given = []
    for name, part in (("a", made[:3]), ("b", made[3:4]), ("c", made[4:])):
        reports, BLOCKS[name] = pack(part)
        given += [(one.response_ids, one.logprobs, one.support) for one in unpack(reports, Elsewhere(name))]
    return rollouts(given)


def assert_equal(ours: Batch, theirs: Batch) -> None:
    for column in dataclasses.fields(Batch):
        mine, other = getattr(ours, column.name), getattr(theirs, column.name)
        assert (mine is None) == (other is None), column.name
        assert mine is None or (torch.equal(mine, other) and mine.dtype == other.dtype), column.name


# ---- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", [False, True])
def test_tokens_that_are_read_later_are_those_that_were_packed(support: bool) -> None:
    for mine, theirs in zip(elsewhere(support), here(support), strict=True):
        assert isinstance(mine.response_ids, Stretch) and mine == theirs and mine.same_response(theirs)
    READS.clear()
    batch = collate(elsewhere(support))
    assert batch.token_ids_S.is_meta and batch.held is not None and READS == []
    assert (len(batch.token_ids_S), batch.num_trained_tokens) == (sum(LENGTHS) + 36, sum(LENGTHS))
    assert_equal(with_tokens(batch), collate(here(support)))


@pytest.mark.parametrize("support", [False, True])
def test_what_is_done_to_a_batch_before_its_tokens_are_read_is_what_is_done_to_it_afterwards(support: bool) -> None:
    kept_T = torch.arange(sum(LENGTHS)) % 3 != 1
    lazy, read = collate(elsewhere(support)), collate(here(support))
    assert_equal(with_tokens(lazy.keep(kept_T)), read.keep(kept_T))
    assert_equal(with_tokens(lazy.keep(kept_T).select([5, 0, 1, 3])), read.keep(kept_T).select([5, 0, 1, 3]))
    assert_equal(with_tokens(lazy.select([7, 2, 6])), read.select([7, 2, 6]))
    logprobs_T = with_rollout_logprobs(lazy.keep(kept_T)).rollout_logprobs_T
    assert torch.equal(logprobs_T, read.keep(kept_T).rollout_logprobs_T)


def test_the_same_response_is_recognised_without_a_look_at_it() -> None:
    one, other = elsewhere()[:2]
    assert one.same_response(dataclasses.replace(one, reward=0.5)) and READS == []
    assert not one.same_response(other)


def test_values_that_the_controller_must_not_need_cannot_be_read_by_mistake() -> None:
    batch = collate(elsewhere())
    with pytest.raises(NotImplementedError, match="meta"):
        batch.token_ids_S.tolist()


# ---- sending --------------------------------------------------------------------------------------------


class Ranks(WorkerGroup):
    """A worker group in this process, to which everything is sent as bytes. Each rank answers from its whole share."""

    def __init__(self, size: int) -> None:
        self.hosts = [WorkerHost.__new__(WorkerHost) for _ in range(size)]
        for host in self.hosts:
            host._instruments = Instruments("host")
        self.workers = [Rank() for _ in range(size)]
        for host, worker in zip(self.hosts, self.workers, strict=True):
            host._worker, host._fetched = worker, ("", None)
        self.sent = b""
        self.num_stored = 0

    def __len__(self) -> int:
        return len(self.hosts)

    def store(self, values: Sequence[Any]) -> list[Stored]:
        self.num_stored += len(values)
        return [Stored(self._send(value), f"{self.num_stored}/{number}") for number, value in enumerate(values)]

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        sent = [self._send(rank) for rank in arguments]
        return [host.call(method, *pickle.loads(rank)) for host, rank in zip(self.hosts, sent, strict=True)]

    def _send(self, value: Any) -> bytes:
        data = pickle.dumps(value)
        self.sent += data
        return data


class Rank:
    """A rank that keeps what it was asked to train on; its log-probs are the engine's, minus 3/8."""

    def logprobs(self, share: Batch, micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([share.select(list(rows)).rollout_logprobs_T - 0.375 for rows in micro_batches])

    values = logprobs

    def update(self, share: Batch, update: Any) -> list[dict[str, float]]:
        self.trained = update.complete(share)
        return [{"share/entropy": 0.5} for _ in update.steps]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(worker_host, "_get", lambda ref: pickle.loads(ref) if isinstance(ref, bytes) else ref)
    return Ranks(3)


def actor(ranks: Ranks, old_logprobs: OldLogprobs) -> ActorRole:
    rule, settings = MicroBatchRule(None, 2), ActorConfig(ppo_mini_batch_size=2)
    return ActorRole(
        ranks,  # type: ignore[arg-type]
        settings,
        train_rule=rule,
        forward_rule=rule,
        old_logprobs=old_logprobs,
        objective=Objective.from_config(settings),
    )


def number_sent(ranks: Ranks, values: np.ndarray) -> int:
    """How many of the values are among the bytes that were sent to the ranks."""
    return sum(one.tobytes() in ranks.sent for one in values)


def trained(old_logprobs: OldLogprobs, ranks: Ranks, made: list[Rollout]) -> tuple[Batch, list[Batch]]:
    """One step's calls: the batch of the controller, and what each rank trained on."""
    role, batch = actor(ranks, old_logprobs), collate(made)
    batch = role.old_logprobs(batch)
    check_finite(batch)
    batch = batch.replace(advantages_T=0.25 + torch.arange(batch.num_trained_tokens, dtype=torch.float32))
    batch, _ = TrainedTokens(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=True)))(batch)
    role.update(batch)
    return batch, [worker.trained for worker in ranks.workers]


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("old_logprobs", ["none", "actor", "engine"])
def test_no_token_of_a_response_is_sent_to_the_ranks_and_they_train_on_the_same(
    ranks: Ranks, old_logprobs: OldLogprobs, support: bool
) -> None:
    batch, shares = trained(old_logprobs, ranks, elsewhere(support))
    all_ids, logprobs = (np.concatenate([getattr(b, name) for b in BLOCKS.values()]) for name in ("token_ids", "logprobs"))
    assert number_sent(ranks, all_ids) == 0, "ids of responses stay where they are"
    assert number_sent(ranks, logprobs) == 0, "and so do their log-probs"
    prompt_ids = np.concatenate([ids for ids in {id(p): p for p in batch.held.prompt_ids}.values()])
    assert number_sent(ranks, prompt_ids) == len(prompt_ids), "the test finds what is sent"
    # The controller reads log-probs where they are the old ones, for what it computes with them, and nothing else.
    other = Ranks(3)
    expected, theirs = trained(old_logprobs, other, here(support))
    assert number_sent(other, all_ids) == len(all_ids), "responses that lie here are sent"
    for mine, share in zip(shares, theirs, strict=True):
        assert_equal(mine, share)
    assert torch.equal(batch.advantages_T, expected.advantages_T)
    assert (batch.old_logprobs_T is None) == (expected.old_logprobs_T is None)
    assert batch.old_logprobs_T is None or torch.equal(batch.old_logprobs_T, expected.old_logprobs_T)


@pytest.mark.parametrize("old_logprobs", ["none", "actor"])
def test_the_controller_reads_no_block_on_the_way(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, old_logprobs: OldLogprobs
) -> None:
    role, batch = actor(ranks, old_logprobs), collate(elsewhere())
    monkeypatch.setattr(WorkerHost, "call", lambda *_: pytest.fail("the ranks read"))
    monkeypatch.setattr(ranks, "call_each", lambda method, arguments: [ANSWERS[method](*one) for one in arguments])
    batch = role.old_logprobs(batch)
    check_finite(batch)
    batch_metrics(batch, Timer())
    batch = batch.replace(advantages_T=torch.ones(batch.num_trained_tokens))
    role.update(batch)
    assert READS == []


ANSWERS: dict[str, Callable[..., Any]] = {
    "logprobs": lambda stored, rows: torch.zeros(num_tokens(stored, rows)),
    "update": lambda stored, update: [{"share/entropy": 0.5} for _ in update.steps],
}


def num_tokens(stored: Stored, micro_batches: Sequence[Sequence[int]]) -> int:
    lengths = pickle.loads(stored.ref).columns.trained_lengths_N
    return sum(int(lengths[list(rows)].sum()) for rows in micro_batches)


def test_a_prompt_is_sent_once_to_a_rank_however_many_responses_it_has(ranks: Ranks) -> None:
    prompt = Prompt("p", np.arange(900_000, 900_040), "?", "test")
    made = [dataclasses.replace(one, prompt=prompt) for one in elsewhere()]
    deal(ranks, collate(made))
    for number in range(900_000, 900_040):
        assert ranks.sent.count(np.int32(number).tobytes()) == len(ranks)


def test_a_share_sends_the_places_of_blocks_once_and_lets_go_of_them_when_it_is_whole() -> None:
    share = pickle.loads(pickle.dumps(Share.of(collate(elsewhere()))))
    assert sorted(source.name for source in share.sources) == ["a", "b", "c"]
    batch = share.whole(lambda refs: pytest.fail("nothing lies in a store"))
    BLOCKS.clear()
    assert batch.held is None and int(batch.token_ids_S[3]) == MARK


def test_a_batch_of_which_some_responses_lie_here_is_sent_as_well(ranks: Ranks) -> None:
    made = [mine if number % 3 else theirs for number, (mine, theirs) in enumerate(zip(elsewhere(), here(), strict=True))]
    batch = collate(made)
    assert_equal(pickle.loads(pickle.dumps(Share.of(batch))).whole(lambda refs: []), int32(collate(here())))


def int32(batch: Batch) -> Batch:
    return batch.replace(token_ids_S=batch.token_ids_S.int())


def test_the_critic_reads_the_same_shares(ranks: Ranks) -> None:
    role = CriticRole(ranks, rule=MicroBatchRule(None, 2), mini_batch_size=4, epochs=1)  # type: ignore[arg-type]
    batch = role.values(collate(elsewhere()))
    assert torch.equal(batch.values_T, collate(here()).rollout_logprobs_T - 0.375)


def test_a_column_that_is_constant_over_every_response_is_sent_as_one_number_for_each(ranks: Ranks) -> None:
    lengths_N = torch.tensor([3, 0, 1, 2])
    assert per_rollout_values(torch.tensor([0.5, 0.5, 0.5, 0.5, -2.0, -2.0]), lengths_N).tolist() == [0.5, 0.0, 0.5, -2.0]
    for column in ([0.5, 0.5, 0.25, 0.5, -2.0, -2.0], [0.0, -0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):
        assert per_rollout_values(torch.tensor(column), lengths_N) is None
    assert per_rollout_values(torch.zeros(0), lengths_N * 0) is None
    advantages_N = torch.linspace(-1.2345, 2.3456, len(LENGTHS))
    kept_T = torch.arange(sum(LENGTHS)) % 4 != 2
    sizes, results = [], []
    for made in (elsewhere(), here()):
        role, batch = actor(ranks, "none"), collate(made)
        batch = batch.replace(advantages_T=advantages_N.repeat_interleave(batch.trained_lengths_N)).keep(kept_T)
        ranks.sent = b""
        role.update(batch)
        sizes += [ranks.sent.count(one.tobytes()) for one in advantages_N.numpy()]
        results.append([worker.trained for worker in ranks.workers])
    assert set(sizes) <= {1, 0} and sum(sizes) >= 2 * (len(LENGTHS) - 1), "of the empty response nothing is sent"
    for mine, theirs in zip(*results, strict=True):
        assert_equal(mine, theirs)
    trained_T = torch.cat([share.advantages_T for share in results[0]]).sort().values
    assert torch.equal(trained_T, batch.advantages_T.sort().values)


# ---- what the controller needs of the values -----------------------------------------------------------------


def test_log_probs_that_are_not_finite_are_named_as_if_they_lay_here() -> None:
    def broken(made: list[Completion]) -> list[Completion]:
        made[3].logprobs[2] = np.nan
        return made

    one = completions()
    reports, BLOCKS["a"] = pack(broken(one))
    lazy = rollouts([(u.response_ids, u.logprobs, None) for u in unpack(reports, Elsewhere("a"))])
    read = rollouts([(c.response_ids, c.logprobs, None) for c in one])
    messages = []
    for made in (lazy, read):
        with pytest.raises(DivergedError) as error:
            check_finite(collate(made))
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "at 1 of 31 tokens, the first nan at token 10, in rollouts [3] of 8" in messages[0]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_corrections_weigh_tokens_by_the_engines_log_probs_wherever_they_lie(mask_truncated: bool) -> None:
    settings = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    decide = TrainedTokens(AlgorithmConfig(rollout_correction=settings, mask_truncated=mask_truncated))
    results = []
    for made in (elsewhere(), here()):
        made[3].finish_reason = "length"
        batch = collate(made)
        old_T = -1.3 * (1 + torch.arange(batch.num_trained_tokens) % 7)
        results.append(decide(batch.replace(old_logprobs_T=old_T)))
    (ours, our_metrics), (theirs, their_metrics) = results
    assert our_metrics == their_metrics and len(our_metrics) > 3
    assert_equal(with_tokens(ours), theirs)


def test_the_mean_support_is_counted_without_a_look() -> None:
    lazy, read = batch_metrics(collate(elsewhere(True)), Timer()), batch_metrics(collate(here(True)), Timer())
    assert READS == [] and lazy == read and lazy["rollout/support_mean"] > 1


def test_completions_whose_tokens_and_log_probs_differ_in_number_are_refused_where_they_are_packed() -> None:
    with pytest.raises(ValueError, match="completion r has 2 tokens and 1 log-probs"):
        pack([Completion("r", (1, 2), (-0.5,), "stop", ((1, 2),))])


def test_texts_stay_in_the_block_and_are_read_where_something_asks_for_them() -> None:
    texts = ["", "né, ok", "\U0001f600", "half a pair: \ud83d"]
    made = [Completion(str(n), (1, 2), (-0.5, -1.0), "stop", ((1, 2),), text=text) for n, text in enumerate(texts)]
    reports, BLOCKS["a"] = pack(made)
    places = list(unpack(pickle.loads(pickle.dumps(reports)), Elsewhere("a")))
    rollouts = [
        Rollout(Prompt("p", (1,), "?", "s"), n, at.response_ids, at.logprobs, "stop", ((1, 2),), text_at=at.text)
        for n, at in enumerate(places)
    ]
    assert READS == [] and "text" not in repr(reports).replace("text_bytes", "")
    assert [rollout.text for rollout in rollouts] == texts
    assert READS == ["a"] * 4
    again = dataclasses.replace(rollouts[1], reward=1.0)
    assert again.text == texts[1] and READS[-1] == "a"
    assert pickle.loads(pickle.dumps(rollouts[3])).text == texts[3]
    written = Rollout(Prompt("p", (1,), "?", "s"), 1, (1, 2), (-0.5, -1.0), "stop", ((1, 2),), text=texts[1])
    assert written == rollouts[1] and written != dataclasses.replace(written, text="other")
