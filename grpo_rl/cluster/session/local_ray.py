"""A Ray that is started here, for one run alone: out of reach of signals and of the network, with a token of its own.

Ray has no settings for most of this, so that names of its Python modules are replaced while it starts. The version of
Ray is pinned, and tests look at what is started: sessions, blocked signals, listening sockets, and what is printed.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.config.secrets import remember
from grpo_rl.processes.family import shielded

LOOK_S = 1.0
"""The longest wait for this machine's own address to answer."""
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
MODE_VARIABLE = "RAY_AUTH_MODE"


@contextmanager
def own_token() -> Iterator[None]:
    """Give this process and those below it a token for a local Ray, unless the user has named one or switched it off.

    Ray would write one to ~/.ray/auth_token, for all of the user's clusters and readable to all users that may enter
    that folder: with it, another user of the machine could make Ray run code. A variable can be read by this user's
    processes only. Afterwards this process is as before, and can start or join clusters of another kind.
    """
    mode = os.environ.get(MODE_VARIABLE)
    has_token = any(name in os.environ for name in TOKEN_VARIABLES)
    makes_token = not has_token and (mode or "token").lower() == "token"
    if makes_token:
        token = secrets.token_hex(32)
        remember([token])
        os.environ["RAY_AUTH_TOKEN"] = token
    try:
        yield
    finally:
        if makes_token:
            del os.environ["RAY_AUTH_TOKEN"]
        if "ray" in sys.modules:
            forget_token()
            restore_mode(mode)


def forget_token() -> None:
    """Make Ray look its token up again: its C++ part remembers the first that it found."""
    import ray._raylet

    raylet: Any = ray._raylet  # which has no types
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def restore_mode(mode: str | None) -> None:
    """Undo that `ray.init` switches tokens on for this process and those below it, for as long as it lives.

    The head of a cluster that is started later by other means, with that mode and no token, ends as soon as it has
    started; all that is seen of it is that Ray waits for a file in vain.
    """
    if os.environ.get(MODE_VARIABLE) == mode:
        return
    import ray._raylet

    if mode is None:
        del os.environ[MODE_VARIABLE]
    else:
        os.environ[MODE_VARIABLE] = mode
    raylet: Any = ray._raylet  # which has no types
    raylet.Config.initialize("")  # reads the environment again


@contextmanager
def started_apart() -> Iterator[None]:
    """Make `ray.init` start its processes in sessions of their own, shielded from signals, and listening on loopback
    only.

    Ray blocks SIGINT for its processes, but leaves them in the controller's process group: a SIGTERM or SIGHUP to the
    group ended Ray's head, and with it the run that was about to save its state.
    """
    from ray._private import services

    popen = services.ConsolePopen

    class Apart(popen):  # type: ignore[misc, valid-type]
        """A process of Ray's, which nothing but SIGKILL ends."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            if options.get("stdin") is None:
                options["stdin"] = subprocess.DEVNULL  # not the controller's terminal
            with shielded():
                super().__init__(*arguments, **options | {"start_new_session": True})

        def terminate(self) -> None:
            # Ray waits for a second after SIGTERM, which is blocked, before it kills. Workers have ended by then.
            self.kill()

    services.ConsolePopen = Apart  # type: ignore[misc]
    try:
        with on_loopback():
            yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray take 127.0.0.1 as this node's address, to listen there and to find what listens there.

    By itself it replaces 127.0.0.1 by the machine's address on the network. The constant is meant for other systems than
    Linux.
    """
    from ray._private import ray_constants

    cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster


def is_only_on_loopback(address: str) -> bool:
    """Return whether a cluster's head at `address`, HOST:PORT, answers on this machine's loopback and nowhere else."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    try:
        socket.create_connection((get_node_ip_address(), int(port)), timeout=LOOK_S).close()
    except OSError:
        return True
    return False


@contextmanager
def errors_logged(log: Path) -> Iterator[None]:
    """Redirect what Ray's own processes report to `log`, in place of the screen.

    A raylet calls every worker that did not announce its end a victim of the OOM killer or of an error of the
    application, also one that this package has ended on purpose. What matters of it is in the errors that calls to
    workers raise.
    """
    from ray._private import worker

    before = worker.print_to_stdstream

    def write(data: Any, ignore_prefix: bool) -> None:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"({data.get('pid')}) {line}\n" for line in data["lines"])

    worker.print_to_stdstream = write
    try:
        yield
    finally:
        worker.print_to_stdstream = before
