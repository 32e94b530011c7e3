"""`grpo-rl watch RUN`: a running run from another terminal, by status.json and logs/console.log; it only
reads. The command ends when the run does, with its exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments, not_negative
from grpo_rl.errors import ConfigError
from grpo_rl.run_files import opened
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.status import is_gone, read_status
from grpo_rl.telemetry.terminal.text import safe_text, say

GONE_CODE = 6  # exit code if a run's process is gone without one: it was killed
SHOWN_LINES = 26  # at first: the header of steps comes every 25
TAIL_BYTES = 2**16  # of the log's end that are read at first


def main(argv: Sequence[str]) -> int:
    """Show the run until it ends; return its exit code, with --once 0 or that code."""
    options = _parser().read(argv)
    run = find_run(options.run)
    status = read_status(run)
    if not status:
        raise ConfigError(f"{run}: has no status.json: the run has not begun, or is older than this command")
    lines, end = new_lines(run, None)
    say("\n".join([_head(run, status), *_trouble(run, status), "", *lines[-SHOWN_LINES:]]))
    code = ended_with(status)
    if options.once:
        return code or 0
    while code is None:
        time.sleep(options.every)
        status = read_status(run)  # before the lines, so that an ended run's are complete
        code, (lines, end) = ended_with(status), new_lines(run, end)
        while lines:
            say("\n".join(lines))
            lines, end = new_lines(run, end)
    say("\n".join([f"{safe_text(run.name)}: the run has ended with exit code {code}", *_trouble(run, status)]))
    return code


def ended_with(status: Mapping[str, Any]) -> int | None:
    """Return the run's exit code, None while it goes on."""
    state, error = status.get("state"), status.get("error")
    if state == "done":
        return 0
    if state in ("failed", "preempted"):
        code = error.get("exit_code") if isinstance(error, Mapping) else None
        return code if isinstance(code, int) and 0 < code < 256 else GONE_CODE
    return GONE_CODE if is_gone(status) else None


def new_lines(run: Path, start: int | None) -> tuple[list[str], int]:
    """Return the log's whole lines from this byte on, and the next byte; None: the lines of its end."""
    with suppress(OSError), opened(run / "logs" / "console.log") as log:
        size = os.fstat(log.fileno()).st_size
        begin = max(0, size - TAIL_BYTES) if start is None else start
        log.seek(begin)
        content = log.read(TAIL_BYTES)
        end = content.rfind(b"\n") + 1 or (len(content) if len(content) == TAIL_BYTES else 0)
        lines = content[:end].decode("utf-8", "replace").removesuffix("\n").split("\n") if end else []
        if start is None and begin:
            lines = lines[1:]  # it may have lost its beginning
        return [safe_text(line) for line in lines], begin + end
    return [], start or 0


def _head(run: Path, status: Mapping[str, Any]) -> str:
    parts = [
        safe_text(run.name, limit=60),
        "gone" if is_gone(status) else safe_text(str(status.get("state", "unknown"))),
        f"step {status.get('step', 0)} of {status.get('total') or '?'}",
    ]
    if ended_with(status) is None:
        parts.append(f"phase {safe_text(str(status.get('phase')), limit=40)}")
    if status.get("last_commit") is not None:
        parts.append(f"last commit: step {status['last_commit']}")
    if isinstance(status.get("time"), int | float):
        parts.append(f"status of {datetime.fromtimestamp(float(status['time'])):%H:%M:%S}")
    return " | ".join(parts)


def _trouble(run: Path, status: Mapping[str, Any]) -> list[str]:
    lines = []
    error, restarts = status.get("error"), status.get("restarts")
    if isinstance(error, Mapping):
        lines.append(f"ended with exit code {error.get('exit_code')}: {safe_text(str(error.get('message')), limit=400)}")
    elif is_gone(status):
        lines.append(
            f"its process {status.get('pid')} is gone and left no word: it was killed. Look at {run / 'logs'}; the same "
            "command goes on from the last commit"
        )
    if isinstance(restarts, Mapping) and restarts:
        counts = ", ".join(f"{safe_text(str(name))} {safe_text(str(count))} times" for name, count in restarts.items())
        lines.append(f"workers restarted: {counts}")
    return lines


def _parser() -> Arguments:
    parser = Arguments(
        "watch",
        "Show a run that goes on: its step, its phase and the lines that it prints. The command only reads the run's files, from\n"
        "any machine that sees them, and ends when the run does, with the run's exit code.",
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
