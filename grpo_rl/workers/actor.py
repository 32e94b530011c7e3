"""The policy being trained: old log-probs, optimizer steps, checkpoints, and its weights for the engines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_rl.algos.correction import kept_lengths, mismatch_shares
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.segments import Segments
from grpo_rl.checkpoint.rank_files import RankFiles
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp, load
from grpo_rl.models.forward import Sequences, TokenOutputs
from grpo_rl.models.optim import make_optimizer, make_scheduler
from grpo_rl.rollout.engine import NcclRendezvous
from grpo_rl.rollout.weights.buckets import WeightBucket
from grpo_rl.rollout.weights.senders import make_sender
from grpo_rl.types import Batch, Counts
from grpo_rl.workers.saving import Saving
from grpo_rl.workers.sharded_policy import (
    build_policy,
    clip_gradients,
    collect,
    forward_micro_batches,
    join_group,
    move_optimizer,
    num_rollouts,
    sequences_of,
    step_optimizer,
)
from grpo_rl.workers.snapshots import Snapshots
from grpo_rl.workers.specs import ActorSpec, OptimizerStep, Rank


class ActorWorker(Saving, Snapshots):
    """One FSDP2 rank of the actor's worker set."""

    def __init__(self, spec: ActorSpec, rank: Rank) -> None:
        self.spec = spec
        self.rank = rank
        self.device = join_group(rank)
        # Each rank draws its own dropout; the offset keeps runs with other seeds apart.
        torch.manual_seed(spec.seed * 1_000_003 + rank.rank)
        self.policy = build_policy(spec.policy, rank, self.device)
        self.optimizer = make_optimizer(self.policy, spec.optim)
        self.scheduler = make_scheduler(self.optimizer, spec.optim, spec.total_optimizer_steps)
        self.files = RankFiles(self.policy, self.optimizer, self.scheduler, rank.rank)
        self.stepped_model = lambda: self.policy
        self.ref_head: dict[str, Tensor | None] = self._reference_head() if spec.objective.needs_full_kl else {}
        sender = spec.sender
        dtype = getattr(torch, sender.dtype) if sender.dtype else None
        self.sender = make_sender(sender.backend, sender.bucket_bytes, dtype, sender.verify, rank.rank, rank.timeout_s)
        self._buckets: Iterator[WeightBucket] | None = None

    # ---- forward passes ------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[Batch | None]) -> list[Tensor | None]:
        """Per micro-batch, the current policy's log-probs of the trained tokens."""
        self._onload()
        self.policy.eval()
        outputs = forward_micro_batches(micro_batches, self.device, lambda sequences, _: self.policy(sequences))
        self.policy.train()
        return collect(outputs, "logprobs_T")

    # ---- training ------------------------------------------------------------------------------------

    def update(self, steps: Sequence[OptimizerStep]) -> list[dict[str, float]]:
        """Per optimizer step, this rank's share of the statistics (see `Objective` for the key prefixes).

        A step whose loss or gradient is not finite is left out, on all ranks, with `same/nonfinite` 1.
        """
        self._onload()
        results = [self._optimizer_step(step) for step in steps]
        self.optimizer.zero_grad(set_to_none=True)
        return results

    def _optimizer_step(self, step: OptimizerStep) -> dict[str, float]:
        rank = self.rank.rank
        fault_point("actor.update.start", rank=rank)
        self.optimizer.zero_grad(set_to_none=True)
        stats: defaultdict[str, float] = defaultdict(float)
        total_loss = 0.0
        for number, batch in enumerate(step.micro_batches):
            last = number == len(step.micro_batches) - 1
            # On CPU whole gradients stay local until the last micro-batch: one reduction per optimizer step.
            # On a GPU their memory would not be there, so every micro-batch is reduced into shards.
            self._root.set_requires_gradient_sync(last or self.device.type == "cuda")
            fault_point("actor.update.forward", rank=rank, micro_batch=number, rollouts=num_rollouts(batch))
            sequences = sequences_of(batch, self.device)
            outputs = self._forward(sequences, batch)
            loss, micro_stats = self._loss(outputs, batch, step)
            if fault_point("actor.update.loss", rank=rank, micro_batch=number) == "nan":
                loss = loss * math.nan
            loss.backward()
            total_loss += float(loss.detach())
            fault_point("actor.update.mid_backward", rank=rank, micro_batch=number)
            for key, value in micro_stats.items():
                share = float(value)
                stats[key] = max(stats.get(key, -math.inf), share) if key.startswith("max/") else stats[key] + share
        grad_norm = clip_gradients(self.policy, self.spec.optim.clip_grad)
        # `same/`: equal on all ranks.
        stats["same/lr"] = float(self.scheduler.get_last_lr()[0])
        stats["same/grad_norm"] = grad_norm
        fault_point("actor.update.before_optimizer", rank=rank)
        stats |= step_optimizer(self.optimizer, self.scheduler, step.counts, total_loss, grad_norm)
        fault_point("actor.update.after_optimizer", rank=rank)
        return dict(stats)

    def _forward(self, sequences: Sequences, batch: Batch | None) -> TokenOutputs:
        objective = self.spec.objective
        ref_hidden_TD = None
        if objective.needs_full_kl:
            ref_hidden_TD = torch.zeros(len(sequences.target_T), self._hidden_size) if batch is None else batch.ref_hidden_TD
            assert ref_hidden_TD is not None
            ref_hidden_TD = ref_hidden_TD.to(self.device)
        return self.policy(sequences, want_entropy=objective.needs_entropy, ref_hidden_TD=ref_hidden_TD, **self.ref_head)

    def _loss(self, outputs: TokenOutputs, batch: Batch | None, step: OptimizerStep) -> tuple[Tensor, dict[str, Tensor]]:
        if batch is None:
            # A rank without work still takes part in the collectives of the backward pass.
            return outputs.logprobs_T.sum() * 0.0, {}
        inputs, old_logprobs_T = self._loss_input(outputs, batch), batch.old_logprobs_T
        loss, stats = self.spec.objective(inputs, step.counts, entropy_coeff=step.entropy_coeff)
        # Without the trainer's old log-probs this pass has to tell: where it is the first with these weights, its own are
        # those of the sampling policy.
        own = old_logprobs_T is None or self.spec.old_from_engine
        trainer_logprobs_T = outputs.logprobs_T.detach().cpu() if own else batch.old_logprobs_T
        assert trainer_logprobs_T is not None
        return loss, stats | _mismatch(trainer_logprobs_T, batch, step.counts, shares=own)

    def _loss_input(self, outputs: TokenOutputs, batch: Batch) -> LossInput:
        """Return the trained tokens' columns of a micro-batch, on this rank's device."""
        assert batch.advantages_T is not None
        keep_T, lengths_N = batch.keep_T, batch.response_lengths_N
        if keep_T is not None:
            lengths_N = kept_lengths(keep_T, lengths_N)

        def kept(column_T: Tensor | None) -> Tensor | None:
            if column_T is None:
                return None
            column_T = column_T.to(self.device)
            return column_T if keep_T is None else column_T[keep_T.to(self.device)]

        policy_logprobs_T, advantages_T = kept(outputs.logprobs_T), kept(batch.advantages_T)
        assert policy_logprobs_T is not None and advantages_T is not None
        return LossInput(
            policy_logprobs_T=policy_logprobs_T,
            advantages_T=advantages_T,
            segments=Segments(lengths_N.to(self.device)),
            old_logprobs_T=kept(batch.old_logprobs_T),
            ref_logprobs_T=kept(batch.ref_logprobs_T),
            rollout_logprobs_T=kept(batch.rollout_logprobs_T),
            entropy_T=kept(outputs.entropy_T),
            full_kl_T=kept(outputs.full_kl_T),
            weights_T=kept(batch.weights_T),
            selected_T=kept(batch.selected_T),
            group_N=batch.group_N.to(self.device),
            group_tokens_N=None if batch.group_tokens_N is None else batch.group_tokens_N.to(self.device),
        )

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.policy, FSDPModule)
        return self.policy

    @property
    def _hidden_size(self) -> int:
        return int(self.policy.lm.config.hidden_size)

    def _reference_head(self) -> dict[str, Tensor | None]:
        """The reference's LM head: with its hidden states it gives whole distributions, and never travels again."""
        model = self.spec.policy.model
        config = load.load_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config)
        lm = load.load_lm(model.path, config, trust_remote_code=model.trust_remote_code)
        head = lm.get_output_embeddings()
        bias_V = None if head.bias is None else head.bias.detach().clone().to(self.device)
        return {"ref_head_VD": head.weight.detach().clone().to(self.device), "ref_bias_V": bias_V}

    # ---- weights for the rollout engines -----------------------------------------------------------------

    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Meet the engines, where weights travel by NCCL."""
        self.sender.connect(rendezvous)

    def begin_weight_sync(self) -> int:
        """Get ready to hand out the weights; their size in bytes as float32."""
        self._onload()
        self._buckets = self.sender.buckets(fsdp.named_full_tensors(self.policy))
        return sum(parameter.numel() * 4 for parameter in self.policy.parameters())

    def next_bucket(self) -> WeightBucket | None:
        """The next piece of the weights, None after the last. A collective: all ranks call it together."""
        assert self._buckets is not None, "begin_weight_sync comes first"
        fault_point("actor.weights.bucket", rank=self.rank.rank)
        return next(self._buckets, None)

    def sent_digests(self) -> dict[str, str]:
        """Digest of every tensor of the last transfer, where they are verified."""
        return self.sender.sent_digests()

    def end_weight_sync(self) -> None:
        """Let go of what was held for the engines, and of the GPU's memory if it is theirs now."""
        self._buckets = None
        self._offload()

    # ---- the trained model ------------------------------------------------------------------------------

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder (model and configs; the controller adds the tokenizer). A collective."""
        self._onload()
        state = {name: tensor.to("cpu") for name, tensor in fsdp.named_full_tensors(self.policy)}
        if self.rank.rank == 0:
            self.policy.lm.save_pretrained(folder, state_dict=state)

    # ---- memory -----------------------------------------------------------------------------------------

    def _onload(self) -> None:
        if self.spec.param_offload:
            self.policy.to(self.device)
        if self.spec.optimizer_offload:
            move_optimizer(self.optimizer, self.device)

    def _offload(self) -> None:
        if self.spec.param_offload:
            fsdp.reshard(self.policy)
            self.policy.to("cpu")
        if self.spec.optimizer_offload:
            move_optimizer(self.optimizer, torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _mismatch(trainer_logprobs_T: Tensor, batch: Batch, counts: Counts, *, shares: bool) -> dict[str, Tensor]:
    """How far the engine's log-probs of the trained tokens are from the trainer's; with `shares`, in all its measures."""
    rollout_T, lengths_N = batch.rollout_logprobs_T, batch.response_lengths_N
    if batch.keep_T is not None:
        lengths_N = kept_lengths(batch.keep_T, lengths_N)
        trainer_logprobs_T, rollout_T = trainer_logprobs_T[batch.keep_T], rollout_T[batch.keep_T]
    if not len(rollout_T):
        return {}
    difference_T = (trainer_logprobs_T - rollout_T).abs().double()
    stats = {"sum/rollout_logprob_diff": difference_T.sum(), "max/rollout_logprob_diff": difference_T.max()}
    if shares:
        found = mismatch_shares(trainer_logprobs_T, rollout_T, Segments(lengths_N), counts)
        stats |= {f"share/rollout_corr/{name}": torch.tensor(value) for name, value in found.items()}
    return stats
