"""Environments in the style of the package verifiers (0.1): an object with `env_response`, `is_completed` and a rubric.

Nothing of that package is imported: any object with these methods is taken, and each of them may be asynchronous.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.envs.contract import Message, Observation, Start, Turn
from grpo_rl.errors import ConfigError
from grpo_rl.registry import load_function

NEEDED = ("env_response", "is_completed", "rubric")


class VerifiersEnvironment:
    """An environment that `load`, `module:function` or `file.py:function`, returns for `arguments`, as `load_environment` does there.

    A row's prompt, ground truth (`answer`), `extra_info` (`info`) and data source (`task`) begin its state. The episode ends where
    `is_completed` says so after a turn, or after `max_turns` of the environment (-1: none); then the rubric's functions are called,
    each with those of `prompt, completion, answer, state, task, info, parser` that it takes, and the reward is their weighted sum.
    The environment is loaded once in each process; what is an episode's own lies in its state.
    """

    def __init__(self, *, load: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._env = _loaded(load, tuple(sorted((arguments or {}).items())))
        self._state: dict[str, Any] = {}
        self._prompt: list[Message] = []

    async def reset(self, start: Start) -> Observation:
        """Make the state of the episode, by `setup_state` where there is one."""
        self._prompt = list(start.messages)
        self._state = {
            "prompt": self._prompt,
            "completion": [],
            "answer": start.ground_truth,
            "task": start.data_source,
            "info": dict(start.extra_info),
            "turn": 0,
            "responses": [],
        }
        if hasattr(self._env, "setup_state"):
            self._state = await _called(self._env.setup_state, self._state) or self._state
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """Return the environment's messages for a turn, or the rubric's reward where the episode is over."""
        self._state["completion"].append({"role": "assistant", "content": turn.text})
        self._state["turn"] += 1
        most = getattr(self._env, "max_turns", -1)
        if await self._completed() or 0 < most <= self._state["turn"]:
            return await self._ended()
        found = await _called(self._env.env_response, self._messages(), self._state)
        if isinstance(found, tuple):  # up to 0.1.7 with the state
            found, self._state = found
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else [dict(message) for message in found]
        self._state["completion"].extend(messages)
        # What the environment says may end the episode too; a last word that nothing answers is no context.
        if not messages or await self._completed():
            return await self._ended()
        return Observation(tuple(messages), info={"turns": float(self._state["turn"])})

    async def close(self) -> None:
        """Release nothing: the environment is shared by all episodes of the process."""

    def _messages(self) -> list[Message]:
        return [*self._prompt, *self._state["completion"]]

    async def _completed(self) -> bool:
        """Return what `is_completed` says of the state, or, where it takes two arguments (up to 0.1.7), of messages and state."""
        asked = self._env.is_completed
        takes = [
            p for p in inspect.signature(asked).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return bool(await (_called(asked, self._messages(), self._state) if len(takes) > 1 else _called(asked, self._state)))

    async def _ended(self) -> Observation:
        rewards = await self._scored()
        weights = _of(self._env.rubric, "weights", "reward_weights") or [1.0] * len(rewards)
        total = sum(weight * value for weight, (_, value) in zip(weights, rewards, strict=True))
        return Observation(reward=float(total), done=True, info=dict(rewards) | {"turns": float(self._state["turn"])})

    async def _scored(self) -> list[tuple[str, float]]:
        state = self._state
        known = {name: state.get(name) for name in ("completion", "answer", "task", "info")}
        known |= {"prompt": self._prompt, "state": state, "parser": getattr(self._env.rubric, "parser", None)}
        found = []
        for function in _of(self._env.rubric, "funcs", "reward_funcs"):
            parameters = inspect.signature(function).parameters.values()
            every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
            wanted = known if every else {p.name: known[p.name] for p in parameters if p.name in known}
            found.append((getattr(function, "__name__", "reward"), float(await _called(function, **wanted))))
        return found


def rows(*, load: str, num_rows: int = -1) -> list[dict[str, Any]]:
    """Return the rows of an environment's own data set, the first `num_rows` (-1: all), in verl's format.

    It is the task `task:grpo_rl.envs.adapters.verifiers_style:rows?load=...`. A row there has `prompt` (chat messages) or `question`,
    and `answer`, `info`, `task`; the environment's `system_prompt` begins the prompt of a question. Raises ConfigError without one.
    """
    env = _loaded(load, ())
    dataset = env.get_dataset() if hasattr(env, "get_dataset") else getattr(env, "dataset", None)
    if dataset is None:
        raise ConfigError(f"environment verifiers: {load} has no dataset; give rows of your own")
    found = []
    for index, row in enumerate(dataset):
        if index == num_rows:
            break
        prompt = row.get("prompt")
        if not isinstance(prompt, list):
            system = getattr(env, "system_prompt", None)
            prompt = [{"role": "system", "content": system}] if system else []
            prompt.append({"role": "user", "content": str(row.get("prompt") or row["question"])})
        found.append({
            "data_source": str(row.get("task") or "verifiers"),
            "prompt": [dict(message) for message in prompt],
            "ability": "game",
            "reward_model": {"style": "rule", "ground_truth": row.get("answer", "")},
            "extra_info": {"index": index, **(row.get("info") or {})},
        })  # fmt: skip
    return found


async def _called(function: Any, *positional: Any, **named: Any) -> Any:
    """Return what a function returns, in a thread where it is not asynchronous: it may take long."""
    if inspect.iscoroutinefunction(function):
        return await function(*positional, **named)
    found = await asyncio.to_thread(function, *positional, **named)
    return await found if inspect.isawaitable(found) else found


def _of(rubric: Any, *names: str) -> Sequence[Any]:
    """Return the first of these attributes that the rubric has, or what its method `get_NAME` returns."""
    for name in names:
        if hasattr(rubric, name):
            return list(getattr(rubric, name))
        if hasattr(rubric, f"get_{name}"):
            return list(getattr(rubric, f"get_{name}")())
    return []


_LOADED: dict[tuple[str, tuple[tuple[str, Any], ...]], Any] = {}


def _loaded(load: str, arguments: tuple[tuple[str, Any], ...]) -> Any:
    """Return the environment, which is loaded once. Raises ConfigError where the function fails, or returns something else."""
    key = (load, tuple((name, repr(value)) for name, value in arguments))
    if key not in _LOADED:
        function = load_function(load, "environment of verifiers")
        try:
            found = function(**dict(arguments))
        except Exception as error:  # a user's function
            raise ConfigError(f"environment verifiers: {load}({dict(arguments)}): {type(error).__name__}: {error}") from error
        missing = [name for name in NEEDED if not hasattr(found, name)]
        if missing:
            raise ConfigError(
                f"environment verifiers: {load} returned a {type(found).__name__} without {', '.join(missing)}; expected an "
                "environment of several turns with a rubric, as verifiers 0.1 has them"
            )
        if not _of(found.rubric, "funcs", "reward_funcs"):
            raise ConfigError(f"environment verifiers: the rubric of {load} has no functions (funcs or reward_funcs)")
        _LOADED[key] = found
    return _LOADED[key]
