"""Rules about the policy and its updates: learning rate, entropy, KL, the ratio, length and repetition of responses."""

from __future__ import annotations

import itertools
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_rl.telemetry.diagnosis.run_record import Finding, RunRecord, Series, Weight

COLLAPSED = 0.1
"""The share of its first entropy below which a policy hardly explores."""
FALLEN = 0.5
"""The share of its first entropy below which a policy hardly explores where its groups have lost their signal meanwhile."""
LITTLE = 0.02
"""Nats per token below which a policy is as good as deterministic, whatever it began with."""
AGREES = 0.02
"""The mean difference of log-probs, in nats, up to which bfloat16 explains that sampler and trainer differ."""
DISAGREES = 0.1
FEW_EFFECTIVE = 0.3
"""The effective sample size, as a share, below which a corrected batch is worth less than a third of its tokens."""
FAR_OFF = 0.3
"""The mean difference of log-probs, in nats, above which stale tokens are far from the policy that they train."""
CLIPPED_OF_ALL = 0.1
MANY_CLIPPED = 0.3
"""The share of clipped tokens above which most of a batch has no gradient."""
MANY_CUT = 0.5
LONG = 200
"""The number of characters that a response needs before its compressed size shows repetition."""
REPEATS = 0.15
"""The size after compression, as a share, below which a text says the same again and again; prose has 0.4 to 0.6."""
KL_STEP = 0.5
"""Nats per token by which one batch's updates may move the policy. Where they move it further, the ratio says nothing."""
KL_FAR = 1.0
"""Nats per token from the reference at which a policy has usually lost what its reference could do."""
LOST_IN_ROUNDING = 1e-9
"""The learning rate below which AdamW's step, of about that size, is lost where it is added to a float32 weight of 0.02."""


def nonfinite(run: RunRecord) -> Finding | None:
    """Find updates that were left out, as their loss or gradient was not finite."""
    bad = [step for key in ("actor/nonfinite", "critic/nonfinite") for step, value in run.series(key).points if value > 0]
    if not bad:
        return None
    return Finding(
        name="nonfinite",
        weight=Weight.ILL,
        title=f"In {len(bad)} of {run.num_steps} steps the loss or the gradient was not a finite number.",
        since=bad[0],
        evidence=f"updates were left out at steps {', '.join(map(str, bad[:6]))}" + (", ..." if len(bad) > 6 else ""),
        meaning="A learning rate that is too high, a reward that is infinite, or overflow in half precision.",
        advice=(
            "lower actor_rollout_ref.actor.optim.lr",
            "look at nonfinite_step_N.jsonl in the run's folder for a reward or a response out of the ordinary",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32, to see whether precision is the cause",
        ),
        source="trainer.on_nonfinite in docs/configuration.md",
    )


def nothing_trained(run: RunRecord) -> Finding | None:
    """Find corrections that leave no token to train."""
    trained = run.series("rollout/trained_token_fraction")
    if not trained or trained.now > 0:
        return None
    step = trained.since(lambda value: value == 0)
    masked = (run.series("rollout/masked_fraction").values or [0.0])[-1]
    causes, advice = [], []
    if masked > 0:
        causes.append(f"algorithm.mask_truncated leaves out the {masked:.0%} of the responses that were cut off")
        advice.append("raise data.max_response_length, or set algorithm.mask_truncated=false")
    if masked < 1:
        causes.append("algorithm.rollout_correction.rollout_rs rejects all other tokens")
        advice.append("widen algorithm.rollout_correction.rollout_rs_threshold, or find out why rollout_corr/* are so large")
    return Finding(
        name="nothing_trained",
        weight=Weight.ILL,
        title="No token of this step is trained, and no weight moves.",
        since=step,
        evidence=f"rollout/trained_token_fraction is 0 since step {step}",
        meaning="; ".join(causes) + ".",
        advice=tuple(advice),
        source="algorithm.rollout_correction in docs/configuration.md",
    )


