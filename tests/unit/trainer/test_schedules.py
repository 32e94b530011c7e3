"""A schedule is one file: what a run does for it, whatever its step is, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sync_trainer import Policy, dataset, make_config, run_of

from grpo_rl.checkpoint.manifest import verify
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import EXIT_CODES, CheckpointError, ConfigError, FunctionError, StoppedByAlarm, details, headline
from grpo_rl.main import main
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.trainer.run import RunLoop
from grpo_rl.trainer.schedule import Roles
from grpo_rl.trainer.schedules import schedule_of

OWN = '''
"""Trains without sampling, in two phases: what a supervised or an iterated schedule looks like."""

from grpo_rl.trainer.progress import Timer


class Phases:
    roles = frozenset({"actor"})
    trained = ()

    def __init__(self, context):
        self.context, self.actor = context, context.roles.actor
        self.phase, self.seen = "first", []

    def step(self):
        timer = Timer(self.context.progress.phase)
        with timer("update_actor"):
            self.seen.append(f"{self.phase} {self.context.step}")
        if self.context.step == 2:
            self.phase = "second"
        return {"own/loss": 1.0 / self.context.step} | timer.metrics()

    def evaluate(self):
        return {"own/quality": float(len(self.seen))}

    def ended(self):
        return "all phases are done" if self.context.step == 5 else None

    def state_dict(self):
        return {"phase": self.phase, "seen": self.seen}

    def load_state_dict(self, state):
        self.phase, self.seen = state["phase"], list(state["seen"])
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The value of trainer.schedule for a schedule in a user's file."""
    (tmp_path / "own_schedule.py").write_text(OWN)
    return f"{tmp_path / 'own_schedule.py'}:Phases"


def own_run(config: Config, folder: Path, total_steps: int, **roles: Any) -> RunLoop:
    """A run with nothing but these roles, and no training data; a folder's second run follows the first."""
    run_dir = RunDir.create(folder, "run")
    run_dir.release()
    return run_of(config, run_dir, Roles(**roles), total_steps, val=dataset("task:arithmetic?num_rows=3"))


def test_a_schedule_in_a_users_file_needs_neither_rollouts_nor_rewards_nor_training_data(own: str, tmp_path: Path) -> None:
    config = make_config(schedule=own, save_freq=2, test_freq=2, val_before_train=False)
    policy = Policy()
    run = own_run(config, tmp_path, total_steps=9, actor=policy)
    run.fit()
    assert run.schedule.seen == ["first 1", "first 2", "second 3", "second 4", "second 5"]  # type: ignore[attr-defined]
    assert policy.calls == ["save", "save", "save"] and run.store.steps() == [2, 4, 5]
    rows = read_metrics(run.output.run_dir.metrics_file)
    assert [row["own/loss"] for row in rows] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert [row["step"] for row in rows if "own/quality" in row] == [2, 4, 5]
    assert [row["step"] for row in rows if "timing_s/save" in row] == [2, 4, 5]


def test_a_checkpoint_of_another_schedule_is_refused_with_both_names(own: str, make: Any, tmp_path: Path) -> None:
    trainer, _ = make(make_config(save_freq=1), total_steps=1, with_val=False)
    trainer.fit()
    other = own_run(make_config(schedule=own), tmp_path / "other", total_steps=3, actor=Policy())
    with pytest.raises(
        CheckpointError, match=r"trainer.schedule=sync, and this run has trainer.schedule=.*own_schedule.py:Phases"
    ):
        other.resume(trainer.store.folder / "step_1")


def test_an_unknown_schedule_is_refused_with_the_nearest_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.dry_run=true", "trainer.device=cpu", "trainer.schedule=sink"]) == 2
    assert "trainer.schedule: unknown schedule 'sink'. Did you mean sync?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Own:\n    roles = frozenset({'actor'})\n", "has no step, evaluate, ended, state_dict, load_state_dict"),
        (OWN.replace('{"actor"}', '{"actor", "tutor"}').replace("class Phases", "class Own"), "names the roles tutor"),
    ],
)
def test_a_class_that_is_no_schedule_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        schedule_of(make_config(schedule=f"{tmp_path / 'own.py'}:Own"))


