"""All rules in their order, and the text of what they find."""

from __future__ import annotations

import textwrap

from grpo_rl.telemetry.diagnosis import optimizer_rules, policy_rules, response_rules, running_rules, signal_rules
from grpo_rl.telemetry.diagnosis.findings import Diagnosis, Finding, Rule, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.terminal.text import safe_text

RULES: tuple[Rule, ...] = (
    optimizer_rules.nonfinite,
    optimizer_rules.learning_rate_zero,
    running_rules.prompts_cut,
    signal_rules.reward_failures,
    optimizer_rules.nothing_trained,
    signal_rules.reward_never_seen,
    signal_rules.reward_constant,
    policy_rules.sampler_trainer_disagree,
    optimizer_rules.learning_rate_too_high,
    policy_rules.entropy_explosion,
    response_rules.truncation_grows,
    response_rules.truncation,
    signal_rules.memorised,
    signal_rules.opinion_parts_from_rules,
    signal_rules.validation_falls,
    signal_rules.format_without_answer,
    optimizer_rules.kl_runaway,
    policy_rules.entropy_collapse,
    response_rules.length_without_reward,
    response_rules.repetition,
    response_rules.language_mixing,
    policy_rules.off_policy,
    policy_rules.ratio_out_of_range,
    signal_rules.groups_without_signal,
    optimizer_rules.gradient_spikes,
    running_rules.memory_nearly_full,
    running_rules.restarts,
    optimizer_rules.always_clipped,
    optimizer_rules.loss_is_zero,
    signal_rules.validation_noise,
    running_rules.phase_dominates,
    running_rules.idle_pools,
)
"""Every rule, causes before what they bring about: a learning rate that is far too high also ruins KL, entropy and reward, and
is named first."""


def diagnose(run: RunRecord) -> Diagnosis:
    """Return what the rules find, the gravest first; among equals in the order of RULES. One finding of a name is enough."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        finding = rule(run)
        if finding is not None:
            found.setdefault(finding.name, finding)
    return Diagnosis(tuple(sorted(found.values(), key=lambda one: one.weight)), run.num_steps)


WORDS = {Weight.ILL: "ILL  ", Weight.WATCH: "WATCH", Weight.NOTE: "note "}


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
