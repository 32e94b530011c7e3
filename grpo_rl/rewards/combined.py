"""Rewards whose summands are rules, models and the turns of episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from grpo_rl.config.schema.model import MultiTurnConfig
from grpo_rl.config.schema.tree import Config, RewardConfig
from grpo_rl.errors import NoRewardError, RewardError
from grpo_rl.rewards.compose import JUDGE, RewardFunction
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult, number_of, summary
from grpo_rl.types import GREEDY, TRUNCATED, Episode, Rollout

if TYPE_CHECKING:  # types imports torch, which a reward process does without
    from grpo_rl.protocols import Rewarder


REWARD_MODEL, ENVIRONMENT = "reward_model", "environment"
RULE = "by-rule"
"""The rules' reward among the parts, if it is no summand. No function can be called so."""


class ModelReward(Protocol):
    name: str
    weight: float

    def submit(self, rollout: Rollout) -> None:
        """Returns at once. A rollout given again while it is pending is scored once."""

    def wait(self, rollouts: Sequence[Rollout]) -> list[Outcome]: ...

    def close(self) -> None: ...


SOLVED = "solved"
"""Becomes the part `acc`: 1 if the episode reached its goal."""
TRUNCATION = "truncation"


class CombinedRewarder:
    """Formula: reward = sum of the rules + sum of weight * score over the models; so are steps of a model.

    With `models_alone` (iterated training) the rules' reward is no summand but the part `by-rule`. Of episodes
    the reward is that sum + weight * Σ_t γ^t r_t - penalty; γ is multi_turn.turn_discount. Their steps are the
    turns with a reward r_t, weight * r_t each; the last has what is given for the whole too.
    """

    def __init__(
        self,
        rules: Rewarder | None,
        models: Sequence[ModelReward],
        config: RewardConfig,
        *,
        models_alone: bool = False,
        episodes: MultiTurnConfig | None = None,
        every_turn: bool = False,
    ) -> None:
        """With `every_turn`, turns without a reward are steps, too."""
        self.rules, self.models, self.config = rules, models, config
        self.models_alone = models_alone
        counted = {RULE: 0.0} if models_alone else {} if rules is None else rules.factors
        self.factors = dict(counted) | {model.name: model.weight for model in models}
        self._episodes, self._every_turn, self._has_outcome = episodes, every_turn, bool(self.factors)
        if episodes is not None:
            self.factors[ENVIRONMENT] = episodes.environment.reward_weight

    def submit(self, rollout: Rollout) -> None:
        if self.rules is not None:
            self.rules.submit(rollout)
        for model in self.models:
            model.submit(rollout)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Fill `reward`, `reward_parts` and `steps`, or `failure`; submits rollouts that were not.

        Raises RewardError if a failure stops the run or all sampled ones failed.
        """
        for rollout in rollouts:
            for model in self.models:
                model.submit(rollout)
        if self.rules is not None:
            self.rules.wait(rollouts)
        for rollout in rollouts:
            if self.rules is None:
                rollout.reward, rollout.reward_parts, rollout.failure, rollout.failure_cause = 0.0, {}, None, None
            if rollout.episode is not None and rollout.episode.failure is not None:
                fail(rollout, RewardFailure(rollout.episode.failure, rollout.episode.failure_cause or ""), self.config)
            if self.models_alone and rollout.failure is None:
                assert rollout.reward is not None
                rollout.reward_parts = rollout.reward_parts | {RULE: rollout.reward}
                rollout.reward, rollout.steps = 0.0, None
        for model in self.models:
            for rollout, result in zip(rollouts, model.wait(rollouts), strict=True):
                if rollout.failure is not None:
                    continue
                if isinstance(result, RewardFailure):
                    place = f"{model.name} for prompt {rollout.prompt.uid}, sample {rollout.sample_index}"
                    fail(rollout, result.at(place), self.config)
                else:
                    _add(rollout, model, result)
        fail_beyond_float32(rollouts, self.config)
        if self._episodes is not None:
            for rollout in rollouts:
                if rollout.episode is not None:
                    self._score_episode(rollout, rollout.episode, self._episodes)
            fail_beyond_float32(rollouts, self.config)
        stop_where_due(rollouts, self.config)
        return list(rollouts)

    def close(self) -> None:
        for model in self.models:
            model.close()

    def _score_episode(self, rollout: Rollout, episode: Episode, config: MultiTurnConfig) -> None:
        if rollout.failure is not None:
            rollout.steps = self._steps(episode, rollout.reward, weight=0.0)
            return
        assert rollout.reward is not None
        score, weight = episode.score(config.turn_discount), config.environment.reward_weight
        of_whole = rollout.reward
        rollout.reward_parts = rollout.reward_parts | {ENVIRONMENT: score}
        if SOLVED in episode.info:  # what validation reports, in place of the reward
            rollout.reward_parts["acc"] = episode.info[SOLVED]
        rule = getattr(config.truncation, episode.ended) if episode.ended in TRUNCATED else "keep"
        if rule == "punish":
            of_whole -= config.truncation.penalty
            rollout.reward_parts[TRUNCATION] = -config.truncation.penalty
        rollout.reward = of_whole + weight * score
        rollout.masked = rule == "mask"
        rollout.steps = self._steps(episode, of_whole if self._has_outcome or rule == "punish" else None, weight)
        if rule == "drop":
            rollout.reward, rollout.failure = None, f"truncated_{episode.ended}"
            rollout.failure_cause = (
                f"the episode ended by its limit on {episode.ended} (multi_turn.truncation.{episode.ended}=drop)"
            )

    def _steps(self, episode: Episode, of_whole: float | None, weight: float) -> tuple[tuple[int, float], ...]:
        turns = [turn for turn in episode.turns if turn.length]
        rewards = {turn.end - 1: weight * (turn.reward or 0.0) for turn in turns if self._every_turn or turn.reward is not None}
        if turns and of_whole is not None:
            end = turns[-1].end - 1
            rewards[end] = rewards.get(end, 0.0) + of_whole
        return tuple(rewards.items())


def fail(rollout: Rollout, failure: RewardFailure, config: RewardConfig) -> None:
    rollout.failure, rollout.failure_cause = failure.kind, failure.cause
    rollout.reward = config.failure_value if config.on_failure == "value" else None
    rollout.reward_parts, rollout.steps = {}, None


def fail_beyond_float32(rollouts: Sequence[Rollout], config: RewardConfig) -> None:
    for rollout in rollouts:
        if rollout.failure is None and rollout.reward is not None:
            try:
                number_of(rollout.reward, "the sum of all rewards")
            except RewardFailure as failure:
                fail(rollout, failure.at(f"prompt {rollout.prompt.uid}, sample {rollout.sample_index}"), config)


def failures_of(rollouts: Sequence[Rollout]) -> list[tuple[str, str]]:
    return [(rollout.failure, rollout.failure_cause or "") for rollout in rollouts if rollout.failure is not None]


def stop_where_due(rollouts: Sequence[Rollout], config: RewardConfig) -> None:
    failures = failures_of(rollouts)
    if failures and config.on_failure == "stop":
        raise RewardError(f"{summary(failures, len(rollouts))} (reward.on_failure=stop)")
    if failures and all(rollout.failure is not None for rollout in rollouts if rollout.sample_index != GREEDY):
        raise NoRewardError(f"no response has a reward: {summary(failures, len(rollouts))}")


def by_rule(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """With the rules' reward, if that is no summand and the rollout did not fail."""
    return [
        replace(rollout, reward=rollout.reward_parts[RULE]) if RULE in rollout.reward_parts else rollout for rollout in rollouts
    ]


