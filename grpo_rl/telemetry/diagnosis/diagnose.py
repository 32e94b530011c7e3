"""The doctor: what its rules find in a run, as text, and the alarms of a run that goes on."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_rl.frozen import frozen
from grpo_rl.telemetry.diagnosis.rules import RULES
from grpo_rl.telemetry.diagnosis.run_record import Finding, RunRecord
from grpo_rl.telemetry.metrics.metrics_file import Metrics
from grpo_rl.telemetry.terminal.text import safe_text

ALARM = "alarm/"  # this metric with its name is 1 in the step in which an illness is first seen
REMEMBERED = 400  # last steps that are looked at, so that a long run's step costs no more
FEWEST_STEPS = 5  # with fewer steps finding nothing says nothing: most rules need as many


@frozen
class Diagnosis:
    findings: tuple[Finding, ...]
    num_steps: int

    @property
    def is_undecided(self) -> bool:
        return not self.findings and self.num_steps < FEWEST_STEPS


def diagnose(run: RunRecord) -> Diagnosis:
    """Return the rules' findings, the gravest first, among equals in the order of RULES; one of each name."""
    findings: dict[str, Finding] = {}
    for rule in RULES:
        finding = rule(run)
        if finding is not None:
            findings.setdefault(finding.name, finding)
    return Diagnosis(tuple(sorted(findings.values(), key=lambda finding: finding.weight)), run.num_steps)


def as_text(diagnosis: Diagnosis, *, brief: bool = False) -> str:
    """Return the diagnosis for people, safe to print."""
    if diagnosis.is_undecided:
        lines = [f"{diagnosis.num_steps} training steps are too few to judge; nothing is wrong so far."]
    elif not diagnosis.findings:
        lines = [f"Nothing is wrong with this run, as far as {len(RULES)} rules see in {diagnosis.num_steps} steps."]
    else:
        grave = sum(entry.weight == "ill" for entry in diagnosis.findings)
        watched = len(diagnosis.findings) - grave
        lines = [f"{diagnosis.num_steps} steps: {grave} illness{'es' if grave != 1 else ''}, {watched} to watch."]

    def add(label: str, text: str, indent: int = 13) -> None:
        safe = safe_text(text, limit=1000)
        lines.extend(textwrap.wrap(safe, 100, initial_indent=label, subsequent_indent=" " * indent, break_long_words=False))

    for number, finding in enumerate(diagnosis.findings):
        lines.append("")
        add(f"{finding.weight.upper():<5}  ", f"{finding.title} [{finding.name}, since step {finding.since}]", 7)
        if brief and number:
            continue
        add("  seen       ", finding.evidence)
        add("  means      ", finding.meaning)
        for place, advice in enumerate(finding.advice):
            add(f"  {'' if place else 'to change':<11}", f"- {advice}")
        add("  source     ", finding.source)
    return "\n".join(lines)


class Alarms:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._records: deque[Metrics] = deque(maxlen=REMEMBERED)
        self._said: set[str] = set()

    def resume(self, records: list[dict[str, float]]) -> None:
        for record in records:
            self._records.append(record)
            self._said |= {key.removeprefix(ALARM) for key in record if key.startswith(ALARM)}

    def see(self, step: int, metrics: Metrics) -> list[Finding]:
        self._records.append({"step": step, **metrics})
        findings = diagnose(RunRecord(self._config, list(self._records))).findings
        new = [finding for finding in findings if finding.name not in self._said]
        self._said |= {finding.name for finding in new}
        return new


def as_warning(finding: Finding) -> str:
    return f"{finding.title} {finding.evidence}. Likeliest remedy: {finding.advice[0]} [{finding.name}: docs/doctor.md]"