@pytest.mark.parametrize(
    ("method", "line", "interface"),
    [
        ("__init__", 'self.phase, self.seen = "first", []', r"Schedule\(context: Context\)"),
        ("step", "timer = Timer(self.context.progress.phase)", r"step\(\) -> Metrics"),
        ("evaluate", 'return {"own/quality": float(len(self.seen))}', r"evaluate\(\) -> Metrics"),
        ("ended", 'return "all phases', r"ended\(\) -> str | None"),
        ("state_dict", 'return {"phase": self.phase', r"state_dict\(\) -> dict"),
        ("load_state_dict", "self.phase, self.seen = state", r"load_state_dict\(state: dict"),
    ],
)
def test_a_failure_of_a_users_schedule_names_its_method_file_line_and_interface(
    own: str, tmp_path: Path, method: str, line: str, interface: str
) -> None:
    config = make_config(schedule=own, save_freq=1, test_freq=1, val_before_train=False)
    own_run(config, tmp_path, total_steps=1, actor=Policy()).fit()
    folder = max(tmp_path.rglob("step_1"))
    (tmp_path / "broken.py").write_text(OWN.replace(line, f"self.no_such_thing; {line}").replace("class Phases", "class Own"))
    config = make_config(schedule=f"{tmp_path / 'broken.py'}:Own", save_freq=1, test_freq=1, val_before_train=False)
    expected = rf"schedule .*broken.py:Own, {method} failed: AttributeError(?s:.*)in .*broken.py, line \d+, in {method}: "
    with pytest.raises(FunctionError, match=rf"{expected}(?s:.*)it is called as {interface}"):
        run = own_run(config, tmp_path / "broken", total_steps=2, actor=Policy())
        if method == "load_state_dict":
            run.load_state_dict(verify(folder).state | {"schedule": config.trainer.schedule})
        run.fit()


def test_validation_alone_takes_the_engines_own_weights_and_saves_nothing(rewarder: RewardRunner, tmp_path: Path) -> None:
    policy = Policy()
    run = own_run(make_config(val_only=True, save_freq=1), tmp_path, total_steps=0, rollout=policy, rewarder=rewarder)
    run.fit()
    assert policy.calls == ["generate 3x1"] and run.store.steps() == []
    [row] = read_metrics(run.output.run_dir.metrics_file)
    assert row["step"] == 0 and "val/arithmetic/mean@1" in row


SICKENING = '''

class Sickening(Phases):
    """From step 5 on no token is trained, and in step 7 the update is not finite."""

    def step(self):
        step = self.context.step
        return {"rollout/trained_token_fraction": float(step < 5), "actor/nonfinite": float(step == 7)}

    def ended(self):
        return None
'''


def sickening(tmp_path: Path, **trainer: Any) -> RunLoop:
    (tmp_path / "sickening.py").write_text(OWN + SICKENING)
    config = make_config(schedule=f"{tmp_path / 'sickening.py'}:Sickening", val_before_train=False, **trainer)
    return own_run(config, tmp_path, total_steps=9, actor=Policy())


def steps_of(run: RunLoop) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run.output.run_dir.metrics_file)]


def test_an_alarm_that_stop_on_names_ends_the_run_in_the_step_in_which_it_begins_saved(tmp_path: Path) -> None:
    run = sickening(tmp_path, stop_on=["nothing_trained"])
    with pytest.raises(StoppedByAlarm) as stopped:
        run.fit()
    assert steps_of(run) == [1, 2, 3, 4, 5] and run.store.steps() == [5]
    assert read_metrics(run.output.run_dir.metrics_file)[-1]["alarm/nothing_trained"] == 1
    assert "No token of this step is trained" in headline(stopped.value) and "[nothing_trained, since step 5" in headline(
        stopped.value
    )
    text = "\n".join(details(stopped.value))
    assert "step 5 of 9 is saved: the same command goes on from it" in text and "likeliest remedy:" in text
    assert stopped.value.exit_code == 76 and 76 in EXIT_CODES
    again = sickening(tmp_path, stop_on=["nothing_trained", "nonfinite"])
    again.resume(again.store.folder / "step_5")
    with pytest.raises(StoppedByAlarm, match="nonfinite, since step 7"):
        again.fit()
    assert steps_of(again) == [1, 2, 3, 4, 5, 6, 7], "the same alarm does not stop it again"
