"""Rules about the policy: entropy, the ratio, how sampler and trainer agree, how old what it learns from is."""

from __future__ import annotations

from collections.abc import Callable

from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, first, last, since

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


def entropy_collapse(run: RunRecord) -> Finding | None:
    """Return a finding where the policy has stopped to explore before the task is solved."""
    points, rewards = run.entropy(), run.values("reward/mean")
    if len(points) < 5 or not rewards:
        return None
    values = [value for _, value in points]
    solved = run.solved_share >= 0.9
    bound = max(LITTLE, COLLAPSED * first(values))
    silent = run.values("advantage/zero_group_fraction")
    if _silenced(run):
        bound = max(bound, FALLEN * first(values))
    if last(values) > bound or first(values) <= bound or solved or (silent and last(silent) < 0.5):
        return None
    return Finding(
        name="entropy_collapse",
        weight=Weight.ILL,
        title="The policy's entropy has collapsed before the task is solved.",
        since=since(points, lambda value: value <= bound),
        evidence=f"{first(values):.3f} nats per token at first, {last(values):.3f} now; reward {last(rewards):.3f} of {run.reward_range[1]:g}"
        + (f"; groups of equal rewards {first(silent):.2f} at first, {last(silent):.2f} now" if silent else ""),
        meaning="All responses to a prompt are nearly the same, so groups have no signal and nothing better is found.",
        advice=(
            "raise the upper clip: actor_rollout_ref.actor.clip_ratio_high=0.28",
            "lower the learning rate, or the number of updates per batch",
            "actor_rollout_ref.actor.entropy_coeff=0.001, or actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "go on from a checkpoint of before: entropy does not come back by itself",
        ),
        source="DAPO (Yu et al. 2025), section 3.1; Cui et al. 2025, section 4",
    )


def _silenced(run: RunRecord) -> bool:
    """Return whether most groups have lost their signal since the beginning, and not by solving the task."""
    silent, rewards, (low, high) = run.values("advantage/zero_group_fraction"), run.values("reward/mean"), run.reward_range
    if not silent or last(silent) < 0.7 or last(silent) < first(silent) + 0.3:
        return False
    return last(rewards) < first(rewards) + 0.2 * (high - low)


def entropy_explosion(run: RunRecord) -> Finding | None:
    """Return a finding where the policy becomes random while its reward falls."""
    points, rewards = run.entropy(), run.values("reward/mean")
    if len(points) < 5 or not rewards:
        return None
    values = [value for _, value in points]
    if last(values) < 2 * first(values) or last(values) < first(values) + 0.5 or last(rewards) > first(rewards):
        return None
    bound = 2 * first(values)
    return Finding(
        name="entropy_explosion",
        weight=Weight.ILL,
        title="The policy becomes random: its entropy grows while the reward falls.",
        since=since(points, lambda value: value >= bound),
        evidence=(
            f"{first(values):.3f} nats per token at first, {last(values):.3f} now; reward {first(rewards):.3f} -> {last(rewards):.3f}"
        ),
        meaning="The entropy bonus outweighs the reward, or the loss pushes tokens down without a bound.",
        advice=(
            f"lower actor_rollout_ref.actor.entropy_coeff (now {run.setting('actor_rollout_ref.actor.entropy_coeff')})",
            "lower the learning rate; keep the lower clip of negative advantages (clip_ratio_c)",
        ),
        source="Skywork-OR1 (He et al. 2025), section 4",
    )


def sampler_trainer_disagree(run: RunRecord) -> Finding | None:
    """Return a finding where the engine's log-probs of the sampled tokens differ from the trainer's."""
    points = run.points("rollout/logprob_diff_mean")
    if not points:
        return None
    values = [value for _, value in points]
    value = last(values)
    stale = run.values("staleness/max")
    if value < AGREES or (stale and last(stale) > 0):
        return None
    step = since(points, lambda one: one >= AGREES)
    grows = value > 3 * first(values)
    return Finding(
        name="sampler_trainer_disagree",
        weight=Weight.ILL if value >= DISAGREES else Weight.WATCH,
        title="The engine that samples and the trainer do not agree about the sampled tokens.",
        since=step,
        evidence=f"log-probs differ by {value:.3f} nats per token on average ({first(values):.3f} at first); float32 differs by 1e-6",
        meaning=_why_they_disagree(run, grows),
        advice=(
            *(("set the dropout in actor_rollout_ref.model.override_config to 0",) if _dropouts(run) else ()),
            "give both sides one precision: actor_rollout_ref.rollout.dtype and actor_rollout_ref.actor.fsdp_config.dtype",
            "correct for it: algorithm.rollout_correction.rollout_is=token",
            "actor_rollout_ref.rollout.checkpoint_engine.verify_checksum=true shows whether the weights arrive whole",
        ),
        source="Yao et al. 2025, on truncated importance sampling between engine and trainer",
    )


