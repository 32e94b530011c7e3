"""A rank is killed while it writes its part of a checkpoint and the training goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ranks_ground import Scene, make_batch
from recovery_ground import Lines

from grpo_rl.checkpoint.manifest import verify
from grpo_rl.config.schema.tree import Config
from grpo_rl.trainer.saving import Saving
from grpo_rl.trainer.schedule import Roles

KILLED = "ckpt.call:kill9@call=fsync,file=weights_rank1.safetensors,n=1"


def make_saving(scene: Scene, folder: Path) -> tuple[Saving, Lines, list[Any]]:
    """The saves of a run that stops where a disk refuses, what it warns of, and the commits that its status tells."""
    config = Config()
    lines, commits = Lines(), []
    nothing = SimpleNamespace(flush=lambda: None, finishing=lambda: None)
    status = SimpleNamespace(update=lambda last_commit: commits.append(last_commit))
    roles = Roles(actor=scene.role)
    run_dir = SimpleNamespace(checkpoints=folder)
    output: Any = SimpleNamespace(run_dir=run_dir, console=lines, sinks=nothing, rollouts=nothing, status=status, stop=nothing)
    assert config.trainer.on_save_error == "stop" and config.actor_rollout_ref.actor.checkpoint.async_save
    return Saving(config, roles, output), lines, commits


def test_a_rank_killed_while_it_saves_costs_that_save_alone(actor_ranks, tmp_path):
    scene = actor_ranks
    undisturbed = scene.undisturbed
    saving, lines, commits = make_saving(scene, tmp_path)
    scene.begin(1)
    saving.begin(1, {"step": 1})
    saving.finish()
    committed = {path.name: path.read_bytes() for path in (tmp_path / "step_1").iterdir()}
    assert commits == [1] and "weights_rank1.safetensors" in committed

    scene.role.update(make_batch(1))
    scene.arm(KILLED, 1)
    saving.begin(2, {"step": 2})
    scene.role.update(make_batch(2))
    saving.finish()
    assert scene.digest() == undisturbed
    assert saving.num_failed == 1 and commits == [1]
    assert [line for _, line in lines.warnings] == [
        "NOT SAVED (1 so far): a process that was writing its part of a checkpoint is gone, and the part with it. "
        "Training goes on; the next save point tries again"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "nothing half written is left"
    assert {path.name: path.read_bytes() for path in (tmp_path / "step_1").iterdir()} == committed
    assert verify(tmp_path / "step_1").state["step"] == 1

    # The last save of a run, for which there is no next one, is made again.
    scene.arm(KILLED, 1)
    saving.settle(3, lambda: {"step": 3})
    assert commits == [1, 3] and saving.num_failed == 1
    assert lines.warnings[-1][1].endswith("gone, and the part with it: step 3 is saved once more")
    scene.role.update(make_batch(0))
    scene.role.load(verify(tmp_path / "step_3").folder)
    assert scene.digest() == undisturbed
