"""What the plan predicted of a run's steps, beside what was measured: seconds of each phase, and the memory of each role.

Each record of the metrics has a prediction under the name of what it predicts, after `plan/`: `plan/timing_s/gen`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

PREDICTED = "plan/"
_MEMORY = "perf/memory/"


def measured(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over the steps after the first, and of the step without validation and saving.

    `perf/memory/actor_gib` and so on are the most that torch gave out to a rank of this role in any phase. Empty for fewer than three
    steps.
    """
    steps = [one for one in records if one["step"] > 0 and "timing_s/step" in one and "response_length/mean" in one][1:]
    if len(steps) < 2:
        return {}

    def median(name: str, *without: str) -> float:
        return statistics.median(one.get(name, 0.0) - sum(one.get(other, 0.0) for other in without) for one in steps)

    found = {name: median(name) for name in steps[-1] if name.startswith("timing_s/")}
    found["timing_s/step"] = median("timing_s/step", "timing_s/testing", "timing_s/save")
    if (waited := found.get("timing_s/rollout_waits_for_trainer")) is not None:
        found["timing_s/gen"] = max(0.0, found["timing_s/step"] - waited)
    for name, value in ((name, value) for one in steps for name, value in one.items() if name.startswith(_MEMORY)):
        if name.endswith("/allocated_gib"):
            role = f"{_MEMORY}{name.split('/')[2]}_gib"
            found[role] = max(value, found.get(role, 0.0))
    return {name: value for name, value in found.items() if value > 0}


def grades(records: Sequence[Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """Return name, prediction and measurement of whatever has both."""
    found = measured(records)
    names = [name.removeprefix(PREDICTED) for name in (records[-1] if found else ()) if name.startswith(PREDICTED)]
    return [(name, records[-1][PREDICTED + name], found[name]) for name in names if name in found]
