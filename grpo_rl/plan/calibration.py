"""The seconds of a step on this machine, predicted from the runs that were made on it, and graded after a run.

A small file beside the runs, `calibration.json`, has for each phase the seconds of a unit of its work, as the latest run on the same
devices with the same engine measured them, and how long its responses were as a share of the longest.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.model_folder import ModelSize

FILE = "calibration.json"
CALL = 2e6
"""Operations that a processor would do in the time in which a layer's kernels start: what small models cost, whatever their batch."""
OTHER = "other"
"""The name of what a step takes beside its phases."""
_NO_WORK = ("step", "testing", "save")


def predict(plan: Plan, runs: Path) -> dict[str, float]:
    """Return the seconds of each phase of a step by earlier runs in this folder, the whole as `step`; empty without such runs."""
    known = _read(runs).get(_machine(plan))
    if known is None or plan.model is None or plan.role("actor") is None or plan.engine is None:
        return {}
    work = dict(_work(plan, plan.model, known["length"] * plan.config.data.max_response_length))
    found = {name: known["seconds"][name] * units for name, units in work.items() if name in known["seconds"]}
    return found | {"step": sum(found.values())} if found else {}


def learn(plan: Plan, runs: Path, records: list[dict[str, float]]) -> None:
    """Write what a run's steps measured; nothing for runs of other kinds, or of fewer than three steps, whose first is not counted."""
    measured, size = measure(records), plan.model
    if len(measured) < 2 or size is None or plan.role("actor") is None or plan.engine is None:
        return
    mean = statistics.fmean(record["response_length/mean"] for record in records if "response_length/mean" in record)
    seconds = {name: measured[name] / units for name, units in _work(plan, size, mean) if name in measured}
    share = mean / plan.config.data.max_response_length
    known = _read(runs) | {_machine(plan): {"seconds": seconds, "length": share}}
    temporary = runs / f"{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    temporary.replace(runs / FILE)


def measure(records: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps after the first, the whole without validation and saving as `step`."""
    steps = [
        record for record in records if record["step"] > 0 and "timing_s/step" in record and "response_length/mean" in record
    ][1:]
    if len(steps) < 2:
        return {}
    names = {key.removeprefix("timing_s/") for record in steps for key in record if key.startswith("timing_s/")} - set(_NO_WORK)
    found = {name: statistics.median(record.get(f"timing_s/{name}", 0.0) for record in steps) for name in sorted(names)}
    beside = [sum(record.get(f"timing_s/{name}", 0.0) for name in _NO_WORK[1:]) for record in steps]
    whole = [record["timing_s/step"] - other for record, other in zip(steps, beside, strict=True)]
    step = statistics.median(whole)
    return found | {OTHER: max(0.0, step - sum(found.values())), "step": step}


def grade(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Return the table of predicted against measured seconds; empty where one of both is missing."""
    names = [name for name in (*predicted,) if name in measured]
    if not names:
        return ""
    lines = [f"{'Seconds of a step by the plan':<46}{'predicted':>10}{'measured':>10}{'error':>10}"]
    for name in names:
        error = predicted[name] / measured[name] - 1 if measured[name] else 0.0
        lines.append(f"  {name:<44}{predicted[name]:>10.3f}{measured[name]:>10.3f}{error:>+10.0%}")
    return "\n".join(lines)


def _work(plan: Plan, size: ModelSize, mean: float) -> Iterator[tuple[str, float]]:
    """Yield the units of each phase's work in a step: operations of a rank or replica, rollouts, or weights."""
    config, rollouts = plan.config, plan.sizes.rollouts_per_step
    per_rank = rollouts / plan.world_size
    context = config.data.max_prompt_length / 2 + mean
    token = 2 * size.active_params + 2 * size.layers * size.heads * size.head_dim * context

    def passes(most: int | None, times: float) -> float:
        micro_batches = max(1.0, per_rank * context / (most or context))
        return times * (per_rank * context * token + micro_batches * size.layers * CALL)

    yield "gen", rollouts / plan.num_replicas * context * token + mean * size.layers * CALL
    yield "reward", rollouts
    yield "old_logprobs", passes(plan.passes.old.max_tokens, 1)
    yield "ref", passes(plan.passes.reference.max_tokens, 1)
    yield "update_actor", passes(plan.passes.update.max_tokens, 3 * plan.sizes.updates_per_step / plan.sizes.mini_batches)
    yield "values", passes(plan.passes.critic.max_tokens, 1)
    yield "update_critic", passes(plan.passes.critic.max_tokens, 3 * plan.sizes.critic_epochs)
    yield "sync_weights", size.num_params + CALL
    yield "adv", rollouts
    yield OTHER, 1.0


def _machine(plan: Plan) -> str:
    machine = plan.machine
    devices = f"{plan.world_size} of {machine.num_gpus} GPUs" if machine.device == "cuda" else f"{machine.num_cpus} cores"
    return f"{devices}, {plan.engine.name if plan.engine is not None else 'no engine'}"


def _read(runs: Path) -> dict[str, Any]:
    """Return what the file has; nothing where it is missing, or no file of this kind."""
    try:
        known = json.loads((runs / FILE).read_text(encoding="utf-8"))
        for one in known.values():
            float(one["length"])
            sum(float(seconds) for seconds in one["seconds"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return dict(known)
