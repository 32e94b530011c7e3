"""Rules about the optimizer: updates that were left out, learning rates, gradients, steps that are too large."""

from __future__ import annotations

import itertools
import statistics

from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, first, last, since

KL_STEP = 0.5
"""Nats per token by which one batch's updates may move the policy. Where they move it further, the ratio says nothing."""
KL_FAR = 1.0
"""Nats per token from the reference at which a policy has usually lost what its reference could do."""
SPIKE = 10.0
"""The multiple of the median that a gradient's norm reaches in a spike."""
LOST_IN_ROUNDING = 1e-9
"""The learning rate below which AdamW's step, of about that size, is lost where it is added to a float32 weight of 0.02."""


def nonfinite(run: RunRecord) -> Finding | None:
    """Return a finding where updates were left out, as their loss or gradient was not finite."""
    bad = [(step, value) for key in ("actor/nonfinite", "critic/nonfinite") for step, value in run.points(key) if value > 0]
    if not bad:
        return None
    return Finding(
        name="nonfinite",
        weight=Weight.ILL,
        title=f"In {len(bad)} of {run.num_steps} steps the loss or the gradient was not a finite number.",
        since=bad[0][0],
        evidence=f"updates were left out at steps {_steps([step for step, _ in bad])}",
        meaning="A learning rate that is too high, a reward that is infinite, or overflow in half precision.",
        advice=(
            "lower actor_rollout_ref.actor.optim.lr",
            "look at nonfinite_step_N.jsonl in the run's folder for a reward or a response out of the ordinary",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32, to see whether precision is the cause",
        ),
        source="trainer.on_nonfinite in docs/configuration.md",
    )


def nothing_trained(run: RunRecord) -> Finding | None:
    """Return a finding where corrections leave no token to train."""
    points = run.points("rollout/trained_token_fraction")
    if not points or points[-1][1] > 0:
        return None
    step = since(points, lambda value: value == 0)
    masked = (run.values("rollout/masked_fraction") or [0.0])[-1]
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
    """Return a finding where the learning rate is 0, or so small that it changes no weight, and is not about to rise."""
    points = run.points("actor/lr")
    if len(points) < 3 or any(value > LOST_IN_ROUNDING for _, value in points[-3:]):
        return None
    step, largest = since(points, lambda value: value <= LOST_IN_ROUNDING), max(value for _, value in points)
    if step == points[-1][0] - 2 and len(points) > 3:
        return None  # the end of a decay
    zero = largest == 0 or points[-1][1] == 0
    return Finding(
        name="learning_rate_zero",
        weight=Weight.ILL,
        title="The learning rate is 0: no weight changes." if zero else "The learning rate is too small to change any weight.",
        since=step,
        evidence=f"actor/lr is {'0' if zero else f'at most {largest:.1e}'} from step {step} to {points[-1][0]}",
        meaning="optim.lr is 0 or nearly, warm-up is longer than the run, or the decay ended before the run does.",
        advice=(
            "set actor_rollout_ref.actor.optim.lr, for instance 1e-6 for a model of 1B to 7B",
            "check lr_warmup_steps and lr_scheduler_type beside trainer.total_training_steps",
        ),
        source="float32 keeps 24 bits: 1e-9 added to a weight of 0.02 is rounded away",
    )


def learning_rate_too_high(run: RunRecord) -> Finding | None:
    """Return a finding where single batches move the policy too far, and the reward does not gain by it."""
    rewards = run.values("reward/mean")
    # Stale tokens are several updates away from the policy, each of which may be small.
    stale = max(run.values("staleness/max"), default=0.0) > 1
    steps = [] if stale else [(step, abs(value)) for step, value in run.points("actor/ppo_kl")]
    kl = run.points("actor/kl_loss")
    # A KL that grows from step to step has other causes; one step that does more than all before it is too large.
    jumps = [(at, value - before) for (_, before), (at, value) in itertools.pairwise(kl) if value > 3 * before]
    large = [(step, value) for step, value in [*steps, *jumps] if value > KL_STEP and not _was_random(run, step)]
    if not large or not rewards or _gains(rewards):
        return None
    step, value = min(large)
    lr = run.points("actor/lr")
    rate = f", at a learning rate of {lr[0][1]:.1e}" if lr else ""
    return Finding(
        name="learning_rate_too_high",
        weight=Weight.ILL,
        title="Single updates move the policy too far, and the reward falls: the learning rate is too high.",
        since=step,
        evidence=(
            f"the KL grew by {value:.2f} nats per token in step {step}{rate}; reward {first(rewards):.3f} at first, "
            f"{last(rewards):.3f} now"
        ),
        meaning="After such a step the sampled tokens say little about the policy, and what it had learnt is overwritten.",
        advice=(
            "lower actor_rollout_ref.actor.optim.lr by 10, from the last good checkpoint or from the beginning",
            "add lr_warmup_steps; lower ppo_epochs or the number of mini-batches",
        ),
        source="PPO's trust region: Schulman et al. 2017, sections 2 and 4",
    )


