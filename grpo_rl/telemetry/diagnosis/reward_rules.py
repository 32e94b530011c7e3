"""Rules about rewards and the signal in them: none, all equal, failing, not true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from grpo_rl.telemetry.diagnosis.run_record import Finding, RunRecord, Series, Weight
from grpo_rl.telemetry.rollouts.rollout_log import prompt_key
from grpo_rl.telemetry.terminal.step_line import FAILURES, OVERALL

FEW_STEPS = 3
"""Steps after which a reward that never varies is no accident."""
MANY_FAILURES = 0.05
"""The share of rewards that fail from which on they change what is learnt."""
FALSE_ALARM = 0.05
"""The chance that an honest run is taken for one whose reward is exploited, by all looks at it together."""
COMPARED_STEPS = 5
"""Steps that are compared with as many before them."""
RISE = NormalDist().inv_cdf(0.95)
"""Standard errors from which on a reward or an audit has risen: at one look in twenty a rise by chance is taken for one."""
LEAST_WORTH = 0.25
"""The rise of an audit, as a share of the reward's and each in its standard deviation, that any honest audit should have."""
TINY = 1e-9
HACKED = "The policy has found responses that the reward model likes and that are wrong."
AGAINST_HACKING = (
    "refresh the reward model from the policy's own samples: trainer.schedule=iterate, with shorter steps_per_iteration there",
    "train the reward model on more pairs",
    "raise actor_rollout_ref.actor.kl_loss_coef",
)
AGAINST_WRONG_PAY = (
    "read what is rewarded: the page's tab Rollouts, highest reward first",
    "raise actor_rollout_ref.actor.kl_loss_coef",
)


def reward_failures(run: RunRecord) -> Finding | None:
    """Find rewards that cannot be computed."""
    kinds = {kind: run.series(f"reward/{kind}") for kind in ("timeouts", "errors", "invalid", "dropped")}
    totals = {kind: sum(series.values) for kind, series in kinds.items()}
    failed = totals["timeouts"] + totals["errors"] + totals["invalid"]
    sampled = _rollouts_per_step(run) * run.num_steps
    if not failed or failed < MANY_FAILURES * sampled:
        return None
    worst = max(("timeouts", "errors", "invalid"), key=lambda kind: totals[kind])
    cause = next((str(one["failure_cause"]) for one in run.last_rollouts() if one.get("failure_cause")), "")
    return Finding(
        name="reward_failures",
        weight=Weight.ILL,
        title=f"{failed:.0f} of {sampled:.0f} rewards could not be computed; most of them {FAILURES[worst]}.",
        since=next(step for step, value in kinds[worst].points if value > 0),
        evidence=", ".join(f"{value:.0f} {FAILURES[kind]}" for kind, value in totals.items() if value)
        + (f"; the last cause: {cause.splitlines()[0][:160]}" if cause else ""),
        meaning="The reward function fails on what this policy writes, or is too slow for its deadline.",
        advice=(
            "try it alone: python -m grpo_rl check-reward with the rows of this run",
            "raise reward.timeout_s where it is slow" if worst == "timeouts" else "mend the function: docs/rewards.md",
        ),
        source="docs/rewards_runtime.md",
    )


def reward_constant(run: RunRecord) -> Finding | None:
    """Find that all responses always got the same reward: none, or more than that."""
    constant = _constant_reward(run)
    cut = run.series("response_length/clip_ratio")
    if constant is None:
        return None
    if constant <= 0 and cut and min(cut.values) > 0.95 and not run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None  # `truncation` names the cause
    sampled = f"{_rollouts_per_step(run) * run.num_steps:.0f} responses of {run.num_steps} steps"
    one = next((one for one in run.last_rollouts() if one.get("response")), None)
    example = f"; for instance {one['response'][:60]!r} where {str(one.get('ground_truth'))[:60]!r} is right" if one else ""
    if constant > 0:
        name, title = "reward_constant", "Every response gets the same reward: there is nothing to compare."
        meaning = "The reward does not read the response, or every prompt is solved by every response."
        advice: tuple[str, ...] = (
            "check what the reward function compares: python -m grpo_rl check-reward",
            "train on harder prompts, where validation says that all of these are solved",
        )
    else:
        name, title = "reward_never_seen", "No response was ever rewarded: there is nothing to learn from."
        meaning = "The task is beyond the model, the reward wants another form of answer, or it cannot be met at all."
        advice = (
            "give the reward the right answer of some rows by hand: python -m grpo_rl check-reward",
            "read some responses: the page's tab Rollouts",
            "begin with easier prompts, a warm start (recipe=paradigm/sft), or more responses per prompt",
        )
    return Finding(
        name=name,
        weight=Weight.ILL,
        title=title,
        since=run.series("reward/min").points[0][0],
        evidence=f"the reward of all {sampled} is {constant:g}{example}",
        meaning=meaning,
        advice=advice,
        source="DAPO (Yu et al. 2025), section 3.2: groups of equal rewards have no gradient",
    )


