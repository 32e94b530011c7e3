"""Schedules that sample while they train: what is trained, how old it is, in which thread, and what a run that stops keeps."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool_in_ticks import Actor, Pool
from test_preemption import interrupt_at, steps_saved
from test_sync_trainer import make_config

from grpo_rl.config.schema.trainer import AsynchronousConfig
from grpo_rl.config.schema.tree import AlgorithmConfig, Config, FilterGroupsConfig
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
from grpo_rl.trainer.parts import training_sampling
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Rollout

BATCH, N = 2, 4


def config_of(
    schedule: str, *, algorithm: AlgorithmConfig | None = None, data: dict[str, Any] | None = None, **options: Any
) -> Config:
    trainer = {name: options.pop(name) for name in ("save_freq", "test_freq", "val_before_train") if name in options}
    config = make_config(algorithm, schedule=schedule, asynchronous=AsynchronousConfig(**options), **trainer)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **(data or {})))


def long_tailed(seed: int) -> Callable[[str, int], int]:
    """Lengths of which a few are many times longer than the others, the same for a response whenever it is sampled."""
    return lambda uid, sample: 1 + int(random.Random(f"{seed}/{uid}/{sample}").paretovariate(1.1)) % 40


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


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_async_trains_every_prompt_once_and_no_token_beyond_the_bound(make, max_staleness, seed):
    pool, steps = Pool(long_tailed(seed), slots=6), 12
    actor = Actor(pool, ticks=4)
    run, _ = make(config_of("async", max_staleness=max_staleness), steps, with_val=False, rows=30, policy=actor, pool=pool)
    run.fit()
    assert_each_prompt_is_trained_once(run, steps)
    rows = rows_of(run)
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    assert any(row["staleness/stale_token_fraction"] > 0 for row in rows), "it samples while it trains"
    assert not pool.is_used_by_another_thread and actor.threads == {"training"}
    # No more is asked for than the last steps train.
    assert len(pool.asked) == steps * BATCH and not len(run.session.flight.groups)
    # At most max_staleness + 1 batches are asked for before anything is trained.
    assert sum(version == 0 for _, version in pool.asked) == (max_staleness + 1) * BATCH


def test_one_step_off_trains_each_batch_one_version_after_the_one_that_sampled_it(make):
    pool = Pool(long_tailed(0), slots=6)
    actor = Actor(pool, ticks=1000)
    config = config_of("one_step_off", test_freq=2)
    run, _ = make(config, 5, rows=30, policy=actor, pool=pool)
    run.fit()
    assert_each_prompt_is_trained_once(run, 5)
    rows = rows_of(run)
    assert [row["staleness/min"] for row in rows] == [0, 1, 1, 1, 1] == [row["staleness/max"] for row in rows]
    training = [sampling for sampling in pool.samplings if sampling.temperature > 0]
    assert training == [training_sampling(config, batch) for batch in range(1, 6)], "a batch is seeded by its own number"
    without = [call for call in pool.calls if call not in ("generate", "submit 3x1")]
    # The second batch is asked for before the first one is trained, with the same weights.
    assert without[:4] == ["sync 0", "sync 0", "submit 2x4", "sync 0"]
    assert not pool.is_used_by_another_thread


def test_a_copy_in_a_users_file_gives_what_the_shipped_schedule_gives_and_is_refused_without_its_declaration(make, tmp_path):
    results = []
    text = inspect.getsource(one_step_off)
    (tmp_path / "my_schedule.py").write_text(text)
    (tmp_path / "undeclared.py").write_text(text.replace("@samples_ahead(versions=1)\n", ""))
    for name in ("one_step_off", f"{tmp_path / 'my_schedule.py'}:train"):
        pool = Pool(long_tailed(1), slots=6)
        run, _ = make(config_of(name, test_freq=2), 5, rows=30, policy=Actor(pool), pool=pool)
        run.fit()
        rows = read_metrics(run.output.run_dir.metrics_file)[-6:]
        timings = ("time", "timing_s/", "perf/")
        results.append([{key: row[key] for key in row if not key.startswith(timings)} for row in rows])
        assert [row["staleness/max"] for row in rows[1:]] == [0, 1, 1, 1, 1]
    assert results[0] == results[1]
    pool = Pool(long_tailed(1), slots=6)
    run, _ = make(config_of(f"{tmp_path / 'undeclared.py'}:train"), 5, rows=30, policy=Actor(pool), pool=pool)
    with pytest.raises(FunctionError, match=r"put @grpo_rl.registry.samples_ahead\(versions=1\) on its function"):
        run.fit()


def test_a_validation_waits_for_the_batch_that_is_sampled_where_weights_must_not_change_in_it(make):
    versions: dict[str, set[int]] = {}
    for schedule in ("one_step_off", "async"):
        pool = Pool(lambda uid, sample: 9, slots=8)
        run, _ = make(config_of(schedule, test_freq=1, max_staleness=2), 4, rows=12, policy=Actor(pool, ticks=2), pool=pool)
        trained: list[Rollout] = []
        train = run.session.train
        run.session.train = lambda rollouts, t=trained, f=train: t.extend(rollouts) or f(rollouts)
        run.fit()
        versions[schedule] = {len(rollout.versions) for rollout in trained}
    assert versions == {"one_step_off": {1}, "async": {1, 2}}


def test_a_token_beyond_the_bound_ends_the_run_before_it_is_trained(make):
    class Late(Pool):
        """Hands over responses with a token of older weights than they can have."""

        def _rollout(self, response):  # type: ignore[no-untyped-def]
            rollout = super()._rollout(response)
            if self.version == 3:
                rollout.versions = ((1, 1), (self.version, len(rollout.response_ids) - 1))
            return rollout

    pool = Late(lambda uid, sample: 2, slots=16)
    actor = Actor(pool, ticks=2)
    run, _ = make(config_of("async", max_staleness=1), 6, with_val=False, rows=14, policy=actor, pool=pool)
    with pytest.raises(WeightVersionError, match=r"weights [23] versions older than those it trains; at most 1 are allowed"):
        run.fit()
    assert actor.version == len(actor.trained) < 6


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
@pytest.mark.parametrize(
    ("call", "count", "saved", "refills"),
    [
        ("submit", 5, None, False),  # prompts were drawn for the step, and nothing is trained
        ("tick", 13, None, False),
        ("keep_weights", 3, 3, False),  # the training is about to begin: nothing leaves it any more
        ("update", 3, 3, False),  # in the other thread: a step whose weights have changed is finished
        ("tick", 60, None, True),
    ],
)
def test_a_stopped_run_loses_no_prompt_and_trains_none_twice(
    make, listening, monkeypatch, schedule, call, count, saved, refills
):
    steps, options = 7, {"max_staleness": 2} if schedule == "async" else {}
    kind, settings, rows = (PartlySolved, refilling, 120) if refills else (Pool, config_of, 16)
    config = settings(schedule, save_freq=-1, **options)

    def started() -> tuple[RunLoop, Pool, Actor]:
        pool = kind(long_tailed(1), slots=6)
        actor = Actor(pool)
        return make(config, steps, with_val=False, rows=rows, policy=actor, pool=pool)[0], pool, actor

    run, pool, actor = started()
    listening(run)
    interrupt_at(actor if call == "update" else pool, monkeypatch, call, count)
    with pytest.raises(Preempted, match=r"step \d of 7 is saved"):
        run.fit()
    [at] = steps_saved(run)
    assert at == (saved or at) and 0 < at < steps
    waiting = run.state_dict()["groups"]["waiting"]
    resumed, pool, _ = started()
    resumed.resume(run.store.folder / f"step_{at}")
    resumed.fit()
    assert_each_prompt_is_trained_once(resumed, steps)
    if refills:
        assert all(has_signal(uid) for groups in trained_groups(resumed).values() for uid in groups)
    else:
        assert 0 < len(waiting) <= 2 * BATCH
        assert {uid for _, _, uid in waiting} <= {uid for uid, _ in pool.asked}, "they are asked for again"


def test_an_error_of_the_training_thread_ends_the_run_with_itself(make, monkeypatch):
    pool = Pool(slots=4)
    actor = Actor(pool)

    def broken(batch: Any) -> Any:
        raise DivergedError("the log-probs are not finite")

    monkeypatch.setattr(actor, "old_logprobs", broken)
    run, _ = make(config_of("async"), 3, with_val=False, policy=actor, pool=pool)
    with pytest.raises(DivergedError, match="not finite"):
        run.fit()


def test_an_error_of_sampling_waits_for_the_training_before_it_ends_the_run(make, monkeypatch):
    pool = Pool(lambda uid, sample: 50, slots=4)
    actor = Actor(pool, ticks=3)
    run, _ = make(config_of("one_step_off"), 3, with_val=False, policy=actor, pool=pool)
    tick = pool.tick

    def failing() -> None:
        if pool.keeps_weights and pool.ticks_left == 0:
            pool.is_done.set()
            raise ClusterError("rollout0 is gone")
        tick()

    monkeypatch.setattr(pool, "tick", failing)
    with pytest.raises(ClusterError, match="rollout0 is gone"):
        run.fit()
    assert actor.version == 1 and not pool.keeps_weights


# ---- refilling: groups without a signal give their places to further prompts ---------------------------------------------


class PartlySolved(Pool):
    """A pool whose policy always answers some prompts right, so that their groups have no signal."""

    def _rollout(self, response):  # type: ignore[no-untyped-def]
        rollout = super()._rollout(response)
        if not has_signal(response.prompt.uid):
            rollout.text = str(response.prompt.ground_truth)
        return rollout


def has_signal(uid: str) -> bool:
    return random.Random(uid).random() < 0.35


def refilling(schedule: str, *, draws: int = 20, gen_batch_size: int | None = None, **options: Any) -> Config:
    groups = FilterGroupsConfig(enable=True, max_num_gen_batches=draws)
    return config_of(
        schedule, algorithm=AlgorithmConfig(filter_groups=groups), data={"gen_batch_size": gen_batch_size}, **options
    )


def trained_groups(run: RunLoop) -> dict[int, list[str]]:
    return {step: list(dict.fromkeys(uid for uid, _ in rollouts)) for step, rollouts in ledger(run).items()}


@pytest.mark.parametrize(("refills", "gen_batch_size"), [(False, None), (True, None), (True, 1), (True, 3)])
def test_async_without_staleness_is_the_synchronous_schedule(make, refills, gen_batch_size):
    trained, samplings, asked = [], [], []
    for schedule in ("sync", "async"):
        pool = PartlySolved(long_tailed(3), slots=5) if refills else Pool(long_tailed(3), slots=3)
        actor = Actor(pool)
        options = {"max_staleness": 0} if schedule == "async" else {}
        config = refilling(schedule, gen_batch_size=gen_batch_size, **options) if refills else config_of(schedule, **options)
        run, _ = make(config, 6, with_val=False, rows=40, policy=actor, pool=pool, reference=True)
        run.fit()
        trained.append(actor.trained)
        samplings.append([] if refills else pool.samplings)  # which are asked for one by one if groups are replaced
        asked.append([uid for uid, _ in pool.asked])
        rows = rows_of(run)
        assert not refills or max(row["filter_groups/num_gen_batches"] for row in rows) > 1
    assert all(row["staleness/max"] == 0 for row in rows)
    assert asked[0] == asked[1] and samplings[0] == samplings[1] and len(trained[0]) == 6
    for ours, theirs in zip(*trained, strict=True):
        columns = [field.name for field in dataclasses.fields(ours) if isinstance(getattr(ours, field.name), torch.Tensor)]
        assert "token_ids_S" in columns and any(name.startswith("advantages_") for name in columns)
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in columns)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_refilling_trains_every_group_with_a_signal_within_the_bound_however_long_it_is(make, max_staleness, seed):
    pool, steps = PartlySolved(long_tailed(seed), slots=6), 12
    actor = Actor(pool, ticks=6)
    config = refilling("async", max_staleness=max_staleness, gen_batch_size=3)
    run, _ = make(config, steps, with_val=False, rows=120, policy=actor, pool=pool)
    run.fit()
    by_step, rows = trained_groups(run), rows_of(run)
    assert [len(groups) for groups in by_step.values()] == [BATCH] * steps
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    assert all(row["filter_groups/surplus_groups"] == 0 for row in rows)
    assert not pool.is_used_by_another_thread
    # In the order in which they were drawn, none with a signal is left out: those that are not trained were drawn last.
    drawn = [uid for uid, _ in pool.asked if has_signal(uid)]
    trained = {uid for groups in by_step.values() for uid in groups}
    assert len(trained) == steps * BATCH and trained <= set(drawn)
    version_of = dict(pool.asked)
    for uid in drawn:
        assert uid in trained or version_of[uid] + max_staleness >= steps, "no shorter group overtakes one beyond the bound"
    assert any(version > 0 for _, version in pool.asked) and actor.threads == {"training"}


def test_refilling_a_batch_apart_takes_the_first_groups_that_were_drawn(make, monkeypatch):
    pool = PartlySolved(long_tailed(0), slots=6)
    run, _ = make(refilling("one_step_off", test_freq=2), 6, rows=120, policy=Actor(pool, ticks=1000), pool=pool)
    selection, scored = run.session.selection, set()
    note = selection.note
    monkeypatch.setattr(selection, "note", lambda rows, rollouts: scored.update(rows) or note(rows, rollouts))
    run.fit()
    rows = rows_of(run)
    # Each group that was scored counts in one step, whether it is trained or not; those of a step that never came in none.
    counted = sum(BATCH / row["filter_groups/kept_fraction"] for row in rows)
    assert counted == pytest.approx(len(scored) - len(run.session.flight.ready) - len(run.session.flight._untrained))
    assert [row["staleness/min"] for row in rows] == [0, 1, 1, 1, 1, 1] == [row["staleness/max"] for row in rows]
    drawn = [uid for uid, _ in pool.asked if has_signal(uid) and not uid.startswith("val")]
    for groups in trained_groups(run).values():
        first = drawn.index(groups[0])
        assert groups == drawn[first : first + BATCH]
    assert sum(row["filter_groups/surplus_groups"] for row in rows) > 0


def test_refilling_ends_the_run_saved_where_too_few_groups_have_a_signal(make):
    for schedule, options in (("async", {"max_staleness": 0}), ("async", {"max_staleness": 2}), ("one_step_off", {})):
        pool = PartlySolved(slots=6)
        run, _ = make(
            refilling(schedule, draws=2, save_freq=100, **options), 30, with_val=False, rows=200, policy=Actor(pool), pool=pool
        )
        with pytest.raises(DataError, match=r"only \d of \d groups had a signal in \d batches .*max_num_gen_batches"):
            run.fit()
        assert run.step == max([0, *steps_saved(run)])


def test_groups_whose_rewards_all_failed_are_replaced_and_a_whole_batch_of_them_ends_the_run(make):
    for num_failing in (1, 1000):
        pool = PartlySolved(long_tailed(2), slots=3)
        run, _ = make(refilling("async", max_staleness=1), 4, with_val=False, rows=60, policy=Actor(pool), pool=pool)
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
