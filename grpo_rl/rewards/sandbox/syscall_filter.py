"""A classic BPF program for seccomp: the system calls that code in a sandbox may make.

Refused with EPERM is what no solution of a task needs and what has opened kernels or evades a limit: starting
a program or a process (threads are fine), memory outside the address space's limit, sockets other than local
ones, namespaces and mounts, other processes' memory, keys, BPF, io_uring. Calls of another architecture end
the process. Newer calls do not exist (ENOSYS), which every C library has a way around.
"""

from __future__ import annotations

import struct

from grpo_rl.errors import RewardError

SINCE_424 = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
}
"""Calls with the same number on every architecture."""
NEWEST = 450
CLONE3 = 435

X86_64 = {
    "shmget": 29, "shmat": 30, "fork": 57, "vfork": 58, "execve": 59, "semget": 64, "msgget": 68, "ptrace": 101,
    "syslog": 103, "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
    "execveat": 322, "userfaultfd": 323,
}  # fmt: skip
AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116,
    "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "add_key": 217, "request_key": 218,
    "keyctl": 219, "execve": 221, "swapon": 224, "swapoff": 225, "migrate_pages": 238, "move_pages": 239,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "memfd_create": 279, "bpf": 280, "execveat": 281, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
MACHINES = {
    "x86_64": (0xC000003E, X86_64, {"clone": 56, "socket": 41, "prlimit64": 302}),
    "aarch64": (0xC00000B7, AARCH64, {"clone": 220, "socket": 198, "prlimit64": 261}),
}
"""Audit architecture, the refused calls, and those that depend on their first argument."""
PIVOT_ROOT = {"x86_64": X86_64["pivot_root"], "aarch64": AARCH64["pivot_root"]}

LOAD, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, AF_UNIX, CLONE_THREAD = 1, 38, 1, 0x10000
FIRST_ARGUMENTS = {"clone": (HAS_BITS, CLONE_THREAD), "socket": (EQUALS, AF_UNIX), "prlimit64": (EQUALS, 0)}
"""Let through: threads, local sockets, the process's own limits."""


def call_filter(machine: str) -> bytes:
    """`machine` as `uname -m` names it."""
    if machine not in MACHINES:
        raise RewardError(
            f"the sandbox for code has the list of system calls of {' and '.join(MACHINES)}, not of {machine}; "
            f"let a service run the code, from a reward function of your own (docs/rewards.md)"
        )
    architecture, refused, special = MACHINES[machine]
    numbers = sorted({*refused.values(), *SINCE_424.values()})
    program = [
        _word(LOAD, ARCHITECTURE),
        _word(EQUALS, architecture, 1, 0),
        _word(RETURN, KILL_PROCESS),
        _word(LOAD, NUMBER),
        # x86's x32 calls, with bit 30 set, are above every real one too.
        _word(AT_LEAST, NEWEST + 1, 0, 1),
        _word(RETURN, ERRNO | ENOSYS),
        # The flags of clone3 lie in memory, where a filter cannot look; without it, libraries use clone.
        _word(EQUALS, CLONE3, 0, 1),
        _word(RETURN, ERRNO | ENOSYS),
        *(word for number in numbers for word in (_word(EQUALS, number, 0, 1), REFUSE)),
        *(word for name, number in special.items() for word in _if_first_argument(number, *FIRST_ARGUMENTS[name])),
        _word(RETURN, ALLOW),
    ]
    return b"".join(program)


def _if_first_argument(number: int, test: int, value: int) -> list[bytes]:
    return [_word(EQUALS, number, 0, 4), _word(LOAD, FIRST_ARGUMENT), _word(test, value, 1, 0), REFUSE, _word(RETURN, ALLOW)]


def _word(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


REFUSE = _word(RETURN, ERRNO | EPERM)
