"""Nobody without the token talks to the Ray of a run."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from sockets import ports_of

from grpo_rl.cluster.session import launcher, liveness
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.errors import ClusterError
from grpo_rl.processes.family import STOP_SIGNALS
from grpo_rl.rollout.engine_environment import SESSION_FOLDER

REPORT_S = 3.0
"""Seconds in which a raylet reports that a worker died: it took less than one."""


def seen(pids: Iterable[int]) -> Iterator[tuple[str, int, int, int]]:
    """Name, group, session and blocked signals of those of these processes that are still there."""
    for pid in pids:
        with suppress(OSError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            yield status["Name"].strip(), os.getpgid(pid), os.getsid(pid), int(status["SigBlk"], 16)


def _gcs() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


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
            liveness.refuse_open_cluster(f"127.0.0.1:{port}", allowed=False)
        liveness.refuse_open_cluster(f"127.0.0.1:{port}", allowed=True)
    finally:
        server.stop(None)


@dataclass(frozen=True)
class Local:
    """A local Ray of a user who has never used one. It stays until the file's end: tests with a Ray of their own come before."""

    folder: Path
    """The session's."""
    home: Path

    def family(self) -> list[int]:
        """The processes of the session."""
        return list(launcher.processes(os.environ[launcher.TOKEN]))

    def addresses(self) -> set[tuple[str, int]]:
        """Host as the kernel writes it, and port, of each socket on which one of them or this process listens."""
        sockets = ports_of([*self.family(), os.getpid()])
        return {(host, int(port, 16)) for host, _, port in (address.rpartition(":") for address, _ in sockets)}


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("HOME", str(home))
        with ray_session(RayInitConfig(), 1):
            yield Local(Path(os.environ[SESSION_FOLDER]), home)


def test_no_listener_of_a_local_cluster_answers_a_stranger(local_ray: Local) -> None:
    ports = {port for _, port in local_ray.addresses()}
    assert int(_gcs().rpartition(":")[2]) in ports
    assert not liveness.answers_without_token(_gcs())
    assert [port for port in ports if liveness.answers_without_token(f"127.0.0.1:{port}")] == []
    liveness.refuse_open_cluster(_gcs(), allowed=False)


def test_other_users_find_neither_files_nor_sockets_nor_the_token_of_a_local_ray(local_ray: Local) -> None:
    found = local_ray.folder.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)
    sockets = [path for path in local_ray.folder.rglob("*") if path.is_socket()]
    assert sockets, "Ray's own are below"
    assert list(local_ray.home.rglob("*")) == [], "no token in the home folder"
    assert liveness.refuses_our_token(_gcs()) is False, "and yet there is one"


def test_a_local_ray_is_out_of_reach_of_other_machines_and_of_signals_to_its_controller(local_ray: Local) -> None:
    import ray

    assert ray.get(ray.remote(lambda: ray.util.get_node_ip_address()).remote(), timeout=60) == "127.0.0.1"
    family = list(seen(local_ray.family()))
    assert {"raylet", "gcs_server"} <= {name for name, *_ in family}
    hosts = {host for host, _ in local_ray.addresses()}
    assert hosts and hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1, as IPv4 and as IPv6 write it"
    stops = sum(1 << (number - 1) for number in STOP_SIGNALS)
    for name, group, session, blocked in family:
        assert group != os.getpgid(0) and session != os.getsid(0) and blocked & stops == stops, name


def test_what_ray_reports_by_itself_is_not_on_the_screen(local_ray: Local, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    class Victim:
        def pid(self) -> int:
            return os.getpid()

        def work(self) -> None:
            time.sleep(600)

    victim = ray.remote(Victim).remote()
    pid = ray.get(victim.pid.remote(), timeout=60)
    busy = victim.work.remote()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(busy, timeout=60)
    time.sleep(REPORT_S)
    assert "died" not in "".join(capfd.readouterr())
