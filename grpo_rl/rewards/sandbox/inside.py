"""Three processes in a sandbox, all forked by a bare interpreter (`-S`), the fork server, which runs no code of a candidate.

- The launcher asks for the namespaces, has its ids mapped by the parent, and waits for the keeper;
- the keeper, process 1 of the new pid namespace, makes the root, then takes a case at a time from its private
  channel;
- the candidate, a fresh process per case, gives up every right for good, runs the source and sends out what
  it returned. It holds no expected output.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import select
import socket
import struct
import sys
import time
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGINT, SIGKILL = 2, 9
STDERR_BYTES = 2048
SOURCE = "/solution.py"
ARMED = 4
"""A descriptor that is closed before the source runs, which so cannot pretend that its walls failed."""

libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception): ...


def call(step: str, name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise Failed(f"{step}: {name}: {os.strerror(code)} (errno {code})")


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def encode(value: object) -> str:
    """JSON of plain data, tagged if JSON has no such type: `["l", ...]`, `["t", ...]`, `["d", k, v, ...]`.

    Raises TypeError for anything else, RecursionError for loops.
    """
    from _json import encode_basestring_ascii

    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return '["i","' + format(int.__index__(value), "x") + '"]'
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if text[-1:].isdigit() else '["f","' + text + '"]'
    if isinstance(value, str):
        return encode_basestring_ascii(str.__str__(value))
    if isinstance(value, bytes | bytearray):
        return '["b","' + bytes(value).hex() + '"]'
    if isinstance(value, complex):
        return '["c",' + encode(value.real) + "," + encode(value.imag) + "]"
    if isinstance(value, dict):
        parts = [part for pair in dict.items(value) for part in pair]
        return ",".join(['["d"', *map(encode, parts)]) + "]"
    for tag, kind in (("l", list), ("t", tuple), ("s", set | frozenset)):
        if isinstance(value, kind):
            return ",".join([f'["{tag}"', *map(encode, value)]) + "]"
    raise TypeError(f"the function returned a {type(value).__name__}, not plain data")


def candidate(setup: dict[str, Any], case: dict[str, Any]) -> None:
    os.setsid()
    if setup["drop_to"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["drop_to"]] * 3)
        os.setresuid(*[setup["drop_to"]] * 3)
    for name, limit in setup["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("drop the capabilities", "capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call("forbid new rights", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(setup["filter"]) // 8, setup["filter"])
    call("filter system calls", "prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
    os.write(ARMED, b"1")
    os.close(ARMED)
    exit_code = 1
    _complete_builtins()
    try:
        _run(case)
        exit_code = 0
    except SystemExit as leaving:
        exit_code = 0 if leaving.code is None else leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        write_all(2, f"{type(error).__name__}: {error}"[:STDERR_BYTES].encode(errors="replace"))
    finally:
        _finish(exit_code & 255)


def _complete_builtins() -> None:
    """As the module `site` and the system give them elsewhere."""
    opened = builtins.open

    def open_file(file: Any, *options: Any, **named: Any) -> Any:
        return opened(0 if file in ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0") else file, *options, **named)

    vars(builtins).update(exit=sys.exit, quit=sys.exit, open=open_file)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _run(case: dict[str, Any]) -> None:
    from importlib.machinery import ModuleSpec, SourceFileLoader

    function = case["function"]
    name = "solution" if function else "__main__"
    loader = SourceFileLoader(name, SOURCE)
    module = type(sys)(name)
    module.__spec__ = ModuleSpec(name, loader, origin=SOURCE) if function else None
    module.__file__ = SOURCE
    sys.modules[name] = module
    sys.argv[:] = [SOURCE]
    loader.exec_module(module)
    if function:
        owner = module if hasattr(module, function) else module.Solution()
        write_all(3, encode(getattr(owner, function)(*case["arguments"])).encode())


def _finish(exit_code: int) -> NoReturn:
    """End as a program ends: threads first, then what it registered, then what it has not yet written."""
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        if exits := sys.modules.get("atexit"):
            exits._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(exit_code)


CLONE_FLAGS = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""The new namespaces: user, mount, pid, network, ipc, uts, cgroup."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
MOUNT_SETATTR = 442
"""The system call has the same number on every architecture."""
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
NONCE_BYTES = 16
HEAD = struct.Struct("<ci3I")
"""Of an outcome: status, exit code, lengths of standard output, standard error and value, which follow."""
SETUP_S = 4.0
"""Less than the asking process waits beyond a case's time."""
TMP = "/tmp"
DEVICES = ("null", "zero", "urandom")