def _add(rollout: Rollout, model: ModelReward, result: RewardResult) -> None:
    assert rollout.reward is not None
    rollout.reward += model.weight * result.score
    rollout.reward_parts = rollout.reward_parts | result.parts(model.name)
    if result.steps is not None:
        rollout.steps = tuple((end, model.weight * reward) for end, reward in result.steps)


def factors_of(config: Config) -> dict[str, float]:
    if config.is_iterated:
        return {RULE: 0.0} | model_factors(config)
    rules = RewardFunction.from_config(config.reward).factors if config.reward.functions else {}
    return rules | model_factors(config)


def model_factors(config: Config) -> dict[str, float]:
    factors: dict[str, float] = {}
    if config.reward.reward_model.enable:
        factors[REWARD_MODEL] = config.reward.reward_model.weight
    if config.has_judge:
        factors[JUDGE] = config.reward.judge.weight
    if config.plays_episodes:
        factors[ENVIRONMENT] = config.rollout.multi_turn.environment.reward_weight
    return factors


def may_score_steps(config: Config) -> bool:
    if config.scores_steps_by_model or config.plays_episodes:
        return True
    return bool(config.reward.functions) and RewardFunction.from_config(config.reward).may_score_steps


def describe_roles(config: Config, num_ranks: int, played_in: str) -> Iterator[tuple[str, str]]:
    if config.reward.reward_model.enable:
        model, several = config.reward.reward_model, num_ranks > 1
        pool = f"in a pool of {'their' if several else 'its'} own"
        place = pool if model.enable_resource_pool else "on the actor's devices"
        what = f"a score per step, cut at {model.step_separator!r}" if model.step_separator else "one score per response"
        passes = f"in passes of <= {model.max_token_len_per_gpu:,} tokens"
        yield "model score", f"{num_ranks} rank{'s' * several} {place}, FSDP2, {model.model_path}; {what}, {passes}"
    if config.plays_episodes:
        turns = config.rollout.multi_turn
        tools = ", ".join(filter(None, [turns.tool_config_path, *turns.tools]))
        names = [turns.environment.name, turns.interaction_config_path, tools and f"tools by {turns.format}: {tools}"]
        limits = [(turns.max_assistant_turns, "turns"), (turns.max_user_turns, "answers")]
        bounds = "".join(f", at most {number:,} {what}" for number, what in limits if number is not None)
        yield "episodes", f"{'; '.join(filter(None, names))}; in {played_in}{bounds}"
    if config.has_judge:
        judge = config.reward.judge
        how = f"answers read by {judge.parser}"
        if judge.rubric is not None:
            how = f"{judge.rubric_aggregation} of the marks of a rubric"
        rate = "" if judge.requests_per_minute is None else f", {judge.requests_per_minute:,} a minute"
        yield (
            "judge",
            f"{judge.model} at {judge.base_url}, {judge.max_concurrency} requests at a time{rate}, {1 + judge.retries} tries "
            f"within {judge.deadline_s:g} s; {how}",
        )


def describe_models(config: Config) -> list[str]:
    return [name if weight == 1 else f"{weight:g}*{name}" for name, weight in model_factors(config).items()]
