"""The reward functions by name.

A reward function takes `(data_source, solution_str, ground_truth, extra_info)`, verl's signature, and
returns a number, or a dict with `score` and whatever else should be logged with it. Further keys
have a meaning of their own: `acc` is what validation reports, `answer` is what its majority vote counts,
and `steps`, a list of (end, reward), scores reasoning steps: see `rewards/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_rl.registry import Registry
from grpo_rl.rewards.arithmetic import arithmetic, arithmetic_process
from grpo_rl.rewards.auto import auto
from grpo_rl.rewards.choice import multiple_choice
from grpo_rl.rewards.code import code
from grpo_rl.rewards.countdown import countdown
from grpo_rl.rewards.deepseek_r1 import deepseek_r1
from grpo_rl.rewards.exact import exact_match
from grpo_rl.rewards.format import tags, think_answer
from grpo_rl.rewards.gsm8k import gsm8k, gsm8k_flexible
from grpo_rl.rewards.math_answer import math
from grpo_rl.rewards.penalties import language_consistency, length, repetition
from grpo_rl.rewards.reasoning_gym import reasoning_gym

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
"""The ones of these that score whole responses only."""
