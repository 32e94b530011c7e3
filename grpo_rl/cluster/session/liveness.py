"""The check that the Ray cluster is there, made before Ray connects and all the time while a run uses it; and access to it.

Ray itself waits for a minute, in silence, where nothing listens, and a driver whose raylet has gone never ends. So a
thread connects to the head and the raylet every LOOK_S; one that takes no connection for longer than a patience is
lost. Only processes that have a cluster's token are answered. Where Ray itself would end this process before, `ray_patches.called_at_exit_of_ray` has the last word.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from grpo_rl.config.secrets import remember
from grpo_rl.errors import ClusterError

CONNECT_S = 3.0
LOOK_S = 0.7
LOCAL_PATIENCE_S = 2.0
"""Seconds of patience with a local cluster, which does not come back once it has gone."""
REMOTE_PATIENCE_S = 60.0
"""Seconds that Ray's own processes wait for a head that is started again, or for a network that comes back."""
NODE_PATIENCE_S = 6.0
"""Seconds of patience with a node: where its raylet has ended, all that ran on it is gone."""
OWN_ADDRESS_S = 1.0
"""The longest wait for this machine's own address to answer."""
_HOST_PORT = re.compile(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)$")


def refuse_unreachable(address: str) -> None:
    """Raise ClusterError where nothing listens at `address`, or what does asks for another token: Ray itself would try for 20 s.

    Words such as `auto` are for Ray to look up.
    """
    found = _HOST_PORT.match(address)
    if found is None:
        return
    reason = unanswered((found[1], int(found[2])))
    if reason is not None:
        raise ClusterError(
            f"no Ray cluster at {address}: {reason}; start it (ray start --head), or mend ray_kwargs.ray_init.address "
            "or the variable RAY_ADDRESS"
        )
    if refuses_our_token(f"{found[1]}:{found[2]}"):
        raise wrong_token(f"the cluster at {address}")


def why_not_connected(address: str | None, error: Exception) -> ClusterError:
    """Return an error, of one line, for a connection that Ray could not make."""
    text = str(error)
    where = f"the cluster at {address}" if address else "a local Ray"
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "Version mismatch" in text and len(versions) == 2:
        (theirs, their_python), (ours, our_python) = versions
        return ClusterError(
            f"{where} runs Ray {theirs} on Python {their_python}, this process Ray {ours} on Python {our_python}: "
            "install the same versions on every node"
        )
    if address and any("token" in str(cause).lower() for cause in _causes(error)):
        return wrong_token(where)
    return ClusterError(f"cannot connect to {where}: {type(error).__name__}: {' '.join(text.split())}")


def wrong_token(where: str) -> ClusterError:
    """Return the error for a cluster that asks for another token, with what to do."""
    return ClusterError(
        f"{where} asks for a token, and this process has none or another: RAY_AUTH_MODE=token with the cluster's own in "
        "RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def unanswered(address: tuple[str, int] | str) -> str | None:
    """Return why no connection is taken at a host and port, or at the path of a Unix socket; None where one is."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        if isinstance(address, str):
            with closing(socket.socket(family)) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(address)
        else:
            socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


class ClusterWatch(threading.Thread):
    """Watches the cluster from a thread of its own: `on_lost` is called once, with the cause, when it has gone."""

    def __init__(
        self,
        places: Mapping[str, tuple[str, int] | str],
        on_lost: Callable[[str], None],
        patience_s: float = LOCAL_PATIENCE_S,
    ) -> None:
        super().__init__(name="cluster", daemon=True)
        self.places, self.on_lost, self.patience_s = dict(places), on_lost, patience_s
        self._over = threading.Event()
        self.start()

    def close(self) -> None:
        """Stop looking, before the cluster is left in good order."""
        self._over.set()
        self.join(CONNECT_S + LOOK_S)

    def run(self) -> None:
        since = dict.fromkeys(self.places, time.monotonic())
        while not self._over.wait(LOOK_S):
            for name, address in self.places.items():
                began = time.monotonic()
                reason = unanswered(address)
                if reason is None:
                    since[name] = time.monotonic()
                    continue
                # What a controller that stood still itself has missed does not count: only looks that failed do.
                silent_s = began - since[name]
                if silent_s > self.patience_s and not self._over.is_set():
                    self.on_lost(f"the Ray cluster is lost: {name} has not answered for {silent_s:.1f} s ({reason})")
                    return


def is_only_on_loopback(address: str) -> bool:
    """Return whether a cluster's head at `address`, HOST:PORT, answers on this machine's loopback and nowhere else."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    try:
        socket.create_connection((get_node_ip_address(), int(port)), timeout=OWN_ADDRESS_S).close()
    except OSError:
        return True
    return False


# ---- access ------------------------------------------------------------------------------------------

ALLOW_KEY = "ray_kwargs.ray_init.allow_insecure"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
MODE_VARIABLE = "RAY_AUTH_MODE"
_PROBE_TIMEOUT_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def _raylet() -> Any:
    """Return Ray's C++ part, which has no types."""
    import ray._raylet

    return ray._raylet


def _refusal(address: str, headers: Mapping[str, str]) -> Any:
    """Return grpc's code of the answer to a harmless question with these headers to the cluster at `address`; None: it answers."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_PROBE_TIMEOUT_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            return error.code()
    return None


def answers_without_token(address: str) -> bool:
    """Return whether the cluster at `address` (host:port) answers without a token, and so runs any process's code."""
    # Where nothing listens the connection itself will show it.
    return _refusal(address, {}) is None


def refuses_our_token(address: str) -> bool:
    """Return whether the cluster at `address` (host:port) refuses this process's token, or its lack of one."""
    import grpc

    ours = _raylet().AuthenticationTokenLoader.instance()
    headers = ours.get_token_for_http_header() if ours.has_token() else {}
    return bool(_refusal(address, headers) == grpc.StatusCode.UNAUTHENTICATED)


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
    _raylet().AuthenticationTokenLoader.instance().reset_cache()


def restore_mode(mode: str | None) -> None:
    """Undo that `ray.init` switches tokens on for this process and those below it, for as long as it lives.

    The head of a cluster that is started later by other means, with that mode and no token, ends as soon as it has
    started; all that is seen of it is that Ray waits for a file in vain.
    """
    if os.environ.get(MODE_VARIABLE) == mode:
        return
    if mode is None:
        del os.environ[MODE_VARIABLE]
    else:
        os.environ[MODE_VARIABLE] = mode
    _raylet().Config.initialize("")  # reads the environment again