def learning_rate_zero(run: RunRecord) -> Finding | None:
    """Find a learning rate that is 0, or so small that it changes no weight, and is not about to rise."""
    rates = run.series("actor/lr")
    if len(rates) < 3 or max(rates.values[-3:]) > LOST_IN_ROUNDING:
        return None
    step, largest = rates.since(lambda value: value <= LOST_IN_ROUNDING), max(rates.values)
    if step == rates.points[-1][0] - 2 and len(rates) > 3:
        return None  # the end of a decay
    zero = largest == 0 or rates.now == 0
    return Finding(
        name="learning_rate_zero",
        weight=Weight.ILL,
        title="The learning rate is 0: no weight changes." if zero else "The learning rate is too small to change any weight.",
        since=step,
        evidence=f"actor/lr is {'0' if zero else f'at most {largest:.1e}'} from step {step} to {rates.points[-1][0]}",
        meaning="optim.lr is 0 or nearly, warm-up is longer than the run, or the decay ended before the run does.",
        advice=(
            "set actor_rollout_ref.actor.optim.lr, for instance 1e-6 for a model of 1B to 7B",
            "check lr_warmup_steps and lr_scheduler_type beside trainer.total_training_steps",
        ),
        source="float32 keeps 24 bits: 1e-9 added to a weight of 0.02 is rounded away",
    )


def learning_rate_too_high(run: RunRecord) -> Finding | None:
    """Find single batches that move the policy too far, while the reward does not gain by it."""
    rewards, kl, rates = run.series("reward/mean"), run.series("actor/kl_loss"), run.series("actor/lr")
    # Stale tokens are several updates away from the policy, each of which may be small.
    is_stale = max(run.series("staleness/max").values, default=0.0) > 1
    moves = [] if is_stale else [(step, abs(value)) for step, value in run.series("actor/ppo_kl").points]
    # A KL that grows from step to step has other causes; one step that does more than all before it is too large.
    moves += [(at, value - before) for (_, before), (at, value) in itertools.pairwise(kl.points) if value > 3 * before]
    large = [(step, value) for step, value in moves if value > KL_STEP and not _was_random(run, step)]
    if not large or not rewards or _gains(rewards):
        return None
    step, value = min(large)
    rate = f", at a learning rate of {rates.values[0]:.1e}" if rates else ""
    return Finding(
        name="learning_rate_too_high",
        weight=Weight.ILL,
        title="Single updates move the policy too far, and the reward falls: the learning rate is too high.",
        since=step,
        evidence=f"the KL grew by {value:.2f} nats per token in step {step}{rate}; reward {rewards.ends()}",
        meaning="After such a step the sampled tokens say little about the policy, and what it had learnt is overwritten.",
        advice=(
            "lower actor_rollout_ref.actor.optim.lr by 10, from the last good checkpoint or from the beginning",
            "add lr_warmup_steps; lower ppo_epochs or the number of mini-batches",
        ),
        source="PPO's trust region: Schulman et al. 2017, sections 2 and 4",
    )


def _was_random(run: RunRecord, step: int) -> bool:
    """Return whether the entropy had grown by half before this step: then the policy was leaving already, for another cause."""
    points = run.entropy().points
    before = [value for at, value in points if at < step]
    return bool(before) and before[-1] > 1.5 * points[0][1]


def _gains(rewards: Series) -> bool:
    """Return whether the reward is above its beginning by a tenth of what it varies by, and not far below its best."""
    low, high = min(rewards.values), max(rewards.values)
    return rewards.last > rewards.first + 0.1 * (high - low) and rewards.last > low + 0.5 * (high - low)


def kl_runaway(run: RunRecord) -> Finding | None:
    """Find a policy that moves away from the reference without end."""
    kl = run.series("actor/kl_loss") or run.series("actor/reward_kl_penalty")
    if len(kl) < 5 or kl.last < KL_FAR or kl.last < 3 * kl.first:
        return None
    step = kl.since(lambda value: value >= KL_FAR)
    return Finding(
        name="kl_runaway",
        weight=Weight.ILL,
        title="The policy moves away from the reference without end.",
        since=step,
        evidence=f"KL in nats per token {kl.ends()}; above {KL_FAR:g} since step {step}",
        meaning=f"The KL term (kl_loss_coef={run.setting('actor_rollout_ref.actor.kl_loss_coef')}) is too weak against the "
        "learning rate.",
        advice=(
            "raise actor_rollout_ref.actor.kl_loss_coef (the paper of GRPO takes 0.04)",
            "lower actor_rollout_ref.actor.optim.lr",
            "look at the responses: the page's tab Rollouts",
        ),
        source="DeepSeekMath, section 4.1.1",
    )


