"""What a process looks for before it connects to a cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.cluster.session.liveness import refuse_another_users_node
from grpo_rl.errors import ClusterError


def test_a_raylet_whose_socket_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    address, socket_path = "192.0.2.1:47123", tmp_path / "raylet"
    options = [f"--raylet_socket_name={socket_path}", f"--gcs-address={address}"]
    code = "print(flush=True); input()"
    raylet = subprocess.Popen([sys.executable, "-c", code, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert raylet.stdout is not None and raylet.stdout.readline()  # its command line is empty for an instant
        with pytest.raises(ClusterError, match=r"47123 on this machine is another user's \(uid \d+\).*ray job submit"):
            refuse_another_users_node(address)
        refuse_another_users_node("192.0.2.1:47124")  # another cluster's
        socket_path.touch()
        refuse_another_users_node(address)
    finally:
        raylet.communicate(b"\n", timeout=60)
