"""The timeline of a run: its steps and their phases, by role; those of steps that are done again are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_sync_trainer import make, make_config  # noqa: F401

from grpo_rl.telemetry.metrics.timeline import Timeline, read_timeline


def test_each_phase_of_a_step_is_an_interval_of_its_role_also_after_a_resume(make: Callable[..., Any]) -> None:  # noqa: F811
    run, _ = make(make_config(save_freq=2, test_freq=2, val_before_train=True), total_steps=3, reference=True)
    path = run.output.run_dir.timeline_file

    def fit(one: Any) -> None:
        one.fit()
        one.timeline.close()

    run.timeline = run.progress.timeline = run.output.timeline = Timeline(path)
    fit(run)
    assert {one.what for one in read_timeline(path) if one.step == 0} == {"testing"}
    done = [one for one in read_timeline(path) if one.step == 1]
    assert {(one.role, one.what) for one in done} == {
        ("step", "step"),
        ("weights", "sync_weights"),
        ("rollout", "gen"),
        ("reward", "reward"),
        ("actor", "old_logprobs"),
        ("reference", "ref"),
        ("controller", "adv"),
        ("actor", "update_actor"),
    }
    [step] = [one for one in done if one.role == "step"]
    assert all(step.start <= one.start and one.end <= step.end for one in done), "all of it lies in the step"
    assert sum(one.end - one.start for one in done) <= 2 * (step.end - step.start) + 1e-4, "phases do not overlap"
    assert [one.what for one in read_timeline(path) if one.step == 2][-2:] == ["testing", "save"]

    again, _ = make(make_config(save_freq=2), total_steps=4, reference=True)
    again.timeline = again.progress.timeline = again.output.timeline = Timeline(path)
    again.resume(run.store.folder / "step_2")
    fit(again)
    steps = [one.step for one in read_timeline(path) if one.role == "step"]
    assert steps == [1, 2, 3, 4], "step 3 of before is gone, and its times are after those of step 2"
