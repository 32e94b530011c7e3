"""A place to run code that a model wrote: namespaces, a read-only root, no rights, no network, hard limits.

Only what a candidate wrote comes out, to be judged here: see docs/rewards.md.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import math
import os
import platform
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_rl.errors import RewardError
from grpo_rl.frozen import frozen
from grpo_rl.rewards.sandbox import inside
from grpo_rl.rewards.sandbox.syscall_filter import PIVOT_ROOT, call_filter

NOBODY = 65534
START_S = 20.0
"""For the fork server and for a sandbox. On an idle machine they take 0.02 s and less than 0.01."""
GRACE_S = 5.0
"""For the inside to report beyond a case's time; then everything in it is killed."""
SERVE = (
    "import sys, socket; sys.path[:0] = sys.argv[1:2]; import inside; del sys.path[0]; "
    "inside.serve(socket.socket(fileno=int(sys.argv[2])))"
)
"""Imports one module, and not the package around it."""
SETUP_FAILED = b"S"
STATUS = {b"E": "ended", b"T": "timed_out", b"O": "too_much"}
MIB = 1 << 20
FILE_BYTES = 16 * MIB
"""Of one file, and of all in /tmp."""


@frozen
class Limits:
    time_s: float = 5.0
    memory_mb: int = 512
    output_kb: int = 4096

    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.time_s) + 1,
            "RLIMIT_AS": int(self.memory_mb * MIB),
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": 16,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@frozen
class Case:
    """A program with `stdin`, or a call of its `function`."""

    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()


@frozen
class CaseOutcome:
    status: str
    """`ended`, `timed_out`, or `too_much`: it wrote more than is allowed."""
    exit_code: int = -1
    stdout: bytes = b""
    value: bytes = b""
    """The returned value, to be read with `code_rule.decode`."""
    stderr: bytes = b""

    @property
    def succeeded(self) -> bool:
        return self.status == "ended" and self.exit_code == 0


class ForkServer:
    """A bare interpreter that forks the launchers of all sandboxes of this process.

    A sandbox takes 7 ms with it, and 24 ms with an interpreter of its own.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def launcher(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Return the id of a new launcher with these open files, and a descriptor of the process. Raises SandboxUnavailable."""
        with self._asking:
            if self._owner != os.getpid():  # a process that was forked has a server of its own
                self._process = None
            try:
                return self._ask(descriptors)
            except (EOFError, OSError):  # somebody has killed the server
                self._end()
            try:
                return self._ask(descriptors)
            except (EOFError, OSError) as error:
                raise unavailable(f"start the launcher with {interpreter()}: {self._end() or error or 'it ended'}") from error

    def _ask(self, descriptors: Sequence[int]) -> tuple[int, int]:
        if self._process is None:
            self._start()
        self._channel.settimeout(START_S)
        socket.send_fds(self._channel, [b"F"], descriptors)
        if len(answer := self._channel.recv(4)) < 4:
            raise EOFError
        launcher = int.from_bytes(answer, "little")
        return launcher, os.pidfd_open(launcher)

    def _start(self) -> None:
        """Start the server, which ends when no process has the other end of its channel."""
        self._channel, server_end = socket.socketpair()
        with server_end:
            words = [str(Path(inside.__file__).parent), str(server_end.fileno())]
            self._process = subprocess.Popen(
                [interpreter(), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", SERVE, *words],
                pass_fds=[server_end.fileno()],
                # An order of sets that is the same in every process, as rewards may depend on it.
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._owner = os.getpid()

    def _end(self) -> str:
        """End the server; return the last line that it wrote."""
        self._channel.close()
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        try:
            output = process.communicate(timeout=GRACE_S)[1]
        except subprocess.TimeoutExpired:  # stuck in the kernel
            return ""
        return output.decode(errors="replace").strip().rpartition("\n")[2]


FORK_SERVER = ForkServer()


class Sandbox:
    """Leaving the `with` statement ends all inside. Raises SandboxUnavailable if a wall cannot be built."""

    def __init__(self, source: str, limits: Limits | None = None, line: socket.socket | None = None) -> None:
        """`line` is the first case's standard input, to be read and written; it is closed here."""
        self._limits = limits or Limits()
        self._setup: dict[str, Any] = {
            "source": source.encode(errors="replace"),
            "filter": call_filter(platform.machine()),
            "pivot_root": PIVOT_ROOT[platform.machine()],
            "rlimits": self._limits.rlimits(),
            "max_output": int(self._limits.output_kb * 1024),
            "tmp_options": f"size={FILE_BYTES},nr_inodes=1000,mode=777",
        }
        self._channel, child_end = socket.socketpair()
        with child_end, line or contextlib.nullcontext():
            try:
                self._launcher: int | None
                self.pid, self._launcher = FORK_SERVER.launcher([end.fileno() for end in (child_end, line) if end])
            except BaseException:
                self._channel.close()
                raise
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case, time_s: float | None = None) -> CaseOutcome:
        """Raises RewardError if the sandbox itself fails: no verdict on the source."""
        allowed = min(self._limits.time_s, time_s or math.inf)
        deadline = time.monotonic() + allowed + GRACE_S
        try:
            nonce = self.begin(case, allowed)
            if self._receive(len(nonce), deadline) != nonce:
                raise EOFError
            return self._outcome(deadline)
        except (EOFError, OSError) as error:
            self.close()
            raise RewardError(
                f"the sandbox for code ended in the middle of a case: {error or 'it closed its channel'}"
            ) from error

    def begin(self, case: Case, time_s: float) -> bytes:
        """Start a case without waiting for its end; return what its outcome begins with."""
        nonce = secrets.token_bytes(inside.NONCE_BYTES)
        request = {
            "stdin": case.stdin.encode(errors="replace"),
            "function": case.function,
            "arguments": case.arguments,
            "time_s": time_s,
        }
        self._send(nonce + _framed(request), time.monotonic() + time_s + GRACE_S)
        return nonce

    def close(self) -> None:
        """May be called twice."""
        self._channel.close()
        if self._launcher is not None:
            launcher, self._launcher = self._launcher, None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(launcher, signal.SIGKILL)
            ended = select.poll()
            ended.register(launcher, select.POLLIN)
            ended.poll(1000 * GRACE_S)  # one that is stuck in the kernel ends when that lets it
            os.close(launcher)

    def _start(self) -> None:
        deadline = time.monotonic() + START_S
        try:
            self._expect(b"U", deadline)
            two = _map_ids(self.pid)
            self._send(b"M" + _framed(self._setup | _mounts() | {"drop_to": NOBODY if two else None}), deadline)
            self._expect(b"R", deadline)
        except (EOFError, OSError) as error:
            raise unavailable(f"start the launcher: {error or 'it ended'}") from error

    def _expect(self, sign: bytes, deadline: float) -> None:
        answer = self._receive(1, deadline)
        if answer == b"F":
            self._channel.settimeout(1.0)
            raise unavailable(self._channel.recv(4096).decode(errors="replace"))
        if answer != sign:
            raise EOFError(f"unexpected {answer!r}")

    def _outcome(self, deadline: float) -> CaseOutcome:
        status, exit_code, *lengths = inside.HEAD.unpack(self._receive(inside.HEAD.size, deadline))
        if status not in (*STATUS, SETUP_FAILED) or max(lengths) > self._setup["max_output"] + (1 << 16):
            raise EOFError
        stdout, stderr, value = (self._receive(length, deadline) for length in lengths)
        if status == SETUP_FAILED:
            raise unavailable(f"start the candidate: {stderr.decode(errors='replace') or 'it was too slow'}")
        return CaseOutcome(STATUS[status], exit_code, stdout, value, stderr)

    def _send(self, data: bytes, deadline: float) -> None:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        self._channel.sendall(data)

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._channel.recv(min(size, MIB))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _framed(message: dict[str, Any]) -> bytes:
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "little") + data


