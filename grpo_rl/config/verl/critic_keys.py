"""What is said to keys of verl's critic that are not in the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say to a key: the values that are right here, and the reason or replacement for all others."""

    advice: str
    accepts: tuple[Any, ...] = ()


_AS_UPDATE = "values are computed in the micro-batches of the critic's update"
_OF_ACTOR = "the critic's model is loaded as the actor's: set it in actor_rollout_ref.model"

CRITIC: dict[str, Answer] = {
    "strategy": Answer("as actor_rollout_ref.actor.strategy: FSDP2", ("fsdp", "fsdp2")),
    "ppo_micro_batch_size": Answer("use critic.ppo_micro_batch_size_per_gpu, which counts rollouts on one rank"),
    "forward_micro_batch_size": Answer(_AS_UPDATE),
    "forward_micro_batch_size_per_gpu": Answer(f"{_AS_UPDATE}: critic.ppo_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": Answer(f"{_AS_UPDATE}: critic.ppo_max_token_len_per_gpu"),
    "shuffle": Answer("the critic's mini-batches keep the order of the prompts", (False,)),
    "data_loader_seed": Answer("the critic's mini-batches keep the order of the prompts"),
    "loss_agg_mode": Answer("the value loss is averaged over all trained tokens", ("token-mean",)),
    "loss_scale_factor": Answer("the value loss is averaged over all trained tokens"),
    "grad_clip": Answer("use critic.optim.clip_grad; verl reads grad_clip nowhere"),
    "checkpoint.save_contents": Answer("the critic is saved with the actor, as a whole"),
    "optim.warmup_style": Answer("use critic.optim.lr_scheduler_type"),
    "model.fsdp_config": Answer("use critic.fsdp"),
    "model.tokenizer_path": Answer("the critic reads the actor's tokens: actor_rollout_ref.model.tokenizer_path"),
    "model.override_config": Answer(_OF_ACTOR),
    "model.trust_remote_code": Answer(_OF_ACTOR, (False,)),
}
