"""Access to the Ray cluster of a run: only processes that have its token are answered."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_rl.config.secrets import remember
from grpo_rl.errors import ClusterError

ALLOW_KEY = "ray_kwargs.ray_init.allow_insecure"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
MODE_VARIABLE = "RAY_AUTH_MODE"
_PROBE_TIMEOUT_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def answers_without_token(address: str) -> bool:
    """Return whether the cluster at `address` (host:port) answers without a token, and so runs any process's code."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(_METHOD)
        try:
            ask(b"", timeout=_PROBE_TIMEOUT_S)
        except grpc.RpcError:
            # Refused; or nothing listens there, which the connection itself will show.
            return False
    return True


def refuses_our_token(address: str) -> bool:
    """Return whether the cluster at `address` (host:port) refuses this process's token, or its lack of one."""
    import grpc
    import ray._raylet

    raylet: Any = ray._raylet  # which has no types
    ours = raylet.AuthenticationTokenLoader.instance()
    headers = ours.get_token_for_http_header() if ours.has_token() else {}
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_PROBE_TIMEOUT_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def refuse_open_cluster(address: str, *, allowed: bool) -> None:
    """Raise ClusterError for a cluster without authentication, unless it is allowed."""
    if not allowed and answers_without_token(address):
        raise ClusterError(
            f"the Ray cluster at {address} takes commands from any process that reaches it: start it with RAY_AUTH_MODE=token, or set "
            f"{ALLOW_KEY}=true where the network itself keeps others out"
        )


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
