"""What is learnt again, pairs and groups with rare successes: what is kept, what is drawn, and that a checkpoint has all of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from real_roles import half_right, learnt, row_of

from grpo_rl.algos.losses.registered import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.config.schema.tree import ReplayConfig
from grpo_rl.errors import CheckpointError
from grpo_rl.rollout.requests import RequestPool
from grpo_rl.trainer.replay import GroupReplay, PairReplay
from grpo_rl.types import Metrics, Prompt, Rollout


def pairs(numbers: range) -> list[tuple[Rollout, Rollout]]:
    def side(number: int, reward: float) -> Rollout:
        prompt = Prompt(f"p{number}", (1, number + 2), "\u2713\ud800", "test")
        answer = (5, 6 + int(reward))
        return Rollout(prompt, 0, answer, (0.0, 0.0), "stop", ((0, 2),), text="sums to 4", reward=reward)

    return [(side(number, 1.0), side(number, 0.0)) for number in numbers]


def filled(capacity: int = 100, share: float = 0.1, seed: int = 1) -> PairReplay:
    history = PairReplay(capacity, share, seed)
    history.add(pairs(range(30)), 1)
    history.add(pairs(range(30, 50)), 2)
    return history


def first_tokens(drawn: list[Sequence[Rollout]]) -> list[list[int]]:
    return [[*pair[0].prompt.token_ids, *(token for one in pair for token in one.response_ids)] for pair in drawn]


@pytest.mark.parametrize("num_new", [3, 8, 90])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_replayed_pairs_are_their_share_of_all_batches_together_however_small_one_is(num_new, share):
    history, due = PairReplay(1000, share, seed=1), num_new * share / (1 - share)
    history.add(pairs(range(900)), 1)
    counts = []
    for step in range(400):
        chosen = history.draw(num_new, 2, step)
        assert all(pair[0].prompt.token_ids[1] < 902 for pair in chosen), "of the first iteration"
        counts.append(len(chosen))
    assert all(abs(count - due) < 1 for count in counts)
    # Each is rounded by itself: the deviation of their mean is at most 1/2 / sqrt(400).
    assert sum(counts) / len(counts) == pytest.approx(due, abs=4 * 0.025)


def test_a_full_history_is_an_even_sample_of_all_pairs_that_were_made():
    counts: Counter[int] = Counter()
    for seed in range(200):
        history = PairReplay(20, 0.1, seed)
        for iteration in range(1, 5):
            history.add(pairs(range(25 * iteration - 25, 25 * iteration)), iteration)
        assert len(history.kept) == 20 and history.num_seen == 100
        assert [pair.number for pair in history.kept] == sorted(pair.number for pair in history.kept)
        counts.update(pair.since for pair in history.kept)
    # 1,000 each are expected, with a standard deviation of about 25 (hypergeometric, 200 draws of 20 of 100).
    assert all(abs(counts[iteration] - 1000) < 120 for iteration in range(1, 5)), counts


def test_a_history_that_was_saved_goes_on_as_if_nothing_had_been(tmp_path: Path):
    history, again = filled(capacity=40, share=0.3), PairReplay(40, 0.3, seed=1)
    history.add(pairs(range(50, 58)), 3)
    history.save(tmp_path)
    assert set(history.saved(0.0) or {}) == {PairReplay.file}
    again.load(tmp_path)
    assert again.num_seen == history.num_seen == 58
    for step in range(2, 6):
        one, other = history.draw(8, 4, step), again.draw(8, 4, step)
        assert first_tokens(one) == first_tokens(other) and len(one) > 0, step
        for each in (history, again):
            each.add(pairs(range(step * 100, step * 100 + 8)), 4)
    (tmp_path / PairReplay.file).unlink()
    history.save(tmp_path)
    (tmp_path / PairReplay.file).rename(tmp_path / "first")
    again.save(tmp_path)
    assert again.saved(0.0) == history.saved(0.0)


def test_a_checkpoint_without_a_history_or_with_a_broken_one_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no replay\.jsonl"):
        filled().load(tmp_path)
    (tmp_path / PairReplay.file).write_text('{"num_seen": 1}\n{"number": 0}\n')
    with pytest.raises(CheckpointError, match=r"replay\.jsonl cannot be used: KeyError"):
        filled().load(tmp_path)


# ---- groups with rare successes ------------------------------------------------------------------------------------


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda row: row["rollouts"][0].update(response_ids=["a"]),
    lambda row: row["rollouts"][0].update(response_ids=[2**40]),
    lambda row: row["rollouts"][0].update(response_ids=[-1]),
    lambda row: row["rollouts"][0].update(response_ids=[[1]]),
    lambda row: row["rollouts"][0].update(response_ids=[]),
    lambda row: row["rollouts"][0].update(rollout_logprobs=[0.0] * 99),
    lambda row: row["rollouts"][0].update(rollout_logprobs=[float("nan")]),
    lambda row: row["rollouts"][0].update(versions=7),
    lambda row: row["rollouts"][0].update(versions=[[0, 10**30]]),
    lambda row: row["rollouts"][0].update(reward="1"),
    lambda row: row["rollouts"][0].update(reward=1e300),
    lambda row: row["rollouts"][0].update(reward_parts=[1]),
    lambda row: row["rollouts"][0].update(steps=3),
    lambda row: row["rollouts"][0].update(__class__="os.system"),
    lambda row: row.update(rollouts=[]),
    lambda row: row.update(rollouts={"a": 1}),
    lambda row: row.update(since=float("inf")),
    lambda row: row["prompt"].update(token_ids="abc"),
    lambda row: row.update(prompt=[1]),
    lambda row: row.pop("prompt"),
]


def test_rows_that_somebody_changed_are_the_checkpoints_fault(tmp_path: Path) -> None:
    filled().save(tmp_path)
    file = tmp_path / "replay.jsonl"
    head, first, *rest = file.read_text().splitlines()
    for change in CHANGES:
        row = json.loads(first)
        change(row)
        file.write_text("\n".join([head, json.dumps(row), *rest]))
        with pytest.raises(CheckpointError, match=r"replay.jsonl cannot be used: "):
            PairReplay(100, 0.1, 1).load(tmp_path)
    file.write_text(f"{head}\n{'[' * 100_000}")
    with pytest.raises(CheckpointError, match=r"replay.jsonl cannot be used: RecursionError"):
        PairReplay(100, 0.1, 1).load(tmp_path)


def group(uid: str, rewards: list[float]) -> list[Rollout]:
    prompt = Prompt(uid, (1, 2), "1+1=", "test")
    return [
        Rollout(
            prompt,
            i,
            (3, 4 + i),
            (-0.1, -0.3 * i),
            "stop",
            ((7, 2),),
            text="long",
            reward=reward,
            reward_parts={"auto": reward},
        )
        for i, reward in enumerate(rewards)
    ]


NONE, RARE, OFTEN, ALL = [0.0] * 4, [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0] * 4


def uids(rollouts: list[Rollout]) -> list[str]:
    return list(dict.fromkeys(rollout.prompt.uid for rollout in rollouts))


def test_groups_with_rare_successes_take_the_places_of_those_without_a_signal_for_a_bounded_time():
    replay = GroupReplay(ReplayConfig(max_age=2), batch_size=3, n=4)
    step_1 = [*group("a", RARE), *group("b", OFTEN), *group("c", NONE)]
    assert replay.fill(step_1, 1) == (step_1, {"replay/groups": 0.0, "replay/kept": 1.0})
    # Nothing is replayed if all groups have a signal.
    trained, metrics = replay.fill([*group("d", RARE), *group("e", OFTEN), *group("f", RARE)], 2)
    assert uids(trained) == ["d", "e", "f"] and metrics == {"replay/groups": 0.0, "replay/kept": 3.0}
    trained, metrics = replay.fill([*group("g", NONE), *group("h", OFTEN), *group("i", ALL)], 3)
    assert uids(trained) == ["d", "h", "f"], "the newest first, in the others' places"
    assert metrics == {"replay/groups": 2.0, "replay/kept": 3.0, "replay/age_mean": 1.0}
    # The sampler's log-probs and the rewards of the whole group are as they were.
    old = [dataclasses.replace(rollout, text="") for rollout in group("d", RARE)]
    assert trained[:4] == old
    trained, metrics = replay.fill([*group("j", NONE), *group("k", NONE), *group("l", NONE)], 4)
    assert uids(trained) == ["d", "f", "l"] and metrics["replay/kept"] == 2.0, "the group of step 1 is too old"
    # If groups without a signal are left out before, the batch is filled up.
    assert uids(replay.fill(group("m", OFTEN), 4)[0]) == ["m", "d", "f"]


def test_a_run_with_replay_goes_on_bit_by_bit_and_trains_by_the_samplers_log_probs(make_run):
    def mostly_solved(prompt: Prompt, sample: int) -> str:
        return half_right(prompt, sample) if row_of(prompt) % 3 == 0 else str(prompt.ground_truth)

    words = ("algorithm.replay.max_age=3", "algorithm.replay.max_success=0.5", "trainer.save_freq=3")
    run, record = make_run(*words, steps=8, rows=18, answers=mostly_solved)
    run.fit()
    rows = learnt(run)
    assert max(row["replay/groups"] for row in rows) > 0
    for batch in record.trained:
        assert batch.num_rollouts == 8 and torch.equal(batch.old_logprobs_T, batch.rollout_logprobs_T)
    again, record_again = make_run(*words, steps=8, rows=18, answers=mostly_solved)
    again.resume(run.store.folder / "step_3")
    again.fit()
    assert learnt(again) == rows and len(record_again.trained) == 5 and again.session.replay.kept
    for ours, theirs in zip(record.trained[3:], record_again.trained, strict=True):
        for name in ("token_ids_S", "rollout_logprobs_T", "advantages_N", "group_N"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
    kept = run.store.folder / "step_3" / GroupReplay.file
    kept.write_text('{"num_seen": 0}\n{"since": 1}\n')
    with pytest.raises(CheckpointError, match="replayed_groups"):
        make_run(*words, steps=8, rows=18)[0].resume(run.store.folder / "step_3")


class SixBits(RequestPool):
    """A policy of six bits, each with a logit: of the 64 responses one is right.

    It learns by the real loss on the real advantages. It stands for pool and actor because no language model has
    a known share of right responses, or takes 80 steps in two seconds.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.logits = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.02)
        self.generator = torch.Generator().manual_seed(seed)
        self.learnt: list[tuple[float, int]] = []
        """The probability of the right response after each step, and the rollouts that were sampled until then."""
        self.num_sampled = 0

    def sync_weights(self, actor) -> Metrics:  # type: ignore[no-untyped-def]
        return {}

    def rest(self) -> None: ...

    def old_logprobs(self, batch):  # type: ignore[no-untyped-def]
        return batch.replace(old_logprobs_T=batch.rollout_logprobs_T)

    def generate(self, prompts, n, sampling, on_finish=None, *, greedy=False):  # type: ignore[no-untyped-def]
        logprobs = self.logits.detach().log_softmax(-1)
        rollouts = []
        for prompt in prompts:
            for sample in range(n):
                bits = torch.multinomial(logprobs.exp(), 1, generator=self.generator)[:, 0]
                text = str(prompt.ground_truth) if bool((bits == 1).all()) else "none"
                bit_logprobs = logprobs.gather(1, bits[:, None])[:, 0].tolist()
                rollouts.append(Rollout(prompt, sample, bits.tolist(), bit_logprobs, "stop", ((self.version, 6),), text=text))
                if on_finish is not None:
                    on_finish(rollouts[-1])
        self.num_sampled += len(rollouts)
        return rollouts

    def update(self, batch) -> Metrics:  # type: ignore[no-untyped-def]
        responses = torch.stack([ids[-6:] for ids in batch.token_ids_S.split(batch.sequence_lengths_N.tolist())]).long()
        logprobs_T = self.logits.log_softmax(-1).expand(len(responses), 6, 2).gather(2, responses[..., None]).flatten()
        inputs = LossInput(
            logprobs_T, batch.token_advantages(), Segments(batch.trained_lengths_N), old_logprobs_T=batch.old_logprobs_T
        )
        loss, _ = Objective()(inputs, batch.counts())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.version += 1
        self.learnt.append((float(self.logits.detach().softmax(-1)[:, 1].prod()), self.num_sampled))
        return {"actor/loss": float(loss.detach())}


