"""Who may talk to the Ray cluster of a run: only those that have its token."""

from __future__ import annotations

from grpo_rl.errors import ClusterError

ALLOW_KEY = "ray_kwargs.ray_init.allow_insecure"
_PROBE_TIMEOUT_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def answers_without_token(address: str) -> bool:
    """Whether the cluster at `address` (host:port) talks to a stranger: whoever reaches that port can run code there."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(_METHOD)
        try:
            ask(b"", timeout=_PROBE_TIMEOUT_S)
        except grpc.RpcError:
            # Refused; or nobody listens there, which the connection itself tells.
            return False
    return True


def refuse_open_cluster(address: str, *, allowed: bool) -> None:
    """Raise ClusterError for a cluster without authentication, unless it is allowed."""
    if not allowed and answers_without_token(address):
        raise ClusterError(
            f"the Ray cluster at {address} takes commands from anybody who reaches it: start it with RAY_AUTH_MODE=token, or set "
            f"{ALLOW_KEY}=true where the network itself keeps others out"
        )
