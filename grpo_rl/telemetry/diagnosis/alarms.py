"""The doctor beside a run that goes on: each illness is named once, in the step in which it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_rl.telemetry.diagnosis.diagnose import diagnose
from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord

ALARM = "alarm/"
"""The metric `alarm/<name>` is 1 in the step in which an illness is first seen."""
REMEMBERED = 400
"""The number of last steps that are looked at, so that a step of a long run costs no more than one of a short run."""


class Alarms:
    """Looks at the metrics of each step. Rollouts are not read here: the command `doctor` and the report do that."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._records: deque[Mapping[str, float]] = deque(maxlen=REMEMBERED)
        self._said: set[str] = set()

    def resume(self, records: list[dict[str, float]]) -> None:
        """Go on behind the steps that an earlier process logged; what it named is not named again."""
        for record in records:
            self._records.append(record)
            self._said |= {key.removeprefix(ALARM) for key in record if key.startswith(ALARM)}

    def see(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Return the illnesses that are seen with this step for the first time."""
        self._records.append({"step": step, **metrics})
        found = diagnose(RunRecord(self._config, list(self._records))).findings
        new = [one for one in found if one.weight is not Weight.NOTE and one.name not in self._said]
        self._said |= {one.name for one in new}
        return new


def as_warning(finding: Finding) -> str:
    """Return a finding as one line of the screen, with the likeliest remedy; the doctor shows the others."""
    return f"{finding.title} {finding.evidence}. Likeliest remedy: {finding.advice[0]} [{finding.name}: docs/doctor.md]"
