"""Access to the Ray cluster of a run: only processes that have its token are answered."""

from __future__ import annotations

from typing import Any

from grpo_rl.errors import ClusterError

ALLOW_KEY = "ray_kwargs.ray_init.allow_insecure"
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
