"""The commit of a save, a failing disk's effect on a run, and commits that outlive an error that follows them."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_trials as trials
import pytest
from real_roles import VALIDATED

from grpo_rl import faults
from grpo_rl.checkpoint.manifest import verify
from grpo_rl.errors import CheckpointError, ClusterError
from grpo_rl.trainer import saving


class SlowDisk:
    """The disk of a run's actor: each save needs so many looks more until it is written."""

    def __init__(self, actor: Any, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actor_save, self.actor_saved = actor.save, actor.saved
        self.looks, self.looks_left = looks, 0
        self.waits: list[float] = []
        monkeypatch.setattr(actor, "save", self.save)
        monkeypatch.setattr(actor, "saved", self.saved)

    def save(self, folder: Path, in_background: bool) -> None:
        self.actor_save(folder, False)  # nothing is written any more when the draft is given up
        self.looks_left = self.looks

    def saved(self, wait_s: float) -> dict[str, tuple[int, str]] | None:
        self.waits.append(wait_s)
        self.looks_left -= 1
        return self.actor_saved(wait_s) if self.looks_left < 0 else None


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(make_run, monkeypatch):
    run, _ = make_run("trainer.save_freq=2", steps=4)
    slow = SlowDisk(run.roles.actor, 100, monkeypatch)
    commits = []
    publish = run.store.publish
    monkeypatch.setattr(run.store, "publish", lambda *a: commits.append((run.step, run.session.version)) or publish(*a))
    run.fit()
    # The save of step 2 is waited for when that of step 4 is due, and that one at the end.
    assert commits == [(4, 4), (4, 4)] and run.store.steps() == [2, 4]
    assert slow.waits.count(1.0) > 100 and set(slow.waits) == {0.0, 1.0}
    assert json.loads((run.store.folder / "step_2" / "actor.json").read_text())["version"] == 2
    assert [verify(run.store.folder / f"step_{step}").state["step"] for step in (2, 4)] == [2, 4]


def test_a_run_without_checkpoints_keeps_one_for_itself_at_most_so_often(make_run, monkeypatch):
    run, _ = make_run(steps=5)
    actor = run.roles.actor
    recovery, times = run.saving.own, iter([0.0, 61.0, 61.0, 62.0, 122.0, 122.0, 124.0, 300.0, 300.0, 301.0, 302.0])
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: next(times)))
    run.saving._next_own, seen = 60.0, []
    update = actor.update
    monkeypatch.setattr(actor, "update", lambda batch: seen.append(recovery.steps()) or update(batch))
    monkeypatch.setattr(run.saving, "finish", lambda: None)
    run.saving.in_background = False
    run.fit()
    # At 0 s none is due. That of 61 s takes one second of 50; that of 122 s two of 100, so that none is due before 224 s.
    assert seen == [[], [], [2], [3], [4]] and run.store.steps() == []
    assert verify(recovery.folder / "step_4").state["step"] == 4


def test_the_best_validation_is_saved_and_kept_and_one_that_fails_costs_the_best_before_nothing(make_run, monkeypatch):
    saves = ("keep_best=true", "max_actor_ckpt_to_keep=1", "on_save_error=continue", "save_at_end=true", "test_freq=1")
    run, _ = make_run(*VALIDATED, *(f"trainer.{word}" for word in saves), steps=6)
    actor = run.roles.actor
    scores = {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.2, 4: 0.5, 5: 0.7, 6: 0.3}
    monkeypatch.setattr(run.session, "evaluate", lambda: {"val/a/mean@1": scores[run.step]})
    save = actor.save

    def failing(folder, in_background):
        if run.step == 5:
            raise OSError(28, "No space left on device")
        save(folder, in_background)

    monkeypatch.setattr(actor, "save", failing)
    run.fit()
    assert run.store.steps() == [2, 6]
    assert verify(run.store.folder / "step_2").state["best"] == [2, 0.5]
    assert verify(run.store.folder / "step_6").state["best"] == [5, 0.7]


def test_the_end_of_a_run_is_committed_and_a_disk_without_room_for_that_costs_a_warning(make_run):
    run, _ = make_run("trainer.save_at_end=true", steps=3)
    run.fit()
    assert run.store.steps() == [3] and run.is_trained
    trials.shutil.rmtree(run.store.folder)
    faults.arm("ckpt.call:enospc@call=open,file=manifest.json")
    try:
        run, record = make_run("trainer.save_at_end=true", steps=3)
        run.fit()
        assert run.store.steps() == [] and any("NOT SAVED: cannot write" in warning for warning in record.warnings)
        with pytest.raises(CheckpointError, match="No space left"):
            run.keep()
    finally:
        faults.arm("")


