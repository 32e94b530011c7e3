"""Rules about how the run runs: where the time goes, what failed and came back, what is cut from the data."""

from __future__ import annotations

import statistics

from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, since

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


def restarts(run: RunRecord) -> Finding | None:
    """Return a finding where workers fail again and again."""
    points = [(step, value) for step, value in run.points("recovery/restarts_total") if value > 0]
    if len(points) < 3:
        return None
    total = sum(value for _, value in points)
    return Finding(
        name="restarts",
        weight=Weight.WATCH,
        title=f"Workers failed and were started again {total:.0f} times.",
        since=points[0][0],
        evidence=f"in {len(points)} of {run.num_steps} steps",
        meaning="A machine or its memory is at its limit, or a process is ended from outside.",
        advice=("read the logs of the workers in the run's folder, logs/", "docs/operations.md names what each failure means"),
        source="docs/operations.md",
    )


def memory_nearly_full(run: RunRecord) -> Finding | None:
    """Return a finding where a machine's or a GPU's memory is nearly used up."""
    for key, what in (("perf/host_memory_share", "controller's machine"), ("actor/gpu_memory_share", "GPU of the actor")):
        points = run.points(key)
        if not points or points[-1][1] < NEARLY_FULL:
            continue
        gpu = key.startswith("actor")
        return Finding(
            name="memory_nearly_full",
            weight=Weight.WATCH,
            title=f"The memory of the {what} is nearly used up.",
            since=since(points, lambda value: value >= NEARLY_FULL),
            evidence=f"{key} is {points[-1][1]:.2f}, and was {points[0][1]:.2f} at first",
            meaning="The next longer batch may not fit. On a machine, the kernel then ends the largest process.",
            advice=(
                "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or actor_rollout_ref.rollout.gpu_memory_utilization",
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true; trainer.on_out_of_memory=split goes on with less",
            )
            if gpu
            else (
                "lower actor_rollout_ref.rollout.kv_cache_gib on a CPU, reward.num_workers, or trainer.recover_memory_gib",
                "offload less: actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
            ),
            source="docs/operations.md, on memory that runs out",
        )
    return None


def phase_dominates(run: RunRecord) -> Finding | None:
    """Return a note where one phase takes most of the time, with the key that shortens it."""
    totals = {key: sum(run.values(key)) for key in SHORTER}
    whole = sum(run.values("timing_s/step"))
    if run.num_steps < 5 or whole <= 0:
        return None
    key = max(totals, key=lambda name: totals[name])
    if totals[key] < (0.8 if key in MAIN_PHASES else 0.5) * whole:
        return None
    title, advice = SHORTER[key]
    return Finding(
        name="phase_dominates",
        weight=Weight.NOTE,
        title=f"{title}: {100 * totals[key] / whole:.0f} % of the run.",
        since=run.points(key)[0][0],
        evidence=f"{totals[key]:.0f} of {whole:.0f} s",
        meaning="The devices wait meanwhile.",
        advice=(advice,),
        source="timing_s/* in metrics.jsonl",
    )


def idle_pools(run: RunRecord) -> Finding | None:
    """Return a note where one of two pools waits for the other most of the time."""
    sides = {
        "trainer": run.values("timing_s/wait_for_rollouts"),
        "rollout": run.values("timing_s/rollout_waits_for_trainer"),
    }
    steps = run.values("timing_s/step")
    if run.num_steps < 5 or sum(steps) <= 0:
        return None
    for side, waited in sides.items():
        share = sum(waited) / sum(steps)
        if share > 0.5:
            more, less = ("rollout", "trainer") if side == "trainer" else ("trainer", "rollout")
            return Finding(
                name="idle_pools",
                weight=Weight.NOTE,
                title=f"The {side}'s devices wait {100 * share:.0f} % of the time.",
                since=1,
                evidence=f"{sum(waited):.0f} of {sum(steps):.0f} s",
                meaning="The other side is the slower one.",
                advice=(f"move devices from the {less} pool to the {more} pool", "raise trainer.asynchronous.max_staleness"),
                source="docs/performance.md",
            )
    return None


def prompts_cut(run: RunRecord) -> Finding | None:
    """Return a finding where prompts reach the limit at which they are cut."""
    limit, way = run.setting("data.max_prompt_length"), run.setting("data.truncation")
    longest = run.values("prompt_length/max")
    if not isinstance(limit, int) or way in (None, "error") or not longest:
        return None
    share = statistics.fmean(float(value >= limit) for value in longest)
    if share < 0.5:
        return None
    mean = statistics.fmean(run.values("prompt_length/mean") or [0.0])
    nearly_all = mean >= 0.95 * limit
    return Finding(
        name="prompts_cut",
        weight=Weight.ILL if nearly_all else Weight.WATCH,
        title=f"{'Nearly all prompts' if nearly_all else 'Prompts'} reach data.max_prompt_length={limit} and are cut ({way}) in "
        f"{100 * share:.0f} % of the steps.",
        since=run.points("prompt_length/max")[0][0],
        evidence=f"prompt_length/max is {max(longest):.0f}, the mean {mean:.1f} tokens",
        meaning="A cut prompt may have lost its question, or the tokens with which an answer begins.",
        advice=("raise data.max_prompt_length", "data.filter_overlong_prompts=true leaves such rows out"),
        source="data.truncation in docs/configuration.md",
    )
