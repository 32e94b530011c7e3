"""The reference policy: frozen weights, log-probs on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import build_policy, join_set, sequences_of
from grpo_rl.workers.specs import PolicySpec, Rank, Rows


class ReferenceWorker:
    """One rank of the reference."""

    def __init__(self, spec: PolicySpec, rank: Rank, *, offload: bool) -> None:
        self.device = join_set(rank)
        self.policy = build_policy(spec, rank, self.device)
        self.offload = offload
        if offload:
            self.policy.to("cpu")

    @torch.no_grad()
    def logprobs(self, share: Batch, micro_batches: Sequence[Rows], want_hidden: bool) -> dict[str, Tensor]:
        """Return the log-probs of the micro-batches' trained tokens, and with `want_hidden` their last hidden states."""
        fault_point("reference.logprobs")
        if self.offload:
            self.policy.to(self.device)
        batches = [share.select(list(rows)) if rows else None for rows in micro_batches]
        outputs = [self.policy(sequences_of(batch, self.device), want_hidden=want_hidden) for batch in batches]
        columns = {"logprobs_T": torch.cat([output.logprobs_T.cpu() for output in outputs])}
        if want_hidden:
            columns["hidden_TD"] = torch.cat([output.hidden_TD.cpu() for output in outputs])
        if self.offload:
            fsdp.reshard(self.policy)
            self.policy.to("cpu")
        return columns
