"""The doctor: all rules in their order, the text of what they find, and the alarms of a run that goes on."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_rl.telemetry.diagnosis import policy_rules, reward_rules
from grpo_rl.telemetry.diagnosis.run_record import Finding, RunRecord, Weight
from grpo_rl.telemetry.terminal.text import safe_text

ALARM = "alarm/"
"""The metric `alarm/<name>` is 1 in the step in which an illness is first seen."""
REMEMBERED = 400
"""The number of last steps that are looked at, so that a step of a long run costs no more than one of a short run."""
RULES: tuple[Callable[[RunRecord], Finding | None], ...] = (
    policy_rules.nonfinite,
    policy_rules.learning_rate_zero,
    policy_rules.prompts_cut,
    reward_rules.reward_failures,
    policy_rules.nothing_trained,
    reward_rules.reward_constant,
    reward_rules.reward_exploited,
    policy_rules.sampler_trainer_disagree,
    policy_rules.learning_rate_too_high,
    policy_rules.entropy_explosion,
    policy_rules.truncation_grows,
    policy_rules.truncation,
    reward_rules.memorised,
    reward_rules.opinion_parts_from_rules,
    reward_rules.validation_falls,
    reward_rules.format_without_answer,
    policy_rules.kl_runaway,
    policy_rules.entropy_collapse,
    policy_rules.length_without_reward,
    policy_rules.repetition,
    policy_rules.off_policy,
    policy_rules.ratio_out_of_range,
    reward_rules.groups_without_signal,
)
"""Every rule, causes before what they bring about: a learning rate that is far too high also ruins KL, entropy and reward, and
is named first."""


FEWEST_STEPS = 5
"""The training steps below which finding nothing says nothing: most rules need as many."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a run, the most important first."""

    findings: tuple[Finding, ...]
    num_steps: int

    @property
    def first(self) -> Finding | None:
        """The finding that explains most; None for a run that is well."""
        return self.findings[0] if self.findings else None

    @property
    def is_healthy(self) -> bool:
        """True where nothing was found."""
        return self.first is None

    @property
    def is_undecided(self) -> bool:
        """True where nothing was found, in too few steps to find much."""
        return self.is_healthy and self.num_steps < FEWEST_STEPS


def diagnose(run: RunRecord) -> Diagnosis:
    """Return what the rules find, the gravest first; among equals in the order of RULES. One finding of a name is enough."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        finding = rule(run)
        if finding is not None:
            found.setdefault(finding.name, finding)
    return Diagnosis(tuple(sorted(found.values(), key=lambda one: one.weight)), run.num_steps)


WORDS = {Weight.ILL: "ILL  ", Weight.WATCH: "WATCH"}


def as_text(diagnosis: Diagnosis, width: int = 100, *, brief: bool = False) -> str:
    """Return the diagnosis for people, safe to print: what is wrong first, then what to change.

    With `brief` only the first finding is shown in full, as it often brought about the others.
    """
    if diagnosis.is_undecided:
        lines = [f"{diagnosis.num_steps} training steps are too few to judge; nothing is wrong so far."]
    elif diagnosis.is_healthy:
        lines = [f"Nothing is wrong with this run, as far as {len(RULES)} rules see in {diagnosis.num_steps} steps."]
    else:
        grave = sum(one.weight is Weight.ILL for one in diagnosis.findings)
        watched = sum(one.weight is Weight.WATCH for one in diagnosis.findings)
        lines = [f"{diagnosis.num_steps} steps: {grave} illness{'es' if grave != 1 else ''}, {watched} to watch."]
    for number, finding in enumerate(diagnosis.findings):
        lines += ["", *(_title(finding, width) if brief and number else _finding(finding, width))]
    return "\n".join(lines)


def _title(finding: Finding, width: int) -> list[str]:
    text = f"{WORDS[finding.weight]}  {finding.title} [{finding.name}, since step {finding.since}]"
    return textwrap.wrap(safe_text(text, limit=1000), width, subsequent_indent=" " * 7)


def _finding(finding: Finding, width: int) -> list[str]:
    def wrapped(label: str, text: str) -> list[str]:
        return textwrap.wrap(
            safe_text(text, limit=1000),
            width,
            initial_indent=f"  {label:<11}",
            subsequent_indent=" " * 13,
            break_long_words=False,
        )

    lines = _title(finding, width)
    lines += wrapped("seen", finding.evidence) + wrapped("means", finding.meaning)
    for number, advice in enumerate(finding.advice):
        lines += wrapped("to change" if number == 0 else "", f"- {advice}")
    return lines + wrapped("source", finding.source)


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
        new = [one for one in found if one.name not in self._said]
        self._said |= {one.name for one in new}
        return new


def as_warning(finding: Finding) -> str:
    """Return a finding as one line of the screen, with the likeliest remedy; the doctor shows the others."""
    return f"{finding.title} {finding.evidence}. Likeliest remedy: {finding.advice[0]} [{finding.name}: docs/doctor.md]"
