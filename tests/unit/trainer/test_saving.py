"""The commit of a save, a failing disk's effect on a run, and commits that outlive an error that follows them."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_trials as trials
import pytest
from test_sync_trainer import Policy, make_config

from grpo_rl import faults
from grpo_rl.checkpoint.manifest import verify
from grpo_rl.errors import CheckpointError, ClusterError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer import saving
from grpo_rl.trainer.run import RunLoop


def failed_saves(trainer: RunLoop) -> list[float | None]:
    return [row.get("trainer/failed_saves") for row in read_metrics(trainer.output.run_dir.metrics_file)]


class Slow:
    """A policy's disk: each save needs so many looks before it is written."""

    def __init__(self, policy: Policy, looks: int) -> None:
        self.policy, self.looks, self.left = policy, looks, 0
        self.waits: list[float] = []

    def save(self, folder: Path, in_background: bool) -> None:
        Policy.save(self.policy, folder, in_background)
        self.left = self.looks

    def saved(self, wait_s: float) -> dict[str, tuple[int, str]] | None:
        self.waits.append(wait_s)
        self.left -= 1
        return {} if self.left < 0 else None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Slow:
        monkeypatch.setattr(self.policy, "save", self.save)
        monkeypatch.setattr(self.policy, "saved", self.saved)
        return self


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(make, monkeypatch):
    trainer, policy = make(make_config(save_freq=2), total_steps=4, with_val=False)
    slow = Slow(policy, looks=100).install(monkeypatch)
    commits = []
    publish = trainer.store.publish
    monkeypatch.setattr(trainer.store, "publish", lambda *a: commits.append((trainer.step, policy.version)) or publish(*a))
    trainer.fit()
    # The save of step 2 is waited for when that of step 4 is due, and that one at the end.
    assert commits == [(4, 4), (4, 4)] and trainer.store.steps() == [2, 4]
    assert slow.waits.count(1.0) > 100 and set(slow.waits) == {0.0, 1.0}
    assert (trainer.store.folder / "step_2" / "version").read_text() == "2"
    assert [verify(trainer.store.folder / f"step_{step}").state["step"] for step in (2, 4)] == [2, 4]


def test_a_run_without_checkpoints_keeps_one_for_itself_at_most_so_often(make, monkeypatch):
    trainer, policy = make(make_config(), total_steps=5, with_val=False)
    own, times = trainer.saving.own, iter([0.0, 61.0, 61.0, 62.0, 122.0, 122.0, 124.0, 300.0, 300.0, 301.0, 302.0])
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: next(times)))
    trainer.saving._next_own, seen = 60.0, []
    update = policy.update
    monkeypatch.setattr(policy, "update", lambda batch: seen.append(own.steps()) or update(batch))
    monkeypatch.setattr(trainer.saving, "finish", lambda: None)
    trainer.saving.in_background = False
    trainer.fit()
    # At 0 s none is due. That of 61 s takes one second of 50; that of 122 s two of 100, so that none is due before 224 s.
    assert seen == [[], [], [2], [3], [4]] and trainer.store.steps() == []
    assert verify(own.folder / "step_4").state["step"] == 4


def test_the_best_validation_is_saved_and_kept_and_one_that_fails_costs_the_best_before_nothing(make, monkeypatch):
    config = make_config(keep_best=True, test_freq=1, max_actor_ckpt_to_keep=1, save_at_end=True, on_save_error="continue")
    trainer, policy = make(config, total_steps=6)
    scores = {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.2, 4: 0.5, 5: 0.7, 6: 0.3}
    monkeypatch.setattr(trainer.session, "evaluate", lambda: {"val/a/mean@1": scores[trainer.step]})
    save = policy.save

    def failing(folder, in_background):
        if trainer.step == 5:
            raise OSError(28, "No space left on device")
        save(folder, in_background)

    monkeypatch.setattr(policy, "save", failing)
    trainer.fit()
    assert trainer.store.steps() == [2, 6]
    assert verify(trainer.store.folder / "step_2").state["best"] == [2, 0.5]
    assert verify(trainer.store.folder / "step_6").state["best"] == [5, 0.7]


def test_the_end_of_a_run_is_committed_and_a_disk_without_room_for_that_costs_a_warning(make, capsys):
    trainer, _ = make(make_config(save_at_end=True), total_steps=3, with_val=False)
    trainer.fit()
    assert trainer.store.steps() == [3] and trainer.is_trained
    trials.shutil.rmtree(trainer.store.folder)
    faults.arm("ckpt.call:enospc@call=open,file=manifest.json")
    try:
        trainer, _ = make(make_config(save_at_end=True), total_steps=3, with_val=False)
        trainer.fit()
        assert trainer.store.steps() == [] and "NOT SAVED: cannot write" in capsys.readouterr().out
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.keep()
    finally:
        faults.arm("")