@pytest.mark.parametrize("seed", [0, 1])
def test_where_one_response_of_64_is_right_replay_learns_with_half_of_the_rollouts(make_run, seed):
    needed = {}
    words = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=100")
    batches = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    for max_age in (0, 8):
        run, _ = make_run(*words, *batches, f"algorithm.replay.max_age={max_age}", steps=80, rows=60)
        run.roles.actor = run.roles.rollout = policy = SixBits(seed)
        run.fit()
        needed[max_age] = next((number for learnt, number in policy.learnt if learnt > 0.5), 10**9)
    assert 2 * needed[8] <= needed[0]


def test_no_step_replays_a_group_older_than_max_age_however_much_room_it_has():
    replay = GroupReplay(ReplayConfig(max_age=2, share=1.0), batch_size=4, n=4)
    replay.fill([*group("a", RARE), *group("b", NONE)], 1)
    # Nothing is filled in between, as of a schedule that asks before it fills: the bound of each question is its own.
    ages = {step: [step - old.since for old in replay.of_step(step)] for step in range(1, 6)}
    assert ages == {1: [0], 2: [1], 3: [2], 4: [], 5: []}
    trained, metrics = replay.fill([*group("c", NONE), *group("d", NONE)], 4)
    assert uids(trained) == ["c", "d"] and metrics["replay/groups"] == 0.0
