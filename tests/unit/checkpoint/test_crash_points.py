"""A save that dies at any call, or loses power there, leaves the newest committed checkpoint; and 1,000 kinds of damage."""

from __future__ import annotations

import checkpoint_trials as trials
import pytest
from checkpoint_trials import DAMAGE, SCENES, Scene, Trials, break_save


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
    assert unharmed == {"a copy as step_99"}
    assert {outcome.kind for outcome in outcomes.values()} == {"unharmed", "fell back", "refused"}
