"""The Ray session of a run: local, or on a cluster that is already there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_rl.background import has_ended, in_background
from grpo_rl.cluster.processes.environment import environment_of
from grpo_rl.cluster.session import launcher, liveness
from grpo_rl.cluster.session.launcher import Session
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.config.secrets import remember
from grpo_rl.errors import ClusterError, DataError
from grpo_rl.machine_memory import machine_memory
from grpo_rl.processes import child
from grpo_rl.processes.family import shielded, started
from grpo_rl.rollout.engine_environment import SESSION_FOLDER
from grpo_rl.run_files import read_json

LEAST_STORE_BYTES = 2 * 2**30
"""Weights travel through it two buckets at a time."""
CLEAN_S = 15.0
START_S = 120.0
OF_RAY, LOG_OF_RAY = "ray", "ray.log"
LOOPBACK = "127.0.0.1"
STAYS_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for systems without clusters: with 0, Ray does not replace 127.0.0.1 by the machine's address on the network."""
NEVER_GIVEN_UP = {"RAY_health_check_failure_threshold": str(10**9)}
"""Ray's head ends a raylet that does not answer for a minute, as on an overloaded machine. A local cluster
has no other to go on with, and `liveness.ClusterWatch` notices a raylet that has ended.
"""
PORTS = range(20_000, 32_768)
"""Below those that the kernel gives to connections, so that nothing takes a free one before Ray does."""
SIGACTION_BYTES = 512

_is_set = False
"""True once `set_environment` has come before the import of Ray."""


def set_environment(address: str | None = None) -> None:
    """Set what Ray reads from the environment when it is imported, for a cluster at `address` or a local one.

    A local Ray stays on the loopback and gets a token, unless the user has named one or switched it off: the
    one that Ray would write to ~/.ray/auth_token may be readable to others. Raises ClusterError if Ray was
    imported.
    """
    global _is_set
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A raylet prints each worker that was ended on purpose as a victim of the OOM killer.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    if address and not liveness.is_only_on_loopback(address):
        return
    if "ray" in sys.modules and not _is_set:
        raise ClusterError("Ray was imported before the run's session began, and does not see its settings: import it later")
    _is_set = True
    os.environ[STAYS_ON_LOOPBACK] = "0"
    if not address and os.environ.setdefault(liveness.MODE_VARIABLE, "token").lower() == "token":
        if not any(name in os.environ for name in liveness.TOKEN_VARIABLES):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        remember([os.environ.get("RAY_AUTH_TOKEN", "")])


@contextmanager
def ray_session(*arguments: Any, **options: Any) -> Iterator[None]:
    with connecting(*arguments, **options) as connection:
        connection.connected()
        yield


@contextmanager
def connecting(
    config: RayInitConfig,
    num_cpus: int,
    record: Path | None = None,
    on_lost: Callable[[str], None] | None = None,
    log: Path | None = None,
    *,
    alone: bool = False,
) -> Iterator[Connection]:
    """Connect to Ray beside whatever the caller does meanwhile, and leave it again.

    The file `record` lists what belongs to the session. `on_lost` is called in another thread, with the
    cause, if the cluster has gone. `alone`: only one worker computes. What `ray start` prints goes to the
    file `log`.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    set_environment(address)
    with watched(record) as folder:
        log = log or folder / LOG_OF_RAY
        connection = Connection(config, address, num_cpus, folder, on_lost, log, environment_of(alone=alone))
        try:
            yield connection
        finally:
            connection.close()


@dataclass(eq=False)
class Connection:
    """The connection to Ray, started or found: seconds in which this process mostly waits."""

    config: RayInitConfig
    address: str | None
    """Of a cluster that is there; None for a local Ray."""
    num_cpus: int
    folder: Path
    on_lost: Callable[[str], None] | None
    log: Path
    environment: Mapping[str, str]
    _watches: list[liveness.ClusterWatch] = field(default_factory=list)
    _is_ours: bool = False
    """False for a Ray to which this process was connected before."""

    def __post_init__(self) -> None:
        self.attempt = in_background("connecting to Ray", self._connect)

    def connected(self) -> None:
        if not has_ended(self.attempt, START_S):
            raise ClusterError(f"Ray did not start within {START_S:g} s: is this machine, or the cluster's head, very busy?")
        self.attempt.result(0.0)

    def watch_nodes(self, raylets: Mapping[str, tuple[str, int]]) -> None:
        if self.address:
            self._watch(raylets, liveness.NODE_PATIENCE_S)

    def _watch(self, places: Mapping[str, tuple[str, int] | str], patience_s: float) -> None:
        if self.on_lost is not None:
            self._watches.append(liveness.ClusterWatch(places, self.on_lost, patience_s))

    def close(self) -> None:
        has_ended(self.attempt, START_S)
        for watch in self._watches:
            watch.close()
        if self._is_ours:
            import ray

            ray.shutdown()

    def _connect(self) -> None:
        if self.address:
            liveness.refuse_unreachable(self.address)
            liveness.refuse_another_users_node(self.address)
        address = self.address or self._start()
        import ray

        try:
            with kept_answer_to_sigterm():
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:
            raise liveness.why_not_connected(self.address, error) from error
        self._is_ours = True
        head = str(ray.get_runtime_context().gcs_address)
        liveness.refuse_open_cluster(head, allowed=self.config.allow_insecure)
        host, _, port = head.rpartition(":")
        places: dict[str, tuple[str, int] | str] = {"its head (gcs_server)": (host, int(port))}
        if not self.address:
            places["its raylet"] = str(ray.nodes()[0]["RayletSocketName"])
        self._watch(places, liveness.REMOTE_PATIENCE_S if self.address else liveness.LOCAL_PATIENCE_S)

    def _start(self) -> str:
        """Start a local Ray and return its address, the loopback's. Raises ClusterError."""
        port, client_port, agent_port = free_ports(3)
        store = self.config.object_store_memory or store_bytes(*machine_memory()[:2], shutil.disk_usage("/dev/shm").free)
        options = {
            "node-ip-address": LOOPBACK,
            "port": port,
            "ray-client-server-port": client_port,
            # With Ray's, which is the same for all sessions, the second session of a machine starts 3 s later: it tries six times.
            "dashboard-agent-listen-port": agent_port,
            "min-worker-port": 0,  # any: two sessions would take the same ones of Ray's range
            "max-worker-port": 0,
            "num-cpus": self.config.num_cpus or self.num_cpus,
            "object-store-memory": store,
            # Ray lets all users write into this folder (mode 1777); the one around it is this user's alone.
            "temp-dir": self.folder / OF_RAY,
            "include-dashboard": "false",
            "include-log-monitor": "false",
        }
        words = ["start", "--head", "--no-monitor", "--disable-usage-stats"]
        words += [f"--{name}={value}" for name, value in options.items()]
        with self.log.open("ab") as output:
            variables = {**NEVER_GIVEN_UP, **os.environ, **self.environment}
            process = child.start("ray.scripts.scripts", words, output, environment=variables)
        try:
            code = process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ClusterError(f"`ray start` did not end within {START_S:g} s: is this machine very busy?") from None
        if code:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise ClusterError(f"a local Ray did not start: {lines[-1] if lines else f'exit code {code}'}\n  log: {self.log}")
        return f"{LOOPBACK}:{port}"


