"""An alarm that `trainer.stop_on` names ends the run in the step in which it begins, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_schedules import own_run
from test_sync_trainer import Policy, make_config

from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import EXIT_CODES, StoppedByAlarm, details, headline
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer.run import RunLoop

SCHEDULE = '''
"""Trains without sampling; from step 5 on no token is trained, and from step 7 on updates are not finite."""

class Sickening:
    roles = frozenset({"actor"})
    trained = ()

    def __init__(self, context):
        self.context = context

    def step(self):
        step = self.context.step
        return {"rollout/trained_token_fraction": float(step < 5), "actor/nonfinite": float(step == 7)}

    def evaluate(self):
        return {}

    def ended(self):
        return None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
'''


def sickening(tmp_path: Path, total_steps: int = 9, **trainer: object) -> RunLoop:
    """A run whose updates train nothing from step 5 on."""
    (tmp_path / "sickening.py").write_text(SCHEDULE)
    config: Config = make_config(schedule=f"{tmp_path / 'sickening.py'}:Sickening", val_before_train=False, **trainer)
    return own_run(config, tmp_path, total_steps=total_steps, actor=Policy())


def steps_of(run: RunLoop) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run.output.run_dir.metrics_file)]


def test_the_run_ends_in_the_step_in_which_the_alarm_begins_and_that_step_is_saved(tmp_path: Path) -> None:
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
