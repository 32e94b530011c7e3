"""Rules about the training itself: the optimizer's steps, where the time goes, what failed and came back, prompts that are cut."""

from __future__ import annotations

import itertools
import statistics

from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, Series

KL_STEP = 0.5
"""Nats per token by which one batch's updates may move the policy. Where they move it further, the ratio says nothing."""
KL_FAR = 1.0
"""Nats per token from the reference at which a policy has usually lost what its reference could do."""
SPIKE = 10.0
"""The multiple of the median that a gradient's norm reaches in a spike."""
LOST_IN_ROUNDING = 1e-9
"""The learning rate below which AdamW's step, of about that size, is lost where it is added to a float32 weight of 0.02."""
NEARLY_FULL = 0.95
"""The share of a memory above which a longer batch may not fit."""
SHORTER = {
    "timing_s/reward": ("Rewards are waited for", "raise reward.num_workers, or make the function faster"),
    "timing_s/testing": ("Validation takes most of the time", "raise trainer.test_freq, or validate on fewer prompts"),
    "timing_s/save": (
        "Saving takes most of the time",
        "raise trainer.save_freq; actor_rollout_ref.actor.checkpoint.async_save=true writes beside the training",
    ),
    "timing_s/sync_weights": (
        "Bringing weights to the engines takes most of the time",
        "raise actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or train more per batch",
    ),
    "timing_s/ref": (
        "The reference takes most of the time",
        "actor_rollout_ref.actor.use_kl_loss=false where the KL is not needed",
    ),
    "timing_s/old_logprobs": (
        "The pass for old log-probs takes most of the time",
        "one update per batch needs none: actor_rollout_ref.actor.ppo_mini_batch_size as data.train_batch_size, ppo_epochs=1",
    ),
    "timing_s/gen": (
        "Sampling takes most of the time",
        "raise actor_rollout_ref.rollout.max_num_seqs; lower data.max_response_length; trainer.schedule=async with devices of "
        "their own for the engines",
    ),
    "timing_s/update_actor": (
        "Updates take most of the time",
        "raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu; actor_rollout_ref.model.enable_gradient_checkpointing=false "
        "where memory is left",
    ),
}
"""Phases of a step, with what shortens each."""
MAIN_PHASES = ("timing_s/gen", "timing_s/update_actor")
"""The two phases that a step is about: worth a note only where hardly anything else takes time."""


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
        evidence=f"updates were left out at steps {_listed(bad)}",
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
            "look at the responses: python -m grpo_rl browse RUN",
        ),
        source="DeepSeekMath, section 4.1.1",
    )


def gradient_spikes(run: RunRecord) -> Finding | None:
    """Find gradients that are now and then far above their usual size."""
    points = [(step, value) for step, value in run.series("actor/grad_norm").points if value > 0]
    if len(points) < 10:
        return None
    median = statistics.median(value for _, value in points)
    spikes = [(step, value) for step, value in points if value > SPIKE * median]
    clip = run.setting("actor_rollout_ref.actor.optim.clip_grad")
    is_clipped = isinstance(clip, int | float) and clip > 0
    if not spikes or len(spikes) > len(points) // 4 or (len(spikes) == 1 and is_clipped):
        return None  # clipping took the only one there was
    at, largest = max(spikes, key=lambda spike: spike[1])
    return Finding(
        name="gradient_spikes",
        weight=Weight.WATCH,
        title=f"The gradient's norm jumps to more than {SPIKE:g} times its median in {len(spikes)} steps.",
        since=spikes[0][0],
        evidence=f"median {median:.3g}, {largest:.3g} at step {at}; spikes at {_listed([step for step, _ in spikes])}",
        meaning="Single batches with rare tokens of very low probability, or advantages divided by a tiny deviation.",
        advice=(
            f"lower actor_rollout_ref.actor.optim.clip_grad (now {clip})",
            "algorithm.norm_adv_by_std_in_grpo=false, where almost equal groups blow advantages up",
            "look at the rollouts of these steps",
        ),
        source="Dr. GRPO (Liu et al. 2025), section 3.1, on the deviation in the denominator",
    )


def always_clipped(run: RunRecord) -> Finding | None:
    """Note that every gradient is far above the bound at which it is clipped."""
    clip = run.setting("actor_rollout_ref.actor.optim.clip_grad")
    norms = run.series("actor/grad_norm")
    if not isinstance(clip, int | float) or clip <= 0 or len(norms) < 10:
        return None
    above = [value for value in norms.values if value > 5 * clip]
    if len(above) < 0.95 * len(norms):
        return None
    return Finding(
        name="always_clipped",
        weight=Weight.NOTE,
        title="Nearly every gradient is clipped to less than a fifth: only its direction counts.",
        since=norms.points[0][0],
        evidence=f"norm {statistics.median(above):.3g} in the middle, clipped at {clip:g}, in {len(above)} of {len(norms)} steps",
        meaning="The clipping acts as a second learning rate, and batches with a strong signal count no more than others.",
        advice=("raise actor_rollout_ref.actor.optim.clip_grad to about the usual norm, and lower the learning rate in turn",),
        source="Pascanu et al. 2013, section 3.2",
    )