def groups_without_signal(run: RunRecord) -> Finding | None:
    """Find that most groups have equal rewards, and say whether they are too easy or too hard."""
    equal, rewards = run.series("advantage/zero_group_fraction"), run.series("reward/mean")
    if len(equal) < FEW_STEPS or not rewards or equal.last < 0.7 or _constant_reward(run) is not None:
        return None
    if run.gain > 0.1:
        return None  # a run that has learnt its task has groups without signal
    solved, mixed = run.solved_share >= 0.8, 0.2 < run.solved_share < 0.8
    which = (
        "a part of the prompts is too easy, the other too hard"
        if mixed
        else f"most prompts are too {'easy' if solved else 'hard'}"
    )
    return Finding(
        name="few_groups_with_signal" if mixed else "groups_too_easy" if solved else "groups_too_hard",
        weight=Weight.ILL if equal.last > 0.9 else Weight.WATCH,
        title=f"In {100 * equal.last:.0f} % of the groups all responses get the same reward: {which}.",
        since=equal.since(lambda value: value >= 0.7),
        evidence=f"advantage/zero_group_fraction {equal.ends(2)}; reward {rewards.last:.3f}",
        meaning="Groups of equal rewards have advantage 0. The rest of the batch carries the whole gradient, with more noise.",
        advice=(
            "algorithm.filter_groups.enable=true samples until the batch is full of groups with a signal",
            "data.retire_above=0.95 leaves solved prompts out"
            if solved or mixed
            else "train on easier prompts first, or warm-start by SFT",
            "raise actor_rollout_ref.rollout.n",
        ),
        source="DAPO (Yu et al. 2025), section 3.2",
    )


def validation_falls(run: RunRecord) -> Finding | None:
    """Find a training reward that rises while validation falls."""
    rewards = run.series("reward/mean")
    for key in run.validation_keys:
        measured = run.series(key, validation=True)
        if len(measured) < 3 or len(rewards) < 6:
            continue
        best = max(measured.values)
        at, end = measured.points[measured.values.index(best)][0], measured.points[-1][0]
        after = Series([point for point in rewards.points if point[0] > at])
        before = Series([point for point in rewards.points if point[0] <= at] or rewards.points[:1])
        prompts = _num_prompts(run, end)
        margin = 2 * math.sqrt(max(0.0, measured.now * (1 - measured.now)) / prompts) if prompts else 0.0
        if at == end or best - measured.now <= max(0.05, margin) or len(after) < 3 or after.last < before.last + 0.02:
            continue
        hacked = any("reward_model" in name or "judge" in name for name in _parts(run))
        return Finding(
            name="reward_model_hacked" if hacked else "validation_falls",
            weight=Weight.ILL,
            title="The reward model's opinion rises while the rules' falls."
            if hacked
            else "The reward rises while validation falls.",
            since=at,
            evidence=(
                f"{key} was {best:.3f} at step {at} and is {measured.now:.3f} now; the training reward went from {before.last:.3f} "
                f"to {after.last:.3f}"
            ),
            meaning=HACKED if hacked else "The policy learns what the reward pays and not what validation measures.",
            advice=(f"take the checkpoint of step {at}", *(AGAINST_HACKING if hacked else AGAINST_WRONG_PAY)),
            source="Gao et al. 2022, section 3: the reward model is optimised past its use",
        )
    return None


def opinion_parts_from_rules(run: RunRecord) -> Finding | None:
    """Find a reward model that agrees less and less with the rule that is logged beside it."""
    agreement = run.series("iterate/agreement")
    if len(agreement) < 5 or agreement.last >= 0.6 or agreement.last > agreement.first - 0.1:
        return None
    return Finding(
        name="reward_model_hacked",
        weight=Weight.ILL,
        title="The reward model's opinion and the rules' part: the policy learns to please the model.",
        since=agreement.since(lambda value: value < 0.6),
        evidence=f"share of the pairs on which both agree {agreement.ends(2)}",
        meaning=HACKED,
        advice=AGAINST_HACKING,
        source="DeepSeekMath, section 4.1.4; Gao et al. 2022, section 3",
    )


