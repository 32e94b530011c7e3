"""A save that dies at any call, or loses power there, leaves the newest committed checkpoint; and 1,000 kinds of damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import checkpoint_trials as trials
import hypothesis.strategies as st
import pytest
from checkpoint_trials import DAMAGE, HARMLESS, SCENES, Crash, Scene, Trials, break_save, breaking
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.errors import CheckpointError


@pytest.mark.parametrize(
    ("scene", "power_cut"), [*((scene, False) for scene in SCENES), (SCENES[2], True), (SCENES[-1], True)], ids=str
)
def test_a_save_that_dies_at_any_call_leaves_the_newest_committed_state(tmp_path, scene, power_cut):
    calls = break_save(tmp_path / "whole", scene, None, power_cut=power_cut)
    assert calls >= 12 + 6 * (scene.shards - 1)
    for at in range(calls):
        break_save(tmp_path / str(at), scene, at, power_cut=power_cut)


def test_the_harness_notices_a_save_that_forgets_to_flush(tmp_path, monkeypatch):
    """Without flushing the folder after the rename, a power cut takes a commit back that was said to be there."""
    monkeypatch.setattr(trials.files, "flush", lambda path: None)
    with pytest.raises(AssertionError):
        break_save(tmp_path, Scene((1,), 2), None, power_cut=True)


def test_damage_of_every_kind_is_noticed(tmp_path):
    found = Trials(tmp_path)
    outcomes = {(name, seed): found.run(name, seed) for name in DAMAGE for seed in range(4)}
    bad = {trial: outcome for trial, outcome in outcomes.items() if outcome.kind == "LOADED"}
    assert bad == {}
    unharmed = {name for (name, _), outcome in outcomes.items() if outcome.kind == "unharmed"}
    assert HARMLESS <= unharmed <= HARMLESS | {"a copy as step_99"}
    assert {outcome.kind for outcome in outcomes.values()} == {"unharmed", "fell back", "refused"}


class Run(RuleBasedStateMachine):
    """A run that saves, dies, resumes and is damaged, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.good: dict[int, int] = {}
        self.bad: set[int] = set()
        self.step = self.value = 0

    @initialize(keep=st.sampled_from([None, 1, 2]))
    def start(self, keep: int | None) -> None:
        self.folder = Path(self.root)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.keep = keep

    root = ""

    @rule(at=st.one_of(st.none(), st.integers(0, 40)), power_cut=st.booleans())
    def save(self, at: int | None, power_cut: bool) -> None:
        self.step, self.value = self.step + 1, self.value + 1
        store = CheckpointStore(self.folder, self.keep)
        with breaking(at) as disk:
            try:
                trials.save(store, self.step, self.value)
            except Crash:
                if power_cut:
                    disk.cut_power()
        if disk.committed:
            self.good[self.step] = self.value
            self.bad.discard(self.step)

    @rule(name=st.sampled_from(sorted(set(DAMAGE) - HARMLESS - {"a copy as step_99"})), seed=st.integers(0, 99))
    def damage(self, name: str, seed: int) -> None:
        there = [step for step in self.good if (self.folder / f"step_{step}").is_dir()]
        if len(there) < 2 or name in ("another step's whole folder", "a link in place of the folder"):
            return
        shutil.rmtree(self.folder / "elsewhere", ignore_errors=True)
        DAMAGE[name](self.folder / f"step_{there[-1]}", trials.random.Random(seed))
        (self.folder / "outside.bin").unlink(missing_ok=True)
        self.bad.add(there[-1])
        del self.good[there[-1]]

    @rule()
    def resume(self) -> None:
        with breaking():
            store = CheckpointStore(self.folder, self.keep)
            try:
                latest = store.latest(lambda _: None)
            except CheckpointError:
                return
            self.step = 0 if latest is None else latest.step
            store.set_aside_after(self.step)
        self.bad = {step for step in self.bad if step <= self.step}

    @invariant()
    def the_latest_is_the_newest_committed_intact_step(self) -> None:
        told: list[str] = []
        with breaking():
            try:
                latest = CheckpointStore(self.folder, self.keep).latest(told.append)
            except CheckpointError:
                assert not self.good
                return
        assert (None if latest is None else (latest.step, latest.state["value"])) == max(self.good.items(), default=None)
        if latest is not None:
            trials.assert_state(latest, shards=2)
            assert len(told) == len([step for step in self.bad if step > latest.step])
        if self.keep is not None:
            # What was removed was not the newest.
            there = [step for step in self.good if (self.folder / f"step_{step}").is_dir()]
            assert there[-1:] == list(self.good)[-1:]


def test_whatever_happens_the_latest_is_the_newest_committed_intact_step(tmp_path):
    Run.root = str(tmp_path / "checkpoints")
    few = settings(max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Run, settings=few)
