from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Not the whole schema, whose classes would be a third of a reward process's start.
from grpo_rl.config.schema.reward import CustomRewardConfig, RewardConfig
from grpo_rl.control_words import opened_thought
from grpo_rl.errors import ConfigError
from grpo_rl.rewards.contract import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    INVALID,
    Component,
    Outcome,
    RewardFailure,
    RewardResult,
    Sample,
    number_of,
)
from grpo_rl.rewards.math.math_rule import LONGEST_QUESTION
from grpo_rl.rewards.registry import REWARDS, SCORE_STEPS, auto, check_data_sources
from grpo_rl.rewards.rules.answers import PROMPT_TAIL
from grpo_rl.rewards.sandbox.code_rule import code_problems, is_code
from grpo_rl.rewards.steps import NO_STEPS, Decode, Step, read_steps

if TYPE_CHECKING:  # types imports torch, which a reward process does without
    from grpo_rl.types import Rollout

LIFTED = ("acc", "answer")
"""Keys of a result that also stand among the parts without the component's name, for validation."""
JUDGE = "judge"


class AssembledReward(NamedTuple):
    reward: float
    parts: dict[str, float]
    steps: tuple[Step, ...] | None


class RewardFunction:
    def __init__(self, components: list[Component], decode: Decode | None = None) -> None:
        if not components:
            raise ConfigError("reward.functions is empty; name at least one reward, e.g. auto")
        self.components = components
        self.decode = decode

    @classmethod
    def from_config(cls, config: RewardConfig, decode: Decode | None = None, key: str = "functions") -> RewardFunction:
        """`decode`, from tokens to the scored text, is given if each response must have rewards of steps.

        `key` (`functions` or `audit`) is named in messages. Raises ConfigError with all problems at once.
        """
        problems, parsed, components = list[str](), list[tuple[float, str]](), list[Component]()
        for spec in _specs(config):
            try:
                parsed.append(_parse(spec))
            except ConfigError as error:
                problems += [f"reward.{key}: {problem}" for problem in error.problems]
        names = [name for _, name in parsed]
        all_names = [*names, *(spec.rpartition("*")[2].strip() for spec in config.audit)]
        all_parts = [_part_name(name, all_names) for name in all_names]
        problems += [
            f"reward.{setting}: {name!r} is not in the reward's sum; it has {', '.join(all_parts)}"
            for setting, function_names in (("batched", config.batched), ("function_kwargs", config.function_kwargs))
            for name in function_names
            if name not in (*all_names, *all_parts) and not problems
        ]
        for factor, name in parsed:
            try:
                components.append(_component(name, factor, names, config))
            except ConfigError as error:
                problems += [f"reward.{key}: {problem}" for problem in error.problems]
        problems += [text for component in components for text in code_problems(component.function, config.timeout_s)]
        counts = Counter(component.name for component in components)
        problems += [f"reward.{key}: {name!r} is there twice" for name in sorted(counts) if counts[name] > 1]
        if problems:
            raise ConfigError(problems)
        return cls(components, decode)

    @property
    def factors(self) -> dict[str, float]:
        return {component.name: component.factor for component in self.components}

    @property
    def may_score_steps(self) -> bool:
        """A function of a user's always may."""
        return any(component.own or component.name in SCORE_STEPS for component in self.components)

    @property
    def runs_code(self) -> bool:
        return any(is_code(component.function) for component in self.components)

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        if any(component.function is auto for component in self.components):
            check_data_sources(data_sources)

    def assemble(self, rollout: Rollout, outcomes: Sequence[Outcome]) -> AssembledReward:
        """`outcomes`: first of the functions of one response, then of the functions of lists.

        Raises RewardFailure for the first failure, and for missing or bad steps.
        """
        results: dict[str, RewardResult] = {}
        as_called = sorted(self.components, key=lambda component: component.batched)
        for component, outcome in zip(as_called, outcomes, strict=False):
            if isinstance(outcome, RewardFailure):
                raise outcome.at(place(component.name, rollout))
            results[component.name] = outcome
        reward, parts = 0.0, dict[str, float]()
        steps: dict[str, tuple[Step, ...]] = {}
        for component in self.components:
            result = results[component.name]
            reward += component.factor * result.score
            parts |= result.parts(component.name)
            for key in LIFTED:
                if key in result.values:
                    parts.setdefault(key, result.values[key])
            if self.decode is not None and result.steps is not None:
                try:
                    steps[component.name] = read_steps(result.steps, rollout, self.decode, component.factor)
                except ValueError as error:
                    raise RewardFailure(INVALID, f"{place(component.name, rollout)}: {error}") from error
        try:
            number_of(reward, "the sum")
        except RewardFailure as failure:
            raise failure.at(place(" + ".join(parts), rollout)) from None
        return AssembledReward(reward, parts, None if self.decode is None else self._only_steps(steps, rollout))

    def _only_steps(self, steps: dict[str, tuple[Step, ...]], rollout: Rollout) -> tuple[Step, ...]:
        if len(steps) == 1:
            return next(iter(steps.values()))
        if steps:
            listed = " and ".join(map(repr, steps))
            raise RewardFailure(INVALID, f"{listed} both return 'steps'; one function of reward.functions may")
        names = " + ".join(component.name for component in self.components)
        raise RewardFailure(INVALID, f"{place(names, rollout)}: {NO_STEPS}")


