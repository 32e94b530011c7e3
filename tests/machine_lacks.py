"""What this machine lacks of what some tests need: their marks, which skip them there with the reason.

As a program it prints the reasons, one a line, and nothing on a machine that has it all.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_rl.rewards.sandbox import sandbox
from grpo_rl.rewards.sandbox.sandbox import SandboxUnavailable, check_available


def _no_sandbox() -> str | None:
    try:
        check_available()
    except SandboxUnavailable as error:
        return str(error)
    return None


def lacks() -> dict[str, str]:
    """Return why tests are skipped here, by what the machine lacks: `sandbox` or `compiler`."""
    compiler = os.environ.get("CXX", "g++")
    reasons = {
        "sandbox": _no_sandbox(),
        "compiler": None if shutil.which(compiler) else f"no C++ compiler: there is no program {compiler}",
    }
    return {name: reason for name, reason in reasons.items() if reason}


LACKS = lacks()


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name in LACKS, reason=LACKS.get(name, ""))


needs_sandbox, needs_compiler = map(_needs, ("sandbox", "compiler"))


def take_namespaces_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one whose kernel refuses new namespaces to sandboxes."""
    monkeypatch.setattr(sandbox, "SERVE", sandbox.SERVE.replace("inside.serve", "inside.CLONE_FLAGS = 1; inside.serve"))
    monkeypatch.setattr(sandbox, "FORK_SERVER", sandbox.ForkServer())


@contextmanager
def memory_group(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield what puts a process, by its id, into a control group in which the kernel ends it beyond so much memory. Skips without one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), "")
    folder = Path(f"/sys/fs/cgroup/memory{own}/test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(num_bytes))
    except OSError as error:
        pytest.skip(f"no control group for memory: {error}")
    try:
        yield lambda pid: (folder / "cgroup.procs").write_text(str(pid)) and None
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()


if __name__ == "__main__":
    for name, why in LACKS.items():
        print(f"skipped for want of {name}: {why}")
