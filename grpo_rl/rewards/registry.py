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
from grpo_rl.rewards.code.code_rule import code
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.rules.auto import auto, deepseek_r1
from grpo_rl.rewards.rules.form_rules import language_consistency, length, repetition, tags, think_answer
from grpo_rl.rewards.rules.number_rules import arithmetic, arithmetic_process, countdown, gsm8k, gsm8k_flexible, written_sum
from grpo_rl.rewards.rules.reasoning_gym import reasoning_gym
from grpo_rl.rewards.rules.text_rules import exact_match, multiple_choice

RewardFn = Callable[..., Any]

REWARDS: Registry[RewardFn] = Registry("reward function")
for _name, _function in {
    "auto": auto,
    "arithmetic": arithmetic,
    "arithmetic_process": arithmetic_process,
    "written_sum": written_sum,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "reasoning_gym": reasoning_gym,
    "format": think_answer,
    "math": math,
    "countdown": countdown,
    "multiple_choice": multiple_choice,
    "exact_match": exact_match,
    "tags": tags,
    "length": length,
    "repetition": repetition,
    "language_consistency": language_consistency,
    "deepseek_r1": deepseek_r1,
    "code": code,
}.items():
    REWARDS.register(_name)(_function)

SCORE_STEPS = frozenset({"arithmetic_process", "written_sum"})
"""The functions of these that score reasoning steps too."""
