"""The check that the Ray cluster is there, before Ray connects and while a run uses it, and access to it.

If nothing listens Ray waits for a minute, in silence, and a driver whose raylet has gone never ends.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_rl.background import Watch
from grpo_rl.errors import ClusterError

CONNECT_S = 3.0
LOOK_S = 0.7
LOCAL_PATIENCE_S = 2.0
"""A local cluster does not come back once it has gone."""
REMOTE_PATIENCE_S = 60.0
"""As long as Ray's own processes wait for a head that is started again, or a network that comes back."""
NODE_PATIENCE_S = 6.0
KNOWS_TOKENS = (2, 52)
OWN_ADDRESS_S = 1.0
_HOST_PORT = re.compile(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)$")


def refuse_unreachable(address: str) -> None:
    """Raise ClusterError if nothing listens at `address`, or what does asks for another token.

    Ray itself would try for 20 s. Words such as `auto` are for Ray to look up.
    """
    match = _HOST_PORT.match(address)
    if match is None:
        return
    if (reason := unanswered((match[1], int(match[2])))) is not None:
        raise ClusterError(
            f"no Ray cluster at {address}: {reason}; start it (ray start --head), or mend ray_kwargs.ray_init.address "
            "or the variable RAY_ADDRESS"
        )
    if refuses_our_token(f"{match[1]}:{match[2]}"):
        raise wrong_token(f"the cluster at {address}")


def refuse_another_users_node(address: str) -> None:
    """Raise ClusterError if another user started this machine's raylet: Ray aborts a process that connects."""
    raylets = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            options = dict(word.partition("=")[::2] for word in file.read_bytes().decode(errors="replace").split("\0"))
            head = options.get("--gcs-address", "")
            if "--raylet_socket_name" in options and (":" not in address or head.endswith(address[address.rindex(":") :])):
                raylets.append((options["--raylet_socket_name"], file.stat().st_uid))
    if raylets and not any(os.access(socket_path, os.W_OK) for socket_path, _ in raylets):
        raise ClusterError(
            f"the Ray of the cluster at {address} on this machine is another user's (uid {raylets[0][1]}), and lets nobody "
            "else connect: submit the run as a job, which runs as that user (scripts/submit.sh, ray job submit)"
        )


def why_not_connected(address: str | None, error: Exception) -> ClusterError:
    text = str(error)
    where = f"the cluster at {address}" if address else "a local Ray"
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "Version mismatch" in text and len(versions) == 2:
        (their_ray, their_python), (our_ray, our_python) = versions
        remedy = f'uv pip install --python {sys.executable} "ray=={their_ray}"'
        if their_ray == our_ray:
            remedy = f"bash scripts/setup.sh with a Python {their_python}"
        return ClusterError(
            f"{where} runs Ray {their_ray} on Python {their_python}, this process Ray {our_ray} on Python {our_python}: {remedy}"
        )
    if address and any("token" in str(cause).lower() for cause in _causes(error)):
        return wrong_token(where)
    return ClusterError(f"cannot connect to {where}: {type(error).__name__}: {' '.join(text.split())}")


def wrong_token(where: str) -> ClusterError:
    installed = version("ray")
    if tuple(map(int, installed.split(".")[:2])) < KNOWS_TOKENS:
        return ClusterError(
            f"{where} asks for a token, which Ray {installed} here does not know: uv pip install --python {sys.executable} "
            '"ray==VERSION" with the version of the cluster (`ray --version` there)'
        )
    return ClusterError(
        f"{where} asks for a token, and this process has none or another: RAY_AUTH_MODE=token with the cluster's own in "
        "RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def unanswered(address: tuple[str, int] | str) -> str | None:
    """Return why no connection is taken at a host and port, or at the path of a Unix socket; None if one is."""
    try:
        if isinstance(address, str):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(address)
        else:
            socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


class ClusterWatch(Watch):
    """Calls `on_lost` once, with the cause, if the cluster has gone."""

    join_timeout_s = CONNECT_S + LOOK_S

    def __init__(
        self,
        places: Mapping[str, tuple[str, int] | str],
        on_lost: Callable[[str], None],
        patience_s: float = LOCAL_PATIENCE_S,
    ) -> None:
        self.places, self.on_lost, self.patience_s = dict(places), on_lost, patience_s
        super().__init__("cluster")

    def run(self) -> None:
        since = dict.fromkeys(self.places, time.monotonic())
        while not self.stopping.wait(LOOK_S):
            for name, address in self.places.items():
                began = time.monotonic()
                reason = unanswered(address)
                if reason is None:
                    since[name] = time.monotonic()
                    continue
                # What a controller that stood still itself has missed does not count: only looks that failed do.
                silent_s = began - since[name]
                if silent_s > self.patience_s and not self.stopping.is_set():
                    self.on_lost(f"the Ray cluster is lost: {name} has not answered for {silent_s:.1f} s ({reason})")
                    return


def is_only_on_loopback(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing, and chooses the interface to other machines
            local_address = probe.getsockname()[0]
        socket.create_connection((local_address, int(port)), timeout=OWN_ADDRESS_S).close()
    except OSError:
        return True
    return False


# ---- access ------------------------------------------------------------------------------------------

ALLOW_KEY = "ray_kwargs.ray_init.allow_insecure"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
MODE_VARIABLE = "RAY_AUTH_MODE"
_PROBE_TIMEOUT_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def _refusal(address: str, headers: Mapping[str, str]) -> Any:
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_PROBE_TIMEOUT_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            return error.code()
    return None


def answers_without_token(address: str) -> bool:
    # If nothing listens the connection itself will show it.
    return _refusal(address, {}) is None


def refuses_our_token(address: str) -> bool:
    """Return whether the cluster at `address` (host:port) refuses this process's token, or its lack of one."""
    import grpc

    token = own_token()
    return bool(_refusal(address, {"authorization": f"Bearer {token}"} if token else {}) == grpc.StatusCode.UNAUTHENTICATED)


def own_token() -> str | None:
    """Return the token that Ray sends from this process, if any."""
    if os.environ.get(MODE_VARIABLE, "").lower() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    try:
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().read_text().strip()
    except OSError:
        return None


def refuse_open_cluster(address: str, *, allowed: bool) -> None:
    if not allowed and answers_without_token(address):
        raise ClusterError(
            f"the Ray cluster at {address} takes commands from any process that reaches it: start it with RAY_AUTH_MODE=token "
            f"(Ray {'.'.join(map(str, KNOWS_TOKENS))} or newer; installed here is {version('ray')}), "
            f"or set {ALLOW_KEY}=true where the network itself keeps others out"
        )
