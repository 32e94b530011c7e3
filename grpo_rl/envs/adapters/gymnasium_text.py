"""Environments of Gymnasium that are played with text: actions by name, observations as text (the optional package gymnasium)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_rl.envs.contract import Observation, Start, Turn
from grpo_rl.errors import ConfigError


class GymnasiumText:
    """An environment `id` of Gymnasium, made with `kwargs`.

    Its action space is Discrete, and `actions` names the actions in order (their numbers, where it is not given); or it is Text,
    and a turn is the action. The last action that is named in a turn counts. `view` is what the policy reads: `observation` (the
    observation as text) or `render` (what `render` returns with render_mode `ansi`). The first message is `describe` and the first
    view. Every step's reward is that of its turn. A turn without an action costs no step; the limit on turns ends an episode then.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        view: Literal["observation", "render"] = "observation",
        describe: str = "",
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("environment gymnasium: the package is not installed; pip install 'grpo_rl[envs]'") from error
        if view not in ("observation", "render"):
            raise ConfigError(f"environment gymnasium: view={view!r} must be observation or render")
        options = dict(kwargs or {}) | ({"render_mode": "ansi"} if view == "render" else {})
        try:
            self._env: Any = gymnasium.make(id, **options)
        except Exception as error:  # whatever the package and the environment raise for a wrong id or wrong options
            raise ConfigError(f"environment gymnasium: make({id!r}, {options}): {type(error).__name__}: {error}") from error
        spaces, space = gymnasium.spaces, self._env.action_space
        self._actions = None if isinstance(space, spaces.Text) else self._named(id, spaces, space, actions)
        self._view, self._describe = view, describe
        self._total, self._num_malformed = 0.0, 0

    @staticmethod
    def _named(id: str, spaces: Any, space: Any, actions: Sequence[str] | None) -> dict[str, int]:
        """Return the actions by name. Raises ConfigError where the space is another, or has another number of actions."""
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"environment gymnasium: {id} has the action space {space}; Discrete and Text can be played with text"
            )
        first, number = int(space.start), int(space.n)
        names = [str(first + place) for place in range(number)] if actions is None else [str(name).lower() for name in actions]
        if len(set(names)) != number:
            raise ConfigError(
                f"environment gymnasium: {id} has {number} actions, and actions={actions} names {len(set(names))}"
            )
        return {name: first + place for place, name in enumerate(names)}

    async def reset(self, start: Start) -> Observation:
        """Begin with the seed of the episode; returns the description and the first view."""
        seen, _ = await asyncio.to_thread(self._env.reset, seed=start.seed % 2**31)
        text = "\n".join(part for part in (self._describe, await self._shown(seen)) if part)
        return Observation(messages=({"role": "user", "content": text},))

    async def step(self, turn: Turn) -> Observation:
        """Take the action that the turn names, and return what is seen then."""
        action = turn.text if self._actions is None else self._read(turn.text)
        if action is None or (self._actions is None and not self._env.action_space.contains(action)):
            self._num_malformed += 1
            known = "a text that the game takes" if self._actions is None else ", ".join(self._actions)
            return self._observed(f"There is no such action. Answer with {known}.", None, False)
        seen, reward, terminated, truncated, _ = await asyncio.to_thread(self._env.step, action)
        self._total += float(reward)
        done = bool(terminated or truncated)
        return self._observed("" if done else await self._shown(seen), float(reward), done)

    async def close(self) -> None:
        """Close the environment."""
        await asyncio.to_thread(self._env.close)

    def _read(self, text: str) -> int | None:
        """Return the last action that the text names as a word of its own; of two that end in one place the longer one."""
        assert self._actions is not None
        words = "".join(character if character.isalnum() or character in "_-" else " " for character in text.lower()).split()
        joined = f" {' '.join(words)} "
        places = {name: joined.rfind(f" {name} ") + len(name) for name in self._actions if f" {name} " in joined}
        return self._actions[max(places, key=lambda name: (places[name], len(name)))] if places else None

    async def _shown(self, seen: Any) -> str:
        text = await asyncio.to_thread(self._env.render) if self._view == "render" else seen
        return str(text).strip("\n")

    def _observed(self, text: str, reward: float | None, done: bool) -> Observation:
        info = {"return": self._total, "malformed": float(self._num_malformed)}
        return Observation(() if done else ({"role": "user", "content": text},), reward, done, info)