def prompts_cut(run: RunRecord) -> Finding | None:
    """Find prompts that reach the limit at which they are cut."""
    limit, way = run.setting("data.max_prompt_length"), run.setting("data.truncation")
    longest = run.series("prompt_length/max")
    if not isinstance(limit, int) or way in (None, "error") or not longest:
        return None
    share = statistics.fmean(float(value >= limit) for value in longest.values)
    if share < 0.5:
        return None
    mean = statistics.fmean(run.series("prompt_length/mean").values or [0.0])
    nearly_all = mean >= 0.95 * limit
    return Finding(
        name="prompts_cut",
        weight=Weight.ILL if nearly_all else Weight.WATCH,
        title=f"{'Nearly all prompts' if nearly_all else 'Prompts'} reach data.max_prompt_length={limit} and are cut ({way}) in "
        f"{100 * share:.0f} % of the steps.",
        since=longest.points[0][0],
        evidence=f"prompt_length/max is {max(longest.values):.0f}, the mean {mean:.1f} tokens",
        meaning="A cut prompt may have lost its question, or the tokens with which an answer begins.",
        advice=("raise data.max_prompt_length", "data.filter_overlong_prompts=true leaves such rows out"),
        source="data.truncation in docs/configuration.md",
    )


def entropy_collapse(run: RunRecord) -> Finding | None:
    """Find a policy that has stopped to explore before the task is solved."""
    entropy, rewards, equal = run.entropy(), run.series("reward/mean"), run.series("advantage/zero_group_fraction")
    if len(entropy) < 5 or not rewards or run.solved_share >= 0.9 or (equal and equal.last < 0.5):
        return None
    # Most groups have lost their signal since the beginning, and not by solving the task.
    is_stuck = equal and equal.last >= max(0.7, equal.first + 0.3) and run.gain < 0.2
    bound = max(LITTLE, COLLAPSED * entropy.first, FALLEN * entropy.first if is_stuck else 0.0)
    if entropy.last > bound or entropy.first <= bound:
        return None
    return Finding(
        name="entropy_collapse",
        weight=Weight.ILL,
        title="The policy's entropy has collapsed before the task is solved.",
        since=entropy.since(lambda value: value <= bound),
        evidence=f"nats per token {entropy.ends()}; reward {rewards.last:.3f} of {run.reward_range[1]:g}"
        + (f"; groups of equal rewards {equal.ends(2)}" if equal else ""),
        meaning="All responses to a prompt are nearly the same, so groups have no signal and nothing better is found.",
        advice=(
            "raise the upper clip: actor_rollout_ref.actor.clip_ratio_high=0.28",
            "lower the learning rate, or the number of updates per batch",
            "actor_rollout_ref.actor.entropy_coeff=0.001, or actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "go on from a checkpoint of before: entropy does not come back by itself",
        ),
        source="DAPO (Yu et al. 2025), section 3.1; Cui et al. 2025, section 4",
    )


def entropy_explosion(run: RunRecord) -> Finding | None:
    """Find a policy that becomes random while its reward falls."""
    entropy, rewards = run.entropy(), run.series("reward/mean")
    if len(entropy) < 5 or not rewards or rewards.last > rewards.first:
        return None
    bound = 2 * entropy.first
    if entropy.last < max(bound, entropy.first + 0.5):
        return None
    return Finding(
        name="entropy_explosion",
        weight=Weight.ILL,
        title="The policy becomes random: its entropy grows while the reward falls.",
        since=entropy.since(lambda value: value >= bound),
        evidence=f"nats per token {entropy.ends()}; reward {rewards.ends()}",
        meaning="The entropy bonus outweighs the reward, or the loss pushes tokens down without a bound.",
        advice=(
            f"lower actor_rollout_ref.actor.entropy_coeff (now {run.setting('actor_rollout_ref.actor.entropy_coeff')})",
            "lower the learning rate; keep the lower clip of negative advantages (clip_ratio_c)",
        ),
        source="Skywork-OR1 (He et al. 2025), section 4",
    )


