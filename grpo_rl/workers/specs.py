"""Plain values that the controller sends to workers. Nothing here loads what only a worker needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from grpo_rl.algos.objective import Objective
from grpo_rl.columns import Column, Fetch, read_columns
from grpo_rl.config.schema.model import POLICY_KEY, FsdpConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import ModelConfig, OptimConfig, RewardModelTrainConfig
from grpo_rl.rollout.engine import WeightBackend
from grpo_rl.types import Batch, Counts


@dataclass(frozen=True, slots=True)
class Rank:
    """One process's place in its worker group."""

    rank: int
    world_size: int
    master_address: str
    master_port: int
    device: str
    """cpu or cuda; a cuda process sees exactly one GPU."""
    timeout_s: float
    """The longest wait in a collective."""
    start_timeout_s: float = 0.0
    """The longest wait for the others while models are loaded, if that is longer."""
    deterministic: bool = False
    """Compute by kernels only whose results have the same bits every time; an operation without one raises."""
    address: str = "127.0.0.1"
    """The address of this process's machine, by which Ray knows it; of a local Ray the loopback."""

    @property
    def patience_s(self) -> float:
        """The longest wait for what is done once, and is slower then: models that load, host memory that is page-locked."""
        return max(self.timeout_s, self.start_timeout_s)


@dataclass(frozen=True, slots=True)
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
    """The ranks that compute each micro-batch together, a slice of its tokens each."""
    shard_ranks: int = -1
    """The ranks that the model is sharded over, each such group with a replica of it; below 1: all."""
    in_host_memory: bool = False
    """Parameters and optimizer lie in host memory, and the optimizer steps there."""
    forward_prefetch: bool = False
    """Gather a layer's parameters while the layer before it is computed."""
    compiled: bool = False
    """Compile the decoder layers."""
    path_key: str = POLICY_KEY
    """The setting that named the model's folder, for error messages."""
    seed: int = 0
    """The seed of the first values of adapters, if there are any."""

    def sharded_as(self, fsdp: FsdpConfig | RefFsdpConfig, sequence_ranks: int) -> PolicySpec:
        """Return the spec with the types and the layout of a role's section for FSDP."""
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


@dataclass(frozen=True, slots=True)
class SenderSpec:
    """The settings of the transfer of weights from the actor to the engines."""

    backend: WeightBackend = "object_store"
    bucket_bytes: int = 512 << 20
    dtype: str | None = None
    """The engines' type; None sends float32."""
    verify: bool = False
    adapters_alone: bool = False
    """Send A and B of every adapter, in float32, and not the merged weights."""
    readers: int = 1
    """Engines on each rank's GPU."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Settings of every actor rank."""

    policy: PolicySpec
    objective: Objective
    optim: OptimConfig
    total_optimizer_steps: int
    seed: int
    sender: SenderSpec = SenderSpec()
    param_offload: bool = False
    optimizer_offload: bool = False
    old_from_engine: bool = False
    """True if old log-probs are the engine's, so that they cannot be compared with the engine's."""
    measures_engine: bool = False
    """True if the ranks measure how far the engine is from the old log-probs: nothing else reads those of all tokens."""
    replays_routing: bool = False
    """True if tokens take the same experts in an update as in the pass for old log-probs (router_replay.mode=R2)."""
    ema_decay: float | None = None
    """The decay of the moving average of the weights that a teacher has; None: no teacher has one."""

    @property
    def in_host_memory(self) -> bool:
        return self.policy.in_host_memory


Rows = tuple[int, ...]
"""The rollouts of one micro-batch, as rows of the rank's shard of the batch; empty if a rank only keeps step."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """This rank's work for one optimizer step, and the global denominators of it."""

    counts: Counts
    micro_batches: tuple[Rows, ...]
    zero_advantage: tuple[Rows, ...] = ()
    """Micro-batches of zero-advantage rollouts, which add nothing to the gradient: forward passes for the statistics only."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus, if it is steered from step to step."""
    selected_T: Tensor | None = None
    """The clipped tokens of this step: a bool for each trained token of the rank's shard."""


@dataclass(frozen=True, slots=True)
class Update:
    """The parts of an update on its shard of the batch that a rank does not have yet."""

    columns: dict[str, Column]
    """Columns of the shard that were made after it was stored, by their names in `Batch`."""
    trained_T: Tensor | None
    """The mask of the shard's trained tokens that the update trains; None: all. The columns cover these only."""
    steps: tuple[OptimizerStep, ...]

    def local(self, fetch: Fetch) -> Update:
        """Return the update with the values of its remote columns, all of them fetched at once."""
        return replace(self, columns={**self.columns, **read_columns(self.columns, fetch)})

    def complete(self, shard: Batch) -> Batch:
        """Return the batch that the steps train on."""
        batch = shard if self.trained_T is None else shard.keep(self.trained_T)
        return batch.replace(**self.columns)


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """Settings of every critic rank."""

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


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """Settings of every rank of the reward model."""

    path: str
    dtype: str
    trust_remote_code: bool = False
    param_offload: bool = False


@dataclass(frozen=True, slots=True)
class TrainedRewardModelSpec:
    """Settings of every rank of a reward model that is trained."""

    scorer: RewardModelSpec
    train: RewardModelTrainConfig
    total_optimizer_steps: int
    seed: int
    share_prompts: bool = True

    @property
    def optim(self) -> OptimConfig:
        return self.train.optim

    @property
    def param_offload(self) -> bool:
        return self.scorer.param_offload

    @property
    def optimizer_offload(self) -> bool:
        return self.train.optimizer_offload

    @property
    def in_host_memory(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Sequences back to back, and the flat positions of the tokens whose scores are wanted."""

    token_ids_S: Tensor
    lengths_N: Tensor
    positions_P: Tensor
