"""Values that follow from a configuration and a machine without a heavy import."""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal

from grpo_rl.config.convert import section
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.config.schema.fields import leaves, replaced
from grpo_rl.config.schema.tree import Config, ModelConfig, ProfilerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.registry import load_function, versions_ahead_of

PAIR_AVERAGE = "seq-mean-token-mean"  # the default average of losses over pairs: the mean over pairs
OFFLINE = "offline"  # the schedule if responses are fixed, whatever `trainer.schedule` says

ASYNC = "async"  # its module is `asynchronous.py`: `async` is a keyword of Python

Pool = Literal["actor", "rollout", "teacher", "reward_model"]  # roles that may have devices of their own


COPIED_BYTES = 512 << 20
"""Bytes of a rank's state on a CPU up to which a save copies it, so that training goes on while a thread
writes. Memory is short first with a larger state: the next optimizer step waits for its write."""
MOST_ON_A_NODE = 32  # default limit on a node's processes of one kind


def processes_on(cores: int, number: int | None) -> int:
    """By default half of the cores that the run's devices leave."""
    return number or min(MOST_ON_A_NODE, max(1, cores // 2))


@frozen
class Machine:
    num_gpus: int
    num_cpus: int  # cores that the run's processes share
    device: Literal["cuda", "cpu"]  # where the models compute; trainer.device=auto is decided already
    cluster: bool = False  # the workers run in a Ray cluster that this machine need not be part of
    gpu_memory: int = 0  # bytes of one GPU; 0 if they differ or were not looked up
    name: str = ""  # of a machine that is not this one, such as 8xH100-80GB
    nodes: int = 1
    host_memory: int = 0  # bytes per node; 0 if it was not looked up

    def devices(self, config: Config, role: Pool) -> tuple[int, int]:
        """Return nodes and devices per node of a role's own pool, or of the actor's."""
        trainer, scorer = config.trainer, config.reward.reward_model
        per_node = trainer.n_gpus_per_node or (max(self.num_gpus, 1) if self.device == "cuda" else 1)
        pools: dict[str, Any] = {
            "rollout": config.rollout,
            "teacher": config.distillation,
            "reward_model": scorer,
        }
        pool = pools.get(role, trainer)
        if not (scorer.enable_resource_pool if pool is scorer else pool.nnodes):
            pool = trainer
        return pool.nnodes, pool.n_gpus_per_node or per_node

    def world_size(self, config: Config, role: Pool = "actor") -> int:
        return math.prod(self.devices(config, role))


@frozen
class MicroBatchRule:
    """How a rank's rollouts are cut into forward passes: by tokens or by rollouts; the other is None."""

    max_tokens: int | None
    max_rollouts: int | None
    shares_prompts: bool = False
    """Responses to one prompt share its states in a pass, so that its tokens count once."""
    sequence_ranks: int = 1
    """Ranks that compute each pass together, a slice of its tokens each; the limits are for all of them."""

    def __str__(self) -> str:
        size = f"<= {self.max_tokens:,} tokens" if self.max_tokens is not None else f"{self.max_rollouts} rollouts"
        return f"{size} per rank" if self.sequence_ranks == 1 else f"{size} per {self.sequence_ranks} ranks together"


def teachers_of(config: Config) -> dict[str, TeacherConfig]:
    """Raises ConfigError with all problems of the teachers."""
    if not config.distillation.enabled:
        return {}
    key = "distillation.teacher_models"
    problems: list[str] = []
    entries = config.distillation.teacher_models
    teachers: dict[str, TeacherConfig] = {
        name: section(TeacherConfig, entry, f"{key}.{name}.", problems) for name, entry in entries.items()
    }
    problems += [
        f"{key}.{name}.ema_decay={entry.ema_decay}: averages the policy's weights, and this teacher has a model_path"
        for name, entry in teachers.items()
        if entry.ema_decay is not None and entry.model_path is not None
    ]
    if len({entry.ema_decay for entry in teachers.values()} - {None}) > 1:
        problems.append(f"{key}: the policy has one moving average; give all teachers with ema_decay the same")
    if problems or not teachers:
        raise ConfigError(problems or f"{key}: distillation.enabled=true names no teacher; {key}.teacher_model.model_path=...")
    return teachers


def versions_ahead(config: Config) -> int | None:
    """Return how many versions the schedule samples ahead (`registry.samples_ahead`): 0 if it samples and
    trains in turns or cannot be loaded, which is reported elsewhere; None: asynchronous.max_staleness."""
    name = config.trainer.schedule
    if config.is_offline or config.is_iterated:
        return 0
    try:
        if ":" in name:
            return versions_ahead_of(load_function(name))
        module = importlib.import_module(f"grpo_rl.schedules.{'asynchronous' if name == ASYNC else name}")
        return versions_ahead_of(module.train)
    except (ConfigError, ImportError, AttributeError):
        return 0


def overlaps(config: Config) -> bool:
    return versions_ahead(config) != 0


def max_staleness(config: Config) -> int:
    """Versions by which a token's sampling weights may be older than those that it trains."""
    versions = versions_ahead(config)
    return config.trainer.asynchronous.max_staleness if versions is None else versions


def oldest_sampler(config: Config) -> int:
    """Steps, replayed groups included."""
    return max(max_staleness(config), config.algorithm.replay.max_age)


def updates_in_flight(config: Config) -> bool:
    """Return whether engines get new weights under unfinished responses."""
    return versions_ahead(config) is None and max_staleness(config) > 0 and config.trainer.asynchronous.partial_rollout


def policy_steps(total: int, reward_model_steps: int, steps_per_iteration: int) -> int:
    """Each iteration begins with `reward_model_steps` steps that do not train the policy."""
    iterations, rest = divmod(total, reward_model_steps + steps_per_iteration)
    return iterations * steps_per_iteration + max(0, rest - reward_model_steps)


def collection(config: Config) -> Config:
    """The phase that collects responses answers every training prompt once."""
    data = config.data
    values = {
        "data.responses": "policy",
        "data.val_files": data.train_files,
        "data.val_max_samples": data.train_max_samples,
        "data.train_files": [],
        "data.val_prompt_files": [],
        "trainer.val_only": True,
    }
    return replaced(config, values)


def settled(config: Config) -> Config:
    """Return the configuration with the settings that schedule and loss fix; `effects.py` refuses keys
    against them.

    Losses over pairs average over pairs, without a KL term: they compare with the reference themselves. If
    tokens may be stale, the ratio is to the policy that sampled them, unless another correction is
    configured. Rows are trained in one optimizer step per batch, at temperature 1, without a KL term.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values: dict[str, Any] = {}
    pairs, correction, scorer = config.trains_pairs, config.algorithm.rollout_correction, config.reward.reward_model
    if pairs:
        values[f"{actor}.use_kl_loss"] = False
        if config.actor.loss_agg_mode == leaves()[f"{actor}.loss_agg_mode"].default:
            values[f"{actor}.loss_agg_mode"] = PAIR_AVERAGE
    is_corrected = correction.bypass_mode is not None or correction.rollout_is or correction.rollout_rs
    if not config.is_offline and oldest_sampler(config) and not pairs and not is_corrected:
        values["algorithm.rollout_correction.bypass_mode"] = True
    if config.is_offline:
        values |= {f"{actor}.ppo_mini_batch_size": config.data.train_batch_size, f"{actor}.ppo_epochs": 1}
        values |= {f"{actor}.shuffle": False, f"{actor}.use_kl_loss": False, "data.gen_batch_size": None}
        values |= {f"{rollout}.n": 2 if pairs else 1, f"{rollout}.temperature": 1.0}
        if config.trains_only_reward_model:
            # It takes the policy's place: tokenizer and sizes are read from its folder. Nothing samples with
            # it; engine hf refuses no model.
            model = ModelConfig(scorer.model_path or "", scorer.tokenizer_path, scorer.trust_remote_code)
            values |= {"actor_rollout_ref.model": model, f"{rollout}.name": "hf"}
        else:
            values["trainer.schedule"] = OFFLINE
    return replaced(config, values)


def pass_rule(config: Config, role: Literal["actor", "old", "ref", "critic"]) -> MicroBatchRule:
    """By default a role's passes are cut as the actor's update. `old`: passes for old log-probs."""
    actor, rollout, ref, critic = config.actor, config.rollout, config.ref, config.critic
    ranks = actor.ulysses_sequence_parallel_size
    # With adapters the reference is the base model in the actor's ranks.
    of_ref = ranks if config.model.lora_rank else ref.ulysses_sequence_parallel_size or ranks
    size = actor.ppo_micro_batch_size_per_gpu
    by_tokens, rollouts, tokens, sequence_ranks = {
        "actor": (bool(actor.use_dynamic_bsz) or size is None, size, None, ranks),
        "old": (
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_max_token_len_per_gpu,
            ranks,
        ),
        "ref": (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_max_token_len_per_gpu,
            of_ref,
        ),
        "critic": (
            critic.use_dynamic_bsz,
            critic.ppo_micro_batch_size_per_gpu,
            critic.ppo_max_token_len_per_gpu,
            critic.ulysses_sequence_parallel_size,
        ),
    }[role]
    if by_tokens is None:
        by_tokens = rollouts is None and (tokens is not None or pass_rule(config, "actor").max_tokens is not None)
    limit = (tokens or actor.ppo_max_token_len_per_gpu) * sequence_ranks if by_tokens else None
    return MicroBatchRule(limit, None if by_tokens else rollouts or size, actor.use_prefix_grouper is not False, sequence_ranks)


def lm_head_chunk(tokens: int | None, vocabulary: int) -> int:
    """By default the logits of a chunk have 64 MiB, of at least 2048 tokens."""
    return tokens or max(2048, 2**24 // vocabulary)


def nodes_per_engine(config: Config, machine: Machine) -> int:
    """Return the nodes over which one engine is spread, 1 if a node has enough devices."""
    return max(1, config.rollout.tensor_model_parallel_size // machine.devices(config, "rollout")[1])


def profilers_of(config: Config) -> dict[str, ProfilerConfig]:
    return {
        "actor_rollout_ref.actor.profiler": config.actor.profiler,
        "actor_rollout_ref.ref.profiler": config.ref.profiler,
        "critic.profiler": config.critic.profiler,
    }


def max_num_seqs(config: Config, device: str) -> int:
    """Return the most responses that one replica samples at once, at most one per token of a pass."""
    rollout = config.rollout
    return rollout.max_num_seqs or min(1024 if device == "cuda" else 256, rollout.max_num_batched_tokens)
