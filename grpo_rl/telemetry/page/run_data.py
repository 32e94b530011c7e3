"""All that the page shows of a run, as JSON, read from the run's folder."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.overrides import SEEDS
from grpo_rl.config.schema.fields import changed, flat, leaves
from grpo_rl.config.secrets import redact
from grpo_rl.errors import DataError
from grpo_rl.run_files import read_text
from grpo_rl.telemetry.diagnosis.diagnose import ALARM, RULES, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.grades import grades
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, Records, jsonable
from grpo_rl.telemetry.metrics.timeline import read_timeline
from grpo_rl.telemetry.metrics.validation import Point, other_results, shown_keys
from grpo_rl.telemetry.page.rollout_chunks import chunks_of, pieces_of, rounded
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import current_status

ENDED = ("done", "failed", "preempted", "lost")
Z95 = 1.959964  # 97.5 % quantile of the normal distribution
MOST_POINTS = 4000  # of a curve; of longer runs every n-th step is drawn
TIMELINE_STEPS = 200  # last steps whose intervals are drawn
_NAME = "trainer.experiment_name"
_FOLDER = "trainer.default_local_dir"

Series = JsonObject  # lists over steps: steps, mean; low, high, prompts if responses were logged


def run_data(
    run: Path, chunk_folder: Path, state: str | None = None, *, keep: bool = False, trusted: bool = False
) -> JsonObject:
    """`state` replaces status.json's; `keep`: see `chunks_of`; `trusted`: `pieces_of`. Raises DataError."""
    run = run.resolve()
    record = RunRecord.of_folder(run)
    status = current_status(run, state)
    index, inlined = chunks_of(run, chunk_folder, pieces_of(run, status, trusted=trusted), keep=keep)
    diagnosis = diagnose(record)
    measured = validations(index, record.records)
    data = {
        "name": run.name,
        "folder": str(run),
        "status": status,
        "plan": redact(_text(run / "plan.txt")),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "num_rules": len(RULES),
        "undecided": diagnosis.is_undecided,
        "num_steps": diagnosis.num_steps,
        "metrics": columns(record.records),
        "alarms": alarms(record.records),
        "graded": grades(record.records),
        "rewards": bands(index, "rollouts"),
        "validation": measured,
        "results": results(record.records, index, measured),
        "timeline": [busy._asdict() for busy in read_timeline(run / "timeline.jsonl", TIMELINE_STEPS)],
        "configuration": configuration(run, record.config),
        "setting": setting(record.config),
        "num_rollouts": sum(entry["num"] for entry in index["steps"]),
        "written": [[name, path.relative_to(run).as_posix()] for name, path in RunDir(run).written() if name != "page"],
    }
    return dict(jsonable(data)) | {"chunks": {"index": None if inlined is None else index, "inlined": inlined or {}}}


def results(records: Records, index: Mapping[str, Any], measured: Mapping[str, Series]) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for name, series in measured.items():
        fields = {"step": "steps", "value": "mean", "low": "low", "high": "high"}
        before, after = ({to: series[of][at] for to, of in fields.items() if of in series} for at in (0, -1))
        row = {"name": f"validation {name}", "before": before, "after": after, "change": None, "prompts": None}
        if "prompts" in series:
            row |= {"change": change(index, series["source"], series["value"]), "prompts": series["prompts"][-1]}
        rows.append(row)
    unvalidated = other_results(records)
    return rows + [{"name": name, "before": _point(first), "after": _point(last)} for name, first, last in unvalidated]


def _point(point: Point) -> JsonObject:
    return {"step": int(point[0]), "value": rounded(point[1])}


def columns(records: Records) -> JsonObject:
    """Return a list over the steps per metric, and the tokens and seconds of training until each step."""
    every = max(1, math.ceil(len(records) / MOST_POINTS))
    tokens, seconds = (
        list(itertools.accumulate(rounded(record.get(name), 12) or 0.0 for record in records))
        for name in ("perf/total_num_tokens", "timing_s/step")
    )
    chosen = [
        place
        for place, record in enumerate(records)
        if place % every == 0 or place == len(records) - 1 or any(name.startswith("val/") for name in record)
    ]
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "time"))
    return {
        "every": every,
        "steps": [int(records[place]["step"]) for place in chosen],
        "tokens": [round(tokens[place]) for place in chosen],
        "seconds": [round(seconds[place], 2) for place in chosen],
        "columns": {
            name: [rounded(records[place].get(name)) for place in chosen] for name in names if not name.startswith(ALARM)
        },
    }


def alarms(records: Records) -> list[list[Any]]:
    """Return (step, name) for the step in which each illness was first seen."""
    return [[int(record["step"]), name.removeprefix(ALARM)] for record in records for name in record if name.startswith(ALARM)]


def interval(by_prompt: Sequence[Sequence[float]], *, single: bool) -> tuple[float, float, float]:
    """Return the mean over prompts, and the bounds of its 95 % interval.

    Prompts are independent draws, responses to one prompt are not: the variance is that of the prompts' means
    (Miller, "Adding Error Bars to Evals", section 2.2); NaN if these are equal. `single`, for prompts that
    are all right or all wrong: Wilson's interval (Wilson 1927).
    """
    means = [statistics.fmean(rewards) for rewards in by_prompt]
    mean, n = statistics.fmean(means), len(means)
    if single:
        middle = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        # At the ends the bound is exactly 0 or 1.
        return mean, max(0.0, round(middle - half, 12)), min(1.0, round(middle + half, 12))
    half = _half_width(means)
    if all(0.0 <= share <= 1.0 for share in means) and not math.isnan(half):  # shares stay shares
        return mean, max(0.0, mean - half), min(1.0, mean + half)
    return mean, mean - half, mean + half