def sampler_trainer_disagree(run: RunRecord) -> Finding | None:
    """Find log-probs of the sampled tokens that differ between engine and trainer."""
    differences, stale = run.series("rollout/logprob_diff_mean"), run.series("staleness/max")
    if not differences or differences.last < AGREES or (stale and stale.last > 0):
        return None
    given = run.setting("actor_rollout_ref.model.override_config") or {}
    drops = [f"{name}={value}" for name, value in given.items() if "drop" in str(name) and value]
    engine, trainer = (run.setting(f"actor_rollout_ref.{key}", "auto") for key in ("rollout.dtype", "actor.fsdp_config.dtype"))
    if drops:
        cause = f"The trainer drops at random ({', '.join(drops)}), and the engine does not: they run different models."
    elif engine != trainer:
        cause = f"The engine computes in {engine}, and the trainer in {trainer} (auto: bfloat16 on GPUs, float32 on CPUs)."
    elif differences.last > 3 * differences.first:
        cause = "The difference grows: the weights of the engine are not the trainer's, or training amplifies rounding."
    else:
        cause = "Another precision, another temperature, another chat template or attention, on one of the two sides."
    return Finding(
        name="sampler_trainer_disagree",
        weight=Weight.ILL if differences.last >= DISAGREES else Weight.WATCH,
        title="The engine that samples and the trainer do not agree about the sampled tokens.",
        since=differences.since(lambda one: one >= AGREES),
        evidence=f"log-probs differ by {differences.last:.3f} nats per token on average ({differences.first:.3f} at first); "
        "float32 differs by 1e-6",
        meaning=cause,
        advice=(
            *(("set the dropout in actor_rollout_ref.model.override_config to 0",) if drops else ()),
            "give both sides one precision: actor_rollout_ref.rollout.dtype and actor_rollout_ref.actor.fsdp_config.dtype",
            "correct for it: algorithm.rollout_correction.rollout_is=token",
            "actor_rollout_ref.rollout.checkpoint_engine.verify_checksum=true shows whether the weights arrive whole",
        ),
        source="Yao et al. 2025, on truncated importance sampling between engine and trainer",
    )


def ratio_out_of_range(run: RunRecord) -> Finding | None:
    """Find batches of which much is clipped."""
    equal, of_all = dict(run.series("advantage/zero_group_fraction").points), run.series("actor/pg_clipfrac")
    # Tokens of groups without a signal have no gradient to clip: the share is that of all others.
    clipped = of_all.map(lambda step, value: value / (1 - equal.get(step, 0.0)) if equal.get(step, 0.0) < 1 else None)
    if len(clipped) < 3 or clipped.last < MANY_CLIPPED or of_all.last < CLIPPED_OF_ALL:
        return None
    largest = max(run.series("actor/ratio_max").values, default=float("nan"))
    return Finding(
        name="ratio_out_of_range",
        weight=Weight.WATCH,
        title=f"{100 * clipped.last:.0f} % of the tokens with a signal are clipped: later updates of a batch have little to train.",
        since=clipped.since(lambda one: one >= MANY_CLIPPED),
        evidence=f"actor/pg_clipfrac {of_all.last:.2f} of all tokens, the largest ratio {largest:.3g}",
        meaning="Too many updates per batch, steps that are too large, or a clip range that is meant for another loss.",
        advice=(
            "look at the clip range: 0.2 for ratios of tokens (vanilla), 3e-4 for those of whole responses (gspo)",
            "lower actor_rollout_ref.actor.ppo_epochs or raise ppo_mini_batch_size",
            "lower actor_rollout_ref.actor.optim.lr",
        ),
        source="Schulman et al. 2017, section 3",
    )


def off_policy(run: RunRecord) -> Finding | None:
    """Find tokens that are too old: the policy has left the one that sampled them."""
    staleness = run.series("staleness/mean")
    if not staleness or staleness.last <= 0:
        return None
    signs: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("rollout_corr/rollout_is_eff_sample_size", "the effective sample size is", lambda one: one <= FEW_EFFECTIVE),
        ("actor/pg_clipfrac", "the share of clipped tokens is", lambda one: one >= MANY_CLIPPED),
        ("rollout/logprob_diff_mean", "log-probs of policy and sampler differ by", lambda one: one >= FAR_OFF),
    )
    seen = [(series, words, holds) for key, words, holds in signs if (series := run.series(key)) and holds(series.last)]
    if not seen:
        return None
    return Finding(
        name="off_policy",
        weight=Weight.WATCH,
        title="What is trained on is far from the policy: it was sampled by weights that are too old.",
        since=min(series.since(holds) for series, _, holds in seen),
        evidence=f"tokens are {staleness.last:.2f} versions old on average; "
        + "; ".join(f"{words} {series.last:.2f}" for series, words, _ in seen),
        meaning="Most of the batch is clipped, or the weights of the correction differ widely: the gradient is that of a smaller batch.",
        advice=("lower trainer.asynchronous.max_staleness", "lower actor_rollout_ref.actor.optim.lr"),
        source="AReaL (Fu et al. 2025), section 5",
    )