def loss_is_zero(run: RunRecord) -> Finding | None:
    """Note that a loss of 0 is right where one update follows each sampling."""
    losses, norms = run.series("actor/pg_loss"), dict(run.series("actor/grad_norm").points)
    near = [step for step, value in losses.points if abs(value) < 1e-5 and norms.get(step, 0.0) > 1e-4]
    equal = run.series("advantage/zero_group_fraction")
    if len(losses) < 2 or len(near) < 0.8 * len(losses) or (equal and equal.last > 0.9):
        return None
    return Finding(
        name="loss_is_zero",
        weight=Weight.NOTE,
        title="The policy loss is 0, and that is right.",
        since=near[0],
        evidence=f"actor/pg_loss below 1e-5 in {len(near)} of {len(losses)} steps, with gradients of norm {norms[near[-1]]:.3g}",
        meaning=(
            "With one update per batch the ratio is exactly 1, and the advantages of a group add up to 0. The value is 0; its "
            "gradient is not, and the gradient is what trains."
        ),
        advice=("nothing; watch the reward and the validation instead",),
        source="DeepSeekMath, equation 21: the gradient coefficient of GRPO",
    )


def restarts(run: RunRecord) -> Finding | None:
    """Find workers that fail again and again."""
    points = [(step, value) for step, value in run.series("recovery/restarts_total").points if value > 0]
    if len(points) < 3:
        return None
    return Finding(
        name="restarts",
        weight=Weight.WATCH,
        title=f"Workers failed and were started again {sum(value for _, value in points):.0f} times.",
        since=points[0][0],
        evidence=f"in {len(points)} of {run.num_steps} steps",
        meaning="A machine or its memory is at its limit, or a process is ended from outside.",
        advice=("read the logs of the workers in the run's folder, logs/", "docs/operations.md names what each failure means"),
        source="docs/operations.md",
    )


def memory_nearly_full(run: RunRecord) -> Finding | None:
    """Find a machine's or a GPU's memory that is nearly used up."""
    for key, what, advice in (
        (
            "perf/host_memory_share",
            "controller's machine",
            (
                "lower actor_rollout_ref.rollout.kv_cache_gib on a CPU, or reward.num_workers",
                "offload less: actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
            ),
        ),
        (
            "actor/gpu_memory_share",
            "GPU of the actor",
            (
                "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or actor_rollout_ref.rollout.gpu_memory_utilization",
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true; trainer.on_out_of_memory=split goes on with less",
            ),
        ),
    ):
        shares = run.series(key)
        if shares and shares.now >= NEARLY_FULL:
            return Finding(
                name="memory_nearly_full",
                weight=Weight.WATCH,
                title=f"The memory of the {what} is nearly used up.",
                since=shares.since(lambda value: value >= NEARLY_FULL),
                evidence=f"{key} is {shares.now:.2f}, and was {shares.values[0]:.2f} at first",
                meaning="The next longer batch may not fit. On a machine, the kernel then ends the largest process.",
                advice=advice,
                source="docs/operations.md, on memory that runs out",
            )
    return None


def phase_dominates(run: RunRecord) -> Finding | None:
    """Note that one phase takes most of the time, with the key that shortens it."""
    totals = {key: sum(run.series(key).values) for key in SHORTER}
    whole = sum(run.series("timing_s/step").values)
    key = max(totals, key=lambda name: totals[name])
    if run.num_steps < 5 or whole <= 0 or totals[key] < (0.8 if key in MAIN_PHASES else 0.5) * whole:
        return None
    title, advice = SHORTER[key]
    return Finding(
        name="phase_dominates",
        weight=Weight.NOTE,
        title=f"{title}: {100 * totals[key] / whole:.0f} % of the run.",
        since=run.series(key).points[0][0],
        evidence=f"{totals[key]:.0f} of {whole:.0f} s",
        meaning="The devices wait meanwhile.",
        advice=(advice,),
        source="timing_s/* in metrics.jsonl",
    )


def idle_pools(run: RunRecord) -> Finding | None:
    """Note that one of two pools waits for the other most of the time."""
    whole = sum(run.series("timing_s/step").values)
    if run.num_steps < 5 or whole <= 0:
        return None
    for side, other, key in (
        ("trainer", "rollout", "timing_s/wait_for_rollouts"),
        ("rollout", "trainer", "timing_s/rollout_waits_for_trainer"),
    ):
        waited = sum(run.series(key).values)
        if waited > 0.5 * whole:
            return Finding(
                name="idle_pools",
                weight=Weight.NOTE,
                title=f"The {side}'s devices wait {100 * waited / whole:.0f} % of the time.",
                since=1,
                evidence=f"{waited:.0f} of {whole:.0f} s",
                meaning="The other side is the slower one.",
                advice=(f"move devices from the {side} pool to the {other} pool", "raise trainer.asynchronous.max_staleness"),
                source="docs/performance.md",
            )
    return None


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


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:6])) + (", ..." if len(steps) > 6 else "")
