"""The reward of episodes: what their turns earned beside what functions and models give, and what a truncated one is worth."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_rl.config.schema.multi_turn import MultiTurnConfig
from grpo_rl.config.schema.reward import RewardConfig
from grpo_rl.episode import TRUNCATED, Episode
from grpo_rl.rewards.combined import ENVIRONMENT, CombinedRewarder, fail, stop_where_due
from grpo_rl.types import Rollout

SOLVED = "solved"
"""The number of an environment's `info` that is the part `acc` of the reward: 1 where the episode reached its goal."""
TRUNCATION = "truncation"
"""The name of the penalty of truncated episodes among the parts."""


class EpisodeRewarder:
    """The reward of a run whose rollouts are episodes; implements `protocols.Rewarder`.

    Formula: reward = functions and models + weight * Σ_t γ^t r_t - penalty, with r_t the reward of turn t, γ =
    multi_turn.turn_discount. The steps of a rollout are its turns with a reward: each has weight * r_t, and the last turn in
    addition everything that is given for the whole episode.
    """

    def __init__(self, whole: CombinedRewarder, config: MultiTurnConfig, reward: RewardConfig) -> None:
        """`whole` gives what functions and models find in whole episodes."""
        self.whole, self.config, self.reward = whole, config, reward
        self.weight = config.environment.reward_weight
        self._has_outcome = bool(whole.factors)
        self.factors = dict(whole.factors) | {ENVIRONMENT: self.weight}

    def submit(self, rollout: Rollout) -> None:
        """Start scoring one episode; returns at once."""
        self.whole.submit(rollout)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the same rollouts with reward, parts and steps, or with a failure.

        An episode whose environment failed is treated by `reward.on_failure`, a truncated one by its rule. Raises RewardError
        where the run shall stop, and where every environment has failed.
        """
        scored = self.whole.wait(rollouts)
        for rollout in scored:
            if rollout.episode is not None:
                self._score(rollout, rollout.episode)
        stop_where_due(scored, self.reward, _environment_failed, "episode")
        return scored

    def close(self) -> None:
        """Stop the models."""
        self.whole.close()

    def _score(self, rollout: Rollout, episode: Episode) -> None:
        if episode.failure is not None:
            fail(rollout, episode.failure, episode.failure_cause, self.reward)
        if rollout.failure is not None:
            rollout.steps = _at_the_end(episode, rollout.reward)
            return
        assert rollout.reward is not None
        score = episode.score(self.config.turn_discount)
        of_whole = rollout.reward
        rollout.reward_parts = {**rollout.reward_parts, ENVIRONMENT: score}
        if SOLVED in episode.info:  # what validation reports, in place of the reward
            rollout.reward_parts["acc"] = episode.info[SOLVED]
        rule = getattr(self.config.truncation, episode.ended) if episode.ended in TRUNCATED else "keep"
        if rule == "punish":
            of_whole -= self.config.truncation.penalty
            rollout.reward_parts[TRUNCATION] = -self.config.truncation.penalty
        rollout.reward = of_whole + self.weight * score
        rollout.masked = rule == "mask"
        rollout.steps = self._steps(episode, of_whole, has_outcome=self._has_outcome or rule == "punish")
        if rule == "drop":
            rollout.reward, rollout.failure = None, f"truncated_{episode.ended}"
            rollout.failure_cause = (
                f"the episode ended by its limit on {episode.ended} (multi_turn.truncation.{episode.ended}=drop)"
            )

    def _steps(self, episode: Episode, of_whole: float, *, has_outcome: bool) -> tuple[tuple[int, float], ...]:
        rewards = {turn.end - 1: self.weight * turn.reward for turn in episode.turns if turn.reward is not None and turn.length}
        if has_outcome and (last := [turn for turn in episode.turns if turn.length]):
            end = last[-1].end - 1
            rewards[end] = rewards.get(end, 0.0) + of_whole
        return tuple(rewards.items())


def _environment_failed(rollout: Rollout) -> bool:
    return rollout.episode is not None and rollout.episode.failure is not None


def _at_the_end(episode: Episode, reward: float | None) -> tuple[tuple[int, float], ...]:
    """Return one step with all of the reward."""
    turns = [turn for turn in episode.turns if turn.length]
    return ((turns[-1].end - 1, reward),) if turns and reward is not None else ()
