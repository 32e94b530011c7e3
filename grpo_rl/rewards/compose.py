"""The reward of a run: a weighted sum of reward functions, each result checked."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from grpo_rl.config.schema import CustomRewardConfig, RewardConfig
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.auto import auto, check_data_sources
from grpo_rl.rewards.code import check_code, code_problems
from grpo_rl.rewards.registry import REWARDS, WITHOUT_STEPS, RewardFn
from grpo_rl.rewards.steps import NO_STEPS, Decode, Step, read_steps
from grpo_rl.types import Rollout

LIFTED = ("acc", "answer")
"""Keys of a result that also appear in the parts without the component's name, for validation."""


@dataclass(frozen=True, slots=True)
class Component:
    """One summand of the reward."""

    name: str
    factor: float
    function: RewardFn


class Scored(NamedTuple):
    """What a rollout is worth."""

    reward: float
    parts: dict[str, float]
    steps: tuple[Step, ...] | None
    """None where no steps are read."""


class RewardFunction:
    """Scores a rollout: `sum of factor * score` over its components."""

    def __init__(self, components: list[Component], decode: Decode | None = None) -> None:
        if not components:
            raise ConfigError("reward.functions is empty; name at least one reward, e.g. auto")
        self.components = components
        self.decode = decode

    @classmethod
    def from_config(cls, config: RewardConfig, decode: Decode | None = None) -> RewardFunction:
        """The sum that `reward.functions` (or `reward.custom_reward_function`) describes.

        `decode`, from tokens to the text that is scored, is given where the rewards of reasoning steps are read;
        each response must have steps then.

        Raises ConfigError, with all problems at once, for unknown names, files that cannot be imported,
        options that a function does not take, and contradictions.
        """
        problems: list[str] = []
        components: list[Component] = []
        try:
            specs, options = _specs(config)
        except ConfigError as error:
            raise ConfigError([f"reward: {problem}" for problem in error.problems]) from error
        for spec in specs:
            try:
                components.append(_component(spec, specs, options))
            except ConfigError as error:
                problems += [f"reward.functions: {problem}" for problem in error.problems]
        problems += [text for component in components for text in code_problems(component.function, config.timeout_s)]
        names = [component.name for component in components]
        problems += [f"reward.functions: {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
        if problems:
            raise ConfigError(problems)
        return cls(components, decode)

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each component, by its name."""
        return {component.name: component.factor for component in self.components}

    @property
    def may_score_steps(self) -> bool:
        """Whether some component may give the rewards of reasoning steps; of a user's own only a result can tell."""
        return any(component.function not in WITHOUT_STEPS for component in self.components)

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raise ConfigError, before any rollout, when `auto` has no rule for some of the `data_sources`.

        Raises RewardError where `code` is to run programs and this machine has no sandbox.
        """
        for component in self.components:
            check_code(component.function)
        if any(component.function is auto for component in self.components):
            check_data_sources(data_sources)

    def score(self, rollout: Rollout) -> Scored:
        """The reward, its parts and, where they are read, its steps. Parts are each component's score by name, further numbers of a dict as `name/key`.

        `acc` and `answer` of the first component that gives them stand in the parts by themselves too.
        Raises RewardError, naming function, rollout and value, for an exception and for anything that
        is not a finite number or a dict with `score`; where steps are read also for none, and for bad ones.
        """
        reward, parts = 0.0, {}
        steps: dict[str, tuple[Step, ...]] = {}
        for component in self.components:
            result = _call(component, rollout)
            extras = result if isinstance(result, dict) else {}
            score = _number(_score_of(result, component, rollout), component, rollout, "score")
            reward += component.factor * score
            parts[component.name] = score
            for key, value in extras.items():
                if key == "score" or not isinstance(value, Real):  # text is for the user's own logs
                    continue
                number = _number(value, component, rollout, key)
                parts[f"{component.name}/{key}"] = number
                if key in LIFTED:
                    parts.setdefault(key, number)
            if self.decode is not None and "steps" in extras:
                try:
                    steps[component.name] = read_steps(extras["steps"], rollout, self.decode, component.factor)
                except ValueError as error:
                    raise RewardError(f"{_place(component.name, rollout)}: {error}") from error
        return Scored(reward, parts, None if self.decode is None else self._only_steps(steps, rollout))

    def _only_steps(self, steps: dict[str, tuple[Step, ...]], rollout: Rollout) -> tuple[Step, ...]:
        """The steps of the one component that gave some. Raises RewardError when none did, or several."""
        if len(steps) == 1:
            return next(iter(steps.values()))
        if steps:
            raise RewardError(f"{' and '.join(map(repr, steps))} both return 'steps'; one function of reward.functions may")
        names = " + ".join(component.name for component in self.components)
        raise RewardError(f"{_place(names, rollout)}: {NO_STEPS}")


def _specs(config: RewardConfig) -> tuple[list[str], dict[str, Any]]:
    """The list of functions, and the options of the custom one."""
    custom = config.custom_reward_function
    if custom.path is None:
        if custom.reward_kwargs:
            raise ConfigError("custom_reward_function.reward_kwargs has no effect without custom_reward_function.path")
        return config.functions, {}
    if config.functions != RewardConfig().functions:
        raise ConfigError(
            f"custom_reward_function.path and functions are both given; put {_custom_spec(custom)} into reward.functions"
        )
    return [_custom_spec(custom)], custom.reward_kwargs


def _custom_spec(custom: CustomRewardConfig) -> str:
    return f"{custom.path}:{custom.name}"


def _component(spec: str, specs: list[str], options: dict[str, Any]) -> Component:
    factor, name = _parse(spec)
    function = REWARDS.get(name)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name!r} is an async function; a reward function must be a plain one")
    if options:
        REWARDS.check_options(name, options)
        function = functools.partial(function, **options)
    return Component(_part_name(name, [_parse(other)[1] for other in specs]), factor, function)


def _parse(spec: str) -> tuple[float, str]:
    """`0.2*format` as (0.2, "format"); the factor is 1 where none is given."""
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
    """The function's name, with its file before it where two files have a function of that name."""
    source, colon, function = name.rpartition(":")
    if not colon or sum(other.rpartition(":")[2] == function for other in names) == 1:
        return function
    return f"{Path(source).stem}.{function}"


def _call(component: Component, rollout: Rollout) -> Any:
    prompt = rollout.prompt
    try:
        return component.function(
            data_source=prompt.data_source,
            solution_str=rollout.text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
    except (Exception, SystemExit) as error:  # a user's code: whatever it raises ends the run with its place
        raise RewardError(f"{_place(component.name, rollout)}: {type(error).__name__}: {error}") from error


def _score_of(result: Any, component: Component, rollout: Rollout) -> Any:
    if not isinstance(result, dict):
        return result
    if "score" not in result:
        raise RewardError(
            f"{_place(component.name, rollout)}: the dict has no 'score', it has {', '.join(map(str, result)) or 'nothing'}"
        )
    return result["score"]


def _number(value: Any, component: Component, rollout: Rollout, key: str) -> float:
    if not isinstance(value, Real):
        raise RewardError(f"{_place(component.name, rollout)}: {key} is {value!r} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{_place(component.name, rollout)}: {key} is {number}, not a finite number")
    return number


def _place(name: str, rollout: Rollout) -> str:
    return f"reward {name!r} for prompt {rollout.prompt.uid}, sample {rollout.sample_index}"
