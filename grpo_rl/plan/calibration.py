"""The seconds of a step on this machine, predicted from the runs that were made on it, and graded after a run.

A phase takes some seconds for each operation of the model, and some for what Python does for each call and each token, whatever the
model. One run cannot tell the two apart: the second part is assumed (`_work`), but for at most four fifths of what was measured. A small
file beside the runs, `calibration.json`, has both parts of each phase, as the latest run on the same devices with the same engine
measured them, and how long its prompts and responses were as shares of the longest.
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
CALL_S, TOKEN_S, SAMPLED_TOKEN_S = 0.04, 5e-6, 1e-4
"""Seconds of Python for a pass of a phase over its batch, for a token of such a pass, and for a token that an engine samples."""
MOST_PYTHON = 0.8
"""The largest share of a phase's measured seconds that is taken for Python's."""
OTHER = "other"
"""The name of what a step takes beside its phases."""
_NO_WORK = ("step", "testing", "save")


def predict(plan: Plan, runs: Path) -> dict[str, float]:
    """Return the seconds of each phase of a step by earlier runs in this folder, the whole as `step`; empty without such runs."""
    known = _read(runs).get(_machine(plan))
    if known is None or plan.model is None or plan.role("actor") is None or plan.engine is None:
        return {}
    data = plan.config.data
    work = _work(plan, plan.model, known["prompt"] * data.max_prompt_length, known["length"] * data.max_response_length)
    found = {
        name: known["seconds"][name] * units + known["python"][name] * python
        for name, units, python in work
        if name in known["seconds"]
    }
    if not found:
        return {}
    step, sampling = sum(found.values()), found.get("gen", 0.0)
    return found | {"step": max(sampling, step - sampling) if plan.overlaps else step}


def learn(plan: Plan, runs: Path, records: list[dict[str, float]]) -> None:
    """Write what a run's steps measured; nothing for runs of other kinds, or of fewer than three steps, whose first is not counted."""
    measured, size = measure(records), plan.model
    if len(measured) < 2 or size is None or plan.role("actor") is None or plan.engine is None:
        return
    data = plan.config.data
    prompt, mean = (
        statistics.fmean(
            record.get(f"{part}_length/mean", longest / 2) for record in records if "response_length/mean" in record
        )
        for part, longest in (("prompt", data.max_prompt_length), ("response", data.max_response_length))
    )
    seconds, shares = {}, {}
    for name, units, python in _work(plan, size, prompt, mean):
        if name in measured:
            of_python = min(python, MOST_PYTHON * measured[name])
            seconds[name], shares[name] = (measured[name] - of_python) / units, of_python / python if python else 0.0
    lengths = {"prompt": prompt / data.max_prompt_length, "length": mean / data.max_response_length}
    known = _read(runs) | {_machine(plan): {"seconds": seconds, "python": shares, **lengths}}
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


def _work(plan: Plan, size: ModelSize, prompt: float, mean: float) -> Iterator[tuple[str, float, float]]:
    """Yield the units of each phase's work in a step (operations of a rank or replica, rollouts, weights), and seconds of Python."""
    rollouts = plan.sizes.rollouts_per_step
    per_rank, per_replica = rollouts / plan.world_size, rollouts / plan.num_replicas
    context = prompt + mean
    token = 2 * size.active_params + 2 * size.layers * size.heads * size.head_dim * context

    def passes(times: float) -> tuple[float, float]:
        return times * per_rank * context * token, CALL_S + times * per_rank * context * TOKEN_S

    yield "gen", per_replica * context * token, CALL_S + per_replica * mean * SAMPLED_TOKEN_S
    yield "reward", rollouts, 0.0
    yield "old_logprobs", *passes(1)
    yield "ref", *passes(1)
    yield "update_actor", *passes(3 * plan.sizes.updates_per_step / plan.sizes.mini_batches)
    yield "values", *passes(1)
    yield "update_critic", *passes(3 * plan.sizes.critic_epochs)
    yield "sync_weights", size.num_params, CALL_S
    yield "adv", rollouts, 0.0
    yield OTHER, 1.0, 0.0


def _machine(plan: Plan) -> str:
    machine = plan.machine
    devices = f"{plan.world_size} of {machine.num_gpus} GPUs" if machine.device == "cuda" else f"{machine.num_cpus} cores"
    return f"{devices}, {plan.engine.name if plan.engine is not None else 'no engine'}"


def _read(runs: Path) -> dict[str, Any]:
    """Return what the file has; nothing where it is missing, or no file of this kind."""
    try:
        known = json.loads((runs / FILE).read_text(encoding="utf-8"))
        for one in known.values():
            sum(map(float, (one["prompt"], one["length"], *one["seconds"].values(), *one["python"].values())))
            if one["seconds"].keys() != one["python"].keys():
                return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return dict(known)
