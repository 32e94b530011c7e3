"""A schedule is one file: what a run does for it, whatever its step is, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_roles import MakeRun

from grpo_rl.config.schema.tree import Config, TrainerConfig
from grpo_rl.errors import EXIT_CODES, CheckpointError, ConfigError, FunctionError, StoppedByAlarm, details, headline
from grpo_rl.main import main
from grpo_rl.schedules.registered import schedule_of
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer.run import RunLoop

USER_SCHEDULE = '''
"""Trains without sampling, in two phases: what a supervised or an iterated schedule looks like."""

from grpo_rl.registry import needs


@needs("actor")
def train(session):
    for step in session.steps():
        phase = session.state.get("phase", "first")
        session.state["seen"] = [*session.state.get("seen", []), f"{phase} {step.number}"]
        step.log({"mine/loss": 1.0 / step.number})
        if step.number == 2:
            session.state["phase"] = "second"
        if step.number == 5:
            session.end("all phases are done")
'''


@pytest.fixture
def user_schedule(tmp_path: Path) -> str:
    """The word for a schedule in a user's file."""
    (tmp_path / "own_schedule.py").write_text(USER_SCHEDULE)
    return f"trainer.schedule={tmp_path / 'own_schedule.py'}:train"


def test_a_schedule_in_a_users_file_needs_neither_rollouts_nor_rewards_nor_training_data(
    user_schedule: str, make_run: MakeRun
) -> None:
    run, record = make_run(user_schedule, "trainer.save_freq=2", steps=9, answers=None)
    assert run.roles.rollout is None and run.roles.rewarder is None
    run.fit()
    assert run.session.state["seen"] == ["first 1", "first 2", "second 3", "second 4", "second 5"]
    assert record.calls == ["save", "save", "save"] and run.store.steps() == [2, 4, 5]
    rows = read_metrics(run.output.run_dir.metrics_file)
    assert [row["mine/loss"] for row in rows] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert [row["step"] for row in rows if "timing_s/save" in row] == [2, 4, 5]
    assert "training ends at step 5 of 9: all phases are done" in record.warnings


def test_a_checkpoint_of_another_schedule_is_refused_with_both_names(user_schedule: str, make_run: MakeRun) -> None:
    run, _ = make_run("trainer.save_freq=1", steps=1)
    run.fit()
    other, _ = make_run(user_schedule, steps=3)
    with pytest.raises(
        CheckpointError, match=r"trainer.schedule=sync, and this run has trainer.schedule=.*own_schedule.py:train"
    ):
        other.resume(run.store.folder / "step_1")


def test_an_unknown_schedule_is_refused_with_the_nearest_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.dry_run=true", "trainer.device=cpu", "trainer.schedule=sink"]) == 2
    assert "trainer.schedule: unknown schedule 'sink'. Did you mean sync?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class train:\n    def __init__(self, context):\n        pass\n", "is a class, and a schedule is a function"),
        ("def train():\n    pass\n", r"takes \(\), and is called as \(session\)"),
        (USER_SCHEDULE.replace('@needs("actor")', '@needs("actor", "tutor")'), "names the roles tutor"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        schedule_of(Config(trainer=TrainerConfig(schedule=f"{tmp_path / 'own.py'}:train")))


def test_a_failure_of_a_users_schedule_names_its_file_line_and_interface_and_no_step_is_logged(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        USER_SCHEDULE.replace("        if step.number == 2", "        session.fly()\n        if step.number == 2")
    )
    run, _ = make_run(f"trainer.schedule={tmp_path / 'broken.py'}:train", steps=2)
    expected = r"schedule .*broken.py:train failed: AttributeError(?s:.*)in .*broken.py, line 13, in train: session.fly\(\)"
    with pytest.raises(FunctionError, match=rf"{expected}(?s:.*)it is called as train\(session: ") as raised:
        run.fit()
    del raised
    assert not read_metrics(run.output.run_dir.metrics_file)


SICKENING = '''
"""From step 5 on no token is trained, and in step 7 the update is not finite."""

from grpo_rl.registry import needs


@needs("actor")
def train(session):
    for step in session.steps():
        step.log({"rollout/trained_token_fraction": float(step.number < 5), "actor/nonfinite": float(step.number == 7)})
'''


def steps_of(run: RunLoop) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run.output.run_dir.metrics_file)]


def test_an_alarm_that_stop_on_names_ends_the_run_in_the_step_in_which_it_begins_saved(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "sickening.py").write_text(SICKENING)
    schedule = f"trainer.schedule={tmp_path / 'sickening.py'}:train"
    run, _ = make_run(schedule, "trainer.stop_on=[nothing_trained]", steps=9)
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
    again, _ = make_run(schedule, "trainer.stop_on=[nothing_trained,nonfinite]", steps=9)
    again.resume(again.store.folder / "step_5")
    with pytest.raises(StoppedByAlarm, match="nonfinite, since step 7"):
        again.fit()
    assert steps_of(again) == [1, 2, 3, 4, 5, 6, 7], "the same alarm does not stop it again"
