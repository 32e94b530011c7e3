"""A finished run whose command is typed again: nothing is trained twice or discarded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.config.relative_paths import function_files
from grpo_rl.errors import ConfigError
from grpo_rl.run_files import model_digests
from grpo_rl.source_code import digest, user_sources
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import step_files
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import read_status

_CHANGED_BY_A_RESUME = ("metrics.jsonl", "timeline.jsonl", "status.json", "report.txt", "page.html", "config.yaml")


def steps_done(run: Path) -> int:
    """Return the last step of a run that ended well, else 0."""
    status = read_status(run)
    return int(status.get("step") or 0) if status.get("state") == "done" else 0


def contents_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the user's function files and model folders that a configuration names."""
    return {"functions": digest(user_sources(function_files(config))), "models": digest(model_digests(config))}


def contents_changed(run: Path, config: Mapping[str, Any]) -> bool:
    status = read_status(run)
    return any(status.get(name, of) != of for name, of in contents_of(config).items())


def nothing_left(run: Path, total: int, config: Mapping[str, Any], *, exports: bool) -> str | None:
    """Return the message for a run whose `total` steps are done; None if something is left to do."""
    run_dir, step = RunDir(run), steps_done(run)
    models = [folder for folder in (run_dir.model, run_dir.reward_model) if (folder / "config.json").is_file()]
    if step < total or (exports and not models):
        return None
    changed = "\n  the files of your functions or models have changed since: the run was trained with what they were"
    return (
        f"step {step} of {total} is done in {run}: nothing is left to train{''.join(f'; {folder}' for folder in models)}\n"
        "  longer: trainer.total_training_steps; a new run: another trainer.experiment_name, or trainer.resume_mode=disable, "
        f"which moves what is there to earlier/{changed if contents_changed(run, config) else ''}"
    )


def refuse_rewind(run: Path, step: int) -> None:
    """Raise ConfigError if the run ended well after this step, whose checkpoint it would go on from."""
    done = steps_done(run)
    if done > step:
        raise ConfigError(
            f"{run}: the run has ended with step {done}, and its newest checkpoint is of step {step}: the steps after it would be "
            f"thrown away. Train a new run from {RunDir(run).model}, begin anew with trainer.resume_mode=disable, or go on from "
            f"step {step} with trainer.resume_mode=resume_path trainer.resume_from_path={RunDir(run).checkpoints}/step_{step}; "
            "both move what is there to earlier/"
        )


def set_aside_after(run_dir: RunDir, step: int) -> Path | None:
    """Move what a run made after this step to `earlier/N`, with copies of files that go on."""
    if max((record["step"] for record in read_metrics(run_dir.metrics_file)), default=0) <= step:
        return None
    aside = run_dir.new_aside()
    for file in (run_dir.path / name for name in _CHANGED_BY_A_RESUME):
        if file.is_file():
            shutil.copy2(file, aside / file.name)
    for model in (run_dir.model, run_dir.reward_model):
        if model.exists():
            model.rename(aside / model.name)
    for folder in (run_dir.rollouts, run_dir.val):
        (aside / folder.name).mkdir()
        for other, file in step_files(folder):
            if other > step:
                file.rename(aside / folder.name / file.name)
    return aside
