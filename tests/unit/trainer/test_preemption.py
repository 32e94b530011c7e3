"""A run that is asked to stop saves a state between two steps, and the run that goes on from it is the undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_sync_trainer import make_config

from grpo_rl.errors import Preempted
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer.run import RunLoop
from grpo_rl.trainer.stopping import Stop


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[RunLoop], None]]:
    """Makes a trainer answer signals."""
    stops = []

    def listen(trainer: RunLoop) -> None:
        # A step of this trainer would always end in time: here none does.
        trainer.output.stop = Stop(60.0, notice=lambda text: None)
        monkeypatch.setattr(trainer.output.stop, "_fits", lambda: False)
        trainer.output.stop.listen()
        stops.append(trainer.output.stop)

    yield listen
    for stop in stops:
        stop.close()


def interrupt_at(target: Any, monkeypatch: pytest.MonkeyPatch, call: str, count: int) -> None:
    """SIGTERM arrives at the end of the `count`th call of this method of a policy, or of a pool."""
    original, seen = getattr(target, call), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        result = original(*args, **kwargs)
        if seen == count:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(target, call, interrupted)


MEASURED = ("time", "perf/tokens_per_s")


def learnt(trainer: RunLoop) -> list[dict[str, float]]:
    rows = read_metrics(trainer.output.run_dir.metrics_file)
    return [{k: v for k, v in row.items() if k not in MEASURED and "timing" not in k} for row in rows]


def steps_saved(trainer: RunLoop) -> list[int]:
    return trainer.store.steps()


@pytest.mark.parametrize(
    ("call", "count", "saved"),
    [
        ("generate", 4, 2),  # the third step's responses are given up, and sampled again (the first call validates)
        ("update", 3, 3),  # a step whose weights have changed is finished
        ("old_logprobs", 3, 3),  # others wait for each other here, and the step is nearly done
        ("sync_weights", 4, 2),
    ],
)
def test_the_state_that_is_saved_is_the_newest_one_between_two_steps(make, listening, monkeypatch, call, count, saved):
    config = make_config(save_freq=-1)
    trainer, policy = make(config, total_steps=5)
    listening(trainer)
    interrupt_at(policy, monkeypatch, call, count)
    with pytest.raises(Preempted, match=f"by SIGTERM: step {saved} of 5 is saved"):
        trainer.fit()
    assert steps_saved(trainer) == [saved]
    assert [int(row["step"]) for row in learnt(trainer)] == list(range(saved + 1))

    resumed, again = make(config, total_steps=5)
    resumed.resume(trainer.store.folder / f"step_{saved}")
    resumed.fit()
    prompts = [*policy.prompts[: saved + 1], *again.prompts]
    rows = learnt(resumed)
    # The undisturbed run is made last: its files take the place of the others.
    whole, undisturbed = make(config, total_steps=5)
    whole.output.run_dir.metrics_file.write_text("")
    whole.fit()
    assert prompts == undisturbed.prompts
    assert rows == learnt(whole)


def test_a_validation_that_is_given_up_is_made_up_for_before_the_run_goes_on(make, listening, monkeypatch):
    config = make_config(test_freq=2, val_before_train=False)
    trainer, policy = make(config, total_steps=3)
    listening(trainer)
    interrupt_at(policy, monkeypatch, "generate", 3)
    with pytest.raises(Preempted, match="step 2 of 3 is saved"):
        trainer.fit()
    assert [int(row["step"]) for row in learnt(trainer)] == [1]

    resumed, again = make(config, total_steps=3)
    resumed.resume(trainer.store.folder / "step_2")
    resumed.fit()
    assert again.calls[:3] == ["load", "sync", "generate 3x1"]
    rows = {int(row["step"]): row for row in learnt(resumed)}
    assert sorted(rows) == [1, 2, 3]
    assert "val/arithmetic/mean@1" in rows[2] and rows[2]["actor/version"] == 2.0


def test_a_step_that_was_saved_and_not_logged_is_logged_by_the_run_that_goes_on(make):
    config = make_config(save_freq=1, val_before_train=False)
    trainer, _ = make(config, total_steps=2)
    trainer.fit()
    expected = learnt(trainer)
    # As when the process was killed between the two.
    lines = trainer.output.run_dir.metrics_file.read_text().splitlines(keepends=True)
    trainer.output.run_dir.metrics_file.write_text(lines[0])
    resumed, policy = make(config, total_steps=2)
    resumed.resume(trainer.store.folder / "step_2")
    resumed.fit()
    assert learnt(resumed) == expected and policy.calls == ["load"]
