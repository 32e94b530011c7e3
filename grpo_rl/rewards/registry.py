"""The reward functions by name.

A reward function takes `(data_source, solution_str, ground_truth, extra_info)`, verl's signature, and
returns a number, or a dict with `score` and whatever else should be logged with it. Further keys
have a meaning of their own: `acc` is what validation reports, `answer` is what its majority vote counts,
and `steps`, a list of (end, reward), scores reasoning steps: see `rewards/contract/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_rl.registry import Registry
from grpo_rl.rewards.code.code_rule import code
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.arithmetic_rule import arithmetic, arithmetic_process
from grpo_rl.rewards.rules.auto import auto
from grpo_rl.rewards.rules.choice import multiple_choice
from grpo_rl.rewards.rules.countdown_rule import countdown
from grpo_rl.rewards.rules.deepseek_r1 import deepseek_r1
from grpo_rl.rewards.rules.exact import exact_match
from grpo_rl.rewards.rules.format import tags, think_answer
from grpo_rl.rewards.rules.gsm8k import gsm8k, gsm8k_flexible
from grpo_rl.rewards.rules.penalties import language_consistency, length, repetition
from grpo_rl.rewards.rules.reasoning_gym_rule import reasoning_gym

RewardFn = Callable[..., Any]

REWARDS: Registry[RewardFn] = Registry("reward function")
REWARDS.register("auto")(auto)
REWARDS.register("arithmetic")(arithmetic)
REWARDS.register("arithmetic_process")(arithmetic_process)
REWARDS.register("gsm8k")(gsm8k)
REWARDS.register("gsm8k_flexible")(gsm8k_flexible)
REWARDS.register("reasoning_gym")(reasoning_gym)
REWARDS.register("format")(think_answer)
REWARDS.register("math")(math)
REWARDS.register("countdown")(countdown)
REWARDS.register("multiple_choice")(multiple_choice)
REWARDS.register("exact_match")(exact_match)
REWARDS.register("tags")(tags)
REWARDS.register("length")(length)
REWARDS.register("repetition")(repetition)
REWARDS.register("language_consistency")(language_consistency)
REWARDS.register("deepseek_r1")(deepseek_r1)
REWARDS.register("code")(code)

WITHOUT_STEPS: tuple[RewardFn, ...] = (auto, arithmetic, gsm8k, gsm8k_flexible, think_answer)
WITHOUT_STEPS += (
    math,
    countdown,
    multiple_choice,
    exact_match,
    tags,
    length,
    repetition,
    language_consistency,
    deepseek_r1,
    code,
    reasoning_gym,
)
"""The functions that score whole responses only."""
