"""The doctor's rules: each looks at a run for one illness, or a few that show alike."""

from __future__ import annotations

import itertools
import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge, gt, le, lt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from grpo_rl.run_files import read_yaml
from grpo_rl.telemetry.diagnosis.run_record import Finding, RunRecord, Series
from grpo_rl.telemetry.metrics.metrics_file import Metrics
from grpo_rl.telemetry.rollout_log import prompt_key
from grpo_rl.telemetry.terminal.step_line import FAILURES, OVERALL

ILLNESSES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("illnesses.yaml"))
FEW_STEPS = 3  # steps after which a reward that never varies is no accident
COLLAPSED = 0.1  # share of its first entropy below which a policy hardly explores
FALLEN = 0.5  # the same if its groups have lost their signal meanwhile
LITTLE = 0.02  # nats per token below which a policy is as good as deterministic
AGREES = 0.02  # nats per token of sampler and trainer apart that bfloat16 explains
DISAGREES = 0.1
FEW_EFFECTIVE = 0.3  # effective sample size of a corrected batch, as a share of its tokens
FAR_OFF = 0.3  # nats per token at which stale tokens are far from the policy that they train
CLIPPED_OF_ALL = 0.1
MANY_CLIPPED = 0.3  # share of clipped tokens
MANY_CUT = 0.5
LONG = 200  # characters that a response needs before its compressed size shows repetition
REPEATS = 0.15  # compressed size as a share; prose has 0.4 to 0.6
KL_STEP = 0.5  # nats per token by which one batch's updates may move the policy
KL_FAR = 1.0  # nats per token at which a policy has usually lost what its reference could do
LOST_IN_ROUNDING = 1e-9  # AdamW's step is about lr; added to a float32 weight of 0.02 it is lost
MANY_FAILURES = 0.05  # share of failed rewards that changes what is learned
FALSE_ALARM = 0.05  # chance that an honest run is called exploited, over all looks together
COMPARED_STEPS = 5  # steps of a block, which is compared with each block before it
RISE = NormalDist().inv_cdf(0.95)  # standard errors: one rise by chance in twenty looks
TINY = 1e-9


def finding(name: str, since: int, evidence: str, *, watch: bool = False, **values: Any) -> Finding:
    """Return the finding of an illness, its words filled with `values`; `watch`: it is on its way there."""
    words = ILLNESSES[name]
    title, meaning = (words[part].format(**values) for part in ("title", "meaning"))
    advice = tuple(text.format(**values) for text in words["advice"])
    return Finding(name, "watch" if watch else "ill", title, since, evidence, meaning, advice, words["source"])


# ---- the policy and its updates ---------------------------------------------------------------------------


def nonfinite(run: RunRecord) -> Finding | None:
    bad = [step for key in ("actor/nonfinite", "critic/nonfinite") for step, value in run.series(key).points if value > 0]
    if not bad:
        return None
    steps = ", ".join(map(str, bad[:6])) + (", ..." if len(bad) > 6 else "")
    return finding("nonfinite", bad[0], f"updates were left out at steps {steps}", count=len(bad), steps=run.num_steps)


def tool_fails(run: RunRecord) -> Finding | None:
    for key in sorted(run.keys("episode/tool_errors/")):
        name = key.removeprefix("episode/tool_errors/")
        calls, errors = run.series(f"episode/tool_calls/{name}"), run.series(key)
        if len(errors) >= 2 and calls.values == errors.values:
            per_step = f"{calls.values[-1]:.3g} calls in an episode"
            return finding("tool_fails", errors.points[0][0], f"{per_step}, in {len(errors)} steps", tool=name)
    return None


def nothing_trained(run: RunRecord) -> Finding | None:
    trained = run.series("rollout/trained_token_fraction")
    if not trained or trained.now > 0:
        return None
    step, masked = trained.since(eq, 0), (run.series("rollout/masked_fraction").values or [0.0])[-1]
    evidence = f"rollout/trained_token_fraction is 0 since step {step}; {masked:.0%} of the responses were cut off and left out"
    return finding("nothing_trained", step, evidence)


