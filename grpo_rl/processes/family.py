"""Processes that a run starts: out of reach of the signals that are meant for its controller, and ended with
all below them.

A Ctrl-C, a closed terminal, `timeout` and a batch system signal every process of a job, and only the
controller may answer: without its workers it could save nothing. So these run in sessions of their own with
the signals blocked, and die with the controller.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop a run, or announce that its time is over."""

KILLED_FOR_MEMORY = "the kernel ended the process, as memory ran out on its machine or in its container"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def shielded() -> Iterator[None]:
    """Start processes from this thread with STOP_SIGNALS blocked, as they stay in them.

    A mask is inherited through fork and exec, so that a new process is never hit. What reaches this one
    meanwhile waits, or goes to another thread.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def oom_kills() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def outlive_stop_signals() -> None:
    """Let STOP_SIGNALS in and do nothing about them, in a shielded process that runs other people's code.
    Main thread only.

    A blocked or ignored signal would stay so in programs that the code starts, which nothing could then end
    by it. A handler ends with exec, and is taken off in forks.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # or calls of libraries in C would fail with EINTR
    # Blocked until the fork answers as usual, or a signal that comes at once would be lost in it.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_answer_as_usual)
    _unblock()


def _nothing(number: int, frame: object) -> None: ...


_block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOP_SIGNALS)
_unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS)


def _answer_as_usual() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _nothing:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _unblock()


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread of `parent` that started it ends (prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before this call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of all below this process whose own parent ends: what ends it finds them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(pid: int, *, title: bytes = b"", spares: Callable[[int], bool] = lambda pid: False) -> None:
    """Send SIGKILL to a process, to the group that it leads or led, and to everything below it in other
    groups.

    A process whose command line does not begin with `title` has only inherited the id, and is left alone, as
    are those that `spares` names. Of those whose own parents ended before, only the group's members are
    found.
    """
    name = _command_line(pid)
    if name and not name.startswith(title):
        return
    victims: set[int] = set()
    # Stopped first, and looked for again until none is new: otherwise one that forks all the time could outrun the signals.
    while new := {other for other in _family(pid) if not spares(other)} - victims:
        _signal_all(new, signal.SIGSTOP)
        victims |= new
    _signal_all(victims, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    return _below(pid, _relations())


def started(pid: int) -> int | None:
    """Return when the process with this id was started, in ticks since the machine's start; None if there is
    none.

    The system gives ids again: id and start together name one process.
    """
    fields = _fields(Path(f"/proc/{pid}"))
    return int(fields[19]) if fields else None


def is_running(pid: int) -> bool:
    fields = _fields(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] not in "ZXTt"


def state(pid: int) -> str:
    words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a device", "R": "runs", "S": "waits"}
    fields = _fields(Path(f"/proc/{pid}"))
    return words.get(fields[0], "has ended") if fields else "has ended"


def waits_for_cpu(pid: int) -> dict[str, float]:
    """Return for each thread of a process the seconds in which it could have run and had no core.

    A wait is counted when it ends (Linux, `/proc/PID/task/*/schedstat`).
    """
    waits = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            waits[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return waits


def _family(pid: int) -> set[int]:
    """Return the process, its descendants, and the members of its group if that is or was its own."""
    relations = _relations()
    relation = relations.get(pid)
    members = set() if relation is None else {pid, *_below(pid, relations)}
    if relation is None or relation[1] == pid:
        members |= {other for other, (_, group) in relations.items() if group == pid}
    return members


def _below(pid: int, relations: dict[int, tuple[int, int]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for other, (parent, _) in relations.items():
        children.setdefault(parent, []).append(other)
    descendant_ids, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        descendant_ids += below
        waiting += below
    return descendant_ids


def _relations() -> dict[int, tuple[int, int]]:
    relations = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            fields = _fields(Path(entry.path))
            if fields and fields[0] not in "ZX":
                relations[int(entry.name)] = int(fields[1]), int(fields[2])
    return relations


def _fields(folder: Path) -> list[str]:
    """Return state, parent, group and more of a process, as proc(5) counts from the third; [] if it ended."""
    try:
        # The name in parentheses may hold anything, spaces and parentheses included.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