def reward_exploited(run: RunRecord) -> Finding | None:
    """Find a training reward that rises while an audit of the same responses falls or stays.

    The last steps are compared with each run of as many before them, by tests of the prompts' means. Found where the reward has
    risen, the audit has not, and the rise of the paired difference between what the reward should be worth to the audit and the audit is
    too large for chance. This last test keeps the chance of one false alarm at most FALSE_ALARM over all comparisons of all
    steps of one audit: Bonferroni's correction, step k having 1/(k (k + 1)) of it.
    """
    for name in dict.fromkeys(key[: -len("/num_prompts")] for record in run.training for key in record if _is_audit(key)):
        keys = [name, *(f"{name}/{end}" for end in ("std", "reward", "reward_std", "correlation"))]
        points = [record for record in run.training if record.get(f"{name}/num_prompts") and record.keys() >= set(keys)]
        if len(points) < 2 * COMPARED_STEPS:
            continue
        # Sums over prompts of 1, reward, audit, their squares and their product, over all steps before each: [steps + 1, 6].
        sums = np.cumsum([np.zeros(6), *(_moments(record, name) for record in points)], axis=0)
        windows = sums[COMPARED_STEPS:] - sums[:-COMPARED_STEPS]
        before, now = windows[:-COMPARED_STEPS], windows[-1]
        step = points[-1]["step"]
        chance = FALSE_ALARM / (step * (step + 1) * len(before) * 2)
        reward, audit, gap = _rises(sums[COMPARED_STEPS:-COMPARED_STEPS], before, now)
        found = np.flatnonzero((reward > RISE) & (audit < RISE) & (gap > -NormalDist().inv_cdf(chance)))
        if not len(found):
            continue
        start = int(found[np.argmax(gap[found])])
        begin, end, first = (int(points[at]["step"]) for at in (start, start + COMPARED_STEPS - 1, -COMPARED_STEPS))
        ends = [f"{before[start][at] / before[start][0]:.3f} -> {now[at] / now[0]:.3f}" for at in (1, 2)]
        return Finding(
            name="reward_exploited",
            weight=Weight.ILL,
            title="The training reward rises, and an audit of the same responses does not: the reward is exploited.",
            since=end,
            evidence=f"steps {begin} to {end} -> steps {first} to {step:.0f}: reward {ends[0]}, {name} {ends[1]}; the paired "
            f"difference has grown by {gap[start]:.1f} standard errors",
            meaning="The policy has found responses that the reward pays and the audit does not; or the audit never pays at all.",
            advice=(
                f"read what is paid and not confirmed: rows of grpo_rl.Run(RUN).rollouts() whose reward is high and reward/{name} is low",
                "mend the reward function, or put the audit's rule into reward.functions and audit by another",
                "go on from a checkpoint of before: what was learnt since is what the reward pays",
            ),
            source="Gao et al. 2022, section 3, on a proxy that rises past the goal; a z-test of paired differences",
        )
    return None


def _is_audit(key: str) -> bool:
    return key.startswith("audit/") and key.endswith("/num_prompts")


def _moments(record: Mapping[str, float], name: str) -> np.ndarray:
    """Return the sums over the prompts of one step: their number, reward, audit, both squares and the product, [6]."""
    number, reward, audit = record[f"{name}/num_prompts"], record[f"{name}/reward"], record[name]
    spread, audit_spread = record[f"{name}/reward_std"], record[f"{name}/std"]
    product = record[f"{name}/correlation"] * spread * audit_spread + reward * audit
    return number * np.array([1.0, reward, audit, spread**2 + reward**2, audit_spread**2 + audit**2, product])