def learning_rate_zero(run: RunRecord) -> Finding | None:
    """Find a rate that is 0, or so small that it changes no weight, and not about to rise."""
    rates = run.series("actor/lr")
    if len(rates) < 3 or max(rates.values[-3:]) > LOST_IN_ROUNDING:
        return None
    step, end = rates.since(le, LOST_IN_ROUNDING), rates.points[-1][0]
    if step == end - 2 and len(rates) > 3:
        return None  # the end of a decay
    return finding("learning_rate_zero", step, f"actor/lr is at most {max(rates.values[-3:]):.2g} from step {step} to {end}")


def learning_rate_too_high(run: RunRecord) -> Finding | None:
    """Find single batches that move the policy too far without a gain in reward."""
    rewards, kl, rates = run.rewards, run.series("actor/kl_loss"), run.series("actor/lr")
    # Stale tokens are several updates away from the policy, each of which may be small.
    is_stale = max(run.series("staleness/max").values, default=0.0) > 1
    moves = [] if is_stale else [(step, abs(value)) for step, value in run.series("actor/ppo_kl").points]
    # A KL that grows from step to step has other causes: one step has to add more than all before.
    moves += [(at, value - previous) for (_, previous), (at, value) in itertools.pairwise(kl.points) if value > 3 * previous]
    large = [(step, value) for step, value in moves if value > KL_STEP and not _was_random(run, step)]
    if not large or not rewards or _gains(rewards):
        return None
    step, value = min(large)
    rate = f", at a learning rate of {rates.values[0]:.1e}" if rates else ""
    evidence = f"the KL grew by {value:.2f} nats per token in step {step}{rate}; reward {rewards.ends()}"
    return finding("learning_rate_too_high", step, evidence)


def _was_random(run: RunRecord, step: int) -> bool:
    """Return whether the entropy had grown by half before: then the policy was leaving for another cause."""
    points = run.entropy().points
    earlier = [value for at, value in points if at < step]
    return bool(earlier) and earlier[-1] > 1.5 * points[0][1]


def _gains(rewards: Series) -> bool:
    """Return whether the reward has gained a tenth of its range, and is not far below its best."""
    low, high = min(rewards.values), max(rewards.values)
    return rewards.last > rewards.first + 0.1 * (high - low) and rewards.last > low + 0.5 * (high - low)


def kl_runaway(run: RunRecord) -> Finding | None:
    kl = run.series("actor/kl_loss") or run.series("actor/reward_kl_penalty")
    if len(kl) < 5 or kl.last < KL_FAR or kl.last < 3 * kl.first:
        return None
    step = kl.since(ge, KL_FAR)
    evidence = f"KL in nats per token {kl.ends()}; above {KL_FAR:g} since step {step}"
    return finding("kl_runaway", step, evidence, coef=run.setting("actor_rollout_ref.actor.kl_loss_coef"))


def prompts_cut(run: RunRecord) -> Finding | None:
    limit, way = run.setting("data.max_prompt_length"), run.setting("data.truncation")
    longest = run.series("prompt_length/max")
    if not isinstance(limit, int) or way in (None, "error") or not longest:
        return None
    share = statistics.fmean(float(value >= limit) for value in longest.values)
    if share < 0.5:
        return None
    mean = statistics.fmean(run.series("prompt_length/mean").values or [0.0])
    evidence = f"prompt_length/max is {max(longest.values):.0f}, the mean {mean:.1f} tokens"
    nearly_all = mean >= 0.95 * limit
    return finding("prompts_cut", longest.points[0][0], evidence, watch=not nearly_all, limit=limit, way=way, share=share)


def entropy_collapse(run: RunRecord) -> Finding | None:
    """Find a policy that has stopped exploring before the task is solved."""
    entropy, rewards, equal = run.entropy(), run.rewards, run.series("advantage/zero_group_fraction")
    if len(entropy) < 5 or not rewards or run.solved_share >= 0.9 or (equal and equal.last < 0.5):
        return None
    is_stuck = equal and equal.last >= max(0.7, equal.first + 0.3) and run.gain < 0.2
    bound = max(LITTLE, COLLAPSED * entropy.first, FALLEN * entropy.first if is_stuck else 0.0)
    if entropy.last > bound or entropy.first <= bound:
        return None
    groups = f"; groups of equal rewards {equal.ends(2)}" if equal else ""
    evidence = f"nats per token {entropy.ends()}; reward {rewards.last:.3f} of {run.reward_range[1]:g}{groups}"
    return finding("entropy_collapse", entropy.since(le, bound), evidence)


