"""`grpo-rl watch RUN`: a running run from another terminal. It reads the run's files and touches nothing.

On a terminal the picture is drawn again every few seconds; on a pipe each step is one line as it comes. The command ends when
the run does, with the run's own exit code.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments, not_negative
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.telemetry.diagnosis.diagnose import ALARM
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts, step_files
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.status import is_gone, read_status
from grpo_rl.telemetry.terminal import step_line
from grpo_rl.telemetry.terminal.text import duration, encodable, safe_text, say

RECENT_STEPS = 20
"""Steps from which the time left is estimated, as the run itself does."""
GONE_CODE = 6
"""The exit code where a run's process is gone and its status does not say how it ended: it was killed."""
SAMPLE_WIDTH = 96
NUM_SAMPLES = 3
"""Responses that are shown."""


@dataclass(frozen=True)
class Look:
    """The content of a run's files at one moment."""

    run: Path
    status: Mapping[str, Any]
    records: Sequence[Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]]
    samples_step: int | None
    is_gone: bool
    """True where the run has not ended by itself and its process is no longer there."""

    @property
    def ended_with(self) -> int | None:
        """The run's exit code, None while it goes on."""
        state = self.status.get("state")
        if state == "done":
            return 0
        error = self.status.get("error")
        if state in ("failed", "preempted"):
            code = error.get("exit_code") if isinstance(error, Mapping) else None
            return code if isinstance(code, int) and 0 < code < 256 else GONE_CODE
        return GONE_CODE if self.is_gone else None

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the latest steps; None before the first, and once the run has ended."""
        seconds = [record["timing_s/step"] for record in self.records if record["step"] > 0 and "timing_s/step" in record]
        # The first step is slower than all others: compilers and caches are cold.
        recent, total = seconds[1:][-RECENT_STEPS:] or seconds, self.status.get("total")
        if not recent or not isinstance(total, int) or self.ended_with is not None:
            return None
        return statistics.fmean(recent) * max(0, total - int(self.records[-1]["step"]))


def main(argv: Sequence[str]) -> int:
    """Show the run until it ends, and return its exit code; with --once show it once, and return 0 or that code."""
    options = _parser().read(argv)
    run = find_run(options.run)
    if not read_status(run):
        raise ConfigError(f"{run}: has no status.json: the run has not begun, or is older than this command")
    if options.once:
        look = look_at(run, NUM_SAMPLES)
        say("\n".join(picture(look)))
        return look.ended_with or 0
    return _follow_on_terminal(run, options) if sys.stdout.isatty() else _follow_in_lines(run, options)


def look_at(run: Path, num_samples: int) -> Look:
    """Read the run's files; damaged and half-written ones are passed over."""
    status = read_status(run)
    step, samples = _last_samples(run, num_samples)
    return Look(run, status, read_metrics(run / "metrics.jsonl"), samples, step, is_gone(status))


def picture(look: Look) -> list[str]:
    """Return the lines of the picture: state, phase, time left, the last steps, alarms, samples. No line drives a terminal."""
    lines = [_head(look), *_trouble(look)]
    shown = [record for record in look.records if len(record) > 2][-8:]
    if shown:
        lines.append("")
        header: list[step_line.Cell] = []
        for one in shown:
            if (named := step_line.header(one)) and named != header:
                lines.append(_plain(named))
                header = named
            lines.append(_plain(step_line.line(int(one["step"]), int(look.status.get("total") or 0), one)))
    alarms = [
        (int(record["step"]), key.removeprefix(ALARM)) for record in look.records for key in record if key.startswith(ALARM)
    ]
    if alarms:
        lines += ["", f"alarms (grpo-rl doctor {safe_text(str(look.run))} explains them):"]
        lines += [f"  step {step}: {safe_text(name)}" for step, name in alarms[-8:]]
    if look.samples:
        lines += ["", f"the last samples, of step {look.samples_step}:"]
        for record in look.samples:
            lines += _sample(record)
    return [line.rstrip() for line in lines]


