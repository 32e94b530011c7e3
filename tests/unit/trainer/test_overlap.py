"""Schedules that sample while they train: what is trained, how old it is, in which thread, and what a run that stops keeps."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from real_roles import REFERENCE, VALIDATED, Record, half_right
from test_preemption import interrupt_at, steps_saved

from grpo_rl.errors import (
    ClusterError,
    DataError,
    DivergedError,
    FunctionError,
    NoRewardError,
    Preempted,
    WeightVersionError,
)
from grpo_rl.schedules import one_step_off
from grpo_rl.schedules.asynchronous import choose
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.testing import Answers
from grpo_rl.trainer.parts import training_sampling
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Prompt, Rollout

BATCH, N = 2, 4


def async_of(max_staleness: int) -> tuple[str, str]:
    return "trainer.schedule=async", f"trainer.asynchronous.max_staleness={max_staleness}"


ONE_STEP_OFF = ("trainer.schedule=one_step_off",)


def long_tailed(seed: int, answers: Answers = half_right) -> Answers:
    """Answers of which a few are many times longer than the others, by spaces; the same for a response at any time."""

    def padded(prompt: Prompt, sample: int) -> str:
        length = int(random.Random(f"{seed}/{prompt.uid}/{sample}").paretovariate(1.1)) % 40
        return answers(prompt, sample).ljust(length)

    return padded


def asked_prompts(record: Record) -> list[tuple[str, int]]:
    """The uid of each prompt that was asked for, and the version of the engine then."""
    return [(uid, asked.version) for asked in record.asked for uid in asked.uids]


def assert_each_role_has_one_thread(record: Record) -> None:
    assert record.threads["rollout"] == {"MainThread"} and record.threads["actor"] == {"training"}


def ledger(run: RunLoop) -> dict[int, list[tuple[str, int]]]:
    """Uid and length of each trained rollout, by step."""
    trained = {}
    for path in sorted(run.output.run_dir.rollouts.glob("step_*.jsonl")):
        records = read_rollouts(path)
        trained[int(path.stem.partition("_")[2])] = [
            (record["uid"], record["response_length"]) for record in records if record["advantage"] is not None
        ]
    return trained


def rows_of(run: RunLoop) -> list[dict[str, float]]:
    return [row for row in read_metrics(run.output.run_dir.metrics_file) if "timing_s/step" in row]


def assert_each_prompt_is_trained_once(run: RunLoop, steps: int) -> None:
    """Whole groups, each in one step, as many as the steps train."""
    by_step = {step: Counter(uid for uid, _ in rollouts) for step, rollouts in ledger(run).items()}
    assert sorted(by_step) == list(range(1, steps + 1))
    assert all(len(groups) == BATCH and set(groups.values()) == {N} for groups in by_step.values())
    assert len({uid for groups in by_step.values() for uid in groups}) == steps * BATCH


@pytest.mark.parametrize(("max_staleness", "seed"), [(1, 0), (2, 1), (4, 0)])
def test_async_trains_every_prompt_once_and_no_token_beyond_the_bound(make_run, max_staleness, seed):
    steps = 10
    run, record = make_run(*async_of(max_staleness), steps=steps, rows=30, answers=long_tailed(seed), slots=6)
    run.fit()
    assert_each_prompt_is_trained_once(run, steps)
    rows = rows_of(run)
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    assert any(row["staleness/stale_token_fraction"] > 0 for row in rows), "it samples while it trains"
    assert_each_role_has_one_thread(record)
    # No more is asked for than the last steps train.
    asked = asked_prompts(record)
    assert len(asked) == steps * BATCH and not len(run.session.flight.groups)
    # At most max_staleness + 1 batches are asked for before anything is trained.
    assert sum(version == 0 for _, version in asked) == (max_staleness + 1) * BATCH


def test_one_step_off_trains_each_batch_one_version_after_the_one_that_sampled_it(make_run):
    words = (*ONE_STEP_OFF, *VALIDATED, "trainer.test_freq=2")
    run, record = make_run(*words, steps=5, rows=30, answers=long_tailed(0), slots=6, tokens_per_update=1000)
    run.fit()
    assert_each_prompt_is_trained_once(run, 5)
    rows = rows_of(run)
    assert [row["staleness/min"] for row in rows] == [0, 1, 1, 1, 1] == [row["staleness/max"] for row in rows]
    training = [sampling for sampling in record.samplings if sampling.temperature > 0]
    assert training == [training_sampling(run.config, batch) for batch in range(1, 6)], "a batch is seeded by its own number"
    # The second batch is asked for before the first one is trained, with the same weights.
    assert record.calls[:8] == ["sync", "sample 3x1", "sync", "sample 2x4", "sync", "sample 2x4", "train beside", "old"]
    assert_each_role_has_one_thread(record)


def test_a_copy_in_a_users_file_gives_what_the_shipped_schedule_gives_and_is_refused_without_its_declaration(
    make_run, tmp_path
):
    results = []
    text = inspect.getsource(one_step_off)
    (tmp_path / "my_schedule.py").write_text(text)
    (tmp_path / "undeclared.py").write_text(text.replace("@samples_ahead(versions=1)\n", ""))

    def started(schedule: str) -> RunLoop:
        words = (f"trainer.schedule={schedule}", *VALIDATED, "trainer.test_freq=2")
        return make_run(*words, steps=5, rows=30, answers=long_tailed(1), slots=6)[0]

    for name in ("one_step_off", f"{tmp_path / 'my_schedule.py'}:train"):
        run = started(name)
        run.fit()
        rows = read_metrics(run.output.run_dir.metrics_file)[-6:]
        timings = ("time", "timing_s/", "perf/")
        results.append([{key: row[key] for key in row if not key.startswith(timings)} for row in rows])
        assert [row["staleness/max"] for row in rows[1:]] == [0, 1, 1, 1, 1]
    assert results[0] == results[1]
    with pytest.raises(FunctionError, match=r"put @grpo_rl.registry.samples_ahead\(versions=1\) on its function"):
        started(f"{tmp_path / 'undeclared.py'}:train").fit()


def test_a_validation_waits_for_the_batch_that_is_sampled_where_weights_must_not_change_in_it(make_run):
    versions: dict[tuple[str, ...], set[int]] = {}
    for words in (ONE_STEP_OFF, async_of(2)):
        run, _ = make_run(
            *words,
            *VALIDATED,
            "trainer.test_freq=1",
            steps=4,
            rows=12,
            answers=lambda prompt, sample: half_right(prompt, sample).ljust(8),
            slots=8,
            tokens_per_update=2,
        )
        trained: list[Rollout] = []
        train = run.session.train
        run.session.train = lambda rollouts, t=trained, f=train: t.extend(rollouts) or f(rollouts)
        run.fit()
        versions[words] = {len(rollout.versions) for rollout in trained}
    assert versions == {ONE_STEP_OFF: {1}, async_of(2): {1, 2}}


def test_a_token_beyond_the_bound_ends_the_run_before_it_is_trained(make_run):
    run, record = make_run(*async_of(1), steps=6, rows=14, slots=16, tokens_per_update=2)
    pool, completed = run.roles.rollout, run.roles.rollout.completed

    def with_an_old_token(*arguments, **options):  # type: ignore[no-untyped-def]
        for rollout in completed(*arguments, **options):
            if pool.version >= 2:
                rollout.versions = ((pool.version - 2, 1), (pool.version, len(rollout.response_ids) - 1))
            yield rollout

    pool.completed = with_an_old_token
    with pytest.raises(WeightVersionError, match=r"weights [23] versions older than those it trains; at most 1 are allowed"):
        run.fit()
    assert run.session.version == len(record.trained) < 6


@pytest.mark.parametrize(
    ("schedule", "call", "count", "saved", "refills"),
    [
        (async_of(2), "submit", 5, None, False),  # prompts were drawn for the step, and nothing is trained
        (ONE_STEP_OFF, "_collect", 20, None, False),
        (async_of(2), "keep_weights", 3, 3, False),  # the training is about to begin: nothing leaves it any more
        (ONE_STEP_OFF, "update", 3, 3, False),  # in the other thread: a step whose weights have changed is finished
        (ONE_STEP_OFF, "_collect", 200, None, True),
        (async_of(2), "_collect", 200, None, True),
    ],
    ids=["draw", "sampling", "before_update", "update", "refill_one_step_off", "refill_async"],
)
def test_a_stopped_run_loses_no_prompt_and_trains_none_twice(
    make_run, listening, monkeypatch, schedule, call, count, saved, refills
):
    steps, words, rows = 6, (*schedule, "trainer.save_at_end=true"), 16
    answers = long_tailed(1)
    if refills:
        words, rows, answers = (*words, *refilling()), 120, long_tailed(1, partly_solved)
    run, record = make_run(*words, steps=steps, rows=rows, answers=answers, slots=6, tokens_per_update=3)
    listening(run)
    interrupt_at(run.roles.actor if call == "update" else run.roles.rollout, monkeypatch, call, count)
    with pytest.raises(Preempted, match=r"step \d of 6 is saved"):
        run.fit()
    [at] = steps_saved(run)
    assert at == (saved or at) and 0 < at < steps
    waiting = run.state_dict()["groups"]["waiting"]
    resumed, record = make_run(*words, steps=steps, rows=rows, answers=answers, slots=6, tokens_per_update=3)
    resumed.resume(run.store.folder / f"step_{at}")
    resumed.fit()
    assert_each_prompt_is_trained_once(resumed, steps)
    if refills:
        assert all(has_signal(uid) for groups in trained_groups(resumed).values() for uid in groups)
    else:
        assert 0 < len(waiting) <= 2 * BATCH
        assert {uid for _, _, uid in waiting} <= {uid for uid, _ in asked_prompts(record)}, "they are asked for again"


def test_an_error_of_the_training_thread_ends_the_run_with_itself(make_run, monkeypatch):
    run, _ = make_run(*async_of(1), steps=3, slots=4)

    def broken(batch: Any) -> Any:
        raise DivergedError("the log-probs are not finite")

    monkeypatch.setattr(run.roles.actor, "old_logprobs", broken)
    with pytest.raises(DivergedError, match="not finite"):
        run.fit()


def test_an_error_of_sampling_waits_for_the_training_before_it_ends_the_run(make_run, monkeypatch):
    run, _ = make_run(
        *ONE_STEP_OFF,
        steps=3,
        answers=lambda prompt, sample: half_right(prompt, sample).ljust(50),
        slots=4,
        tokens_per_update=3,
    )
    pool, collect = run.roles.rollout, run.roles.rollout._collect

    def failing(wait_s: float) -> None:
        if pool._looks_left == 0:
            raise ClusterError("rollout0 is gone")
        collect(wait_s)

    monkeypatch.setattr(pool, "_collect", failing)
    with pytest.raises(ClusterError, match="rollout0 is gone"):
        run.fit()
    assert run.session.version == 1 and pool._looks_left is None


# ---- refilling: groups without a signal give their places to further prompts ---------------------------------------------


def has_signal(uid: str) -> bool:
    return random.Random(uid).random() < 0.35


def partly_solved(prompt: Prompt, sample: int) -> str:
    """Some prompts are always answered right, so that their groups have no signal."""
    return half_right(prompt, sample) if has_signal(prompt.uid) else str(prompt.ground_truth)


def refilling(draws: int = 20, gen_batch_size: int | None = None) -> list[str]:
    words = ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.max_num_gen_batches={draws}"]
    return words if gen_batch_size is None else [*words, f"data.gen_batch_size={gen_batch_size}"]


def trained_groups(run: RunLoop) -> dict[int, list[str]]:
    return {step: list(dict.fromkeys(uid for uid, _ in rollouts)) for step, rollouts in ledger(run).items()}


@pytest.mark.parametrize(("refills", "gen_batch_size"), [(False, None), (True, 1), (True, 3)])
def test_async_without_staleness_is_the_synchronous_schedule(make_run, refills, gen_batch_size):
    runs, options = [], {"slots": 5} if refills else {"slots": 3}
    for schedule in (["trainer.schedule=sync"], async_of(0)):
        words = [*schedule, REFERENCE, *(refilling(gen_batch_size=gen_batch_size) if refills else [])]
        answers = long_tailed(3, partly_solved) if refills else long_tailed(3)
        run, record = make_run(*words, steps=5, rows=40, answers=answers, **options)
        run.fit()
        rows = rows_of(run)[-5:]
        runs.append((record, [row["actor/grad_norm"] for row in rows]))
        assert not refills or max(row["filter_groups/num_gen_batches"] for row in rows) > 1
    assert all(row["staleness/max"] == 0 for row in rows)
    (sync, sync_norms), (ahead, norms) = runs
    assert sync_norms == norms and min(norms) > 0, "the same updates of the same weights, to the bit"
    assert list(chain(*sync.prompts)) == list(chain(*ahead.prompts)) and len(sync.trained) == 5
    assert refills or sync.samplings == ahead.samplings  # which are asked for one by one if groups are replaced
    for ours, theirs in zip(sync.trained, ahead.trained, strict=True):
        columns = [field.name for field in dataclasses.fields(ours) if isinstance(getattr(ours, field.name), torch.Tensor)]
        assert "token_ids_S" in columns and any(name.startswith("advantages_") for name in columns)
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in columns)


@pytest.mark.parametrize(("max_staleness", "seed"), [(1, 0), (2, 1), (4, 0)])
def test_refilling_trains_every_group_with_a_signal_within_the_bound_however_long_it_is(make_run, max_staleness, seed):
    steps, words = 10, (*async_of(max_staleness), *refilling(gen_batch_size=3))
    answers = long_tailed(seed, partly_solved)
    run, record = make_run(*words, steps=steps, rows=120, answers=answers, slots=6, tokens_per_update=6)
    run.fit()
    by_step, rows = trained_groups(run), rows_of(run)
    assert [len(groups) for groups in by_step.values()] == [BATCH] * steps
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    assert all(row["filter_groups/surplus_groups"] == 0 for row in rows)
    assert_each_role_has_one_thread(record)
    # In the order in which they were drawn, none with a signal is left out: those that are not trained were drawn last.
    version_of = dict(asked_prompts(record))
    drawn = [uid for uid in version_of if has_signal(uid)]
    trained = {uid for groups in by_step.values() for uid in groups}
    assert len(trained) == steps * BATCH and trained <= set(drawn)
    for uid in drawn:
        assert uid in trained or version_of[uid] + max_staleness >= steps, "no shorter group overtakes one beyond the bound"
    assert any(version > 0 for version in version_of.values())


def test_refilling_a_batch_apart_takes_the_first_groups_that_were_drawn(make_run, monkeypatch):
    words = (*ONE_STEP_OFF, *VALIDATED, *refilling(), "trainer.test_freq=2")
    answers = long_tailed(0, partly_solved)
    run, record = make_run(*words, steps=6, rows=120, answers=answers, slots=6, tokens_per_update=1000)
    selection, scored = run.session.selection, set()
    note = selection.note
    monkeypatch.setattr(selection, "note", lambda rows, rollouts: scored.update(rows) or note(rows, rollouts))
    run.fit()
    rows = rows_of(run)
    # Each group that was scored counts in one step, whether it is trained or not; those of a step that never came in none.
    counted = sum(BATCH / row["filter_groups/kept_fraction"] for row in rows)
    assert counted == pytest.approx(len(scored) - len(run.session.flight.ready) - len(run.session.flight._untrained))
    assert [row["staleness/min"] for row in rows] == [0, 1, 1, 1, 1, 1] == [row["staleness/max"] for row in rows]
    drawn = [uid for uid, _ in asked_prompts(record) if has_signal(uid) and not uid.startswith("val")]
    for groups in trained_groups(run).values():
        first = drawn.index(groups[0])
        assert groups == drawn[first : first + BATCH]
    assert sum(row["filter_groups/surplus_groups"] for row in rows) > 0


def test_refilling_ends_the_run_saved_where_too_few_groups_have_a_signal(make_run):
    for schedule in (async_of(0), async_of(2), ONE_STEP_OFF):
        words = (*schedule, *refilling(draws=2), "trainer.save_freq=100")
        run, _ = make_run(*words, steps=30, rows=200, answers=partly_solved, slots=6)
        with pytest.raises(DataError, match=r"only \d of \d groups had a signal in \d batches .*max_num_gen_batches"):
            run.fit()
        assert run.step == max([0, *steps_saved(run)])


def test_groups_whose_rewards_all_failed_are_replaced_and_a_whole_batch_of_them_ends_the_run(make_run):
    for num_failing in (1, 1000):
        answers = long_tailed(2, partly_solved)
        run, _ = make_run(*async_of(1), *refilling(), steps=4, rows=60, answers=answers, slots=3)
        rewarded, failed = run.session.rewarded, []

        def failing(rollouts, rewarded=rewarded, failed=failed, most=num_failing):  # type: ignore[no-untyped-def]
            if len(failed) >= most:
                return rewarded(rollouts)
            failed.append({rollout.prompt.uid for rollout in rollouts})
            for rollout in rollouts:
                rollout.failure = "reward_timeout"
            raise NoRewardError("no response has a reward")

        run.session.rewarded = failing
        if num_failing == 1000:
            with pytest.raises(NoRewardError):
                run.fit()
        else:
            run.fit()
            # The first lot is the first group that ended.
            assert len(failed[0]) == 1 and not failed[0] & {uid for groups in trained_groups(run).values() for uid in groups}


# ---- which groups an asynchronous training takes ------------------------------------------------------------------------


def test_a_batch_takes_first_what_would_be_too_old_in_the_next_one():
    # Batches of 2; three groups have to be trained at version 5 or 6, so at least one of them now.
    waiting = [6, 6, 6, 7, 7]
    assert choose([7, 7], waiting, 5, 2) is None, "one of them waits for a group of deadline 6"
    assert choose([7, 7, 6], waiting, 5, 2) == [0, 2]
    assert choose([7, 6, 6, 7], waiting, 5, 2) == [0, 1], "the others are taken as they ended"


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_completion_breaks_the_bound_and_every_group_is_trained_once(max_staleness, seed):
    """Groups are asked for within the bound and end in a random order; the trainer takes batches as soon as it may."""
    rng, size, steps = random.Random(seed), (1, 2, 3, 8, 5)[seed], 40
    asked: list[int] = []
    waiting: list[int] = []
    ended: list[int] = []
    trained: Counter[int] = Counter()
    ages: list[int] = []
    for version in range(steps):
        while len(waiting) + size <= (max_staleness + 1) * size:
            waiting += range(len(asked), len(asked) + size)
            asked += [version] * size
        deadlines = [asked[group] + max_staleness for group in waiting]
        running = [group for group in waiting if group not in ended]
        # A few more end than are needed, and long ones, whose number is odd, hardly ever before they must.
        while (places := choose([asked[group] + max_staleness for group in ended], deadlines, version, size)) is None or (
            running and rng.random() < 0.5
        ):
            short = [group for group in running if group % 2 == 0]
            group = rng.choice(short if short and rng.random() < 0.95 else running)
            running.remove(group)
            ended.append(group)
        assert len(places) == size and places == sorted(places)
        batch = [ended[place] for place in places]
        ended = [group for group in ended if group not in batch]
        waiting = [group for group in waiting if group not in batch]
        trained.update(batch)
        ages += [version - asked[group] for group in batch]
    assert max(ages) <= max_staleness and min(ages) >= 0
    assert set(trained.values()) == {1} and len(trained) == steps * size
    assert sorted(waiting) == sorted(set(range(len(asked))) - set(trained)), "nothing is lost"
