"""Rules about the responses: cut off, longer for nothing, repeating themselves, in several scripts."""

from __future__ import annotations

import statistics
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.telemetry.diagnosis.findings import Finding, Weight
from grpo_rl.telemetry.diagnosis.run_record import RunRecord, first, last, since

MANY_CUT = 0.5
LONG = 200
"""The number of characters that a response needs before its compressed size shows repetition."""
REPEATS = 0.15
"""The size after compression, as a share, below which a text says the same again and again; prose has 0.4 to 0.6."""


def truncation(run: RunRecord) -> Finding | None:
    """Return a finding where many responses end at the limit and not by themselves."""
    points = run.points("response_length/clip_ratio")
    if len(points) < 3 or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    values = [value for _, value in points]
    if last(values) < MANY_CUT:
        return None
    rises = last(values) > first(values) + 0.2
    limit = run.setting("data.max_response_length")
    unrewarded = max(run.values("reward/max"), default=1.0) <= 0
    return Finding(
        name="truncation",
        weight=Weight.ILL if last(values) > 0.9 else Weight.WATCH,
        title=f"{100 * last(values):.0f} % of the responses are cut off at data.max_response_length={limit}.",
        since=since(points, lambda value: value >= MANY_CUT),
        evidence=f"response_length/clip_ratio {first(values):.2f} at first, {last(values):.2f} now"
        + ("; no response was ever rewarded" if unrewarded else ""),
        meaning=(
            "Training made the responses longer until most of them do not end: a cut response is judged on half an answer."
            if rises
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
    """Return a finding where responses grow into the limit and the reward rises with them."""
    cut, lengths, rewards = (
        run.points("response_length/clip_ratio"),
        run.values("response_length/mean"),
        run.values("reward/mean"),
    )
    if len(cut) < 5 or len(lengths) < 5 or len(rewards) < 5 or run.setting("actor_rollout_ref.rollout.ignore_eos"):
        return None
    shares, (low, high) = [share for _, share in cut], run.reward_range
    grown = last(shares) - first(shares)
    if grown < 0.2 or last(lengths) < 1.3 * first(lengths) or last(rewards) < first(rewards) + 0.1 * (high - low):
        return None
    return Finding(
        name="truncation_grows",
        weight=Weight.ILL if last(shares) > MANY_CUT else Weight.WATCH,
        title="Responses grow until they are cut off, and the reward rises with them.",
        since=since(cut, lambda value: value > first(shares) + 0.1),
        evidence=(
            f"cut off {first(shares):.2f} -> {last(shares):.2f}, {first(lengths):.0f} -> {last(lengths):.0f} tokens, reward "
            f"{first(rewards):.3f} -> {last(rewards):.3f}"
        ),
        meaning="The reward pays for length, or the limit is too short for the answers that are being learnt.",
        advice=(
            "look at which part of the reward rises (the table Rewards of the report): one that grows with length is to be mended",
            "raise data.max_response_length where the answers themselves rise",
            "reward.overlong_buffer punishes length softly before data.max_response_length",
        ),
        source="Singhal et al. 2023, on length as what reward models pay for; DAPO (Yu et al. 2025), section 3.4",
    )


def length_without_reward(run: RunRecord) -> Finding | None:
    """Return a finding where responses grow and rewards do not."""
    points, rewards = run.points("response_length/mean"), run.values("reward/mean")
    if len(points) < 10 or len(rewards) < 10:
        return None
    values = [value for _, value in points]
    low, high = run.reward_range
    if (
        last(values) < 1.5 * first(values)
        or last(values) < first(values) + 4
        or last(rewards) > first(rewards) + 0.05 * (high - low)
    ):
        return None
    bound = 1.5 * first(values)
    return Finding(
        name="length_without_reward",
        weight=Weight.WATCH,
        title="Responses become longer, and the reward does not rise with them.",
        since=since(points, lambda value: value >= bound),
        evidence=(
            f"{first(values):.0f} tokens at first, {last(values):.0f} now; reward {first(rewards):.3f} -> {last(rewards):.3f}"
        ),
        meaning="Losses averaged per response punish long wrong answers less per token, so that wrong answers grow.",
        advice=(
            "actor_rollout_ref.actor.loss_agg_mode=token-mean or seq-mean-token-sum-norm",
            "reward.overlong_buffer, with a length that is enough for a right answer",
        ),
        source="Dr. GRPO (Liu et al. 2025), section 3.1",
    )


def repetition(run: RunRecord) -> Finding | None:
    """Return a finding where many of the last responses repeat themselves."""
    now, before = _repeating(run.last_rollouts()), _repeating(run.first_rollouts())
    if now is None or now < 0.2 or (before is not None and now < before + 0.1 and before < 0.5):
        return None
    step = run.rollout_files[-1][0]
    return Finding(
        name="repetition",
        weight=Weight.WATCH,
        title=f"{100 * now:.0f} % of the long responses repeat themselves.",
        since=step,
        evidence=f"{100 * (before or 0):.0f} % in step {run.rollout_files[0][0]}, {100 * now:.0f} % in step {step}, by their compressed size",
        meaning="The policy falls into loops, which raise length and often end at the limit.",
        advice=("a rule that pays nothing for loops: docs/rewards.md", "raise the temperature; lower the learning rate"),
        source="Holtzman et al. 2020, section 4",
    )


def language_mixing(run: RunRecord) -> Finding | None:
    """Return a finding where responses begin to mix scripts that their prompts do not mix."""
    now, before = _mixed(run.last_rollouts()), _mixed(run.first_rollouts())
    if now is None or before is None or now < before + 0.1:
        return None
    step = run.rollout_files[-1][0]
    return Finding(
        name="language_mixing",
        weight=Weight.WATCH,
        title=f"{100 * now:.0f} % of the responses mix scripts that their prompts do not have.",
        since=step,
        evidence=f"{100 * before:.0f} % in step {run.rollout_files[0][0]}, {100 * now:.0f} % in step {step}",
        meaning="Nothing in the reward asks for one language, and the model reasons in whatever is likely.",
        advice=("add a reward for the language of the prompt", "raise actor_rollout_ref.actor.kl_loss_coef"),
        source="DeepSeek-R1 (2025), sections 2.2.4 and 2.3.2",
    )


def _repeating(rollouts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of long responses that compress to almost nothing; None where fewer than 8 are long."""
    long = [str(one["response"]).encode() for one in rollouts if len(str(one.get("response", ""))) >= LONG]
    if len(long) < 8:
        return None
    return statistics.fmean(float(len(zlib.compress(text)) < REPEATS * len(text)) for text in long)


def _mixed(rollouts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of responses with letters of a script that the prompt does not have; None without responses."""
    if not rollouts:
        return None
    mixed = [
        len(_scripts(str(one.get("response", ""))) - _scripts(str(one.get("prompt", ""))) - {"LATIN"}) > 0 for one in rollouts
    ]
    return statistics.fmean(map(float, mixed))


def _scripts(text: str) -> set[str]:
    """Return the scripts of which the text has at least three letters, by the first word of their Unicode names."""
    counts: dict[str, int] = {}
    for letter in text[:4000]:
        if letter.isalpha():
            script = unicodedata.name(letter, "?").split(" ")[0]
            counts[script] = counts.get(script, 0) + 1
    return {script for script, number in counts.items() if number >= 3}
