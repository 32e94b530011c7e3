"""Reward functions by name, and by the `data_source` of a row. They have verl's signature.

Of a returned dict, `acc` is what validation reports, `answer` what its majority vote counts, and `steps` the
rewards of reasoning steps (`rewards/steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.answers import ExtraInfo
from grpo_rl.rewards.rules.number_rules import (
    arithmetic,
    arithmetic_process,
    countdown,
    gsm8k,
    gsm8k_flexible,
    written_sum,
)
from grpo_rl.rewards.rules.structured_rules import instructions, json_fields, json_schema
from grpo_rl.rewards.rules.text_rules import exact_match, multiple_choice, repetition, think_answer
from grpo_rl.rewards.sandbox.code_rule import code

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

RULES: dict[str, Callable[..., float | dict[str, float]]] = {
    "arithmetic": arithmetic,
    "rated_sums": written_sum,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
    "countdown": countdown,
    "json_extraction": json_fields,
    "instructions": instructions,
    **dict.fromkeys(MATH_SOURCES, math),
}


def auto(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo = None) -> float | dict[str, float]:
    check_data_sources([data_source])
    return RULES[data_source](data_source, solution_str, ground_truth, extra_info)


def reads_marks(name: str, data_source: str) -> bool:
    """Whether the function looks for an answer that is marked: a box, `####`, tags, `answer is`."""
    function = RULES.get(data_source) if name == "auto" else REWARDS.get(name) if name in REWARDS else None
    return function in (math, gsm8k, gsm8k_flexible, exact_match, multiple_choice)


def check_data_sources(data_sources: Iterable[str]) -> None:
    if unknown := sorted(set(data_sources) - set(RULES)):
        raise ConfigError(
            f"no rule-based reward belongs to data_source {', '.join(map(repr, unknown))}; there is one for "
            f"{', '.join(RULES)}. Name a reward in reward.functions, or give your own function with "
            f"reward.custom_reward_function.path=my_reward.py (reward.custom_reward_function.name=compute_score)"
        )


REWARDS: Registry[Callable[..., Any]] = Registry("reward function")
REWARDS.register("format")(think_answer)
for _function in (
    *(auto, arithmetic, arithmetic_process, written_sum, countdown, gsm8k, gsm8k_flexible, math),
    *(multiple_choice, exact_match, repetition, json_fields, json_schema, instructions, code),
):
    REWARDS.register(_function.__name__)(_function)

SCORE_STEPS = frozenset({"arithmetic_process", "written_sum"})
