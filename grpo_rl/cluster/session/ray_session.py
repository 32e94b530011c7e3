"""The Ray session of a run: local, or on a cluster that is already there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.cluster.processes.forks import ForkServer
from grpo_rl.cluster.session import liveness, ray_patches, run_watcher
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.errors import ClusterError, DataError
from grpo_rl.machine_memory import machine_memory
from grpo_rl.processes.family import shielded, started
from grpo_rl.rollout.engine_environment import SESSION_FOLDER
from grpo_rl.run_files import read_json

LEAST_STORE_BYTES = 2 * 2**30
"""The smallest object store that is chosen: weights travel through it two buckets at a time."""
WATCH_S = 15.0
START_S = 120.0
# Ray puts its sockets below, and a socket's path has at most 107 characters.
LONGEST_FOLDER = 36
OF_RAY, LOG_OF_RAY = "ray", "ray.log"


@contextmanager
def ray_session(*arguments: Any, **options: Any) -> Iterator[None]:
    """Connect as `connecting` does, and be connected from the first line on."""
    with connecting(*arguments, **options) as connection:
        connection.connected()
        yield


@contextmanager
def connecting(
    config: RayInitConfig,
    num_cpus: int,
    record: Path | None = None,
    on_lost: Callable[[str], None] | None = None,
    copied: Sequence[str] = (),
    log: Path | None = None,
    *,
    alone: bool = False,
) -> Iterator[Connection]:
    """Connect to Ray beside whatever the caller does meanwhile, and leave it again.

    `Connection.connected` waits until that is done, and raises ClusterError when it does not work. A local Ray has no
    dashboard, its workers' output stays in log files, and nothing of it outlives this process by more than seconds,
    however this process ends. `record`, a file, lists what belongs to the session while it lasts. `on_lost` is called
    by another thread, with the cause, when the cluster has gone. Workers of a local Ray are copies of a process that
    has imported the modules in `copied` (`forks`), where there are any; `alone` where only one of them computes. What
    Ray reports by itself goes to the file `log`.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with watched(record) as folder, ExitStack() as stack:
        connection = Connection(config, num_cpus, folder, on_lost, log or folder / LOG_OF_RAY, waits_for_copies=bool(copied))
        if connection.is_local:
            stack.enter_context(liveness.own_token())
            if copied:
                stack.callback(ForkServer(folder, copied, alone=alone).close)
        connection.start()
        try:
            yield connection
        finally:
            connection.close()


