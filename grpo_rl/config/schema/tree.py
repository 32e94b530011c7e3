"""Every option: key, type, range, default, meaning; no option is defined elsewhere, or without a reader.

Keys and meanings are verl's wherever verl has one that is right. `conf/base` is generated from these files.
All classes and kinds are names of this module.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

from grpo_rl.config.schema.algorithm import *
from grpo_rl.config.schema.data import *
from grpo_rl.config.schema.kinds import *
from grpo_rl.config.schema.model import *
from grpo_rl.config.schema.reward import *
from grpo_rl.config.schema.trainer import *


@frozen
class Config:
    data: DataConfig = field(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(ActorRolloutRefConfig)
    critic: CriticConfig = field(CriticConfig, part="critic")
    algorithm: AlgorithmConfig = field(AlgorithmConfig)
    reward: RewardConfig = field(RewardConfig, part="sampling")
    distillation: DistillationConfig = field(DistillationConfig, needs="distillation.enabled=true")
    trainer: TrainerConfig = field(TrainerConfig)
    global_profiler: GlobalProfilerConfig = field(GlobalProfilerConfig)
    ray_kwargs: RayConfig = field(RayConfig)

    @property
    def model(self) -> ModelConfig:
        """The policy's: verl has one group for its model, actor, rollout and reference."""
        return self.actor_rollout_ref.model

    @property
    def actor(self) -> ActorConfig:
        return self.actor_rollout_ref.actor

    @property
    def rollout(self) -> RolloutConfig:
        return self.actor_rollout_ref.rollout

    @property
    def ref(self) -> RefConfig:
        return self.actor_rollout_ref.ref

    # ---- what follows from keys alone

    @property
    def is_offline(self) -> bool:
        """Return whether the trained responses are fixed before training."""
        return self.data.responses != "policy" or self.trains_only_reward_model

    @property
    def trains_pairs(self) -> bool:
        """A user's own loss is known only once it is imported."""
        loss = self.actor.policy_loss.loss_mode
        return not self.trains_only_reward_model and loss in PAIR_LOSSES

    @property
    def estimates_advantages(self) -> bool:
        """Return whether rewards become advantages: not for fixed responses, pairs, or teachers alone."""
        return not self.is_offline and not self.trains_pairs and not self.learns_from_teachers_alone

    @property
    def learns_from_teachers_alone(self) -> bool:
        return self.distillation.enabled and not self.distillation.distillation_loss.use_task_rewards

    @property
    def collects(self) -> bool:
        """Return whether the trained responses are sampled once, from the initial policy."""
        return self.data.responses == "initial_policy"

    @property
    def samples_answers(self) -> bool:
        """With fixed responses only validation samples and scores."""
        return not self.is_offline or bool(self.data.val_prompt_files)

    @property
    def plays_episodes(self) -> bool:
        return self.rollout.multi_turn.enable and self.samples_answers and not self.collects

    @property
    def is_iterated(self) -> bool:
        return self.trainer.schedule == ITERATE and not self.is_offline

    @property
    def longest_sequence(self) -> int:
        data = self.data
        if self.is_offline and data.max_length is not None:
            return data.max_length
        return data.max_prompt_length + data.max_response_length

    @property
    def may_have_critic(self) -> bool:
        """A user's own estimator is known only once it is imported."""
        estimator = self.algorithm.adv_estimator
        return self.estimates_advantages and (estimator in VALUE_ESTIMATORS or ":" in estimator)

    @property
    def critic_has_own_model(self) -> bool:
        return self.critic.model.path not in ("", self.model.path)

    @property
    def is_colocated(self) -> bool:
        return self.rollout.nnodes == 0

    @property
    def updates_per_step(self) -> int:
        actor = self.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs

    @property
    def gen_batch_size(self) -> int:
        return self.data.gen_batch_size or self.data.train_batch_size

    @property
    def has_kl_in_loss(self) -> bool:
        actor = self.actor
        return actor.use_kl_loss and actor.kl_loss_coef > 0

    @property
    def has_kl_in_reward(self) -> bool:
        return self.algorithm.use_kl_in_reward and self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def trains_reward_model(self) -> bool:
        """A user's own schedule may train the reward model."""
        if self.is_iterated:
            return self.trainer.iterate.reward_model_steps > 0
        return self.trains_only_reward_model or ":" in self.trainer.schedule

    @property
    def trains_only_reward_model(self) -> bool:
        return self.trainer.schedule == REWARD_MODEL

    @property
    def has_judge(self) -> bool:
        """Return whether a judge's score is part of the reward, instead of an audit."""
        return self.reward.judge.base_url is not None and "judge" not in self.reward.audit

    @property
    def scores_steps_by_model(self) -> bool:
        return self.reward.reward_model.enable and self.reward.reward_model.step_separator is not None