def _half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean; NaN without variance."""
    return Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(set(values)) > 1 else math.nan


def bands(index: Mapping[str, Any], kind: str, value: str = "reward") -> dict[str, Series]:
    """Return mean and 95 % interval of the reward by step for each source, and of training's `all`, from an
    index. `kind`: rollouts, or val, whose failed rewards count as 0; `value`: reward, or for val mean@N. A
    series has one kind of interval."""
    by_source: dict[str, dict[int, list[list[float]]]] = {}
    for entry in _entries(index, kind):
        for group in entry["groups"]:
            if values := _values(group, kind, value):
                for name in (index["sources"][group[1]], "all"):
                    by_source.setdefault(name, {}).setdefault(entry["step"], []).append(values)
    if kind == "val" or len(by_source) == 2:
        by_source.pop("all", None)
    curves = {}
    for source, steps in by_source.items():
        single = all(len(set(values)) == 1 and values[0] in (0.0, 1.0) for groups in steps.values() for values in groups)
        bounds = [interval(groups, single=single) for groups in steps.values()]
        curves[source] = {
            "steps": list(steps),
            **{name: [rounded(bound[at]) for bound in bounds] for at, name in enumerate(("mean", "low", "high"))},
            "prompts": [len(groups) for groups in steps.values()],
        }
    return curves


def validations(index: Mapping[str, Any], records: Records) -> dict[str, Series]:
    """Return each shown number of validation over the steps, by its metric's name without `val/`."""
    curves: dict[str, Series] = {}
    for key in shown_keys(records):
        source, _, value = key.removeprefix("val/").rpartition("/")
        points = [(int(record["step"]), rounded(record[key])) for record in records if key in record]
        measured: Series = {"steps": [step for step, _ in points], "mean": [mean for _, mean in points]}
        curves[f"{source}/{value}"] = bands(index, "val", value).get(source, measured) | {"source": source, "value": value}
    main = [series for series in curves.values() if series["value"] != "reward"]
    if len(main) < 2 or any(series["steps"] != main[0]["steps"] for series in main):
        return curves
    means = [rounded(statistics.fmean(values)) for values in zip(*(curve["mean"] for curve in main), strict=True)]
    value = main[0]["value"]
    return {f"mean of {len(main)} sources, {value}": {"steps": main[0]["steps"], "mean": means, "value": value}} | curves


def change(index: Mapping[str, Any], source: str, value: str = "reward") -> JsonObject | None:
    """Return a source's change from first to last validation, by prompt."""
    entries, number = _entries(index, "val"), index["sources"].index(source)
    if len(entries) < 2:
        return None
    first, last = (
        {group[0]: statistics.fmean(_values(group, "val", value)) for group in entry["groups"] if group[1] == number}
        for entry in (entries[0], entries[-1])
    )
    pairs = [(first[prompt], last[prompt]) for prompt in first if prompt in last]
    if len(pairs) < 2:
        return None
    differences = [later - earlier for earlier, later in pairs]
    mean = statistics.fmean(differences)
    half = _half_width(differences)
    limit = 1.0 if all(0.0 <= share <= 1.0 for pair in pairs for share in pair) else math.inf
    low, high = max(mean - half, -limit), min(mean + half, limit)  # NaN stays NaN
    return {"mean": rounded(mean), "low": rounded(low), "high": rounded(high), "prompts": len(pairs)}


def _entries(index: Mapping[str, Any], kind: str) -> list[JsonObject]:
    """Return the steps of this kind, which are in order in an index."""
    return [entry for entry in index["steps"] if entry["kind"] == kind]


def _values(group: Sequence[Any], kind: str, value: str) -> list[float]:
    """Return a group's rewards, or what the index has in their place for mean@N."""
    values = group[6] if value != "reward" and len(group) > 6 else group[2]
    return [number or 0.0 for number in values] if kind == "val" else [number for number in values if number is not None]


def configuration(run: Path, config: Mapping[str, Any]) -> JsonObject:
    """Return changed keys, the YAML text, and commands that repeat and resume the run."""
    words = _text(run / "overrides.txt").splitlines()
    named = {word.partition("=")[0].lstrip("+~") for word in words}
    different = [
        {
            "key": key,
            "value": show(value),
            "default": show(default) if key in leaves() else "",
            "named": any(key == name or key.startswith(f"{name}.") for name in named),
        }
        for key, (value, default) in changed(flat(config)).items()
    ]
    settings = [word for word in words if word.partition("=")[0] not in (_NAME, _FOLDER)]
    commands = {
        what: shlex.join(["python", "-m", "grpo_rl.main", *settings, f"{_FOLDER}={run.parent}", f"{_NAME}={name}"])
        for what, name in (("repeat", f"{run.name}_again"), ("resume", run.name))
    }
    return {"different": different, "whole": _text(run / "config.yaml")} | commands


def setting(config: Mapping[str, Any]) -> str:
    """Return what differs from the defaults but names and seeds: equal texts are repetitions."""
    names = (_NAME, _FOLDER, *SEEDS)
    return "\n".join(f"{key}={show(value)}" for key, (value, _) in changed(flat(config)).items() if key not in names)


def _text(file: Path) -> str:
    with suppress(DataError):
        return read_text(file)
    return ""