def test_training_does_not_wait_for_a_commit_and_older_checkpoints_go_only_when_it_is_told(make, monkeypatch):
    trainer, policy = make(make_config(save_freq=2, max_actor_ckpt_to_keep=1), total_steps=5, with_val=False)
    store, told, seen = trainer.store, trainer.output.status, []
    publish, clear, real = store.publish, store.clear, policy.update
    may_commit = threading.Event()

    def held(*arguments: Any) -> Any:
        assert arguments[0].step == 2 or may_commit.wait(120)
        return publish(*arguments)

    def cleared(newest: int, replaced: Any) -> None:
        assert told._fields["last_commit"] == newest
        clear(newest, replaced)

    def update(batch: Any) -> Any:
        if policy.version == 4:
            seen.append(store.steps())
            may_commit.set()
        return real(batch)

    monkeypatch.setattr(store, "publish", held)
    monkeypatch.setattr(store, "clear", cleared)
    monkeypatch.setattr(policy, "update", update)
    trainer.fit()
    assert seen == [[2]] and store.steps() == [5]


def test_a_save_that_never_ends_is_given_up_at_its_deadline(make, monkeypatch):
    trainer, policy = make(make_config(save_freq=1, step_timeout_s=0.01), total_steps=3, with_val=False)
    Slow(policy, looks=10**9).install(monkeypatch)
    monkeypatch.setattr(saving, "RESCUE_S", 0.0)
    with pytest.raises(
        CheckpointError, match=r"of step 1 was not written within 0 s, and is given up; .*trainer.step_timeout_s"
    ):
        trainer.fit()
    assert trainer.store.steps() == [] and list(trainer.store.folder.iterdir()) == []


@pytest.mark.parametrize("action", ["enospc", "eio", "erofs"])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_disk_that_fails_ends_the_run_and_the_commit_before_is_untouched(make, action, in_background):
    trainer, _ = make(configured(in_background, save_freq=1), total_steps=3, with_val=False)
    faults.arm(f"ckpt.call:{action}@call=open,file=manifest.json,n=2")
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step_2: .*; it needs 0.0 MiB, .* are free there") as caught:
            trainer.fit()
    finally:
        faults.arm("")
    assert caught.value.exit_code == 4
    assert trainer.store.steps() == [1] and [path.name for path in trainer.store.folder.iterdir()] == ["step_1"]
    latest = trainer.store.latest(pytest.fail)
    assert latest is not None and latest.step == 1


def configured(in_background: bool, **trainer: Any) -> Any:
    config = make_config(**trainer)
    parts = config.actor_rollout_ref
    checkpoint = dataclasses.replace(parts.actor.checkpoint, async_save=in_background)
    actor = dataclasses.replace(parts.actor, checkpoint=checkpoint)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(parts, actor=actor))


def test_a_save_that_fails_at_the_end_is_made_up_for_and_else_the_run_fails(make):
    config = make_config(save_freq=2, on_save_error="continue")
    for count, steps in ((1, [2]), (2, [])):
        trainer, _ = make(config, total_steps=2, with_val=False)
        trials.shutil.rmtree(trainer.store.folder)
        # What is armed first does not let the second one count.
        faults.arm(";".join(["ckpt.call:enospc@call=rename,file=step_2,n=1"] * count))
        try:
            if steps:
                trainer.fit()
            else:
                with pytest.raises(CheckpointError, match="No space left"):
                    trainer.fit()
        finally:
            faults.arm("")
        assert trainer.store.steps() == steps


def test_a_checkpoint_that_is_written_is_committed_though_the_run_fails_meanwhile(make, monkeypatch):
    trainer, policy = make(make_config(save_freq=1), total_steps=3, with_val=False)
    Slow(policy, looks=20).install(monkeypatch)

    def die(batch: Any) -> Any:
        raise ClusterError("actor0 died")

    real = policy.update
    monkeypatch.setattr(policy, "update", lambda batch: real(batch) if policy.version < 1 else die(batch))
    with pytest.raises(ClusterError, match="actor0 died"):
        trainer.fit()
    assert trainer.store.steps() == [1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("sampler"), "it has no field 'sampler'"),
        (lambda state: state["sampler"].pop("epoch"), "it has no field 'epoch'"),
        (lambda state: state["sampler"].update(data=3), "(TypeError|AttributeError): "),
        (lambda state: state.update(sampler=[1, 2]), "(TypeError|AttributeError): "),
        (
            lambda state: state.update(nonfinite="two"),
            r"ValueError: ",
        ),
        (lambda state: state.update(step=float("inf")), r"OverflowError: "),
    ],
)
def test_a_state_that_cannot_be_loaded_is_an_error_of_the_checkpoint_that_names_the_file(make, change, problem):
    trainer, _ = make(make_config(save_freq=1), total_steps=1, with_val=False)
    trainer.fit()
    checkpoint = verify(trainer.store.folder / "step_1")
    change(checkpoint.state)
    again, _ = make(make_config(save_freq=1), total_steps=2, with_val=False)
    with pytest.raises(CheckpointError, match=rf"step_1: trainer.json cannot be used: {problem}") as refused:
        again.resume(checkpoint)
    assert refused.value.exit_code == 4