def _why_they_disagree(run: RunRecord, grows: bool) -> str:
    """Return the likeliest cause, from the configuration where it shows one."""
    if drops := _dropouts(run):
        return f"The trainer drops at random ({', '.join(drops)}), and the engine does not: they run different models."
    sides = [run.setting(f"actor_rollout_ref.{key}", "auto") for key in ("rollout.dtype", "actor.fsdp_config.dtype")]
    if sides[0] != sides[1]:
        return f"The engine computes in {sides[0]}, and the trainer in {sides[1]} (auto: bfloat16 on GPUs, float32 on CPUs)."
    if grows:
        return "The difference grows: the weights of the engine are not the trainer's, or training amplifies rounding."
    return "Another precision, another temperature, another chat template or attention, on one of the two sides."


def _dropouts(run: RunRecord) -> list[str]:
    """Return the settings of dropout that the run gave to its model, as `name=value`."""
    given = run.setting("actor_rollout_ref.model.override_config") or {}
    return [f"{name}={value}" for name, value in given.items() if "drop" in str(name) and value]


def ratio_out_of_range(run: RunRecord) -> Finding | None:
    """Return a finding where much of a batch is clipped."""
    silent = dict(run.points("advantage/zero_group_fraction"))
    raw = run.points("actor/pg_clipfrac")
    # Tokens of groups without a signal have no gradient to clip: the share is that of all others.
    points = [(step, value / (1 - silent.get(step, 0.0))) for step, value in raw if silent.get(step, 0.0) < 1]
    if len(points) < 3:
        return None
    value, of_all = last([one for _, one in points]), last([one for _, one in raw])
    if value < MANY_CLIPPED or of_all < CLIPPED_OF_ALL:
        return None
    largest = max(run.values("actor/ratio_max"), default=float("nan"))
    return Finding(
        name="ratio_out_of_range",
        weight=Weight.WATCH,
        title=f"{100 * value:.0f} % of the tokens with a signal are clipped: later updates of a batch have little to train.",
        since=since(points, lambda one: one >= MANY_CLIPPED),
        evidence=f"actor/pg_clipfrac {of_all:.2f} of all tokens, the largest ratio {largest:.3g}",
        meaning="Too many updates per batch, steps that are too large, or a clip range that is meant for another loss.",
        advice=(
            "look at the clip range: 0.2 for ratios of tokens (vanilla), 3e-4 for those of whole responses (gspo)",
            "lower actor_rollout_ref.actor.ppo_epochs or raise ppo_mini_batch_size",
            "lower actor_rollout_ref.actor.optim.lr",
        ),
        source="Schulman et al. 2017, section 3",
    )


def off_policy(run: RunRecord) -> Finding | None:
    """Return a finding where what is trained on is too old: the policy has left the one that sampled it."""
    staleness = run.values("staleness/mean")
    if not staleness or last(staleness) <= 0:
        return None
    signs: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("rollout_corr/rollout_is_eff_sample_size", "the effective sample size is", lambda one: one <= FEW_EFFECTIVE),
        ("actor/pg_clipfrac", "the share of clipped tokens is", lambda one: one >= MANY_CLIPPED),
        ("rollout/logprob_diff_mean", "log-probs of policy and sampler differ by", lambda one: one >= FAR_OFF),
    )
    seen = [(key, words, holds) for key, words, holds in signs if run.points(key) and holds(last(run.values(key)))]
    if not seen:
        return None
    return Finding(
        name="off_policy",
        weight=Weight.WATCH,
        title="What is trained on is far from the policy: it was sampled by weights that are too old.",
        since=min(since(run.points(key), holds) for key, _, holds in seen),
        evidence=f"tokens are {last(staleness):.2f} versions old on average; "
        + "; ".join(f"{words} {last(run.values(key)):.2f}" for key, words, _ in seen),
        meaning="Most of the batch is clipped, or the weights of the correction differ widely: the gradient is that of a smaller batch.",
        advice=("lower trainer.asynchronous.max_staleness", "lower actor_rollout_ref.actor.optim.lr"),
        source="AReaL (Fu et al. 2025), section 5",
    )
