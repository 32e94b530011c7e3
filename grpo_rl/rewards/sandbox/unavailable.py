"""Why there is no sandbox on a machine, and what to do."""

from __future__ import annotations

from pathlib import Path

from grpo_rl.errors import RewardError


class SandboxUnavailable(RewardError):
    """This machine has no sandbox: which step failed, and what to do."""


SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
)
"""Settings that forbid namespaces: file under /proc/sys, forbidding value, remedy."""


def unavailable(step: str, settings: Path = Path("/proc/sys")) -> str:
    """The message for a step that failed, with the remedy for the setting of the kernel that forbids it, where one does."""
    remedies = [remedy for name, value, remedy in SWITCHES if _setting(settings / name) == value] or [
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "(Kubernetes: seccompProfile Unconfined), or with --cap-add SYS_ADMIN"
    ]
    return (
        f"no sandbox for code on this machine, and code of a model is never run without one. Failed: {step}. "
        f"To do: {'; '.join(remedies)}; or use a remote sandbox with reward.function_kwargs.code.sandbox_url"
    )


def _setting(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
