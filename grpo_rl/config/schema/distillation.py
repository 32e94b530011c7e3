"""Options of distillation: `distillation.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_rl.config.schema.kinds import Coefficient, Devices, Fraction, NodesOrNone, Positive, TopK

Dtype = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class DistillationLossConfig:
    loss_mode: str = "k3"
    """The distance to the teacher: an estimate by the sampled token (k1, k3, ...), or a divergence over the teacher's top k
    (forward_kl, reverse_kl, jsd, verl's forward_kl_topk), or your own as file.py:function; docs/teachers.md has all of them."""
    topk: TopK = 32
    """Divergences: the so many likeliest tokens of the teacher are compared, all others together as one; -1: the whole vocabulary."""
    jsd_beta: Fraction = 0.5
    """jsd: share of the teacher in the mixture; 0 is forward_kl, 1 is reverse_kl."""
    use_task_rewards: bool = True
    """Train on the task beside the teacher: on rewards, or on the answers of rows; false: on the teacher alone."""
    distillation_loss_coef: Coefficient = 1.0
    """Weight of the teacher beside the task."""
    use_policy_gradient: bool = False
    """The distance is a negative advantage of each token, with loss_mode=k1; false: it is a loss of its own, with any other."""
    discount: Fraction = 0.0
    """use_policy_gradient: weight of a later token's distance in an earlier one's advantage, per token; 0: each token has its own."""
    loss_max_clamp: Positive | None = None
    """Distances are cut to +- this; null: not cut."""


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    enabled: bool = False
    """Learn from teachers, which are frozen models or the policy itself with another prompt (docs/teachers.md)."""
    teacher_models: dict[str, Any] = field(default_factory=dict)
    """The teachers by name, each with model_path (null: the policy itself), key (the data_source that it teaches; null: any),
    weight (share of the prompts, among teachers of the same key), context (text that only it reads) and dtype."""
    nnodes: NodesOrNone = 0
    """Nodes of the teachers' own pool; 0: they share the actor's devices."""
    n_gpus_per_node: Devices | None = None
    """Ranks per node of that pool; null: as trainer.n_gpus_per_node."""
    param_offload: bool = False
    """GPU: keep the teachers' parameters in host memory while they are not asked."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """One entry of `distillation.teacher_models`."""

    model_path: str | None = None
    """The folder of a model with the policy's tokenizer, or an embedded one; None: the policy as it is in each step."""
    key: str | None = None
    """The data_source that it teaches; None: all that no other teacher has as its key."""
    weight: float = 1.0
    """Share of the prompts, among teachers of the same key: each prompt draws one by a hash of its uid."""
    context: str | None = None
    """Text before the prompt, in its system message where it has messages, with {ground_truth} and {extra_info.NAME} of the row."""
    dtype: Dtype = "auto"
    """The number type its layers compute in."""
