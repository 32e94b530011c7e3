"""Machines made out of this one: each with its own network address, host name, processes, /tmp, /dev/shm and home.

They share the file system apart from that, as machines of a cluster share storage. A machine is a process in namespaces of its
own (`unshare`) in a network namespace (`ip netns`), joined to the others by a bridge. It needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PREFIX, NET = "grpotest", "10.78.0"
BRIDGE, ROUTER = f"{PREFIX}br", f"{NET}.254"
READY_S = 10.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CPU_GROUPS, PERIOD_US = Path("/sys/fs/cgroup/cpu"), 10_000
"""The kernel's groups of processes with a share of the cores (cgroup v1), and the time within which a share is spent."""
NAMES = {1: "127.0.1.1 node-1", 2: "172.17.0.1 node-2", 3: ""}
"""What /etc/hosts of a machine calls it. Debian and Ubuntu write the first form; the second is an address on another interface
of the machine, which every machine has, as docker's bridge; the third machine's name is known to nobody."""


def lacking() -> str | None:
    """Return why no machines can be made here; None if they can."""
    if os.geteuid() != 0:
        return "machines are made by root only"
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]} (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"unshare: {probe.stderr.decode().strip()}"


def lacks_shares() -> str | None:
    """Return why a machine cannot be given a share of the cores here; None if it can."""
    return None if os.access(CPU_GROUPS / "cpu.cfs_quota_us", os.W_OK) else f"{CPU_GROUPS} is no writable cgroup of version 1"


def _do(*words: str, may_fail: bool = False) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert may_fail or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Machines:
    """Up to three machines, `1`, `2` and `3`; what lies in `shared` is the same on all, also below /tmp."""

    def __init__(self, folder: Path, shared: Sequence[Path], environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.shared = {path for path in [folder, *shared] if path.is_relative_to("/tmp")}
        self._first: dict[int, subprocess.Popen[str]] = {}
        self.close()
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        _do("ip", "link", "set", BRIDGE, "up")

    @property
    def running(self) -> set[int]:
        """The machines that have not been killed."""
        return set(self._first)

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"{NET}.{number}"

    def add(self, number: int) -> None:
        """Start a machine, also one that was killed."""
        netns, outer = f"{PREFIX}{number}", f"{PREFIX}v{number}"
        self._remove(number)
        _do("ip", "netns", "add", netns)
        _do("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", netns)
        _do("ip", "link", "set", outer, "master", BRIDGE, "up")
        _do("ip", "-n", netns, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _do("ip", "-n", netns, "link", "add", "docker0", "type", "bridge")
        _do("ip", "-n", netns, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        for device in ("lo", "eth0", "docker0"):
            _do("ip", "-n", netns, "link", "set", device, "up")
        # Nothing answers there. With a route Ray finds the address by which other machines know this one.
        _do("ip", "-n", netns, "route", "add", "default", "via", ROUTER)
        hosts, ready = self.folder / f"hosts-{number}", self.folder / f"ready-{number}"
        hosts.write_text(f"127.0.0.1 localhost\n{NAMES[number]}\n")
        ready.unlink(missing_ok=True)
        places = [(path, '"$new"' + str(path).removeprefix("/tmp")) for path in sorted(self.shared)]
        binds = "; ".join(f"mkdir -p {place} && mount --rbind {path} {place}" for path, place in places) or "true"
        # The shell stays: as the machine's first process it takes in the orphans that end, for which Ray would wait.
        script = f"""set -e
            hostname node-{number}; mount --make-rprivate /; mount --bind {hosts} /etc/hosts
            new=$(mktemp -d); mount -t tmpfs tmpfs "$new"; chmod 1777 "$new"
            {binds}
            mount --move "$new" /tmp; mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/home
            touch {ready}; sleep infinity & wait"""
        unshare = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--mount-proc", "bash", "-c", script]
        self._first[number] = subprocess.Popen(
            ["ip", "netns", "exec", netns, *unshare], start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + READY_S
        while not ready.exists():
            assert self._first[number].poll() is None, f"machine {number}: {self._first[number].stderr.read()}"  # type: ignore[union-attr]
            assert time.monotonic() < until, f"machine {number} did not start"
            time.sleep(0.05)

    def _inside(self, number: int) -> int:
        """Return the id of a machine's first process as this machine sees it."""
        unshare = self._first[number].pid
        return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

    def start(self, number: int, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a machine, in the current folder, with a home of the machine's own and no environment of Python's."""
        enter = ["nsenter", "--target", str(self._inside(number)), "--mount", "--pid", "--net", "--uts", "--ipc"]
        join = (
            f"cd {CPU_GROUPS / (PREFIX + str(number))} 2>/dev/null && echo 0 > cgroup.procs"  # of one with a share of the cores
        )
        enter += ["bash", "-c", f'{join}; cd "$0" && exec "$@"', os.getcwd()]
        known = {"PATH": PATH, "HOME": "/tmp/home", "LANG": "C.UTF-8"} | self.environment | environment
        return subprocess.Popen([*enter, *words], env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, number: int, *words: str, code: int | None = 0, timeout_s: float = 500.0, **environment: str) -> str:
        """Return what a command on a machine prints; it must end with `code`."""
        process = self.start(number, *words, **environment)
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert code is None or process.returncode == code, f"{' '.join(words)}: ended with {process.returncode}\n{said}"
        return said

    def share(self, number: int, cores: float | None) -> None:
        """Give all processes of a machine so many cores together, now and later; None: all that there are."""
        group = CPU_GROUPS / f"{PREFIX}{number}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(-1 if cores is None else int(cores * PERIOD_US)))
        inside = os.stat(f"/proc/{self._inside(number)}/ns/pid").st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.stat(process / "ns/pid").st_ino == inside:
                    (group / "cgroup.procs").write_text(process.name)

    def cut(self, number: int, seconds: float | None = None) -> None:
        """Take a machine's network away, for some seconds or for good."""
        _do("ip", "link", "set", f"{PREFIX}v{number}", "down")
        if seconds is not None:
            time.sleep(seconds)
            _do("ip", "link", "set", f"{PREFIX}v{number}", "up")

    def kill(self, number: int) -> None:
        """End a machine with every process on it, at once."""
        os.kill(self._inside(number), signal.SIGKILL)
        self._first.pop(number).wait(READY_S)

    def _remove(self, number: int) -> None:
        with contextlib.suppress(OSError):  # there is none, or its last processes are still ending
            (CPU_GROUPS / f"{PREFIX}{number}").rmdir()
        _do("ip", "netns", "del", f"{PREFIX}{number}", may_fail=True)
        _do("ip", "link", "del", f"{PREFIX}v{number}", may_fail=True)

    def close(self) -> None:
        """End all machines, and what an earlier test left of them."""
        for number in list(self._first):
            self.kill(number)
        for number in NAMES:
            self._remove(number)
        _do("ip", "link", "del", BRIDGE, may_fail=True)
