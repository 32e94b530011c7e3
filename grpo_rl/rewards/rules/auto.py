"""The reward that belongs to a row's `data_source`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.gym import SOURCE_PREFIX
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.arithmetic_rule import arithmetic
from grpo_rl.rewards.rules.countdown_rule import countdown
from grpo_rl.rewards.rules.gsm8k import gsm8k
from grpo_rl.rewards.rules.reasoning_gym_rule import reasoning_gym

MATH_SOURCES = (
    "math",
    "DigitalLearningGmbH/MATH-lighteval",
    "lighteval/MATH",
    "HuggingFaceH4/MATH-500",
    "hiyouga/math12k",
    "math_dapo",
    "math_dapo_reasoning",
    "aime",
    "aime24",
    "aime25",
    "amc",
    "olympiadbench",
    "minerva",
)
"""The names of mathematics in verl's scripts and in the data sets that they read."""

RULES: dict[str, Callable[..., float | dict[str, float]]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
    "countdown": countdown,
    **dict.fromkeys(MATH_SOURCES, math),
}


def auto(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, float]:
    """Return what the rule for this `data_source` gives. Raises RewardError when there is none."""
    rule = rule_for(data_source)
    if rule is None:
        raise RewardError(_no_rule([data_source]))
    return rule(data_source, solution_str, ground_truth, extra_info)


def rule_for(data_source: str) -> Callable[..., float | dict[str, float]] | None:
    """The reward function that belongs to rows of this `data_source`; None where there is none."""
    return reasoning_gym if data_source.startswith(SOURCE_PREFIX) else RULES.get(data_source)


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise ConfigError when some of the `data_sources` have no rule."""
    unknown = sorted(source for source in set(data_sources) if rule_for(source) is None)
    if unknown:
        raise ConfigError(_no_rule(unknown))


def _no_rule(data_sources: list[str]) -> str:
    return (
        f"no rule-based reward belongs to data_source {', '.join(map(repr, data_sources))}; there is one for "
        f"{', '.join(RULES)} and {SOURCE_PREFIX}NAME. Name a reward in reward.functions, or give your own function with "
        f"reward.custom_reward_function.path=my_reward.py (reward.custom_reward_function.name=compute_score)"
    )
