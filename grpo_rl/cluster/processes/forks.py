"""Workers as copies of one process that has imported everything, on this machine and without GPUs.

On other machines of a cluster, with a GPU (whose driver does not survive a fork), and for an engine whose libraries read
variables that others must not have, a worker starts from nothing, as it does when the process to copy is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl import faults
from grpo_rl.cluster.processes import fork_server
from grpo_rl.errors import ClusterError
from grpo_rl.processes.family import shielded
from grpo_rl.rollout.engine_environment import SESSION_FOLDER, SPIN_COUNT

SOCKET, LOG = "fork", "fork.log"
END_S = 5.0

KEPT_BYTES = 256 << 20
"""Bytes of freed memory that a process keeps for what it allocates next.

With glibc's defaults a step's tensors, which are megabytes each, are given back and mapped anew, and the kernel clears every
page again: 14,000 to 37,000 page faults in a step of 1.1 M parameters, and 4 % of its time (scripts/bench_sft.py). A second arena,
which is what a thread beside the first one gets, gives back even more often."""
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of all workers that libraries read when they are imported."""
SHARED_CORES = {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
"""Variables of workers that compute on the same cores as others. One that has the cores to itself spins as long as libgomp chooses,
as any program with PyTorch does: threads that sleep between the short operations of a small model cost 4 to 6 % of its updates
(scripts/bench_sft.py)."""
READ_LATER = {"OMP_NUM_THREADS", *faults.VARIABLES}
"""Variables that a worker obeys whenever they are set: `WorkerHost` gives torch the number of threads."""

WORKERS = ("actor", "critic", "reference", "reward_model", "rollout")
MODULES = (*(f"grpo_rl.workers.{name}" for name in WORKERS), "grpo_rl.rollout.hf.hf_engine")
WITH_RAY = ("ray._private.workers.default_worker", "grpo_rl.cluster.processes.worker_group")
"""Modules that can be imported once Ray's request has arrived with its variables."""


def modules_for(model_path: str) -> tuple[str, ...]:
    """Return the modules which the workers of a run with this model import."""
    # It loads torch, before which a worker that imports this module has to set its environment.
    from grpo_rl.models import builtin

    embedded = builtin.BUILTINS.get(model_path.removeprefix(builtin.PREFIX))
    kind = builtin.MODEL_TYPE if embedded is None else embedded.model_type
    if not model_path.startswith(builtin.PREFIX):
        try:
            kind = json.loads(Path(model_path, "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            return MODULES  # refused soon, where all of it is read
    return (*MODULES, f"transformers.models.{kind}.modeling_{kind}")


def environment_of(*, alone: bool) -> dict[str, str]:
    """Return the variables of workers which share their cores, or of one that computes `alone`."""
    return ENVIRONMENT if alone else ENVIRONMENT | SHARED_CORES


class ForkServer:
    """The process that is copied (`fork_server.py`), from a session's start to its end."""

    def __init__(self, folder: Path, modules: Sequence[str], *, alone: bool = False) -> None:
        """Start it, with its socket in `folder`. Raises ClusterError for a folder that others may write or look into."""
        try:
            fork_server.refuse_shared(folder)
        except fork_server.NotOurs as error:
            raise ClusterError(f"workers are not started from a folder that is not private: {error}") from None
        with shielded(), socket.socket(socket.AF_UNIX) as listener, (folder / LOG).open("wb") as log:
            listener.bind(str(folder / SOCKET))
            (folder / SOCKET).chmod(0o600)
            listener.listen(64)  # clients that come before the imports are done wait
            order = {"listener": listener.fileno(), "path": sys.path, "modules": list(modules), "later": WITH_RAY}
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, json.dumps(order)],
                env=os.environ | environment_of(alone=alone),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process that is copied."""
        return self._process.pid

    def close(self) -> None:
        """End it. Its copies stay: they are Ray's."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
            return
        self._process.kill()
        self._process.wait(END_S)


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's `runtime_env` of a worker with these variables: how it is copied, or nothing where it cannot be."""
    address = Path(os.environ.get(SESSION_FOLDER, ""), SOCKET)
    everybodys = environment_of(alone=False)
    same = all(name in READ_LATER or everybodys.get(name) == value for name, value in environment.items())
    if not same or not address.is_socket():
        return {}
    # Neither `site` nor PYTHON* variables: it only passes on what it was given.
    return {"py_executable": shlex.join([sys.executable, "-S", "-E", fork_server.__file__, str(address)])}
