"""The conditions that hold after every run, whatever happened to it: bounded time, exit code, status, state, ledger.

A library for tests that break running trainings. Victims are picked by ids that the run itself recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sockets import listening

from grpo_rl.cluster.session import launcher
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.telemetry.status import read_status

ORPHANS_S = 30.0
"""Longest time after the controller's end in which something of the run may still be there. By itself it is gone within 5 s; a busy
machine takes longer, and what was measured is printed."""
STATE_FILES = (".safetensors",)


@dataclass
class Training:
    """One command, and what it leaves in its run folder."""

    folder: Path
    name: str
    words: Sequence[str]
    faults: str = ""
    program: Sequence[str] = ("-m", "grpo_rl.main")
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.path)

    def start(self) -> Training:
        """Start the command in a process of its own."""
        command = [sys.executable, *self.program, f"trainer.default_local_dir={self.folder / 'runs'}"]
        command += [f"trainer.experiment_name={self.name}", "trainer.logger=[console]", *self.words]
        own_of_ray = {name for name in os.environ if name.startswith("RAY_")}  # of this process's sessions
        environment = {name: value for name, value in os.environ.items() if name not in own_of_ray} | {
            "HF_HUB_OFFLINE": "1",
            "GRPO_FAULT_STATE": str(self._state_folder()),
            "GRPO_FAULT": self.faults,
        }
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{self.name}.out").open("ab") as out, (self.folder / f"{self.name}.err").open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=out, stderr=err, start_new_session=True
            )
        return self

    def wait(self, seconds: float) -> int:
        """The exit code. Past `seconds` the test fails with everything that is known of the run."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError(f"{self.name} did not end within {seconds:g} s\n{self.describe()}") from None

    def until(self, reached: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """The first status of which `reached` is true. Fails when the run ends before, or after `seconds`."""
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.note_session()
            status = self.status
            if self.controller is not None and reached(status):
                return status
            assert self.process.poll() is None, f"{self.name} ended before\n{self.describe()}"
            time.sleep(0.02)  # polling: the status is a file
        raise AssertionError(f"{self.name} was never there within {seconds:g} s\n{self.describe()}")

    @property
    def controller(self) -> int | None:
        """The process below the launcher that the status names; None before there is one."""
        pid = self.status.get("pid")
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return None
        return pid if self.process is not None and int(parent) == self.process.pid else None

    def kill(self) -> None:
        """kill -9 of the controller alone."""
        self.note_session()
        assert self.controller is not None
        os.kill(self.controller, signal.SIGKILL)
        assert self.wait(ORPHANS_S) == 128 + signal.SIGKILL, self.describe()

    def end(self) -> None:
        """kill -9 of the controller if it is still running, or of the launcher before there is one."""
        if self.process is not None and self.process.poll() is None:
            if self.controller is not None:
                self.kill()
            else:
                self.process.kill()
                self.process.wait(10)

    def error_lines(self) -> list[str]:
        return (self.folder / f"{self.name}.err").read_text(errors="replace").strip().splitlines()

    def fired(self) -> list[dict[str, Any]]:
        """The faults that happened, in order."""
        path = self._state_folder() / "fired.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def describe(self) -> str:
        """Status, screen and the ends of all logs."""
        texts = [json.dumps(self.status)]
        for path in [self.folder / f"{self.name}.out", self.folder / f"{self.name}.err", *sorted(self.path.glob("logs/*.log"))]:
            with contextlib.suppress(OSError):
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(texts)

    def _state_folder(self) -> Path:
        folder = self.folder / f"{self.name}.faults"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def note_session(self) -> None:
        """Remember what the run's processes and folder are told by, as long as it says so."""
        with contextlib.suppress(OSError, ValueError):
            session = json.loads((self.path / "session.json").read_text())
            if session not in self.sessions:
                self.sessions.append(session)


def state_hash(run: Path, step: int) -> str:
    """SHA-256 over every tensor file of the checkpoint of `step`: weights, optimizer and random state."""
    digest = hashlib.sha256()
    folder = run / "checkpoints" / f"step_{step}"
    files = sorted(path for path in folder.rglob("*") if path.suffix in STATE_FILES)
    assert files, f"no checkpoint in {folder}"
    for path in files:
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def learnt(run: Path) -> list[str]:
    """The lines of metrics.jsonl without what depends on the clock or the machine, or tells of recoveries, as text: so a NaN is equal to itself."""
    groups = ("timing_s/", "recovery/", "perf/", "plan/", "episode/wait_s")
    rows = read_metrics(run / "metrics.jsonl")
    kept = [
        {k: v for k, v in row.items() if k == "perf/total_num_tokens" or (k != "time" and not k.startswith(groups))}
        for row in rows
    ]
    return [json.dumps(row, sort_keys=True) for row in kept]


def assert_each_sample_once(run: Path, steps: int, batch_size: int, n: int, max_staleness: int = 0) -> None:
    """The rollouts of every step are there, each prompt's samples 0 to n - 1 once, and no prompt in two steps of an epoch.

    The oldest weights that sampled one are at most so many versions older than those that the step trained.
    """
    uids: Counter[str] = Counter()
    for step in range(1, steps + 1):
        rows = read_rollouts(run / "rollouts" / f"step_{step}.jsonl")
        ledger = Counter((row["uid"], row["sample"]) for row in rows)
        prompts = {row["uid"] for row in rows}
        assert ledger == Counter((uid, sample) for uid in prompts for sample in range(n)), f"step {step}"
        assert len(prompts) == batch_size, f"step {step}"
        ages = {step - 1 - row["weight_version"] for row in rows}
        assert ages <= set(range(max_staleness + 1)), f"step {step}: {ages}"
        uids.update(prompts)
    assert set(uids.values()) == {1}
    assert not (run / "rollouts" / f"step_{steps + 1}.jsonl").exists()


def left(training: Training, seconds: float = ORPHANS_S, ports: Set[tuple[str, str]] = frozenset()) -> tuple[list[str], float]:
    """The processes, temporary folders and ports of these that stay, looked for until there is none or for so long; and how long that was."""
    assert training.sessions, "the run was never seen with a session"
    began = time.monotonic()
    lines: list[str] = ["not looked yet"]
    while lines and time.monotonic() < began + seconds:
        lines = [line for session in training.sessions for line in leftovers(session)]
        # A process that is ending shows no environment any more, and its sockets are still there for an instant.
        lines += [f"port {address}" for address, _ in ports & listening()]
        time.sleep(0.02)
    return lines, time.monotonic() - began


def assert_nothing_left(training: Training, seconds: float = ORPHANS_S, ports: Set[tuple[str, str]] = frozenset()) -> float:
    """Within so many seconds no process, temporary folder, or port of these is left of the run; after how many it was."""
    lines, after = left(training, seconds, ports)
    assert not lines, f"left after {seconds:g} s: {lines}"
    return after


def leftovers(session: dict[str, Any]) -> Iterator[str]:
    """Processes and folder of a session."""
    for pid in launcher.processes(session["token"]):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"process {pid}: {command[:80]}"
    if Path(session["folder"]).exists():
        yield f"folder {session['folder']}"


def shared_memory() -> set[str]:
    """Names in /dev/shm that Python, torch, Ray and vLLM give, and that no process has mapped: others may use theirs meanwhile."""
    kinds = ("psm_*", "sem.*", "torch_*", "plasma*", "vllm_*")
    names = {path.name for kind in kinds for path in Path("/dev/shm").glob(kind)}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            names.difference_update(re.findall(r" /dev/shm/(\S+)$", maps.read_text(), re.MULTILINE))
    return names
