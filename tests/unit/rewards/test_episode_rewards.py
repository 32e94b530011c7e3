"""What an episode is worth: its turns, its outcome, and the rules of truncation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo_rl.config.schema.model import EnvironmentConfig, MultiTurnConfig, TruncationConfig
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.data.collate import collate
from grpo_rl.errors import RewardError
from grpo_rl.rewards.combined import CombinedRewarder
from grpo_rl.rewards.compose import sample_of
from grpo_rl.trainer.metrics import episode_metrics, rollout_metrics
from grpo_rl.types import Episode, PlayedTurn, Prompt, Rollout


class Outcome:
    """Rules that give every episode the same."""

    factors = {"rule": 1.0}  # noqa: RUF012

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def submit(self, rollout: Rollout) -> None: ...

    def wait(self, rollouts: Any) -> list[Rollout]:
        for one in rollouts:
            one.reward, one.reward_parts, one.steps = self.reward, {"rule": self.reward}, None
        return list(rollouts)


def episode_of(
    *rewards: float | None, ended: Any = "done", failure: str | None = None, sample: int = 0, **more: Any
) -> Rollout:
    """Turns of two sampled tokens, each followed by three of context."""
    turns = tuple(PlayedTurn(5 * i, 2, reward, state=7 - i) for i, reward in enumerate(rewards))
    length = max(0, 5 * len(rewards) - 3)
    messages = tuple({"role": "assistant", "content": f"t{i}"} for i in range(len(rewards)))
    episode = Episode(turns, messages, ended, failure=failure, failure_cause="why" if failure else None, **more)
    prompt = Prompt("p", [1, 2], "?", "test", extra_info={"row": 1})
    return Rollout(prompt, sample, list(range(length)), np.zeros(length), "stop", ((0, 2 * len(rewards)),), episode=episode)


def rewarder(outcome: float | None = None, discount: float = 1.0, weight: float = 1.0, reward: RewardConfig | None = None, **rules: Any) -> CombinedRewarder:  # fmt: skip
    reward = reward or RewardConfig(functions=[])
    config = MultiTurnConfig(
        enable=True,
        turn_discount=discount,
        environment=EnvironmentConfig(reward_weight=weight),
        truncation=TruncationConfig(**rules),
    )
    return CombinedRewarder(None if outcome is None else Outcome(outcome), [], reward, episodes=config)


def test_turns_and_outcome_add_up_and_the_turns_are_the_steps() -> None:
    (only_turns,) = rewarder(weight=2.0).wait([episode_of(1.0, None, 0.5)])
    assert (only_turns.reward, only_turns.steps) == (3.0, ((1, 2.0), (11, 1.0)))
    assert only_turns.reward_parts == {"environment": 1.5}
    (both,) = rewarder(outcome=10.0).wait([episode_of(1.0, None, 0.5)])
    assert (both.reward, both.steps) == (11.5, ((1, 1.0), (11, 10.5)))
    (only_outcome,) = rewarder(outcome=10.0).wait([episode_of(None, None)])
    assert (only_outcome.reward, only_outcome.steps) == (10.0, ((6, 10.0),))
    (neither,) = rewarder().wait([episode_of(None, None)])
    assert (neither.reward, neither.steps) == (0.0, ())
    every = CombinedRewarder(None, [], RewardConfig(), episodes=MultiTurnConfig(), every_turn=True)
    assert every.wait([episode_of(1.0, None, 0.5)])[0].steps == ((1, 1.0), (6, 0.0), (11, 0.5))
    assert rewarder(outcome=1.0, weight=0.5).factors == {"rule": 1.0, "environment": 0.5}


def test_a_later_turn_counts_less_with_a_discount() -> None:
    (found,) = rewarder(outcome=1.0, discount=0.5).wait([episode_of(1.0, 1.0, 1.0)])
    assert found.reward == 1.0 + 1.0 + 0.5 + 0.25


def test_each_kind_of_truncation_has_its_rule() -> None:
    ways = rewarder(turns="punish", tokens="mask", time="drop", penalty=0.25)
    done, turns, tokens, late = ways.wait(
        [episode_of(1.0, ended=e, sample=i) for i, e in enumerate(("done", "turns", "tokens", "time"))]
    )
    assert (done.reward, done.masked, done.failure) == (1.0, False, None)
    assert (turns.reward, turns.reward_parts["truncation"], turns.steps) == (0.75, -0.25, ((1, 0.75),))
    assert (tokens.reward, tokens.masked) == (1.0, True)
    assert (late.reward, late.failure) == (None, "truncated_time")
    (kept,) = rewarder(time="keep").wait([episode_of(1.0, ended="time")])
    assert (kept.reward, kept.failure) == (1.0, None)
    batch = collate([done, turns, tokens])
    assert batch.masked_N is not None and batch.masked_N.tolist() == [False, False, True]


def test_a_failed_environment_is_treated_as_a_failed_reward() -> None:
    failed = lambda: [episode_of(1.0, ended="failed", failure="environment_error"), episode_of(1.0, sample=1)]  # noqa: E731
    dropped, good = rewarder().wait(failed())
    assert (dropped.reward, dropped.failure, good.reward) == (None, "environment_error", 1.0)
    value = RewardConfig(functions=[], on_failure="value", failure_value=-1.0)
    given, _ = rewarder(reward=value).wait(failed())
    assert (given.reward, given.steps) == (-1.0, ((1, -1.0),))
    with pytest.raises(RewardError, match="on_failure=stop"):
        rewarder(reward=RewardConfig(functions=[], on_failure="stop")).wait(failed())
    with pytest.raises(RewardError, match="no response has a reward"):
        rewarder().wait(failed()[:1])


def test_steps_are_numbered_among_the_sampled_tokens() -> None:
    rollouts = rewarder(outcome=1.0).wait([episode_of(1.0, 2.0), episode_of(None, 3.0, sample=1)])
    batch = collate(rollouts)
    assert batch.num_steps_N.tolist() == [2, 1]
    assert batch.step_ends_K.tolist() == [1, 3, 3]
    assert batch.step_states_K.tolist() == [7, 6, 6] and batch.select([1, 0]).step_states_K.tolist() == [6, 7, 6]
    rollouts[0].steps = ((0, 1.0),)
    assert collate(rollouts).step_states_K is None  # a step within a turn begins in no state
    rollouts[0].steps = ((2, 1.0),)
    with pytest.raises(ValueError, match="ends at token 2, which was not sampled"):
        collate(rollouts)


def test_a_function_sees_the_conversation() -> None:
    sample = sample_of(episode_of(1.0, None))
    assert sample.extra_info["row"] == 1 and sample.extra_info["num_turns"] == 2
    assert sample.extra_info["turn_rewards"] == [1.0, None]
    assert [message["content"] for message in sample.extra_info["messages"]] == ["t0", "t1"]


def test_the_metrics_of_episodes() -> None:
    episodes = [
        episode_of(1.0, ended="turns", counts={"tool_calls": 2.0}, waits_s=(1.0, 3.0), info={"found": 1.0}),
        episode_of(1.0, 1.0, 1.0, info={"found": 0.0}),
    ]
    found = episode_metrics(episodes)
    assert found["episode/turns"] == 2.0 and found["episode/turns/max"] == 3.0
    assert found["episode/tool_calls"] == 1.0 and found["episode/malformed_calls"] == 0.0
    assert (found["episode/truncated_turns"], found["episode/truncated_time"], found["episode/failed"]) == (0.5, 0.0, 0.0)
    assert (found["episode/wait_s"], found["episode/wait_s/max"], found["env/found"]) == (2.0, 3.0, 0.5)
    assert found["episode/context_token_fraction"] == 1 - 8 / 14
    assert "episode/cache_hit_fraction" not in found
    assert not [
        name
        for name in rollout_metrics([Rollout(Prompt("p", [1], "", "t"), 0, [1], [0.0], "stop", ((0, 1),))])
        if "episode" in name
    ]


def test_what_an_environment_calls_solved_is_what_validation_reports() -> None:
    found = rewarder().wait([episode_of(None, 0.25, info={"solved": 0.0, "turns": 2.0}), episode_of(1.0, info={"solved": 1.0})])
    assert [one.reward_parts for one in found] == [{"environment": 0.25, "acc": 0.0}, {"environment": 1.0, "acc": 1.0}]
    assert [one.reward for one in found] == [0.25, 1.0]
