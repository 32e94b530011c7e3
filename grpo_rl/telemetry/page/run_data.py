"""All that the page shows of a run, as JSON can hold it. Reads the run's folder, and starts or loads nothing."""

from __future__ import annotations

import os
import re
import socket
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.child_processes import is_running
from grpo_rl.config.secrets import redact
from grpo_rl.errors import DataError
from grpo_rl.run_files import read_text
from grpo_rl.telemetry.diagnosis.diagnose import RULES, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.page.configuration import configuration
from grpo_rl.telemetry.page.metric_columns import Series, alarms, bands, change, columns, timeline, validations
from grpo_rl.telemetry.page.rollout_chunks import INLINE_BYTES, Chunks, chunks_of, rounded
from grpo_rl.telemetry.page.token_pieces import pieces_of
from grpo_rl.telemetry.report import LOSSES
from grpo_rl.telemetry.status import read_status

ENDED = ("done", "failed", "preempted", "killed")
_SECTION = re.compile(r"\S")
_ROW = re.compile(r"  (\S+(?: \S+)*)\s+(.*)")


@dataclass(frozen=True, slots=True)
class RunData:
    """The page's part about one run."""

    data: dict[str, Any]
    chunks: Chunks


def run_data(
    run: Path, chunk_folder: Path, state: str | None = None, inline_bytes: int = INLINE_BYTES, *, keep: bool = False
) -> RunData:
    """Return what the page shows of the run; `state` is put in place of the one in status.json, `keep` is that of `chunks_of`.

    Raises DataError where there is no run.
    """
    run = run.resolve()
    record = RunRecord.of_folder(run)
    status = current_status(run, state)
    chunks = chunks_of(run, chunk_folder, pieces_of(run, status), inline_bytes, keep=keep)
    index = chunks.index
    diagnosis = diagnose(record)
    measured = validations(index, record.records)
    data = {
        "name": run.name,
        "folder": str(run),
        "status": status,
        "plan": plan_sections(run),
        "findings": [one.as_json() for one in diagnosis.findings],
        "num_rules": len(RULES),
        "undecided": diagnosis.is_undecided,
        "num_steps": diagnosis.num_steps,
        "metrics": columns(record.records),
        "alarms": alarms(record.records),
        "rewards": bands(index, "rollouts"),
        "validation": measured,
        "results": results(record, index, measured),
        "timeline": timeline(run / "timeline.jsonl"),
        "configuration": configuration(run, record.config),
        "num_rollouts": sum(entry["num"] for entry in index["steps"]),
        "written": _written(run, diagnosis.num_steps if state == "done" else None),
    }
    return RunData(jsonable(data), chunks)


def current_status(run: Path, state: str | None = None) -> dict[str, Any]:
    """Return the run's status. A run on this machine that says it is running, and whose process is gone, was killed."""
    status = read_status(run)
    if state is not None:
        status["state"] = state
    elif status.get("state") == "running" and status.get("host") == socket.gethostname():
        pid = status.get("pid")
        if isinstance(pid, int) and not is_running(pid) and not os.path.exists(f"/proc/{pid}"):
            status["state"] = "killed"
    return status


def plan_sections(run: Path) -> list[dict[str, Any]]:
    """Return the plan as sections of (label, text); empty where the run left none."""
    text = ""
    with suppress(DataError):
        text = redact(read_text(run / "plan.txt"))
    sections: list[dict[str, Any]] = []
    for line in text.splitlines():
        if _SECTION.match(line):
            sections.append({"title": line, "rows": []})
        elif sections and line.strip():
            match, rows = _ROW.match(line[:15] + line[15:]), sections[-1]["rows"]
            if match is not None and not line.startswith("   "):
                rows.append([match[1] if match[1] != "-" else "", match[2]])
            elif rows:
                rows[-1][1] += " " + line.strip()
    return sections


def results(record: RunRecord, index: Mapping[str, Any], measured: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return what the run changed: validation with intervals, losses on given answers, and the training reward.

    Intervals are there where the responses of a validation were logged.
    """
    found: list[dict[str, Any]] = []
    for name, series in measured.items():
        fields = {"value": "mean"} | ({"low": "low", "high": "high"} if "low" in series else {})
        ends = [{"step": series["steps"][at]} | {to: series[of][at] for to, of in fields.items()} for at in (0, -1)]
        changed = change(index, series["source"], series["value"]) if "low" in series and series["source"] else None
        prompts = series["prompts"][-1] if "prompts" in series else None
        found.append({"name": f"validation {name}", "before": ends[0], "after": ends[1], "change": changed, "prompts": prompts})
    for key, name in LOSSES.items():
        points = record.validation(key)
        if points:
            found.append({"name": name, "before": _point(points[0]), "after": _point(points[-1])})
    rewards = record.points("reward/mean")
    if len(rewards) > 1:
        k = min(5, len(rewards) // 2)
        before, after = (statistics.fmean(value for _, value in part) for part in (rewards[:k], rewards[-k:]))
        name = f"training reward, mean of the first and the last {k} steps" if k > 1 else "training reward, first and last step"
        found.append({"name": name, "before": _point((rewards[0][0], before)), "after": _point((rewards[-1][0], after))})
    return found


def _point(point: tuple[int, float]) -> dict[str, Any]:
    return {"step": point[0], "value": rounded(point[1])}


def _written(run: Path, ends_after: int | None) -> list[list[Any]]:
    """Return name and path of what lies in the run's folder for people. A run that ends, after so many steps, writes some of it now."""
    soon = {"report": ends_after is not None, "curves": bool(ends_after)}
    places: Sequence[tuple[str, str]] = (
        ("model", "model"),
        ("reward model", "reward_model"),
        ("checkpoints", "checkpoints"),
        ("report", "report.txt"),
        ("curves", "plots/curves.png"),
        ("metrics", "metrics.jsonl"),
        ("rollouts", "rollouts"),
        ("validation", "val"),
        ("logs", "logs"),
    )
    found = []
    for name, place in places:
        path = run / place
        with suppress(OSError):
            if soon.get(name) or (any(path.iterdir()) if path.is_dir() else path.exists()):
                found.append([name, place])
    return found