def test_training_does_not_wait_for_a_commit_and_older_checkpoints_go_only_when_it_is_told(make_run, monkeypatch):
    run, _ = make_run("trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", steps=5)
    actor = run.roles.actor
    store, told, seen = run.store, run.output.status, []
    publish, clear, real = store.publish, store.clear, actor.update
    may_commit = threading.Event()

    def held(*arguments: Any) -> Any:
        assert arguments[0].step == 2 or may_commit.wait(120)
        return publish(*arguments)

    def cleared(newest: int, replaced: Any) -> None:
        assert told._fields["last_commit"] == newest
        clear(newest, replaced)

    def update(batch: Any) -> Any:
        if actor.version == 4:
            seen.append(store.steps())
            may_commit.set()
        return real(batch)

    monkeypatch.setattr(store, "publish", held)
    monkeypatch.setattr(store, "clear", cleared)
    monkeypatch.setattr(actor, "update", update)
    run.fit()
    assert seen == [[2]] and store.steps() == [5]


def test_a_save_that_never_ends_is_given_up_at_its_deadline(make_run, monkeypatch):
    run, _ = make_run("trainer.save_freq=1", steps=3)
    SlowDisk(run.roles.actor, 10**9, monkeypatch)
    run.saving.trainer = dataclasses.replace(run.saving.trainer, step_timeout_s=0.01)
    monkeypatch.setattr(saving, "RESCUE_S", 0.0)
    with pytest.raises(
        CheckpointError, match=r"of step 1 was not written within 0 s, and is given up; .*trainer.step_timeout_s"
    ):
        run.fit()
    assert run.store.steps() == [] and list(run.store.folder.iterdir()) == []


@pytest.mark.parametrize(("action", "in_background"), [("enospc", True), ("eio", False), ("erofs", True)])
def test_a_disk_that_fails_ends_the_run_and_the_commit_before_is_untouched(make_run, action, in_background):
    in_background = f"actor_rollout_ref.actor.checkpoint.async_save={in_background}"
    run, _ = make_run("trainer.save_freq=1", in_background, steps=3)
    faults.arm(f"ckpt.call:{action}@call=open,file=manifest.json,n=2")
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot write .*step_2: .*; it needs \d+\.\d MiB, .* are free there"
        ) as caught:
            run.fit()
    finally:
        faults.arm("")
    assert caught.value.exit_code == 4
    assert run.store.steps() == [1] and [path.name for path in run.store.folder.iterdir()] == ["step_1"]
    latest = run.store.latest(pytest.fail)
    assert latest is not None and latest.step == 1


def test_a_save_that_fails_at_the_end_is_made_up_for_and_else_the_run_fails(make_run):
    for count, steps in ((1, [2]), (2, [])):
        run, _ = make_run("trainer.save_freq=2", "trainer.on_save_error=continue", steps=2)
        trials.shutil.rmtree(run.store.folder)
        # What is armed first does not let the second one count.
        faults.arm(";".join(["ckpt.call:enospc@call=rename,file=step_2,n=1"] * count))
        try:
            if steps:
                run.fit()
            else:
                with pytest.raises(CheckpointError, match="No space left"):
                    run.fit()
        finally:
            faults.arm("")
        assert run.store.steps() == steps


def test_a_checkpoint_that_is_written_is_committed_though_the_run_fails_meanwhile(make_run, monkeypatch):
    run, _ = make_run("trainer.save_freq=1", steps=3)
    actor = run.roles.actor
    SlowDisk(actor, 20, monkeypatch)

    def die(batch: Any) -> Any:
        raise ClusterError("actor0 died")

    real = actor.update
    monkeypatch.setattr(actor, "update", lambda batch: real(batch) if actor.version < 1 else die(batch))
    with pytest.raises(ClusterError, match="actor0 died"):
        run.fit()
    assert run.store.steps() == [1]


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: state.pop("sampler"), "it has no field 'sampler'"),
    (lambda state: state["sampler"].pop("epoch"), "it has no field 'epoch'"),
    (lambda state: state["sampler"].update(data=3), "(TypeError|AttributeError): "),
    (lambda state: state.update(sampler=[1, 2]), "(TypeError|AttributeError): "),
    (lambda state: state.update(nonfinite="two"), "ValueError: "),
    (lambda state: state.update(step=float("inf")), "OverflowError: "),
]


def test_a_state_that_cannot_be_loaded_is_an_error_of_the_checkpoint_that_names_the_file(make_run):
    run, _ = make_run("trainer.save_freq=1", steps=1)
    run.fit()
    again, _ = make_run("trainer.save_freq=1", steps=2)
    for change, problem in CHANGES:
        checkpoint = verify(run.store.folder / "step_1")
        change(checkpoint.state)
        with pytest.raises(CheckpointError, match=rf"step_1: trainer.json cannot be used: {problem}") as refused:
            again.resume(checkpoint)
        assert refused.value.exit_code == 4