def _head(look: Look) -> str:
    status = look.status
    state = "gone" if look.is_gone else str(status.get("state", "unknown"))
    parts = [
        safe_text(look.run.name, limit=60),
        safe_text(state),
        f"step {status.get('step', 0)} of {status.get('total') or '?'}",
    ]
    if look.ended_with is None:
        parts.append(f"phase {safe_text(str(status.get('phase')), limit=40)}")
    if look.seconds_left is not None:
        parts.append(f"about {duration(look.seconds_left)} left")
    if status.get("last_commit") is not None:
        parts.append(f"last commit: step {status['last_commit']}")
    if isinstance(status.get("time"), int | float):
        parts.append(f"status of {datetime.fromtimestamp(float(status['time'])):%H:%M:%S}")
    return " | ".join(parts)


def _trouble(look: Look) -> list[str]:
    """Return what a person has to know first: an error, restarts, a process that is gone."""
    lines = []
    error = look.status.get("error")
    if isinstance(error, Mapping):
        lines.append(f"ended with exit code {error.get('exit_code')}: {safe_text(str(error.get('message')), limit=400)}")
    elif look.is_gone:
        lines.append(
            f"its process {look.status.get('pid')} is gone and left no word: it was killed. Look at {look.run / 'logs'}; the same "
            "command goes on from the last commit"
        )
    restarts = look.status.get("restarts")
    if isinstance(restarts, Mapping) and restarts:
        lines.append(
            "workers restarted: " + ", ".join(f"{safe_text(str(name))} {count} times" for name, count in restarts.items())
        )
    return lines


def _sample(record: Mapping[str, Any]) -> list[str]:
    reward = record.get("reward")
    shown = f"{reward:g}" if isinstance(reward, int | float) else str(record.get("failure") or "none")
    prompt, response = (safe_text(str(record.get(name, "")), limit=SAMPLE_WIDTH) for name in ("prompt", "response"))
    return [f"  reward {safe_text(shown, limit=20):>8}  {prompt}", f"{'':>17}  -> {response}"]


def _last_samples(run: Path, count: int) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the newest step with a file of rollouts, and some of them: spread over the file, so over the prompts."""
    for step, path in reversed(step_files(run / "rollouts")[-2:]):
        try:
            records = read_rollouts(path)
        except DataError:
            continue
        if records and count:
            return step, [records[index * len(records) // count] for index in range(min(count, len(records)))]
    return None, []


def _follow_on_terminal(run: Path, options: Any) -> int:
    """Draw the picture again and again in place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            look = look_at(run, NUM_SAMPLES)
            text = encodable("\n".join(picture(look)), console.encoding)
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            if look.ended_with is not None:
                break
            time.sleep(options.every)
    return _ended(look)


def _follow_in_lines(run: Path, options: Any) -> int:
    """Print each step once, in its order, for a pipe or a log."""
    said: set[int] = set()
    while True:
        look = look_at(run, 0)
        new = [record for record in look.records if int(record["step"]) not in said and len(record) > 2]
        for record in new:
            if not said:
                say(_plain(step_line.header(record)))
            step = int(record["step"])
            said.add(step)
            say(_plain(step_line.line(step, int(look.status.get("total") or 0), record)))
            for key in record:
                if key.startswith(ALARM):
                    say(f"alarm in step {step}: {safe_text(key.removeprefix(ALARM))}")
        if look.ended_with is not None:
            return _ended(look)
        time.sleep(options.every)


def _ended(look: Look) -> int:
    code = look.ended_with or 0
    say(f"{safe_text(look.run.name)}: the run has ended with exit code {code}")
    for line in _trouble(look):
        say(line)
    return code


def _plain(cells: Sequence[step_line.Cell]) -> str:
    return "".join(cell.text for cell in cells)


def _parser() -> Arguments:
    parser = Arguments(
        "watch",
        "Show a run that goes on: its step, phase and time left, the last steps, alarms and samples. The command only reads the\n"
        "run's files, from any machine that sees them, and ends when the run does, with the run's exit code.",
        "grpo-rl watch runs/grpo_rl/my_run\n  grpo-rl watch my_run --once",
    )
    parser.add_argument("run", metavar="RUN", help="the folder or the name of a run")
    parser.add_argument("--once", action="store_true", help="show it once and end, for scripts")
    parser.add_argument(
        "--every",
        type=lambda text: max(0.2, not_negative(text)),
        default=2.0,
        metavar="S",
        help="seconds between two looks (2)",
    )
    return parser
