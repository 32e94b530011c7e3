"""The reward model: scores of whole sequences or of the ends of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.algos.losses.reward_scores import bradley_terry, step_classification
from grpo_rl.checkpoint.files import refusals
from grpo_rl.columns import values
from grpo_rl.config.schema.model import ModelConfig
from grpo_rl.models import fsdp
from grpo_rl.models.heads import ScoreModel, load_score_config, load_scorer
from grpo_rl.models.packing import Sequences
from grpo_rl.types import Batch
from grpo_rl.workers.device_memory import DeviceMemory
from grpo_rl.workers.model_work import ModelWork
from grpo_rl.workers.sharded_policy import as_block, build_sharded, join_set
from grpo_rl.workers.specs import OptimizerStep, PolicySpec, Rank, RewardModelSpec, Rows, TrainedRewardModelSpec
from grpo_rl.workers.trained_rank import PerToken, TrainedRank


class Scores(PerToken):
    """The trained tokens of its batches are those at which a score stands, which has read that token too."""

    device: torch.device
    share_prompts = False

    def scores(self, shard: Batch, micro_batches: Sequence[Rows]) -> tuple[bool, dict[str, Any]]:
        return as_block({"scores_T": self.per_token(shard, micro_batches)})

    position_scores = scores

    def measure(self, batch: Batch | None) -> Tensor:
        if batch is None:  # a rank without work runs the layers all the same, so that every rank enters every collective
            zero = torch.zeros(1, dtype=torch.long)
            at_T: Tensor = self.model(Sequences.scored(zero, zero + 1, zero, self.device))[:0]
            return at_T
        ids_S, lengths_N = values(batch.token_ids_S), batch.sequence_lengths_N
        group_N = batch.group_N if self.share_prompts else None
        scores_T: Tensor = self.model(Sequences.scored(ids_S, lengths_N, batch.positions(), self.device, group_N))
        return scores_T


class RewardModelWorker(Scores):
    def __init__(self, spec: RewardModelSpec, rank: Rank) -> None:
        self.device = join_set(rank)
        self.model = _build(spec, rank, self.device)
        self.work = ModelWork(self.model)
        self.memory = DeviceMemory(self.model, self.device, param_offload=spec.param_offload)
        self.memories = [self.memory]
        self.memory.release()


class TrainedRewardModelWorker(Scores, TrainedRank[TrainedRewardModelSpec, ScoreModel]):
    role = "reward_model"

    def build(self) -> ScoreModel:
        self.share_prompts = self.spec.share_prompts
        return _build(self.spec.scorer, self.rank, self.device, checkpointing=self.spec.train.enable_gradient_checkpointing)

    def loss(self, batch: Batch | None, step: OptimizerStep) -> tuple[Tensor, dict[str, Tensor]]:
        scores_T = self.measure(batch)
        if batch is None:
            return scores_T.sum() * 0.0, {}
        if self.spec.train.loss == "steps":
            assert batch.labels_T is not None
            loss_K, stats = step_classification(scores_T, batch.labels_T.to(self.device))
            total = step.counts.num_tokens
        else:
            assert batch.chosen_N is not None
            pairs = Pairs.of(batch.group_N, values(batch.chosen_N))
            chosen_P, rejected_P = (scores_T[index_P.to(self.device)] for index_P in (pairs.chosen_P, pairs.rejected_P))
            margin_P = None if batch.margins_N is None else batch.margins_N[pairs.chosen_P].to(self.device)
            center_coef = self.spec.train.center_coef
            loss_K, stats = bradley_terry(chosen_P, rejected_P, margin_P=margin_P, center_coef=center_coef)
            total = step.counts.num_groups
        loss = loss_K.sum() / total
        return loss, {"share/loss": loss.detach()} | {f"share/{name}": value_K.sum() / total for name, value_K in stats.items()}

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder with a head of one label and no tokenizer. A collective."""
        with refusals(Path(folder), self.export_bytes()):
            fsdp.save_model(self.model, Path(folder), self.device, writes=self.rank.rank == 0)
        self.memory.free_cache()


def _build(spec: RewardModelSpec, rank: Rank, device: torch.device, *, checkpointing: bool | None = None) -> ScoreModel:
    """`checkpointing` is None for a frozen model."""
    trained, own_code = checkpointing is not None, spec.trust_remote_code

    def read(on_meta: bool) -> Any:
        config = load_score_config(spec.path, trust_remote_code=own_code, trained=trained)
        return load_scorer(spec.path, config, trust_remote_code=own_code, on_meta=on_meta)

    model = ModelConfig(path=spec.path, enable_gradient_checkpointing=bool(checkpointing))
    # A trained one may start from a language model, which has no head for scores.
    new = ("score.weight", "score.bias") if trained else ()
    return build_sharded(PolicySpec(model, 1.0, spec.dtype, train=trained), rank, device, ScoreModel, read, new)