def entropy_explosion(run: RunRecord) -> Finding | None:
    entropy, rewards = run.entropy(), run.rewards
    if len(entropy) < 5 or not rewards or rewards.last > rewards.first:
        return None
    bound = 2 * entropy.first
    if entropy.last < max(bound, entropy.first + 0.5):
        return None
    evidence = f"nats per token {entropy.ends()}; reward {rewards.ends()}"
    coeff = run.setting("actor_rollout_ref.actor.entropy_coeff")
    return finding("entropy_explosion", entropy.since(ge, bound), evidence, coeff=coeff)


def sampler_trainer_disagree(run: RunRecord) -> Finding | None:
    differences, stale = run.series("rollout/logprob_diff_mean"), run.series("staleness/max")
    if not differences or differences.last < AGREES or (stale and stale.last > 0):
        return None
    engine, trainer = (run.setting(f"actor_rollout_ref.{key}", "auto") for key in ("rollout.dtype", "actor.fsdp_config.dtype"))
    evidence = (
        f"log-probs differ by {differences.last:.3f} nats per token on average ({differences.first:.3f} at first); "
        f"float32 differs by 1e-6; rollout.dtype={engine}, actor.fsdp_config.dtype={trainer}"
    )
    since, watch = differences.since(ge, AGREES), differences.last < DISAGREES
    return finding("sampler_trainer_disagree", since, evidence, watch=watch)


def ratio_out_of_range(run: RunRecord) -> Finding | None:
    equal, of_all = dict(run.series("advantage/zero_group_fraction").points), run.series("actor/pg_clipfrac")
    # Tokens of groups without a signal have no gradient to clip.
    clipped = Series([(at, value / (1 - equal.get(at, 0.0))) for at, value in of_all.points if equal.get(at, 0.0) < 1])
    if len(clipped) < 3 or clipped.last < MANY_CLIPPED or of_all.last < CLIPPED_OF_ALL:
        return None
    largest = max(run.series("actor/ratio_max").values, default=float("nan"))
    evidence = f"actor/pg_clipfrac {of_all.last:.2f} of all tokens, the largest ratio {largest:.3g}"
    since = clipped.since(ge, MANY_CLIPPED)
    return finding("ratio_out_of_range", since, evidence, watch=True, share=clipped.last)


def off_policy(run: RunRecord) -> Finding | None:
    staleness = run.series("staleness/mean")
    if not staleness or staleness.last <= 0:
        return None
    signs: tuple[tuple[str, str, Callable[[float, float], bool], float], ...] = (
        ("rollout_corr/rollout_is_eff_sample_size", "the effective sample size is", le, FEW_EFFECTIVE),
        ("actor/pg_clipfrac", "the share of clipped tokens is", ge, MANY_CLIPPED),
        ("rollout/logprob_diff_mean", "log-probs of policy and sampler differ by", ge, FAR_OFF),
    )
    evidence, steps = [f"tokens are {staleness.last:.2f} versions old on average"], []
    for key, words, compare, bound in signs:
        if (series := run.series(key)) and compare(series.last, bound):
            evidence.append(f"{words} {series.last:.2f}")
            steps.append(series.since(compare, bound))
    return finding("off_policy", min(steps), "; ".join(evidence), watch=True) if steps else None


def truncation(run: RunRecord) -> Finding | None:
    cut = run.series("response_length/clip_ratio")
    if len(cut) < 3 or cut.last < MANY_CUT or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    unrewarded = max(run.series("reward/max").values, default=1.0) <= 0
    evidence = f"response_length/clip_ratio {cut.ends(2)}" + ("; no response was ever rewarded" if unrewarded else "")
    since, limit = cut.since(ge, MANY_CUT), run.setting("data.max_response_length")
    return finding("truncation", since, evidence, watch=cut.last <= 0.9, share=cut.last, limit=limit)