def truncation(run: RunRecord) -> Finding | None:
    """Find responses that end at the limit and not by themselves."""
    cut = run.series("response_length/clip_ratio")
    if len(cut) < 3 or cut.last < MANY_CUT or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    unrewarded = max(run.series("reward/max").values, default=1.0) <= 0
    return Finding(
        name="truncation",
        weight=Weight.ILL if cut.last > 0.9 else Weight.WATCH,
        title=f"{100 * cut.last:.0f} % of the responses are cut off at data.max_response_length="
        f"{run.setting('data.max_response_length')}.",
        since=cut.since(lambda value: value >= MANY_CUT),
        evidence=f"response_length/clip_ratio {cut.ends(2)}" + ("; no response was ever rewarded" if unrewarded else ""),
        meaning=(
            "Training made the responses longer until most of them do not end: a cut response is judged on half an answer."
            if cut.last > cut.first + 0.2
            else "The model does not end its responses: the limit is too short, or it does not know the end token of the template."
        ),
        advice=(
            "raise data.max_response_length",
            "check that the chat template is the model's: a base model seldom writes the end token",
            "reward.overlong_buffer punishes length softly; algorithm.mask_truncated=true leaves cut responses out",
        ),
        source="DAPO (Yu et al. 2025), section 3.4",
    )


def truncation_grows(run: RunRecord) -> Finding | None:
    """Find responses that grow into the limit while the reward rises with them."""
    cut, lengths, rewards = map(run.series, ("response_length/clip_ratio", "response_length/mean", "reward/mean"))
    if min(map(len, (cut, lengths, rewards))) < 5 or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    if cut.last < cut.first + 0.2 or lengths.last < 1.3 * lengths.first or run.gain < 0.1:
        return None
    return Finding(
        name="truncation_grows",
        weight=Weight.ILL if cut.last > MANY_CUT else Weight.WATCH,
        title="Responses grow until they are cut off, and the reward rises with them.",
        since=cut.since(lambda value: value > cut.first + 0.1),
        evidence=f"share that is cut off {cut.ends(2)}; tokens {lengths.ends(0)}; reward {rewards.ends()}",
        meaning="The reward pays for length, or the limit is too short for the answers that are being learnt.",
        advice=(
            "look at which part of the reward rises (the page's tab Curves): one that grows with length is to be mended",
            "raise data.max_response_length where the answers themselves rise",
            "reward.overlong_buffer punishes length softly before data.max_response_length",
        ),
        source="Singhal et al. 2023, on length as what reward models pay for; DAPO (Yu et al. 2025), section 3.4",
    )


def length_without_reward(run: RunRecord) -> Finding | None:
    """Find responses that grow while rewards do not."""
    lengths, rewards = run.series("response_length/mean"), run.series("reward/mean")
    if len(lengths) < 10 or len(rewards) < 10:
        return None
    bound = 1.5 * lengths.first
    if lengths.last < max(bound, lengths.first + 4) or run.gain > 0.05:
        return None
    return Finding(
        name="length_without_reward",
        weight=Weight.WATCH,
        title="Responses become longer, and the reward does not rise with them.",
        since=lengths.since(lambda value: value >= bound),
        evidence=f"tokens {lengths.ends(0)}; reward {rewards.ends()}",
        meaning="Losses averaged per response punish long wrong answers less per token, so that wrong answers grow.",
        advice=(
            "actor_rollout_ref.actor.loss_agg_mode=token-mean or seq-mean-token-sum-norm",
            "reward.overlong_buffer, with a length that is enough for a right answer",
        ),
        source="Dr. GRPO (Liu et al. 2025), section 3.1",
    )


def repetition(run: RunRecord) -> Finding | None:
    """Find responses that repeat themselves."""
    now, before = _repeating(run.last_rollouts()), _repeating(run.first_rollouts())
    if now is None or now < 0.2 or (before is not None and now < before + 0.1 and before < 0.5):
        return None
    begin, step = run.rollout_files[0][0], run.rollout_files[-1][0]
    return Finding(
        name="repetition",
        weight=Weight.WATCH,
        title=f"{100 * now:.0f} % of the long responses repeat themselves.",
        since=step,
        evidence=f"{100 * (before or 0):.0f} % in step {begin}, {100 * now:.0f} % in step {step}, by their compressed size",
        meaning="The policy falls into loops, which raise length and often end at the limit.",
        advice=("a rule that pays nothing for loops: docs/rewards.md", "raise the temperature; lower the learning rate"),
        source="Holtzman et al. 2020, section 4",
    )


def _repeating(rollouts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of long responses that compress to almost nothing; None where fewer than 8 are long."""
    long = [str(one["response"]).encode() for one in rollouts if len(str(one.get("response", ""))) >= LONG]
    if len(long) < 8:
        return None
    return statistics.fmean(float(len(zlib.compress(text)) < REPEATS * len(text)) for text in long)