class Connection(threading.Thread):
    """The connection to Ray, started or found: seconds in which this process mostly waits for others."""

    def __init__(
        self,
        config: RayInitConfig,
        num_cpus: int,
        folder: Path,
        on_lost: Callable[[str], None] | None,
        log: Path,
        *,
        waits_for_copies: bool,
    ) -> None:
        super().__init__(name="connecting to Ray", daemon=True)
        self._config = config
        self._address = config.address or os.environ.get("RAY_ADDRESS")
        self._options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "ignore_reinit_error": False}
        if self._address:
            self._options["address"] = self._address
        else:
            self._options |= {
                "num_cpus": config.num_cpus or num_cpus,
                "include_dashboard": False,
                "object_store_memory": config.object_store_memory
                or store_bytes(*machine_memory()[:2], shutil.disk_usage("/dev/shm").free),
                # Ray lets all users write into this folder (mode 1777); the one around it is this user's alone.
                "_temp_dir": str(folder / OF_RAY),
            }
            if waits_for_copies:
                # None of the usual workers starts before it is asked for, and Ray waits for those that wait for imports.
                patience = {"worker_register_timeout_seconds": int(START_S)}
                self._options["_system_config"] = {"prestart_worker_first_driver": False} | patience
        self._log, self._on_lost = log, on_lost
        self._watches: list[liveness.ClusterWatch] = []
        self._error: BaseException | None = None
        self._patched = ExitStack()
        self._is_ours = False
        """True where Ray was started or connected here: one that was there before in this process is left as it is."""
        self._tried, self._closed = threading.Event(), threading.Event()

    @property
    def is_local(self) -> bool:
        """True where Ray is started here, for this run alone."""
        return not self._address

    def run(self) -> None:
        try:
            self._connect()
        except BaseException as error:  # raised again by `connected`
            self._error = error
        finally:
            self._tried.set()
        # The kernel ends a local Ray's processes with the thread that started them.
        while not self._closed.wait(START_S):
            pass

    @property
    def has_tried(self) -> bool:
        """Return whether Ray is there, or will not come: then `connected` returns at once."""
        return self._tried.is_set()

    def connected(self) -> None:
        """Wait until Ray is there. Raises ClusterError when it does not come."""
        if not self._tried.wait(START_S):
            raise ClusterError(f"Ray did not start within {START_S:g} s: is this machine, or the cluster's head, very busy?")
        if self._error is not None:
            raise self._error

    def watch_nodes(self, raylets: Mapping[str, tuple[str, int]]) -> None:
        """Watch over these nodes of a cluster as well; a local one has none but its own."""
        if self._on_lost is not None and self._address:
            self._watches.append(liveness.ClusterWatch(raylets, self._on_lost, liveness.NODE_PATIENCE_S))

    def close(self) -> None:
        """Disconnect from Ray, and end a local one, whether or not it had started."""
        self._tried.wait(START_S)
        for each in self._watches:
            each.close()
        if self._is_ours:
            import ray

            ray.shutdown()
        self._patched.close()
        self._closed.set()

    def _connect(self) -> None:
        import ray

        ray_patches.check_version()
        if self._address:
            liveness.refuse_unreachable(self._address)
        self._patched.enter_context(ray_patches.errors_logged(self._log))
        try:
            with ray_patches.own_answer_to_sigterm(), ExitStack() as stack:
                if self.is_local:
                    liveness.forget_token()
                    stack.enter_context(ray_patches.started_apart())
                elif liveness.is_only_on_loopback(self._address or ""):
                    stack.enter_context(ray_patches.on_loopback())
                ray.init(**self._options)
        except Exception as error:
            raise liveness.why_not_connected(self._address, error) from error
        self._is_ours = True
        # A local Ray asks for a token by itself, unless RAY_AUTH_MODE=disabled stands in the environment.
        liveness.refuse_open_cluster(str(ray.get_runtime_context().gcs_address), allowed=self._config.allow_insecure)
        if self._on_lost is not None:
            self._patched.enter_context(ray_patches.called_at_exit_of_ray(self._on_lost))
            host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
            places: dict[str, tuple[str, int] | str] = {"its head (gcs_server)": (host, int(port))}
            if self.is_local and (node := ray._private.worker.global_worker.node) is not None:
                places["its raylet"] = str(node.raylet_socket_name)
            patience_s = liveness.LOCAL_PATIENCE_S if self.is_local else liveness.REMOTE_PATIENCE_S
            self._watches.append(liveness.ClusterWatch(places, self._on_lost, patience_s))


@contextmanager
def watched(record: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder of this user's alone. It goes at the end, even if this process is killed, and so does every
    process that was started meanwhile: a watcher beside this one (`run_watcher.py`) sees to that."""
    token = secrets.token_hex(16)
    base = tempfile.gettempdir()
    room = LONGEST_FOLDER - len("/grpo-12345678/") - len(OF_RAY)
    folder = Path(tempfile.mkdtemp(prefix="grpo-", dir=base if len(base) <= room else "/tmp"))
    (folder / run_watcher.MARKER).write_text(token)
    if record is not None:
        controller = {"pid": os.getpid(), "started": started(os.getpid()), "host": socket.gethostname()}
        found = {"token": token, "folder": str(folder)} | controller
        record.write_text(json.dumps(found))
    with shielded():
        watcher = subprocess.Popen(
            [sys.executable, "-S", "-E", run_watcher.__file__, token, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    ours = {run_watcher.TOKEN: token, SESSION_FOLDER: str(folder)}
    earlier = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield folder
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        assert watcher.stdin is not None
        watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(WATCH_S)
        if record is not None:
            record.unlink(missing_ok=True)


def clean_earlier(record: Path) -> list[int]:
    """End the processes that an earlier run, which left `record`, had left too, and remove its temporary folder; return their ids.

    A run whose controller is alive is left alone: this is a copy of its folder.
    """
    try:
        found = read_json(record)
        token, folder, host = str(found["token"]), Path(found["folder"]), found["host"]
        is_running = started(int(found["pid"])) == found["started"]
    except (DataError, KeyError, TypeError, ValueError):
        return []
    if host != socket.gethostname() or len(token) != 32 or is_running:
        return []
    ended = run_watcher.clean(token, folder)
    record.unlink(missing_ok=True)
    return ended


def store_bytes(free: float, total: float, shared: float) -> int:
    """Return the size of the object store where `free` bytes of memory and `shared` bytes of /dev/shm are free.

    The store takes memory for what is in it and no more, so that room costs nothing. What has no room is written to disk, and
    a step over 65 million tokens is 0.8 GB of ids and log-probs alone. Where /dev/shm is small Ray puts the store into files.
    """
    most = min(0.3 * min(free, total), 0.8 * shared)
    return max(LEAST_STORE_BYTES, int(most))