def interpreter() -> str:
    """Not a virtual environment's link, which needs the environment's files."""
    return getattr(sys, "_base_executable", None) or sys.executable


@functools.cache
def _mounts() -> dict[str, list[Any]]:
    """`site-packages` are hidden: they may hold a user's data."""
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    roots = [f"{prefix}/{name}" for prefix in (sys.base_prefix, sys.base_exec_prefix) for name in ("lib", sys.platlibdir)]
    for folder in dict.fromkeys(["/usr/lib", "/usr/lib64", "/lib", "/lib64", *sorted(roots)]):
        if os.path.islink(folder):
            links.append((os.readlink(folder), folder))
        elif os.path.isdir(folder):
            binds.append((os.path.realpath(folder), folder))
    hidden = [
        str(packages)
        for _, folder in binds
        for name in ("site-packages", "dist-packages")
        for packages in Path(folder).glob(f"python3*/{name}")
    ]
    return {"binds": binds, "links": links, "hidden": hidden}


def _map_ids(pid: int) -> bool:
    """True if there are two ids, so that a candidate has another than the keeper.

    Root maps itself and the user `nobody`; any other user maps itself, under the name `nobody` inside.
    """
    folder = Path(f"/proc/{pid}")
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            for name in ("uid_map", "gid_map"):
                (folder / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return True
        except OSError:
            pass
    try:
        (folder / "setgroups").write_text("deny")
        (folder / "gid_map").write_text(f"{NOBODY} {gid} 1\n")
        (folder / "uid_map").write_text(f"{NOBODY} {uid} 1\n")
    except OSError as error:
        raise unavailable(f"map the user's id into the namespace: {error.strerror}") from error
    return False


def check_available() -> None:
    with Sandbox("print(6 * 7)") as sandbox:
        outcome = sandbox.run(Case())
    if not outcome.succeeded or outcome.stdout != b"42\n":
        message = outcome.stderr.decode(errors="replace") or f"{outcome.status}, exit code {outcome.exit_code}"
        raise unavailable(f"run a first program: {message}")


class SandboxUnavailable(RewardError): ...


def unavailable(step: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"no sandbox for code on this machine, and code of a model is never run without one. Failed: {step}. To do: on the machine "
        "itself, sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 "
        "user.max_user_namespaces=10000, as far as it has them; in a container, start it with --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined (Kubernetes: seccompProfile Unconfined), or with --cap-add SYS_ADMIN; or let a service "
        "run the programs, from a reward function of your own (docs/rewards.md)"
    )