@contextmanager
def kept_answer_to_sigterm() -> Iterator[None]:
    """Restore the present answer to SIGTERM after the block: with Ray's, a process aborts where a run saves
    its state.

    By sigaction, as Python's `signal` works in a main thread only.
    """
    libc, answer = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, answer)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, answer, None)


def free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 1000):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError(f"no free port in {PORTS.start} to {PORTS.stop} for a local Ray")


@contextmanager
def watched(record: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder of this user's alone. At the end, even if this process is killed, it goes, and
    with it every process that was started meanwhile.
    """
    session = launcher.current or Session.new()
    session.folder.mkdir(mode=0o700)
    (session.folder / launcher.MARKER).write_text(session.token)
    if record is not None:
        (session.folder / launcher.RUN).symlink_to(record.parent.resolve())
        controller = {"pid": os.getpid(), "started": started(os.getpid()), "host": socket.gethostname()}
        record_fields = {"token": session.token, "folder": str(session.folder)} | controller
        record.write_text(json.dumps(record_fields))
    cleaner = None if launcher.current else _cleaner(session)
    variables = {launcher.TOKEN: session.token, SESSION_FOLDER: str(session.folder)}
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield session.folder
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if cleaner is None:
            session.clean()
        else:
            assert cleaner.stdin is not None
            cleaner.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                cleaner.wait(CLEAN_S)
        if record is not None:
            record.unlink(missing_ok=True)


def _cleaner(session: Session) -> subprocess.Popen[bytes]:
    """Start the process that cleans up when this one's end of its standard input closes."""
    with shielded():
        return subprocess.Popen(
            [sys.executable, "-S", "-E", launcher.__file__, session.token, str(session.folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def clean_earlier(record: Path) -> list[int]:
    """End the processes that an earlier run, which left `record`, had left too, and remove its folder; return
    their ids.

    A run whose controller is alive is left alone: this is a copy of its folder.
    """
    try:
        record_fields = read_json(record)
        session, host = Session(str(record_fields["token"]), Path(record_fields["folder"])), record_fields["host"]
        is_running = started(int(record_fields["pid"])) == record_fields["started"]
    except (DataError, KeyError, TypeError, ValueError):
        return []
    if host != socket.gethostname() or len(session.token) != 32 or is_running:
        return []
    ended = session.clean()
    record.unlink(missing_ok=True)
    return ended


def store_bytes(free: float, total: float, shared: float) -> int:
    """Return the size of the object store if `free` bytes of memory and `shared` bytes of /dev/shm are free.

    The store takes memory only for what is in it. What has no room is written to disk; a step over 65 million
    tokens is 0.8 GB. If /dev/shm is small, Ray puts the store into files.
    """
    max_bytes = min(0.3 * min(free, total), 0.8 * shared)
    return max(LEAST_STORE_BYTES, int(max_bytes))
