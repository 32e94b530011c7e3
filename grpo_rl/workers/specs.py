"""Plain values that the controller sends to workers. Nothing here loads what only a worker needs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from grpo_rl.algos.objective import Objective
from grpo_rl.columns import Column, Fetch, read_columns
from grpo_rl.config.schema.model import POLICY_KEY, FsdpConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import ModelConfig, OptimConfig, RewardModelTrainConfig
from grpo_rl.frozen import frozen
from grpo_rl.rollout.engine import WeightBackend
from grpo_rl.types import Batch, Counts


@frozen
class Rank:
    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: str
    """cpu or cuda; a cuda process sees exactly one GPU."""
    timeout_s: float
    start_timeout_s: float = 0.0
    """The longest wait while models are loaded, if longer than `timeout_s`."""
    deterministic: bool = False
    """Only kernels with the same bits every time; an operation without one raises."""
    address: str = "127.0.0.1"

    @property
    def patience_s(self) -> float:
        """The longest wait for models that load, and memory that is page-locked."""
        return max(self.timeout_s, self.start_timeout_s)


@frozen
class PolicySpec:
    """The settings from which a policy is built: the model, and what decides its forward pass."""

    model: ModelConfig
    temperature: float
    dtype: str
    reshard_after_forward: bool = True
    train: bool = False
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a micro-batch."""
    sequence_ranks: int = 1
    """Ranks that compute each micro-batch together."""
    shard_ranks: int = -1
    """Ranks that hold one replica of the model; below 1: all."""
    in_host_memory: bool = False
    forward_prefetch: bool = False
    compiled: bool = False
    path_key: str = POLICY_KEY
    seed: int = 0

    def sharded_as(self, fsdp: FsdpConfig | RefFsdpConfig, sequence_ranks: int) -> PolicySpec:
        return replace(
            self,
            dtype=fsdp.dtype,
            reshard_after_forward=getattr(fsdp, "reshard_after_forward", self.reshard_after_forward),
            sequence_ranks=sequence_ranks,
            shard_ranks=fsdp.fsdp_size,
            in_host_memory=fsdp.offload_policy,
            forward_prefetch=fsdp.forward_prefetch,
            compiled=fsdp.use_torch_compile,
        )


@frozen
class SenderSpec:
    backend: WeightBackend = "object_store"
    bucket_bytes: int = 512 << 20
    dtype: str | None = None
    """The engines' type; None sends float32."""
    verify: bool = False
    adapters_alone: bool = False
    """Send A and B of every adapter, in float32."""
    readers: int = 1
    """Engines on each rank's GPU."""


@frozen
class ActorSpec:
    policy: PolicySpec
    objective: Objective
    optim: OptimConfig
    total_optimizer_steps: int
    seed: int
    sender: SenderSpec = SenderSpec()
    param_offload: bool = False
    optimizer_offload: bool = False
    old_from_engine: bool = False
    measures_engine: bool = False
    """Measure how far the engine is from the old log-probs, which nothing else reads."""
    replays_routing: bool = False
    """Tokens take the experts of the pass for old log-probs (router_replay.mode=R2)."""
    ema_decay: float | None = None
    """Of the moving average of the weights that a teacher has; None: no teacher has one."""

    @property
    def in_host_memory(self) -> bool:
        return self.policy.in_host_memory


Rows = tuple[int, ...]
"""The rollouts of one micro-batch, as rows of the rank's shard; empty if a rank only keeps step."""


@frozen
class OptimizerStep:
    """This rank's work for one optimizer step, and its global denominators."""

    counts: Counts
    micro_batches: tuple[Rows, ...]
    zero_advantage: tuple[Rows, ...] = ()
    """Micro-batches that add nothing to the gradient: forward passes for the statistics only."""
    entropy_coeff: float | None = None
    selected_T: Tensor | None = None
    """The clipped tokens: a bool for each trained token of the rank's shard."""


@frozen
class Update:
    """The parts of an update on its shard that a rank does not have yet."""

    columns: dict[str, Column]
    """By their names in `Batch`; of the tokens of `trained_T`."""
    trained_T: Tensor | None
    """Which of the shard's trained tokens the update trains; None: all."""
    steps: tuple[OptimizerStep, ...]

    def local(self, fetch: Fetch) -> Update:
        return replace(self, columns={**self.columns, **read_columns(self.columns, fetch)})

    def complete(self, shard: Batch) -> Batch:
        batch = shard if self.trained_T is None else shard.keep(self.trained_T)
        return batch.replace(**self.columns)


@frozen
class CriticSpec:
    model: PolicySpec
    optim: OptimConfig
    total_optimizer_steps: int
    seed: int
    cliprange_value: float
    param_offload: bool = False
    optimizer_offload: bool = False

    @property
    def in_host_memory(self) -> bool:
        return self.model.in_host_memory


@frozen
class RewardModelSpec:
    path: str
    dtype: str
    trust_remote_code: bool = False
    param_offload: bool = False


@frozen
class TrainedRewardModelSpec:
    scorer: RewardModelSpec
    train: RewardModelTrainConfig
    total_optimizer_steps: int
    seed: int
    share_prompts: bool = True
    in_host_memory: ClassVar[bool] = False

    @property
    def optim(self) -> OptimConfig:
        return self.train.optim

    @property
    def param_offload(self) -> bool:
        return self.scorer.param_offload

    @property
    def optimizer_offload(self) -> bool:
        return self.train.optimizer_offload
