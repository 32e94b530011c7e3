"""Options of episodes of several turns: `actor_rollout_ref.rollout.multi_turn.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_rl.config.schema.kinds import (
    Factor,
    Fraction,
    Length,
    NonNegative,
    Processes,
    ProcessGib,
    Requests,
    Rollouts,
    Seconds,
    Tries,
    Turns,
)

TruncationRule = Literal["keep", "drop", "mask", "punish"]


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    name: str | None = None
    """Registered environment, or your own as file.py:Class, which answers the policy's turns; null: tools alone. See
    docs/agents.md."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the environment's constructor by name."""
    reward_weight: Factor = 1.0
    """Factor of the episode's own reward (that of its turns, from environment and tools) in the reward; 0 leaves it out."""
    num_workers: Processes = 2
    """Processes that environments and tools run in."""
    max_episodes: Rollouts = 512
    """Most episodes that one process has at the same time; others wait for their turn."""
    step_timeout_s: Seconds = 60.0
    """Longest answer of an environment to one turn, tool calls included; then the episode ends as truncated by time."""
    tool_timeout_s: Seconds = 30.0
    """Longest tool call; then the policy reads that the call took too long, and goes on."""
    memory_limit_gb: ProcessGib | None = 8.0
    """Address space of an environment process, in GiB; null: no limit."""
    retries: Tries = 2
    """Further tries of an episode whose environment process was lost."""


@dataclass(frozen=True, slots=True)
class TruncationConfig:
    turns: TruncationRule = "keep"
    """Episodes that end by the limit on turns: keep trains them like others, drop leaves them out of their groups, mask compares
    them and trains none of their tokens, punish takes truncation.penalty off their reward."""
    tokens: TruncationRule = "keep"
    """The same for episodes that end by data.max_response_length or the engine's max_model_len."""
    time: TruncationRule = "drop"
    """The same for episodes that end by a deadline."""
    penalty: NonNegative = 1.0
    """The amount that punish takes off the reward."""


@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    enable: bool = False
    """Sample episodes of several turns, with an environment or with tools, in place of single responses."""
    max_assistant_turns: Turns | None = None
    """Most turns of the policy in one episode; null: until data.max_response_length is full."""
    max_user_turns: Turns | None = None
    """Most answers of tools or environment in one episode; one more turn of the policy may follow. null: no limit."""
    tool_config_path: str | None = None
    """A YAML file of tools in verl's form: `tools:`, a list of class_name, config, tool_schema."""
    interaction_config_path: str | None = None
    """A YAML file of one environment in verl's form, in place of environment.name: `interaction:`, a list of name, class_name,
    config."""
    tools: dict[str, Any] = field(default_factory=dict)
    """Tools by registered name or file.py:Class, with their options: {calculator: {}}."""
    format: str = "hermes"
    """The way the model writes tool calls: hermes (Qwen too), llama3_json, mistral, or your own parser as file.py:function."""
    max_parallel_calls: Requests = 1
    """Most tool calls of one turn that are run, side by side; further ones are left out."""
    max_tool_response_length: Length = 256
    """Most characters of a tool's answer that the policy reads."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The part that longer answers lose: the end (left keeps the beginning, as in verl), the middle, or the beginning."""
    episode_timeout_s: Seconds | None = None
    """Longest time of one episode, from its first turn; null: none."""
    turn_discount: Fraction = 1.0
    """Discount of a turn's reward for each turn before it, in the reward of the episode."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    truncation: TruncationConfig = field(default_factory=TruncationConfig)
