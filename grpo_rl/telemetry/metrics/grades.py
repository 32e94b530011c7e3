"""The plan's predictions beside measurements: `plan/timing_s/gen` predicts `timing_s/gen`."""

from __future__ import annotations

import statistics

from grpo_rl.telemetry.metrics.metrics_file import Records

PREDICTED = "plan/"
_MEMORY = "perf/memory/"
_LEAST_SHARE = 0.01
"""Of a step's seconds: a phase that is shorter, by prediction and by measurement, is not graded."""


def measured(records: Records) -> dict[str, float]:
    """Return median seconds of each phase after the first step, and of the step without validation and
    saving. `perf/memory/actor_gib` and so on are the most that torch allocated in a rank of the role. Empty
    below three steps."""
    steps = [row for row in records if row["step"] > 0 and "timing_s/step" in row and "response_length/mean" in row][1:]
    if len(steps) < 2:
        return {}

    def median(name: str, *without: str) -> float:
        return statistics.median(row.get(name, 0.0) - sum(row.get(other, 0.0) for other in without) for row in steps)

    medians = {name: median(name) for name in steps[-1] if name.startswith("timing_s/")}
    medians["timing_s/step"] = median("timing_s/step", "timing_s/testing", "timing_s/save")
    if (waited := medians.get("timing_s/rollout_waits_for_trainer")) is not None:
        medians["timing_s/gen"] = max(0.0, medians["timing_s/step"] - waited)
    for name, value in (entry for row in steps for entry in row.items()):
        if name.startswith(_MEMORY) and name.endswith("/allocated_gib"):
            role = f"{_MEMORY}{name.split('/')[2]}_gib"
            medians[role] = max(value, medians.get(role, 0.0))
    return {name: value for name, value in medians.items() if value > 0}


def grades(records: Records) -> list[tuple[str, float, float]]:
    """Return (name, prediction, measurement) of whatever has both."""
    medians = measured(records)
    names = [name.removeprefix(PREDICTED) for name in (records[-1] if medians else ()) if name.startswith(PREDICTED)]
    least = _LEAST_SHARE * medians.get("timing_s/step", 0.0)
    rows = [(name, records[-1][PREDICTED + name], medians[name]) for name in names if name in medians]
    return [row for row in rows if not row[0].startswith("timing_s/") or max(row[1:]) >= least]