def truncation_grows(run: RunRecord) -> Finding | None:
    cut, lengths, rewards = map(run.series, ("response_length/clip_ratio", "response_length/mean", "reward/mean"))
    if min(map(len, (cut, lengths, rewards))) < 5 or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    if cut.last < cut.first + 0.2 or lengths.last < 1.3 * lengths.first or run.gain < 0.1:
        return None
    evidence = f"share that is cut off {cut.ends(2)}; tokens {lengths.ends(0)}; reward {rewards.ends()}"
    since = cut.since(gt, cut.first + 0.1)
    return finding("truncation_grows", since, evidence, watch=cut.last <= MANY_CUT)


def length_without_reward(run: RunRecord) -> Finding | None:
    lengths, rewards = run.series("response_length/mean"), run.rewards
    if len(lengths) < 10 or len(rewards) < 10:
        return None
    bound = 1.5 * lengths.first
    if lengths.last < max(bound, lengths.first + 4) or run.gain > 0.05:
        return None
    evidence = f"tokens {lengths.ends(0)}; reward {rewards.ends()}"
    return finding("length_without_reward", lengths.since(ge, bound), evidence, watch=True)


def repetition(run: RunRecord) -> Finding | None:
    last, first = _repeating(run.last_rollouts), _repeating(run.first_rollouts)
    if last is None or last < 0.2 or (first is not None and last < first + 0.1 and first < 0.5):
        return None
    begin, step = min(run.rollout_files), max(run.rollout_files)
    evidence = f"{first or 0:.0%} in step {begin}, {last:.0%} in step {step}, by their compressed size"
    return finding("repetition", step, evidence, watch=True, share=last)


