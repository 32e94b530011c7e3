"""The candidate's process: it gives up every right for good, runs the source on one case, and sends out what it returned."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGINT, SIGKILL = 2, 9
STDERR_BYTES = 2048
SOURCE = "/solution.py"
ARMED = 4
"""A descriptor written to and closed before the source runs, which so cannot pretend that its walls failed."""

libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """An error: a wall could not be built, which its text names."""


def call(step: str, name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise Failed(f"{step}: {name}: {os.strerror(code)} (errno {code})")


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def encode(value: object) -> str:
    """JSON of a value made of plain data, tagged where JSON has no such type: `["l", ...]`, `["t", ...]`, `["d", k, v, ...]`.

    Subclasses are sent as the built-in type they are. Raises TypeError for anything else, RecursionError for loops.
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
    """Give up every right for good, then run the source; leaves by `os._exit`."""
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
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call("drop the capabilities", "capset", ctypes.byref(header), ctypes.byref(empty))
    call("forbid new rights", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_calls(setup["filter"])
    os.write(ARMED, b"1")
    os.close(ARMED)
    exit_code = 1
    try:
        _run(case)
        exit_code = 0
    except SystemExit as leaving:
        exit_code = 0 if leaving.code is None else leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        write_all(2, f"{type(error).__name__}: {error}"[:STDERR_BYTES].encode(errors="replace"))
    finally:
        _finish(exit_code & 255)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _filter_calls(instructions: bytes) -> None:
    program = _Program(len(instructions) // 8, instructions)
    call("filter system calls", "prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def _run(case: dict[str, Any]) -> None:
    """The source as a program, or one function of it, whose value goes out as plain data."""
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
    """End as a program ends: its threads first, then what it registered, then what it has not yet written."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        exits = sys.modules.get("atexit")
        if exits is not None:
            exits._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(exit_code)