def _rises(until: np.ndarray, before: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rises of reward and audit, and how much less the audit has risen than it should have: three times [windows].

    All are in standard errors. `before` has the sums of `_moments` over each window, [windows, 6], `until` those over all steps to
    its end, `now` those of the last window.
    Each prompt's audit is compared with slope * its reward, by the larger of two tests, whose variance is that of both windows
    together, as under the hypothesis that nothing has changed. One slope is the regression of audit on reward until then, with
    its own error: what a reward was worth. The other is a quarter of the ratio of the standard deviations, for a reward that never had
    to do with the audit.
    """
    count, reward, audit, *_ = _central(before)
    known, _, _, spread, _, shared = _central(until)
    both = _central(before + now)
    rise, audit_rise = now[1] / now[0] - reward, now[2] / now[0] - audit
    error = np.sqrt(1 / count + 1 / now[0])
    worth = np.divide(shared, spread, out=np.zeros_like(shared), where=spread > TINY)
    least = LEAST_WORTH * np.sqrt(both[4] / np.maximum(both[3], TINY))
    short = []
    for slope, estimated in ((worth, 1.0), (least, 0.0)):
        variance = np.maximum(both[4] - 2 * slope * both[5] + slope**2 * both[3], TINY)
        factor = error**2 + estimated * rise**2 / (known * np.maximum(spread, TINY))
        short.append((slope * rise - audit_rise) / np.sqrt(variance * factor))
    rises = [one / (error * np.sqrt(np.maximum(variance, TINY))) for one, variance in ((rise, both[3]), (audit_rise, both[4]))]
    return rises[0], rises[1], np.maximum(*short)


def _central(sums: np.ndarray) -> np.ndarray:
    """Return number, means of reward and audit, their variances and covariance from the sums of `_moments`: [6, windows]."""
    _, reward, audit, *squares = (sums / sums[:, :1]).T
    squares = [squares[0] - reward**2, squares[1] - audit**2, squares[2] - reward * audit]
    return np.array([sums[:, 0], reward, audit, *squares])


def format_without_answer(run: RunRecord) -> Finding | None:
    """Find that the form of the answer is learnt and the answer is not."""
    parts = _parts(run)
    forms = [name for name in parts if "format" in name.lower()]
    answers = [name for name in parts if name not in forms and "/" not in name and name not in ("acc", "overlong")]
    for form in forms:
        shape, others = run.series(f"reward/{form}"), {name: run.series(f"reward/{name}") for name in answers}
        others = {name: values for name, values in others.items() if len(values) >= FEW_STEPS}
        if len(shape) < 5 or not others or shape.last < 0.8 or shape.last < shape.first + 0.1:
            continue
        if all(values.last < 0.1 and values.last <= values.first + 0.02 for values in others.values()):
            return Finding(
                name="format_without_answer",
                weight=Weight.ILL,
                title="The form of the answer is learnt, the answer is not.",
                since=shape.since(lambda value: value >= 0.8),
                evidence=f"{form} {shape.ends(2)}; "
                + ", ".join(f"{name} {values.last:.3f}" for name, values in others.items()),
                meaning="Form is easier to come by than truth, and pays enough.",
                advice=(
                    f"lower the factor of {form} in reward.functions, or pay it only together with a right answer",
                    "begin with easier prompts, or a warm start on worked answers",
                ),
                source="DeepSeek-R1 (2025), section 2.2.2, on rewards of format and accuracy",
            )
    return None


def memorised(run: RunRecord) -> Finding | None:
    """Find prompts that are solved after several passes over them, while new ones are not."""
    epochs, rewards = run.series("trainer/epoch"), run.series("reward/mean")
    if not epochs or epochs.now < 2 or len(rewards) < 5 or run.solved_share <= 0.9:
        return None
    for key in run.validation_keys:
        measured = run.series(key, validation=True)
        if measured and measured.now < run.solved_share - 0.25:
            return Finding(
                name="memorised",
                weight=Weight.ILL,
                title="The training prompts are known by heart: they are solved, and new ones are not.",
                since=measured.points[-1][0],
                evidence=f"reward {rewards.last:.3f} in epoch {epochs.now:.0f}, {key} {measured.now:.3f}",
                meaning="The same prompts came too often, or are too few.",
                advice=("add prompts", "stop earlier: take the checkpoint with the best validation", "raise kl_loss_coef"),
                source="Zhang et al. 2017, on fitting and generalising",
            )
    return None


def _constant_reward(run: RunRecord) -> float | None:
    """Return the one reward that all responses of all steps got; None where two differ, or before FEW_STEPS steps."""
    low, high = run.series("reward/min").values, run.series("reward/max").values
    if len(low) < FEW_STEPS or not high or max(high) != min(low):
        return None
    return low[0]


def _parts(run: RunRecord) -> list[str]:
    keys = dict.fromkeys(key for record in run.training for key in record if key.startswith("reward/"))
    own = {f"reward/{name}" for name in (*OVERALL, *FAILURES)}
    return [key.removeprefix("reward/") for key in keys if key not in own and not key.endswith("/std")]


def _rollouts_per_step(run: RunRecord) -> float:
    if rollouts := run.last_rollouts():
        return float(len(rollouts))
    size, n = run.setting("data.train_batch_size", 0), run.setting("actor_rollout_ref.rollout.n", 1)
    return float((size or 0) * (n or 1))


def _num_prompts(run: RunRecord, step: int) -> int:
    """Return the number of prompts of one validation; 0 where it is not known."""
    return len({prompt_key(one) for one in run.rollouts(step, val=True)})
