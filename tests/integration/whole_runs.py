"""Whole runs from the command line, for tests: started, and read from what they leave behind."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_rl import testing
from grpo_rl.cluster.session.liveness import KNOWS_TOKENS
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts

RUN_TIMEOUT_S = 540

# A random model never gets a sum right: this one makes a difference between its responses.
REWARD = """\
def variety(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 10


def odd(data_source, solution_str, ground_truth, extra_info):
    return float(len(set(solution_str)) % 2)
"""


def environment_of_user() -> dict[str, str]:
    """This process's environment without what its own sessions set for Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Run:
    path: Path
    output: str

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by training step."""
        return {int(row["step"]): row for row in read_metrics(self.path / "metrics.jsonl") if "actor/loss" in row}

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return read_rollouts(self.path / "rollouts" / f"step_{step}.jsonl")

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model" / "model.safetensors")


def train(folder: Path, name: str, *words: str, exit_code: int = 0) -> Run:
    """`python -m grpo_rl.main` with these words, in a process of its own; its screen is shown when it ends otherwise."""
    (folder / "my_reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "grpo_rl.main", f"trainer.default_local_dir={folder / 'runs'}"]
    command += [f"trainer.experiment_name={name}", "trainer.logger=[console]", "trainer.page_freq=-1", *words]
    if tuple(map(int, version("ray").split(".")[:2])) < KNOWS_TOKENS:
        command.append("ray_kwargs.ray_init.allow_insecure=true")
    environment = environment_of_user() | {"VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    run = Run(folder / "runs" / name, done.stdout if exit_code == 0 else done.stdout + done.stderr)
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}\n{_log_tails(run.path)}"
    return run


def without_ray(loop: Callable[[Any], None], folder: Path, name: str, *words: str) -> Run:
    """The run of these words with its roles in this process, whose bits are those of the command (test_sessions.py)."""
    (folder / "my_reward.py").write_text(REWARD)
    with (
        contextlib.chdir(folder),
        testing.session(*words, f"trainer.experiment_name={name}", folder=folder / "runs") as session,
    ):
        loop(session)
        session.actor.export(session.output.run_dir.model)
        return Run(session.output.run_dir.path, "")


def command(run: Run, *words: str, typed: str | None = None) -> tuple[str, str]:
    """Return the two streams of `python -m grpo_rl` with these words, beside the run's folder, if `typed` comes by a pipe.

    Fails with both if the command does.
    """
    line, beside = [sys.executable, "-m", "grpo_rl", *words], run.path.parents[1]
    done = subprocess.run(
        line, cwd=beside, env=environment_of_user(), input=typed, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def _log_tails(path: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(path.glob("logs/*.log")))


def arithmetic(model: Path, *own: str) -> list[str]:
    """The words of a small run on sums; `own` ones take the place of those of the same keys."""
    words = [
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=task:arithmetic?split=train&num_rows=64",
        "data.val_files=task:arithmetic?split=val&num_rows=6",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "reward.functions=[auto,my_reward.py:variety]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.kv_cache_gib=0.1",
    ]
    keys = {word.partition("=")[0] for word in own}
    return [*(word for word in words if word.partition("=")[0] not in keys), *own]


def assert_trains_like_its_engine(run: Run, last: int) -> None:
    """Every step's rollouts have the weights that the step before left, and the log-probs that the trainer finds."""
    assert sorted(run.steps) == list(range(1, last + 1))
    for step, row in run.steps.items():
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert {record["weight_version"] for record in run.rollouts(step)} == {step - 1}


def assert_group_advantages(records: list[dict[str, Any]], n: int) -> None:
    """The advantages in the log are those of the rewards beside them, in groups of `n`."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["uid"]].append(record)
    assert {len(group) for group in groups.values()} == {n}
    assert any(record["advantage"] for record in records)
    for group in groups.values():
        rewards = [record["reward"] for record in group]
        spread = statistics.stdev(rewards)
        for record in group:
            expected = (record["reward"] - statistics.fmean(rewards)) / (spread + 1e-6) if spread else 0.0
            assert record["advantage"] == pytest.approx(expected, abs=1e-5)


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {
        key: value
        for key, value in row.items()
        if key == "perf/total_num_tokens" or (not key.startswith(("timing_s/", "perf/", "plan/")) and key != "time")
    }
