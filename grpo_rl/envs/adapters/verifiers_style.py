"""Environments in the style of the package verifiers: an object with `env_response`, `is_completed` and a rubric.

The shape is that of `MultiTurnEnv` in its versions 0.1.8 to 0.1.14: a state with a `trajectory`, stop conditions, a group of
rubrics. Nothing of that package is imported: any object with these methods is taken, and each of them may be asynchronous.
Versions up to 0.1.7 passed the messages to `is_completed`, and later ones (0.4) have task sets and harnesses instead.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from grpo_rl.envs.contract import Message, Observation, Start, Turn
from grpo_rl.errors import ConfigError
from grpo_rl.registry import load_function

_TIMED = ("setup", "generation", "model", "env", "scoring", "total")
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
        self._prompt = [_Said(message) for message in start.messages]
        self._state = {
            "prompt": self._prompt,
            "completion": [],
            "answer": start.ground_truth,
            "task": start.data_source,
            "info": dict(start.extra_info),
            # A step for each turn. Stop conditions and rubrics of the package count and read these.
            "trajectory": [],
            "trajectory_id": start.uid,
            "example_id": start.extra_info.get("index", 0),
            "error": None,
            "final_env_response": None,
            "is_completed": False,
            "is_truncated": False,
            "timing": SimpleNamespace(**{name: SimpleNamespace(start=0.0, end=0.0) for name in _TIMED}),
        }
        if hasattr(self._env, "setup_state"):
            self._state = await _called(self._env.setup_state, self._state) or self._state
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """Return the environment's messages for a turn, or the rubric's reward where the episode is over."""
        state = self._state
        before, said = self._messages(), _Said({"role": "assistant", "content": turn.text})
        state["completion"].append(said)
        is_truncated = turn.finish_reason != "stop"
        state["is_truncated"] = is_truncated
        state["trajectory"].append({
            "prompt": before, "completion": [said], "response": None, "tokens": None, "reward": None, "advantage": None,
            "is_truncated": is_truncated, "trajectory_id": state["trajectory_id"], "extras": {},
        })  # fmt: skip
        most = getattr(self._env, "max_turns", -1)
        if await self._is_completed() or 0 < most <= self._num_turns:
            return await self._ended()
        found = await _called(self._env.env_response, self._messages(), state)
        final = self._state.get("final_env_response")
        messages = _plain(found if final is None else final)
        self._state["completion"].extend(messages)
        # What the environment says may end the episode too; a last word that nothing answers is no context.
        if final is not None or not messages or await self._is_completed():
            return await self._ended()
        return Observation(tuple(dict(message) for message in messages), info={"turns": float(self._num_turns)})

    async def close(self) -> None:
        """Call the environment's cleanup handlers, once; the environment itself is shared by all episodes of the process."""
        state, self._state = self._state, {}
        if state and hasattr(self._env, "cleanup"):
            await _called(self._env.cleanup, state)

    async def _is_completed(self) -> bool:
        return bool(await _called(self._env.is_completed, self._state))

    @property
    def _num_turns(self) -> int:
        return len(self._state["trajectory"])

    def _messages(self) -> list[Message]:
        return [*self._prompt, *self._state["completion"]]

    async def _ended(self) -> Observation:
        total, info = 0.0, {"turns": float(self._num_turns)}
        for function, weight, rubric in _scored_by(self._env.rubric):
            value = await self._score(function, rubric)
            total += weight * value
            info[getattr(function, "__name__", "reward")] = value
        return Observation(reward=total, done=True, info=info)

    async def _score(self, function: Any, rubric: Any) -> float:
        """Return what a function of a rubric gives. It gets those of the known values that it takes by name."""
        state = self._state
        known = {name: state.get(name) for name in ("completion", "answer", "task", "info")}
        known |= {"prompt": self._prompt, "state": state, "parser": getattr(rubric, "parser", None)}
        known |= getattr(rubric, "class_objects", None) or {}
        parameters = inspect.signature(function).parameters.values()
        every = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        wanted = known if every else {p.name: known[p.name] for p in parameters if p.name in known}
        return float(await _called(function, **wanted))


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
            "extra_info": _extra(index, row.get("info")),
        })  # fmt: skip
    return found


def _extra(index: int, info: Any) -> dict[str, Any]:
    """Return a row's index and its `info`, which may be a mapping as JSON. Raises ConfigError for another value."""
    found = json.loads(info) if isinstance(info, str) and info else info or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"environment verifiers: a row's info is {info!r:.60}, no mapping")
    return {"index": index, **found}


class _Said(dict[str, Any]):
    """A message that is read as a mapping, as up to 0.1.9, and by its attributes, as the package's own message classes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def _plain(found: Any) -> list[Message]:
    """Return an environment's answer, a text or messages of any class, as messages."""
    if isinstance(found, str):
        return [_Said({"role": "user", "content": found})]
    dumped = (one.model_dump(exclude_none=True) if hasattr(one, "model_dump") else one for one in found)
    return [_Said(message) for message in dumped]


async def _called(function: Any, *positional: Any, **named: Any) -> Any:
    """Return what a function returns, in a thread where it is not asynchronous: it may take long."""
    if inspect.iscoroutinefunction(function):
        return await function(*positional, **named)
    found = await asyncio.to_thread(function, *positional, **named)
    return await found if inspect.isawaitable(found) else found


def _scored_by(rubric: Any) -> list[tuple[Any, float, Any]]:
    """Return the functions of a rubric, each with its weight and the rubric it belongs to: those of all rubrics of a group."""
    if getattr(rubric, "rubrics", None):
        return [one for part in rubric.rubrics for one in _scored_by(part)]
    functions = _of(rubric, "funcs", "reward_funcs")
    weights = _of(rubric, "weights", "reward_weights") or [1.0] * len(functions)
    return [(function, float(weight), rubric) for function, weight in zip(functions, weights, strict=True)]


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
        _check_rubric(found.rubric, load)
        if getattr(found, "tool_defs", None) or getattr(found, "oai_tools", None):
            raise ConfigError(
                f"environment verifiers: {load} has tools of its own (a ToolEnv), which are not read; name them as multi_turn.tools"
            )
        _LOADED[key] = found
    return _LOADED[key]


def _check_rubric(rubric: Any, load: str) -> None:
    """Raise ConfigError for a rubric without functions, and for functions of whole groups, which one episode cannot give."""
    functions = [function for function, _, _ in _scored_by(rubric)]
    if not functions:
        raise ConfigError(f"environment verifiers: the rubric of {load} has no functions (funcs or reward_funcs)")
    of_groups = [f for f in functions if set(inspect.signature(f).parameters) & {"states", "prompts", "completions", "answers"}]
    if of_groups:
        names = ", ".join(getattr(function, "__name__", "a function") for function in of_groups)
        raise ConfigError(
            f"environment verifiers: {names} of {load} scores whole groups of rollouts; an episode is scored by itself"
        )
