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
from pathlib import Path
from typing import Any

from grpo_rl.plan.cost import MEAN_SHARE, SPREAD, Fitted, step_time
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.memory import GIB
from grpo_rl.telemetry.metrics.grades import PREDICTED, measured
from grpo_rl.types import Metrics

FILE = "calibration.json"
PHASES = {
    "sampling": "gen", "reward": "reward", "old log-probs": "old_logprobs", "reference": "ref", "critic's values": "values",
    "update": "update_actor", "critic's update": "update_critic", "weight transfer": "sync_weights", "step": "step",
}  # fmt: skip
"""The metric `timing_s/...` of each phase of a step."""


def predict(plan: Plan, runs: Path) -> dict[str, float]:
    """Return the seconds of each phase of a step by earlier runs in this folder, the whole as `step`; empty without such runs."""
    try:
        here = Fitted(**_read(runs)[_machine(plan)])
        time = None if plan.model is None else step_time(plan, plan.model, here)
    except (TypeError, KeyError, AttributeError):  # another kind of file
        return {}
    return {} if time is None else time.phases | {"step": time.total}


def expected(plan: Plan) -> Metrics:
    """Return what the metrics of a step are to be by the plan, each under its name after `plan/`: `plan/timing_s/gen`.

    Memory is that of GPUs, of roles whose tensors torch counts; the resident size of a process has more than its tensors.
    """
    seconds = predict(plan, Path(plan.config.trainer.default_local_dir).expanduser())
    found = {f"{PREDICTED}timing_s/{PHASES[name]}": value for name, value in seconds.items() if name in PHASES}
    for need in plan.memory if plan.machine.device == "cuda" else ():
        if need.role != "rollout":
            found[f"{PREDICTED}perf/memory/{'ref' if need.role == 'reference' else need.role}_gib"] = need.num_bytes / GIB
    return found


def learn(plan: Plan, runs: Path, records: list[dict[str, float]]) -> None:
    """Write what a run's steps measured; nothing for runs of other kinds, or of fewer than three steps, whose first is not counted."""
    found, data = measured(records), plan.config.data
    here = Fitted(
        {},
        _share(records, "prompt", data.max_prompt_length),
        _share(records, "response", data.max_response_length),
        _spread(records, plan.sizes.rollouts_per_step),
    )
    nominal = step_time(plan, plan.model, here) if plan.model is not None and found else None
    if nominal is None or plan.model is None:
        return
    names = {name: f"timing_s/{PHASES[name]}" for name in nominal.phases if name in PHASES}
    factors = {name: found[key] / nominal.phases[name] for name, key in names.items() if key in found}
    fitted = dataclasses.replace(here, factors=factors | {"other": 0.0})
    without = step_time(plan, plan.model, fitted)
    assert without is not None, "the same run"
    # Lengths that were forced say nothing of other runs.
    forced = plan.config.actor_rollout_ref.rollout.ignore_eos
    one = {
        "factors": factors | {"other": max(0.0, found["timing_s/step"] - without.total)},
        "prompt": here.prompt,
        "response": MEAN_SHARE if forced else here.response,
        "spread": SPREAD if forced else here.spread,
    }
    temporary = runs / f"{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(_read(runs) | {_machine(plan): one}, indent=1), encoding="utf-8")
    temporary.replace(runs / FILE)


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
