"""One episode's tokens: how many more there is room for."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_rl.envs.playing import Playing
from grpo_rl.types import Prompt, Sampling


@pytest.mark.parametrize(("max_tokens", "max_model_len", "room"), [(20, 100, 14), (20, 12, 3), (20, 9, 0)])
def test_an_episode_ends_at_its_own_limit_or_at_the_models_positions(max_tokens: int, max_model_len: int, room: int) -> None:
    playing = Playing("e", Prompt("e", np.array([1, 2, 3], np.int32), "text", "test"), 0, Sampling(max_tokens=max_tokens), 1)
    playing.add_context(np.arange(6))
    assert playing.room(max_model_len) == room


def test_equal_states_have_equal_numbers_and_without_a_state_the_messages_are_it() -> None:
    playing = Playing("e", Prompt("e", np.array([1], np.int32), "text", "test"), 0, Sampling(max_tokens=9), 1)

    def number(state: str | None, *contents: str) -> int:
        playing.comes_to(state, [{"role": "user", "content": content} for content in contents])
        return playing.state

    assert number("here", "a") == number("here", "b") != number("there", "a")
    assert number(None, "a") == number(None, "a") != number(None, "b")
    assert len({number(None), number(None, ""), number(None, "a", "b"), number(None, "ab")}) == 4
    assert number("a grid of ten by ten cells") == -4175360491201906180  # the same on every machine