def _was_random(run: RunRecord, step: int) -> bool:
    """Return whether the entropy had grown by half before this step: then the policy was leaving already, for another cause."""
    points = run.entropy()
    before = [value for at, value in points if at < step]
    return bool(before) and before[-1] > 1.5 * points[0][1]


def kl_runaway(run: RunRecord) -> Finding | None:
    """Return a finding where the policy moves away from the reference without end."""
    points = run.points("actor/kl_loss") or run.points("actor/reward_kl_penalty")
    if len(points) < 5:
        return None
    values = [value for _, value in points]
    if last(values) < KL_FAR or last(values) < 3 * first(values):
        return None
    step = since(points, lambda value: value >= KL_FAR)
    coefficient = run.setting("actor_rollout_ref.actor.kl_loss_coef")
    return Finding(
        name="kl_runaway",
        weight=Weight.ILL,
        title="The policy moves away from the reference without end.",
        since=step,
        evidence=f"KL {first(values):.3f} nats per token at first, {last(values):.3f} now; above {KL_FAR:g} since step {step}",
        meaning=f"The KL term (kl_loss_coef={coefficient}) is too weak against the learning rate.",
        advice=(
            "raise actor_rollout_ref.actor.kl_loss_coef (the paper of GRPO takes 0.04)",
            "lower actor_rollout_ref.actor.optim.lr",
            "look at the responses: python -m grpo_rl browse RUN",
        ),
        source="DeepSeekMath, section 4.1.1",
    )


def gradient_spikes(run: RunRecord) -> Finding | None:
    """Return a finding where gradients are now and then far above their usual size."""
    points = [(step, value) for step, value in run.points("actor/grad_norm") if value > 0]
    if len(points) < 10:
        return None
    median = statistics.median(value for _, value in points)
    spikes = [(step, value) for step, value in points if value > SPIKE * median]
    if not spikes or len(spikes) > len(points) // 4:
        return None
    clip = run.setting("actor_rollout_ref.actor.optim.clip_grad")
    if len(spikes) == 1 and isinstance(clip, int | float) and clip > 0:
        return None  # clipping took the only one there was
    largest = max(spikes, key=lambda spike: spike[1])
    return Finding(
        name="gradient_spikes",
        weight=Weight.WATCH,
        title=f"The gradient's norm jumps to more than {SPIKE:g} times its median in {len(spikes)} steps.",
        since=spikes[0][0],
        evidence=f"median {median:.3g}, {largest[1]:.3g} at step {largest[0]}; spikes at {_steps([step for step, _ in spikes])}",
        meaning="Single batches with rare tokens of very low probability, or advantages divided by a tiny deviation.",
        advice=(
            f"lower actor_rollout_ref.actor.optim.clip_grad (now {clip})",
            "algorithm.norm_adv_by_std_in_grpo=false, where almost equal groups blow advantages up",
            "look at the rollouts of these steps",
        ),
        source="Dr. GRPO (Liu et al. 2025), section 3.1, on the deviation in the denominator",
    )


def always_clipped(run: RunRecord) -> Finding | None:
    """Return a note where every gradient is far above the bound at which it is clipped."""
    clip = run.setting("actor_rollout_ref.actor.optim.clip_grad")
    points = run.points("actor/grad_norm")
    if not isinstance(clip, int | float) or clip <= 0 or len(points) < 10:
        return None
    above = [value for _, value in points if value > 5 * clip]
    if len(above) < 0.95 * len(points):
        return None
    return Finding(
        name="always_clipped",
        weight=Weight.NOTE,
        title="Nearly every gradient is clipped to less than a fifth: only its direction counts.",
        since=points[0][0],
        evidence=f"norm {statistics.median(above):.3g} in the middle, clipped at {clip:g}, in {len(above)} of {len(points)} steps",
        meaning="The clipping acts as a second learning rate, and batches with a strong signal count no more than others.",
        advice=("raise actor_rollout_ref.actor.optim.clip_grad to about the usual norm, and lower the learning rate in turn",),
        source="Pascanu et al. 2013, section 3.2",
    )


def loss_is_zero(run: RunRecord) -> Finding | None:
    """Return a note that explains a loss of 0, which is right where one update follows each sampling."""
    losses, norms = run.points("actor/pg_loss"), dict(run.points("actor/grad_norm"))
    near = [step for step, value in losses if abs(value) < 1e-5 and norms.get(step, 0.0) > 1e-4]
    equal = run.values("advantage/zero_group_fraction")
    if len(losses) < 2 or len(near) < 0.8 * len(losses) or (equal and last(equal) > 0.9):
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


def _gains(rewards: list[float]) -> bool:
    """Return whether the reward is above its beginning by a tenth of what it varies by, and not far below its best."""
    low, high = min(rewards), max(rewards)
    return last(rewards) > first(rewards) + 0.1 * (high - low) and last(rewards) > low + 0.5 * (high - low)


def _steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:6]))
    return shown + (", ..." if len(steps) > 6 else "")
