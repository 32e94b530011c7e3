"""Lines of the plan's page on a machine: whether the run fits it, what does instead, and how long a step may take."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.memory import gib
from grpo_rl.plan.named_machine.fit import TIGHT, fit_of, table
from grpo_rl.plan.named_machine.proposal import MOST_MACHINES, Proposal, propose
from grpo_rl.plan.named_machine.step_time import assumptions, step_time

Rows = Iterator[tuple[str, str]]
TABLE = "|"
"""The label of a line that stays as it is: a row of a table, or a word to paste."""


def fit(plan: Plan, instead: Proposal | None) -> Rows:
    """Yield whether the run fits its GPUs and its host, and what makes it fit where it does not."""
    judged = fit_of(plan, plan.model) if plan.model is not None else None
    if judged is None or plan.model is None:
        return
    tight = judged.tightest
    state = "yes, tightly" if judged.fits and tight.share > TIGHT else "yes" if judged.fits else "no"
    yield "fits", f"{state}: {tight.what} takes {gib(tight.needed)} of {gib(tight.there)} (estimated, not run)"
    for line in table(plan, plan.model, judged):
        yield TABLE, line
    if plan.engine is not None:
        yield "cache", f"{judged.cache_tokens:,} tokens for each engine, {judged.cache_sequences:.3g} sequences of full length"
    if judged.fits:
        return
    if instead is None:
        yield "instead", f"no configuration was found that fits, on up to {MOST_MACHINES} machines"
        return
    used = instead.fit.tightest
    yield "instead", f"this fits ({used.what} takes {used.share:.0%} of its memory); add to the command:"
    for word in instead.words():
        yield TABLE, word


def instead_of(plan: Plan) -> Proposal | None:
    """Return the nearest configuration that fits, where the plan's own does not."""
    judged = fit_of(plan, plan.model) if plan.model is not None else None
    return None if judged is None or judged.fits or plan.model is None else propose(plan, plan.model)


def time(plan: Plan) -> Rows:
    """Yield the seconds of each phase of a step on a named machine."""
    judged = fit_of(plan, plan.model) if plan.model is not None else None
    found = step_time(plan, plan.model) if plan.model is not None and judged is not None and judged.fits else None
    if found is None:
        return
    for name, seconds in found.phases.items():
        yield TABLE, f"{name:<30}{seconds:>10,.1f} s"
    yield TABLE, f"{'together':<30}{found.total:>10,.1f} s, {found.tokens_per_gpu:,.0f} tokens a second and GPU"
    yield "assumed", assumptions(plan)
