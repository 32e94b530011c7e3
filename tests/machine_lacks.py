"""What this machine lacks of what some tests need: their marks, which skip them there with the reason.

As a program it prints the reasons, one a line, and nothing on a machine that has it all.
"""

import os
import shutil

import pytest

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

if __name__ == "__main__":
    for name, why in LACKS.items():
        print(f"skipped for want of {name}: {why}")
