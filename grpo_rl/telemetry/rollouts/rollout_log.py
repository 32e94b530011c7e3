"""The files rollouts/step_N.jsonl and val/step_N.jsonl: one line per response, with all that the run has of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grpo_rl.config.secrets import hide_known
from grpo_rl.telemetry.metrics.metrics_file import dump_line
from grpo_rl.telemetry.rundir import RunDir

if TYPE_CHECKING:  # types imports torch, which reading a log does not need
    from grpo_rl.types import Rollout

Kind = Literal["rollouts", "val"]


class RolloutLog:
    """Writes the rollouts of a step as one JSON line each."""

    def __init__(self, run_dir: RunDir) -> None:
        self._folders: dict[Kind, Path] = {"rollouts": run_dir.rollouts, "val": run_dir.val}

    def write(
        self, kind: Kind, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None
    ) -> Path:
        """Write `<kind>/step_<step>.jsonl`, which is complete or not there at all, and return its path.

        `advantages` has one entry per rollout, None for a rollout that is not trained.
        """
        if advantages is not None and len(advantages) != len(rollouts):
            raise ValueError(f"{len(rollouts)} rollouts but {len(advantages)} advantages")
        return write_rollouts(self._folders[kind] / f"step_{step}.jsonl", rollouts, advantages)

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps: a resumed run writes them again."""
        for folder in self._folders.values():
            for other_step, path in step_files(folder):
                if other_step > step:
                    path.unlink()


def write_rollouts(path: Path, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None) -> Path:
    """Write one line per rollout to `path`, which is complete or not there at all, and return it."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for index, rollout in enumerate(rollouts):
            file.write(hide_known(dump_line(_record(rollout, None if advantages is None else advantages[index]))))
    os.replace(temporary, path)
    return path


def _record(rollout: Rollout, advantage: float | None) -> dict[str, Any]:
    logprobs = np.asarray(rollout.rollout_logprobs)
    optional = {
        "weight_versions": rollout.versions if len(rollout.versions) > 1 else None,
        "baseline": rollout.baseline,
        "steps": rollout.steps,
        "failure": rollout.failure,
        "failure_cause": rollout.failure_cause,
    }
    return {
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "ground_truth": rollout.prompt.ground_truth,
        "data_source": rollout.prompt.data_source,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "advantage": advantage,
        "uid": rollout.prompt.uid,
        "sample": rollout.sample_index,
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.oldest_version,
        "prompt_length": len(rollout.prompt.token_ids),
        "response_length": len(rollout.response_ids),
        "rollout_logprob_mean": float(logprobs.mean(dtype="float64")) if len(logprobs) else None,
    } | {name: value for name, value in optional.items() if value is not None}


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the records of one file that `RolloutLog.write` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def first_and_last(folder: Path) -> tuple[tuple[int, Path], tuple[int, Path]] | None:
    """Return (step, file) of the first and of the last step in `folder`, which may be the same; None without any."""
    files = step_files(folder)
    return (files[0], files[-1]) if files else None


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of every step in `folder`, ascending; none where there is no such folder."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)
