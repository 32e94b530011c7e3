"""Random faults for one training: kinds, processes and times. Everything is drawn from one seed.

Some come from outside, as signals to processes whose ids the run itself recorded; some are armed at a start of the
driver, as fault points that a later step passes. Faults that change what is computed (a gradient that is not finite, a reward
process that does not answer in time) are not among them: an undisturbed run could not be compared with.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.manifest import step_of, verify
from grpo_rl.cluster.session import launcher
from grpo_rl.errors import CheckpointError

# A run loses replicas often, ranks now and then, and its driver seldom: each weight is how often one is drawn.
FROM_OUTSIDE: dict[str, float] = {
    "kill -9 replica": 6,
    "SIGSTOP replica": 4,
    "kill -9 reward process": 3,
    "kill -9 reference": 2,
    "SIGSTOP reference": 1,
    "kill -9 actor rank": 2,
    "SIGSTOP actor rank": 1,
    "SIGTERM driver": 1,
    "kill -9 driver": 1,
    "kill -9 driver, newest checkpoint damaged": 1,
}
ARMED = (
    "rollout.step:hold_gil@worker=rollout0,step={step},once",
    "rollout.step:loop@worker=rollout1,step={step},once",
    "rollout.submitted:kill9@worker=rollout1,step={step},once",
    "rollout.weights.bucket:kill9@worker=rollout0,step={step},once",
    "rollout.weights.before_finish:kill9@worker=rollout1,step={step},once",
    "actor.update.mid_backward:kill9@rank={rank},step={step},once",
    "actor.update.after_optimizer:kill9@rank={rank},step={step},once",
    "actor.weights.bucket:kill9@rank={rank},step={step},once",
    "reference.logprobs:kill9@step={step},once",
    "ckpt.before_write:enospc@step={saved},once",
    "ckpt.before_rename:kill9@n={few}",
    "ckpt.after_rename:kill9@n={few}",
    "driver.phase:kill9@phase=update_actor,step={step},once",
    "driver.log:kill9@step={step},once",
)
AHEAD = ((0.5, 1.5), (1.5, 2.5))
"""Two faults are armed at once; each waits for a step so far after the newest commit, in steps between two faults."""
FEWEST_AHEAD = 3
REWARD_PROCESS = b"grpo_rl.rewards.runtime.process"


class Source:
    """Draws faults."""

    def __init__(self, seed: int, num_ranks: int, save_freq: int, steps_between: float) -> None:
        self.random = random.Random(seed)
        self.num_ranks = num_ranks
        self.save_freq = save_freq
        self.steps_between = steps_between
        """Training steps between two faults, about."""

    def armed(self, commit: int, last_step: int) -> list[str]:
        """Fault points for a driver that goes on from `commit`: GRPO_FAULT entries."""
        entries = []
        for template, ahead in zip(self.random.sample(ARMED, len(AHEAD)), AHEAD, strict=True):
            few = max(FEWEST_AHEAD, round(self.random.uniform(*ahead) * self.steps_between))
            step = commit + few
            saved = -(-step // self.save_freq) * self.save_freq
            if saved < last_step:  # the last save is not optional
                entries.append(
                    template.format(
                        step=step, saved=saved, few=-(-few // self.save_freq), rank=self.random.randrange(self.num_ranks)
                    )
                )
        return entries

    def draw(self) -> str:
        """A fault from outside."""
        return self.random.choices(list(FROM_OUTSIDE), list(FROM_OUTSIDE.values()))[0]

    def victim(self, kind: str, status: Mapping[str, Any], session: Mapping[str, Any]) -> int | None:
        """The process that this kind is for; None if there is none just now."""
        family = set(launcher.processes(session["token"]))
        if kind.endswith("reward process"):
            candidates = [pid for pid in family if _parent(pid) == status["pid"] and REWARD_PROCESS in _words(pid)]
        else:
            role = {"replica": "rollout", "reference": "reference", "rank": "actor"}[kind.split()[-1]]
            candidates = [pid for name, pid in status.get("workers", {}).items() if name.startswith(role)]
        alive = sorted(pid for pid in candidates if pid in family and not _is_stopped(pid))
        return self.random.choice(alive) if alive else None

    def damage(self, checkpoints: Path) -> Path | None:
        """A file of the newest checkpoint, of which a bit is turned, the end is missing, or all; None if it is the only one."""
        good = intact(checkpoints)
        if len(good) < 2:
            return None
        folder = checkpoints / f"step_{good[-1]}"
        path = self.random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        content = bytearray(path.read_bytes())
        how = self.random.choice(("bit", "end", "all"))
        if how == "all" or not content:
            path.unlink()
        elif how == "end":
            path.write_bytes(content[: self.random.randrange(len(content))])
        else:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
        return path


def intact(checkpoints: Path) -> list[int]:
    """The steps of all checkpoints that are as they were written."""
    found = []
    for folder in checkpoints.iterdir() if checkpoints.is_dir() else ():
        step = step_of(folder.name)
        if step is not None:
            try:
                found.append(verify(folder).step)
            except CheckpointError:
                continue
    return sorted(found)


def signal_of(kind: str) -> int:
    return signal.SIGSTOP if "SIGSTOP" in kind else signal.SIGTERM if "SIGTERM" in kind else signal.SIGKILL


def send(pid: int, kind: str) -> bool:
    """Send the signal; return whether the process was still there to be hit."""
    try:
        os.kill(pid, signal_of(kind))
        return True
    except ProcessLookupError:
        return False


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_stopped(pid: int) -> bool:
    return _stat(pid)[0] in "TXZ"