def _repeating(rollouts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of long responses that compress to almost nothing; None for fewer than 8 long ones."""
    long = [str(rollout["response"]).encode() for rollout in rollouts if len(str(rollout.get("response", ""))) >= LONG]
    if len(long) < 8:
        return None
    return statistics.fmean(float(len(zlib.compress(text)) < REPEATS * len(text)) for text in long)


# ---- rewards and the signal in them -----------------------------------------------------------------------


def reward_failures(run: RunRecord) -> Finding | None:
    kinds = {kind: run.series(f"reward/{kind}") for kind in ("timeouts", "errors", "invalid", "dropped")}
    totals = {kind: sum(series.values) for kind, series in kinds.items()}
    failures = {kind: total for kind, total in totals.items() if kind != "dropped"}
    failed, worst = sum(failures.values()), max(failures, key=failures.__getitem__)
    sampled = _rollouts_per_step(run) * run.num_steps
    if not failed or failed < MANY_FAILURES * sampled:
        return None
    cause = next((str(rollout["failure_cause"]) for rollout in run.last_rollouts if rollout.get("failure_cause")), "")
    evidence = ", ".join(f"{total:.0f} {FAILURES[kind]}" for kind, total in totals.items() if total)
    evidence += f"; the last cause: {cause.splitlines()[0][:160]}" if cause else ""
    since = next(step for step, value in kinds[worst].points if value > 0)
    return finding("reward_failures", since, evidence, failed=failed, sampled=sampled, worst=FAILURES[worst])


def reward_constant(run: RunRecord) -> Finding | None:
    constant = _constant_reward(run)
    cut = run.series("response_length/clip_ratio")
    if constant is None:
        return None
    if constant <= 0 and cut and min(cut.values) > 0.95 and not run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None  # `truncation` names the cause
    row = next((row for row in run.last_rollouts if row.get("response")), None)
    example = f"; for instance {row['response'][:60]!r} where {str(row.get('ground_truth'))[:60]!r} is right" if row else ""
    sampled = f"{_rollouts_per_step(run) * run.num_steps:.0f} responses of {run.num_steps} steps"
    evidence = f"the reward of all {sampled} is {constant:g}{example}"
    name = "reward_constant" if constant > 0 else "reward_never_seen"
    return finding(name, run.series("reward/min").points[0][0], evidence)


def groups_without_signal(run: RunRecord) -> Finding | None:
    equal, rewards = run.series("advantage/zero_group_fraction"), run.rewards
    if len(equal) < FEW_STEPS or not rewards or equal.last < 0.7 or _constant_reward(run) is not None:
        return None
    if run.gain > 0.1:
        return None  # its task is learned
    solved = run.solved_share
    name = "groups_too_easy" if solved >= 0.8 else "few_groups_with_signal" if solved > 0.2 else "groups_too_hard"
    evidence = f"advantage/zero_group_fraction {equal.ends(2)}; reward {rewards.last:.3f}"
    return finding(name, equal.since(ge, 0.7), evidence, watch=equal.last <= 0.9, share=equal.last)


def validation_falls(run: RunRecord) -> Finding | None:
    rewards = run.rewards
    for key in run.validation_keys:
        measured = run.series(key)
        if len(measured) < 3 or len(rewards) < 6:
            continue
        best = max(measured.values)
        at, end = measured.points[measured.values.index(best)][0], measured.points[-1][0]
        later = Series([point for point in rewards.points if point[0] > at])
        earlier = Series([point for point in rewards.points if point[0] <= at] or rewards.points[:1])
        prompts = len({prompt_key(rollout) for rollout in run.validated(end)})
        margin = 2 * math.sqrt(max(0.0, measured.now * (1 - measured.now)) / prompts) if prompts else 0.0
        if at == end or best - measured.now <= max(0.05, margin) or len(later) < 3 or later.last < earlier.last + 0.02:
            continue
        hacked = any("reward_model" in name or "judge" in name for name in _parts(run))
        return finding(
            "reward_model_hacked" if hacked else "validation_falls",
            at,
            f"{key} was {best:.3f} at step {at} and is {measured.now:.3f} now; the training reward went from {earlier.last:.3f} "
            f"to {later.last:.3f}",
            best=f"step {at}",
        )
    return None


def opinion_parts_from_rules(run: RunRecord) -> Finding | None:
    """Find a reward model that agrees less and less with the rule logged beside it."""
    agreement = run.series("iterate/agreement")
    if len(agreement) < 5 or agreement.last >= 0.6 or agreement.last > agreement.first - 0.1:
        return None
    evidence = f"share of the pairs on which both agree {agreement.ends(2)}"
    return finding("reward_model_hacked", agreement.since(lt, 0.6), evidence, best="a step before")


def reward_exploited(run: RunRecord) -> Finding | None:
    """Find a training reward that rises while an audit of the same responses falls.

    The last full block of steps is compared with each earlier one, by z-tests of the prompts' means with
    pooled variance. Bonferroni's correction over all comparisons at all steps, block k having 1/(k (k + 1))
    of FALSE_ALARM, bounds the chance of a false alarm. A constant audit says nothing: the answer's form may
    be learned first.
    """
    ending = "/num_prompts"
    for name in (key.removesuffix(ending) for key in run.keys("audit/") if key.endswith(ending)):
        needed = {name, *(f"{name}/{end}" for end in ("std", "reward", "reward_std"))}
        points = [record for record in run.training if record.get(name + ending) and record.keys() >= needed]
        # A step's block does not depend on how many earlier steps are remembered.
        number = int(run.training[-1]["step"]) // COMPARED_STEPS
        by_block = itertools.groupby(points, lambda record: (int(record["step"]) - 1) // COMPARED_STEPS)
        full = [list(block) for place, block in by_block if place < number]
        if len(full) < 2:
            continue
        *earlier, latest = (np.sum([_moments(record, name) for record in block], axis=0) for block in full)
        reward, audit = _rises(np.array(earlier), latest)
        fallen = NormalDist().inv_cdf(FALSE_ALARM / (number * (number + 1) * len(earlier)))
        exploited = np.flatnonzero((reward > RISE) & (audit < fallen))
        if not len(exploited):
            continue
        start = int(exploited[np.argmin(audit[exploited])])
        ranges = (f"{int(block[0]['step'])} to {int(block[-1]['step'])}" for block in (full[start], full[-1]))
        ends = [f"{earlier[start][at] / earlier[start][0]:.3f} -> {latest[at] / latest[0]:.3f}" for at in (1, 2)]
        evidence = (
            f"steps {' -> '.join(ranges)}: reward {ends[0]}, {name} {ends[1]}; "
            f"the audit has fallen by {-audit[start]:.1f} standard errors"
        )
        return finding("reward_exploited", int(full[start][-1]["step"]), evidence, audit=name)
    return None


def _moments(record: Metrics, name: str) -> np.ndarray:
    """Return sums over a step's prompts, [5]: number, reward, audit, and both squares."""
    means = np.array([record[f"{name}/reward"], record[name]])
    spreads = np.array([record[f"{name}/reward_std"], record[f"{name}/std"]])
    return float(record[f"{name}/num_prompts"]) * np.array([1.0, *means, *(spreads**2 + means**2)])


def _rises(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rise of reward and audit since each block, in standard errors, [blocks]; from `_moments`."""
    means, now_mean = old[:, 1:3] / old[:, :1], new[1:3] / new[0]
    pooled = old + new
    variance = pooled[:, 3:] / pooled[:, :1] - (pooled[:, 1:3] / pooled[:, :1]) ** 2
    error = np.sqrt(np.maximum(variance, TINY) * (1 / old[:, :1] + 1 / new[0]))
    reward, audit = ((now_mean - means) / error).T
    return reward, audit


def format_without_answer(run: RunRecord) -> Finding | None:
    parts = {name: run.series(f"reward/{name}") for name in _parts(run)}
    forms = [name for name in parts if "format" in name.lower()]
    answers = {
        name: values
        for name, values in parts.items()
        if name not in (*forms, "acc", "overlong") and "/" not in name and len(values) >= FEW_STEPS
    }
    for form in forms:
        shape = parts[form]
        if len(shape) < 5 or not answers or shape.last < 0.8 or shape.last < shape.first + 0.1:
            continue
        if all(values.last < 0.1 and values.last <= values.first + 0.02 for values in answers.values()):
            ends = ", ".join(f"{name} {values.last:.3f}" for name, values in answers.items())
            since = shape.since(ge, 0.8)
            return finding("format_without_answer", since, f"{form} {shape.ends(2)}; {ends}", form=form)
    return None


def memorised(run: RunRecord) -> Finding | None:
    epochs, rewards = run.series("trainer/epoch"), run.rewards
    if not epochs or epochs.now < 2 or len(rewards) < 5 or run.solved_share <= 0.9:
        return None
    for key in run.validation_keys:
        measured = run.series(key)
        if measured and measured.now < run.solved_share - 0.25:
            evidence = f"reward {rewards.last:.3f} in epoch {epochs.now:.0f}, {key} {measured.now:.3f}"
            return finding("memorised", measured.points[-1][0], evidence)
    return None


def _constant_reward(run: RunRecord) -> float | None:
    """Return the only reward of all responses; None if two differ, or before FEW_STEPS steps."""
    low, high = run.series("reward/min").values, run.series("reward/max").values
    if len(low) < FEW_STEPS or not high or max(high) != min(low):
        return None
    return low[0]


def _parts(run: RunRecord) -> list[str]:
    names = [key.removeprefix("reward/") for key in run.keys("reward/")]
    return [name for name in names if name not in (*OVERALL, *FAILURES) and not name.endswith("/std")]


def _rollouts_per_step(run: RunRecord) -> float:
    size, n = run.setting("data.train_batch_size", 0), run.setting("actor_rollout_ref.rollout.n", 1)
    return float(len(run.last_rollouts) or (size or 0) * (n or 1))


RULES: tuple[Callable[[RunRecord], Finding | None], ...] = (
    nonfinite,
    learning_rate_zero,
    prompts_cut,
    reward_failures,
    tool_fails,
    nothing_trained,
    reward_constant,
    reward_exploited,
    sampler_trainer_disagree,
    learning_rate_too_high,
    entropy_explosion,
    truncation_grows,
    truncation,
    memorised,
    opinion_parts_from_rules,
    validation_falls,
    format_without_answer,
    kl_runaway,
    entropy_collapse,
    length_without_reward,
    repetition,
    off_policy,
    ratio_out_of_range,
    groups_without_signal,
)
"""Causes before their consequences: a learning rate far too high also ruins KL, entropy and reward."""