def sample_of(rollout: Rollout) -> Sample:
    """Adds the prompt's short `question`: a rule can tell a task of arithmetic by it."""
    prompt, episode = rollout.prompt, rollout.episode
    last = prompt.messages[-1] if prompt.messages else {}
    question = prompt.text if prompt.messages is None else last.get("content")
    extra_info = prompt.extra_info
    if isinstance(question, str) and len(question) <= LONGEST_QUESTION and any(map(str.isdigit, question)):
        extra_info = {"question": question} | extra_info
    if tail := last["content"] if last.get("role") == "assistant" else opened_thought(prompt.text):
        extra_info = extra_info | {PROMPT_TAIL: tail}
    if episode is not None:
        turns = {"num_turns": len(episode.turns), "messages": list(episode.messages), "ended": episode.ended}
        extra_info = extra_info | turns | {"turn_rewards": [turn.reward for turn in episode.turns]}
    text: Any = rollout.text  # a view is read where it is sent from
    return Sample(prompt.data_source, text, prompt.ground_truth, extra_info)


def place(name: str, rollout: Rollout) -> str:
    return f"reward {name!r} for prompt {rollout.prompt.uid}, sample {rollout.sample_index}"


def audit_of(config: RewardConfig) -> RewardConfig:
    """The settings of `reward.audit`, with the two lists of functions in each other's place."""
    return replace(
        config,
        functions=[name for name in config.audit if name != JUDGE],
        audit=_specs(config),
        custom_reward_function=CustomRewardConfig(),
        on_failure="drop",
        num_workers=1,
    )


def _specs(config: RewardConfig) -> list[str]:
    custom = config.custom_reward_function
    if custom.path is None:
        return config.functions
    spec = f"{custom.path}:{custom.name}"
    if config.functions != RewardConfig().functions:
        raise ConfigError(
            f"reward.custom_reward_function.path={custom.path}: would replace reward.functions; add {spec} to reward.functions instead"
        )
    return [spec]


def _component(name: str, factor: float, names: list[str], config: RewardConfig) -> Component:
    function = REWARDS.get(name)
    part = _part_name(name, names)
    batched = bool({name, part} & set(config.batched))
    options = config.function_kwargs.get(part, config.function_kwargs.get(name, {}))
    if not isinstance(options, dict):
        raise ConfigError(f"reward.function_kwargs.{part}={options!r}: write its options by name, {{option: value}}")
    if twice := sorted(set(options) & set(config.custom_reward_function.reward_kwargs)):
        raise ConfigError(
            f"{', '.join(twice)} is in custom_reward_function.reward_kwargs and in function_kwargs.{part}; give it once"
        )
    options = options | config.custom_reward_function.reward_kwargs
    fixed = BATCH_ARGUMENTS if batched else ARGUMENTS
    if fixed_options := sorted(set(options) & set(fixed)):
        raise ConfigError(f"{name!r}: {', '.join(fixed_options)} is given with every call and no option")
    REWARDS.check_keywords(name, options)
    try:
        REWARDS.check_call(name, **dict.fromkeys(fixed), **options)
    except ConfigError as error:
        hint = (
            "with lists, as it is in reward.batched"
            if batched
            else "for one response; reward.batched names those that take lists"
        )
        raise ConfigError(f"{error} ({hint})") from error
    if options:
        function = functools.partial(function, **options)
    return Component(part, factor, function, batched, own=":" in name)


def _parse(spec: str) -> tuple[float, str]:
    text, star, name = spec.partition("*")
    if not star:
        return 1.0, spec.strip()
    try:
        factor = float(text)
    except ValueError:
        raise ConfigError(f"{spec!r}: {text!r} is not a number; write factor*name, e.g. 0.2*format") from None
    if not math.isfinite(factor):
        raise ConfigError(f"{spec!r}: the factor must be finite")
    return factor, name.strip()


def _part_name(name: str, names: list[str]) -> str:
    """The function's name, behind its file's if two files have a function of that name."""
    source, colon, function = name.rpartition(":")
    if not colon or sum(other.rpartition(":")[2] == function for other in names) == 1:
        return function
    return f"{Path(source).stem}.{function}"
