"""Nobody without the token talks to the Ray of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_rl.cluster.session import auth
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.errors import ClusterError


def listeners() -> set[int]:
    """Ports on which somebody of this machine listens."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_no_listener_of_a_local_cluster_answers_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    before = listeners()
    with ray_session(RayInitConfig(), 1):
        import ray

        gcs = str(ray.get_runtime_context().gcs_address)
        opened = listeners() - before
        assert int(gcs.rpartition(":")[2]) in opened
        assert not auth.answers_without_token(gcs)
        assert [port for port in opened if auth.answers_without_token(f"127.0.0.1:{port}")] == []
        auth.refuse_open_cluster(gcs, allowed=False)


def test_a_cluster_that_answers_strangers_is_refused_unless_allowed() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    class Anybody(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Anybody()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE=token.*allow_insecure=true"):
            auth.refuse_open_cluster(f"127.0.0.1:{port}", allowed=False)
        auth.refuse_open_cluster(f"127.0.0.1:{port}", allowed=True)
    finally:
        server.stop(None)
