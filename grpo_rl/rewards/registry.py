"""The reward functions by name, by the `data_source` of a row, and as the accuracy in DeepSeek-R1's sum.

A reward function takes `(data_source, solution_str, ground_truth, extra_info)`, verl's signature, and
returns a number, or a dict with `score` and whatever else should be logged with it. Further keys
have a meaning of their own: `acc` is what validation reports, `answer` is what its majority vote counts,
and `steps`, a list of (end, reward), scores reasoning steps: see `rewards/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grpo_rl.config.schema.kinds import Factor
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.registry import Registry
from grpo_rl.rewards.code.code_rule import code
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.number_rules import (
    arithmetic,
    arithmetic_process,
    countdown,
    gsm8k,
    gsm8k_flexible,
    written_sum,
)
from grpo_rl.rewards.rules.text_rules import (
    exact_match,
    language_consistency,
    length,
    multiple_choice,
    repetition,
    tags,
    think_answer,
)

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
    "rated_sums": written_sum,
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
    return RULES.get(data_source)


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise ConfigError when some of the `data_sources` have no rule."""
    unknown = sorted(source for source in set(data_sources) if rule_for(source) is None)
    if unknown:
        raise ConfigError(_no_rule(unknown))


def _no_rule(data_sources: list[str]) -> str:
    return (
        f"no rule-based reward belongs to data_source {', '.join(map(repr, data_sources))}; there is one for "
        f"{', '.join(RULES)}. Name a reward in reward.functions, or give your own function with "
        f"reward.custom_reward_function.path=my_reward.py (reward.custom_reward_function.name=compute_score)"
    )


ACCURACY: dict[str, Callable[..., dict[str, float]]] = {
    rule.__name__: rule for rule in (math, gsm8k, gsm8k_flexible, countdown, multiple_choice, exact_match)
}


def deepseek_r1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    accuracy: str = "math",
    accuracy_weight: Factor = 1.0,
    format_weight: Factor = 1.0,
) -> dict[str, float]:
    """`accuracy_weight * accuracy + format_weight * format`, both 0 or 1; each of them, unweighted, and `acc` are
    parts.

    `accuracy` names the rule that decides whether the answer is right: math, gsm8k, gsm8k_flexible, countdown,
    multiple_choice or exact_match. The format is `<think>...</think><answer>...</answer>`, once and in order.
    Raises ValueError for another rule, and what that rule raises.
    """
    if accuracy not in ACCURACY:
        raise ValueError(f"accuracy is {accuracy!r}; it is one of {', '.join(ACCURACY)}")
    graded = ACCURACY[accuracy](data_source, solution_str, ground_truth, extra_info)
    right = graded["acc"]
    form = think_answer(data_source, solution_str, ground_truth, extra_info)
    parts = {"score": accuracy_weight * right + format_weight * form, "acc": right, "accuracy": right, "format": form}
    return parts | {key: graded[key] for key in ("answer", "refused") if key in graded}


RewardFn = Callable[..., Any]

REWARDS: Registry[RewardFn] = Registry("reward function")
REWARDS.register("format")(think_answer)
for _function in (
    *(auto, arithmetic, arithmetic_process, written_sum, countdown, gsm8k, gsm8k_flexible, math),
    *(multiple_choice, exact_match, tags, length, repetition, language_consistency, deepseek_r1, code),
):
    REWARDS.register(_function.__name__)(_function)

SCORE_STEPS = frozenset({"arithmetic_process", "written_sum"})
"""The functions of these that score reasoning steps too."""
