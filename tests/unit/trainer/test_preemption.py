"""A run that is asked to stop saves a state between two steps, and the run that goes on from it is the undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_roles import VALIDATED, learnt

from grpo_rl.errors import Preempted
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
    """SIGTERM arrives at the end of the `count`th call of this method of a role."""
    original, seen = getattr(target, call), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        result = original(*args, **kwargs)
        if seen == count:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(target, call, interrupted)


def steps_saved(trainer: RunLoop) -> list[int]:
    return trainer.store.steps()


def test_the_state_that_is_saved_is_the_newest_one_between_two_steps(make_run, listening, monkeypatch):
    whole, undisturbed = make_run(*VALIDATED, "trainer.experiment_name=whole", steps=5)
    whole.fit()
    for role, call, count, saved in (
        ("rollout", "generate", 4, 2),  # the third step's responses are given up, and sampled again (the first call validates)
        ("actor", "update", 3, 3),  # a step whose weights have changed is finished
        ("actor", "old_logprobs", 3, 3),  # others wait for each other here, and the step is nearly done
        ("rollout", "sync_weights", 4, 2),
    ):
        words = (*VALIDATED, f"trainer.experiment_name={call}")
        run, record = make_run(*words, steps=5)
        listening(run)
        interrupt_at(getattr(run.roles, role), monkeypatch, call, count)
        with pytest.raises(Preempted, match=f"by SIGTERM: step {saved} of 5 is saved"):
            run.fit()
        assert steps_saved(run) == [saved]
        assert [int(row["step"]) for row in learnt(run)] == list(range(saved + 1))

        resumed, again = make_run(*words, steps=5)
        resumed.resume(run.store.folder / f"step_{saved}")
        resumed.fit()
        assert [*record.prompts[: saved + 1], *again.prompts] == undisturbed.prompts, call
        assert learnt(resumed) == learnt(whole), call


def test_a_validation_that_is_given_up_is_made_up_for_before_the_run_goes_on(make_run, listening, monkeypatch):
    words = (*VALIDATED, "trainer.test_freq=2", "trainer.val_before_train=false")
    run, _ = make_run(*words, steps=3)
    listening(run)
    interrupt_at(run.roles.rollout, monkeypatch, "generate", 3)
    with pytest.raises(Preempted, match="step 2 of 3 is saved"):
        run.fit()
    assert [int(row["step"]) for row in learnt(run)] == [1]

    resumed, again = make_run(*words, steps=3)
    resumed.resume(run.store.folder / "step_2")
    resumed.fit()
    assert again.calls[:3] == ["load", "sync", "sample 3x1"]
    rows = {int(row["step"]): row for row in learnt(resumed)}
    assert sorted(rows) == [1, 2, 3]
    assert "val/arithmetic/mean@1" in rows[2] and "actor/grad_norm" in rows[2]


def test_a_step_that_was_saved_and_not_logged_is_logged_by_the_run_that_goes_on(make_run):
    run, _ = make_run("trainer.save_freq=1", steps=2)
    run.fit()
    expected, file = learnt(run), run.output.run_dir.metrics_file
    # As when the process was killed between the two.
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    resumed, record = make_run("trainer.save_freq=1", steps=2)
    resumed.resume(run.store.folder / "step_2")
    resumed.fit()
    assert learnt(resumed) == expected and record.calls == ["load"]
