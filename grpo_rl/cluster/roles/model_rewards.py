"""The models of a run's reward: read before any worker starts, at work beside the rules afterwards."""

from __future__ import annotations

from typing import Any

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.reward_model_role import prepare
from grpo_rl.plan.decisions import Plan
from grpo_rl.protocols import Rewarder
from grpo_rl.rewards.combined import CombinedRewarder, ModelReward
from grpo_rl.rewards.episode_rewards import EpisodeRewarder
from grpo_rl.rewards.steps import Decode


class ModelRewards:
    """The reward model, whose settings and tokenizer lie in `folder`, and the judge of a run, as far as the plan has them.

    Raises ConfigError for a model, a template or a parser that cannot be used.
    """

    def __init__(self, plan: Plan, folder: str, tokenizer: Any, decode: Decode) -> None:
        self._config = plan.config.reward
        self._episodes = plan.config.actor_rollout_ref.rollout.multi_turn if plan.plays_episodes else None
        self._models_alone = plan.reward.model_alone
        trained = plan.trains_reward_model
        scores = plan.reward.scores and plan.role("reward_model") is not None
        self._setup = prepare(plan.config, folder, tokenizer, decode, trained=trained) if scores else None
        self._judge = None
        if plan.reward.judge:
            # The HTTP client is loaded only where there is an endpoint to ask.
            from grpo_rl.rewards.models.judge import JudgeSetup

            self._judge = JudgeSetup.from_config(plan.config.reward.judge)

    def beside(self, rules: Rewarder | None, scorers: WorkerGroup | None) -> CombinedRewarder | EpisodeRewarder:
        """Rules and models as the one reward of the run, and the reward of turns where there are several."""
        models: list[ModelReward] = []
        if self._setup is not None:
            assert scorers is not None
            models.append(self._setup.over(scorers))
        if self._judge is not None:
            models.append(self._judge.start())
        whole = CombinedRewarder(rules, models, self._config, models_alone=self._models_alone)
        return whole if self._episodes is None else EpisodeRewarder(whole, self._episodes, self._config)