def _mount(step: str, source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call(step, "mount", *words, ctypes.c_ulong(flags), os.fsencode(data))


def read_exactly(descriptor: int, size: int) -> bytearray:
    """A buffer that can be wiped. Raises EOFError if the other end is gone."""
    buffer, done = bytearray(size), 0
    while done < size:
        count = os.readv(descriptor, [memoryview(buffer)[done:]])
        if not count:
            raise EOFError
        done += count
    return buffer


def serve(requests: socket.socket) -> NoReturn:
    """Fork a launcher for each request, which carries its channel and perhaps a candidate's line; answer with its process id.

    An ended launcher stays a zombie until the next request: until then its id is no other process's.
    """
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1, 2)
        if not message:
            os._exit(0)
        while _has_reaped():
            pass
        launcher = os.fork()
        if not launcher:
            requests.close()
            os.dup2(1, 2)  # /dev/null: the pipe is the server's alone
            launch(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.sendall(launcher.to_bytes(4, "little"))


def _has_reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def launch(control: int, line: int | None = None) -> NoReturn:
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    try:
        call("make the namespaces", "unshare", CLONE_FLAGS)
    except Failed as error:
        write_all(control, b"F" + str(error).encode())
        os._exit(1)
    write_all(control, b"U")
    if os.read(control, 1) != b"M":
        os._exit(1)
    keeper = os.fork()
    if keeper:
        # The candidate's line ends when the candidate does only if no other process has it.
        os.closerange(3, 4096)
        os.waitpid(keeper, 0)
        os._exit(0)
    try:
        _keep(control, line)
    finally:
        os._exit(0)


def _keep(control: int, line: int | None) -> None:
    libc.signal(SIGINT, None)  # the kernel drops signals for which process 1 has no handler
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    try:
        setup = _message(control)
        _make_root(setup)
    except Failed as error:
        write_all(control, b"F" + str(error).encode())
        return
    write_all(control, b"R")
    while True:
        try:
            nonce, case = read_exactly(control, NONCE_BYTES), _message(control)
        except EOFError:
            return
        _mount("mount /tmp", "tmpfs", TMP, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, setup["tmp_options"])
        os.chdir(TMP)
        answer = _answer(control, setup, case, nonce, line)
        line = None
        call("empty /tmp", "umount2", TMP.encode(), MNT_DETACH)
        write_all(control, bytes(nonce) + answer)


def _message(control: int) -> dict[str, Any]:
    size = int.from_bytes(read_exactly(control, 4), "little")
    message: dict[str, Any] = marshal.loads(read_exactly(control, size))
    return message


def _make_root(setup: dict[str, Any]) -> None:
    step = "make a fresh root"
    _mount(step, "none", "/", None, MS_REC | MS_PRIVATE)
    _mount(step, "tmpfs", TMP, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    os.mkdir(TMP + "/old")
    call(step, "syscall", ctypes.c_long(setup["pivot_root"]), TMP.encode(), (TMP + "/old").encode())
    os.chdir("/")
    for source, target in setup["binds"]:
        os.makedirs(target, exist_ok=True)
        _mount(f"mount {source}", "/old" + source, target, None, MS_BIND | MS_REC)
        # Those to set and to clear, propagation, user namespace.
        attributes = struct.pack("4Q", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
        arguments = (ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes)
        call(f"make {target} read-only (needs Linux 5.12)", "syscall", *arguments, ctypes.c_size_t(len(attributes)))
    for packages in setup["hidden"]:
        _mount(f"hide {packages}", "none", packages, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k")
    for text, link in setup["links"]:
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(text, link)
    os.mkdir("/dev")
    for name in DEVICES:
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"mount /dev/{name}", f"/old/dev/{name}", f"/dev/{name}", None, MS_BIND)
    os.makedirs(TMP, exist_ok=True)
    with open(SOURCE, "wb") as file:
        file.write(setup["source"])
    os.chmod(SOURCE, 0o644)
    call("leave the old root", "umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    _mount("make the root read-only", "none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    libc.sethostname(b"sandbox", 7)


def _answer(control: int, setup: dict[str, Any], case: dict[str, Any], nonce: bytearray, line: int | None) -> bytes:
    input_bytes = case.pop("stdin")
    stdin = os.memfd_create("stdin") if line is None else line
    if line is None:
        write_all(stdin, input_bytes)
        os.lseek(stdin, 0, os.SEEK_SET)
    pipes = [os.pipe() for _ in range(ARMED)]
    child = os.fork()
    if not child:
        try:
            nonce[:] = bytes(NONCE_BYTES)
            for number, descriptor in enumerate([stdin, *(write for _, write in pipes)]):
                # Move descriptors above those that are overwritten.
                os.dup2(descriptor, 30 + number)
            for number in range(ARMED + 1):
                os.dup2(30 + number, number)
            os.closerange(ARMED + 1, 4096)
            candidate(setup, case)
        except (Failed, OSError, ValueError) as error:
            write_all(2, str(error).encode())
        finally:
            os._exit(1)
    for descriptor in (stdin, *(write for _, write in pipes)):
        os.close(descriptor)
    watched = os.pidfd_open(child)
    # Its time begins when it is set up: on a busy machine that alone may take longer than a case may.
    _poll_of(control, pipes[-1][0], watched).poll(int(1000 * SETUP_S))
    status, outputs = _watch(control, watched, [read for read, _ in pipes[: ARMED - 1]], setup["max_output"], case["time_s"])
    os.close(watched)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    if not os.read(pipes[-1][0], 1):
        status = b"S"
    os.close(pipes[-1][0])
    return HEAD.pack(status, exit_code, *map(len, outputs)) + b"".join(outputs)


def _poll_of(control: int, *descriptors: int) -> select.poll:
    poll = select.poll()
    poll.register(control, 0)  # if it hangs up, no process waits for the answer; data on it would be the next case
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def _watch(control: int, watched: int, reads: list[int], limit: int, time_s: float) -> tuple[bytes, list[bytes]]:
    """Kill the candidate at the end of its time, or after `limit` bytes in one place."""
    outputs, totals = [bytearray() for _ in reads], [0] * len(reads)
    poll = _poll_of(control, *reads, watched)
    deadline = time.monotonic() + time_s
    status, ended = b"E", False
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 and not ended:
            status, ended = b"T", True
        events = dict(poll.poll(0 if ended else int(1000 * min(remaining_s, 1000.0)) + 1))
        if control in events:
            os._exit(1)
        if watched in events:
            ended = True
            poll.unregister(watched)
        ready = [index for index, descriptor in enumerate(reads) if descriptor in events]
        if ended and (status != b"E" or not ready):
            break
        for index in ready:
            part = os.read(reads[index], 1 << 16)
            totals[index] += len(part)
            outputs[index] += part
            if index == 1:
                del outputs[index][STDERR_BYTES:]
            if not part:
                poll.unregister(reads[index])
            elif totals[index] > limit:
                status, ended = b"O", True
    # All processes, before the pipes close: the candidate would take that for an error of its own, and answer once more.
    try:  # noqa: SIM105 - contextlib would be loaded each time
        os.kill(-1, SIGKILL)
    except ProcessLookupError:
        pass
    for descriptor in reads:
        os.close(descriptor)
    return status, [bytes(output[:limit]) for output in outputs]
