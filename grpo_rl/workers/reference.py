"""The reference policy: frozen weights, log-probs on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.models.forward import Sequences, TokenOutputs
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import build_policy, collect, forward_micro_batches, join_group
from grpo_rl.workers.specs import PolicySpec, Rank


class ReferenceWorker:
    """One rank of the reference's worker set."""

    def __init__(self, spec: PolicySpec, rank: Rank, *, offload: bool) -> None:
        self.device = join_group(rank)
        self.policy = build_policy(spec, rank, self.device)
        self.offload = offload
        if offload:
            self.policy.to("cpu")

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[Batch | None], want_hidden: bool) -> dict[str, list[Tensor | None]]:
        """Per micro-batch, the log-probs of the trained tokens, and their last hidden states if wanted."""
        fault_point("reference.logprobs")
        if self.offload:
            self.policy.to(self.device)

        def run(sequences: Sequences, _: Batch | None) -> TokenOutputs:
            return self.policy(sequences, want_hidden=want_hidden)

        outputs = forward_micro_batches(micro_batches, self.device, run)
        columns = {"logprobs_T": collect(outputs, "logprobs_T")}
        if want_hidden:
            columns["hidden_TD"] = collect(outputs, "hidden_TD")
        if self.offload:
            fsdp.reshard(self.policy)
            self.policy.to("cpu")
        return columns
