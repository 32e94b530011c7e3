"""A Ray that is started here, for one run alone: out of reach of signals and of the network, with a token of its own.

Ray has no settings for most of this, so that names of its Python modules are replaced while it starts. The version of
Ray is pinned, and tests look at what is started: sessions, blocked signals, listening sockets, and what is printed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.child_processes import shielded
from grpo_rl.config.secrets import remember

TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def own_token() -> Iterator[None]:
    """Give this process and those below it a token for a local Ray, unless the user has named one or switched it off.

    Ray would write one to ~/.ray/auth_token, for all of the user's clusters and readable to all users that may enter
    that folder: with it, another user of the machine could make Ray run code. A variable can be read by this user's
    processes only.
    """
    if any(name in os.environ for name in TOKEN_VARIABLES) or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        yield
        return
    token = secrets.token_hex(32)
    remember([token])
    os.environ["RAY_AUTH_TOKEN"] = token
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
        if "ray" in sys.modules:
            forget_token()


def forget_token() -> None:
    """Make Ray look its token up again: its C++ part remembers the first that it found."""
    import ray._raylet

    raylet: Any = ray._raylet  # which has no types
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def started_apart() -> Iterator[None]:
    """Make `ray.init` start its processes in sessions of their own, shielded from signals, and listening on loopback
    only.

    Ray blocks SIGINT for its processes, but leaves them in the controller's process group: a SIGTERM or SIGHUP to the
    group ended Ray's head, and with it the run that was about to save its state.
    """
    from ray._private import ray_constants, services

    popen, cluster = services.ConsolePopen, ray_constants.ENABLE_RAY_CLUSTER

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

    # With this, which is meant for other systems than Linux, Ray takes 127.0.0.1 as the node's address, and listens there.
    services.ConsolePopen, ray_constants.ENABLE_RAY_CLUSTER = Apart, False  # type: ignore[misc]
    try:
        yield
    finally:
        services.ConsolePopen, ray_constants.ENABLE_RAY_CLUSTER = popen, cluster  # type: ignore[misc]


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
