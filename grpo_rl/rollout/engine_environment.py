"""Environment variables of a process that holds a rollout engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_rl.rollout.engine import EngineSpec

SESSION_FOLDER = "GRPO_SESSION_FOLDER"
SPIN_COUNT = 10_000
"""Rounds (a fraction of a millisecond) that a waiting thread spins before it sleeps.

Without spinning, sampling from 11.8 M parameters took 1.4 times as long; with libgomp's default
(milliseconds), two processes on the same cores become ten times slower."""


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """OpenMP reads its variables when torch is loaded: set them before; others by set_missing."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if spec.device == "cpu":
        environment |= {"OMP_NUM_THREADS": str(spec.threads), "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    if spec.name != "vllm":
        return environment
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Pickled functions between vLLM's processes: never, whatever the user's environment says.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if spec.deterministic and spec.device == "cuda":
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if spec.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if spec.enforce_eager:
            # vLLM compiles helpers even if it runs the model eagerly: 18 s and a C++ compiler, and no gain.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def own_folder(pid: int) -> Path | None:
    """None outside of a run on this machine."""
    folder = os.environ.get(SESSION_FOLDER)
    return Path(folder) / f"engine-{pid}" if folder and Path(folder).is_dir() else None


@contextmanager
def temporary_files() -> Iterator[None]:
    """Make temporary files in the folder that the run removes at its end."""
    folder, previous_folder = own_folder(os.getpid()), tempfile.tempdir
    if folder is not None:
        folder.mkdir(exist_ok=True)
        tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = previous_folder


def set_missing(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
