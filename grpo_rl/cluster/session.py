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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.cluster import auth, presence, watch
from grpo_rl.config.schema import RayInitConfig
from grpo_rl.rollout.environment import SESSION_FOLDER

# Weights travel through shared memory two buckets at a time; batches are small beside them.
OBJECT_STORE_BYTES = 2 * 2**30
WATCH_S = 15.0
# Ray puts its sockets below, and a socket's path has at most 107 characters.
LONGEST_FOLDER = 36


@contextmanager
def ray_session(
    config: RayInitConfig,
    num_cpus: int,
    record: Path | None = None,
    on_lost: Callable[[str], None] | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Connect to Ray, and leave it again. Raises ClusterError when that does not work.

    A local Ray has no dashboard, its workers' output stays in log files, and nothing of it outlives this process by
    more than seconds, however this process ends. `record`, a file, says what belongs to the session while it lasts.
    `on_lost` is called by another thread, with the cause, when the cluster has gone.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "ignore_reinit_error": False}
    address = config.address or os.environ.get("RAY_ADDRESS")
    with watched(record) as folder:
        import ray

        if address:
            presence.refuse_unreachable(address)
            options["address"] = address
        else:
            options |= {
                "num_cpus": config.num_cpus or num_cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(folder),
            }
        try:
            ray.init(**options)
        except Exception as error:
            raise presence.why_not_connected(address, error) from error
        watch = None
        try:
            # A local Ray asks for a token by itself, unless RAY_AUTH_MODE=disabled stands in the environment.
            auth.refuse_open_cluster(str(ray.get_runtime_context().gcs_address), allowed=config.allow_insecure)
            if on_lost is not None:
                watch = _watch(on_lost, warn, is_local=not address)
            yield
        finally:
            if watch is not None:
                watch.close()
            ray.shutdown()


def _watch(on_lost: Callable[[str], None], warn: Callable[[str], None], *, is_local: bool) -> presence.ClusterWatch:
    import ray

    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    places: dict[str, tuple[str, int] | str] = {"its head (gcs_server)": (host, int(port))}
    if is_local:
        node = ray._private.worker.global_worker.node
        assert node is not None
        places["its raylet"] = str(node.raylet_socket_name)
    patience_s = presence.LOCAL_PATIENCE_S if is_local else presence.REMOTE_PATIENCE_S
    return presence.ClusterWatch(places, on_lost, warn, patience_s)


@contextmanager
def watched(record: Path | None = None) -> Iterator[Path]:
    """A temporary folder. It goes at the end, and so does every process started within, even if this one is killed."""
    token = secrets.token_hex(16)
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="grpo-", dir=base if len(base) < LONGEST_FOLDER - 14 else "/tmp"))
    (folder / watch.MARKER).write_text(token)
    if record is not None:
        record.write_text(
            json.dumps(
                {"token": token, "folder": str(folder), "pid": os.getpid(), "host": socket.gethostname(), "boot": _boot()}
            )
        )
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-E", watch.__file__, token, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C on the terminal is for the controller
    )
    ours = {watch.TOKEN: token, SESSION_FOLDER: str(folder)}
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
    """Processes that the run which left `record` had left too, ended now with its temporary folder.

    To be called by who holds the lock of the run's folder, so that the earlier run's controller is gone.
    """
    try:
        found = json.loads(record.read_text())
        token, folder, host = str(found["token"]), Path(found["folder"]), found["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if host != socket.gethostname() or len(token) != 32:
        return []
    if found.get("boot") != _boot():
        # No process outlives its machine; the folder may.
        with contextlib.suppress(OSError):
            if (folder / watch.MARKER).read_text() == token:
                shutil.rmtree(folder, ignore_errors=True)
        return []
    ended = watch.clean(token, folder)
    record.unlink(missing_ok=True)
    return ended


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
