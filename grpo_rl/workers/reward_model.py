"""The reward model: frozen weights, scores of whole sequences or of the ends of their steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from grpo_rl.models import fsdp
from grpo_rl.models.heads import ScoreModel, load_score_config, load_scorer, scored_sequences
from grpo_rl.workers.sharded_policy import compute_dtype, join_set
from grpo_rl.workers.specs import Rank, RewardModelSpec, ScoreBatch


class RewardModelWorker:
    """One rank of the reward model's worker set."""

    def __init__(self, spec: RewardModelSpec, rank: Rank) -> None:
        self.spec = spec
        self.device = join_set(rank)
        self.model = _build(spec, rank, self.device)
        if spec.param_offload:
            self.model.to("cpu")

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[ScoreBatch | None]) -> list[Tensor | None]:
        """Per micro-batch, the float32 scores at its positions. An empty one becomes a dummy, so that every rank enters every collective."""
        if self.spec.param_offload:
            self.model.to(self.device)
        columns = []
        for batch in micro_batches:
            filled = batch or ScoreBatch(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long), torch.tensor([0]))
            sequences = scored_sequences(filled.token_ids_S, filled.lengths_N, filled.positions_P, self.device)
            scores_P = self.model(sequences).to("cpu")
            columns.append(None if batch is None else scores_P)
        if self.spec.param_offload:
            fsdp.reshard(self.model)
            self.model.to("cpu")
        return columns


def _build(spec: RewardModelSpec, rank: Rank, device: torch.device) -> ScoreModel:
    """The model, sharded over the worker set; only rank 0 reads the weights."""
    alone = rank.world_size == 1
    model = _load(spec, on_meta=not alone)
    model.eval()
    model.requires_grad_(False)
    if alone:
        model.to(device)
    mesh = init_device_mesh(device.type, (rank.world_size,))
    fsdp.shard(model, mesh, compute_dtype=compute_dtype(spec.dtype, device), reshard_after_forward=True)
    if not alone:
        fsdp.materialize(model, _load(spec, on_meta=False) if rank.rank == 0 else None, device)
    return model


def _load(spec: RewardModelSpec, *, on_meta: bool) -> ScoreModel:
    config = load_score_config(spec.path, trust_remote_code=spec.trust_remote_code)
    return ScoreModel(load_scorer(spec.path, config, trust_remote_code=spec.trust_remote_code, on_meta=on_meta))
