"""What the runs on this machine say of it, for the model of cost: the factors of its phases, and the grade of a prediction.

A small file beside the runs, `calibration.json`, has the factors (`cost.Fitted`) of the latest run on the same devices with the same
engine, and how long its prompts and responses were.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.plan.cost import MEAN_SHARE, SPREAD, Fitted, step_time
from grpo_rl.plan.decisions import Plan

FILE = "calibration.json"
PHASES = {
    "gen": "sampling", "reward": "reward", "old_logprobs": "old log-probs", "ref": "reference", "values": "critic's values",
    "update_actor": "update", "update_critic": "critic's update", "sync_weights": "weight transfer",
}  # fmt: skip
"""The phases of a step by their names in the metrics, `timing_s/gen`."""


def predict(plan: Plan, runs: Path) -> dict[str, float]:
    """Return the seconds of each phase of a step by earlier runs in this folder, the whole as `step`; empty without such runs."""
    try:
        here = Fitted(**_read(runs)[_machine(plan)])
        time = None if plan.model is None else step_time(plan, plan.model, here)
    except (TypeError, KeyError, AttributeError):  # another kind of file
        return {}
    return {} if time is None else time.phases | {"step": time.total}


def learn(plan: Plan, runs: Path, records: list[dict[str, float]]) -> None:
    """Write what a run's steps measured; nothing for runs of other kinds, or of fewer than three steps, whose first is not counted."""
    measured, data = measure(records), plan.config.data
    here = Fitted(
        {},
        _share(records, "prompt", data.max_prompt_length),
        _share(records, "response", data.max_response_length),
        _spread(records, plan.sizes.rollouts_per_step),
    )
    nominal = step_time(plan, plan.model, here) if plan.model is not None and measured else None
    if nominal is None or plan.model is None:
        return
    factors = {name: measured[name] / seconds for name, seconds in nominal.phases.items() if name in measured}
    fitted = dataclasses.replace(here, factors=factors | {"other": 0.0})
    without = step_time(plan, plan.model, fitted)
    assert without is not None, "the same run"
    # Lengths that were forced say nothing of other runs.
    forced = plan.config.actor_rollout_ref.rollout.ignore_eos
    one = {
        "factors": factors | {"other": max(0.0, measured["step"] - without.total)},
        "prompt": here.prompt,
        "response": MEAN_SHARE if forced else here.response,
        "spread": SPREAD if forced else here.spread,
    }
    temporary = runs / f"{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(_read(runs) | {_machine(plan): one}, indent=1), encoding="utf-8")
    temporary.replace(runs / FILE)


def measure(records: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps after the first, the whole without validation and saving as `step`."""
    steps = [
        record for record in records if record["step"] > 0 and "timing_s/step" in record and "response_length/mean" in record
    ][1:]
    if len(steps) < 2:
        return {}

    def median(*names: str) -> float:
        return statistics.median(sum(record.get(f"timing_s/{name}", 0.0) for name in names) for record in steps)

    found = {phase: median(name) for name, phase in PHASES.items()}
    step = statistics.median(
        record["timing_s/step"] - record.get("timing_s/testing", 0.0) - record.get("timing_s/save", 0.0) for record in steps
    )
    if any("timing_s/rollout_waits_for_trainer" in record for record in steps):
        found["sampling"] = max(0.0, step - median("rollout_waits_for_trainer"))
    return {name: seconds for name, seconds in found.items() if seconds > 0} | {"step": step}


def grade(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Return the table of predicted against measured seconds; empty where one of both is missing."""
    names = [name for name in predicted if measured.get(name)]
    if not names:
        return ""
    lines = [f"{'Seconds of a step by the plan':<46}{'predicted':>10}{'measured':>10}{'error':>10}"]
    for name in names:
        error = predicted[name] / measured[name] - 1
        lines.append(f"  {name:<44}{predicted[name]:>10.3f}{measured[name]:>10.3f}{error:>+10.0%}")
    return "\n".join(lines)


def _share(records: list[dict[str, float]], part: str, longest: int) -> float:
    lengths = [
        record.get(f"{part}_length/mean", MEAN_SHARE * longest) for record in records if "response_length/mean" in record
    ]
    return statistics.fmean(lengths) / longest if lengths else MEAN_SHARE


def _spread(records: list[dict[str, float]], rollouts: int) -> float:
    """Return the spread with which the longest of so many lognormal lengths is as far above their mean as it was."""
    longest = [
        math.log(record["response_length/max"] / record["response_length/mean"])
        for record in records
        if record.get("response_length/mean", 0) > 0 and "response_length/max" in record
    ]
    return statistics.fmean(longest) / math.sqrt(2 * math.log(max(2, rollouts))) if longest else SPREAD


def _machine(plan: Plan) -> str:
    machine = plan.machine
    devices = f"{plan.world_size} of {machine.num_gpus} GPUs" if machine.device == "cuda" else f"{machine.num_cpus} cores"
    return f"{devices}, {plan.engine.name if plan.engine is not None else 'no engine'}"


def _read(runs: Path) -> dict[str, Any]:
    """Return what the file has; nothing where it is missing, or no file of this kind."""
    try:
        known = json.loads((runs / FILE).read_text(encoding="utf-8"))
        return dict(known)
    except (OSError, ValueError, TypeError):
        return {}
