"""The policy being trained: old log-probs, optimizer steps, checkpoints, and its weights for the engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.correction import mismatch_shares
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.segments import Segments
from grpo_rl.checkpoint.files import refusals
from grpo_rl.columns import Column, values
from grpo_rl.faults import fault_point
from grpo_rl.gpu_allocator import to_device
from grpo_rl.models import fsdp, lora
from grpo_rl.models.experts import stored_tensors
from grpo_rl.models.forward import PolicyModel, TokenOutputs
from grpo_rl.models.optim import averaged, keep_average
from grpo_rl.models.packing import Sequences
from grpo_rl.rollout.engine import NcclRendezvous
from grpo_rl.rollout.senders import make_sender
from grpo_rl.rollout.weights import WeightBucket
from grpo_rl.types import Batch, Counts
from grpo_rl.workers.router_watch import RouterWatch
from grpo_rl.workers.sharded_policy import Teaches, as_block, build_policy, language_model, optional_values, sequences_of
from grpo_rl.workers.specs import ActorSpec, OptimizerStep, Rank, Rows, Update
from grpo_rl.workers.trained_rank import TrainedRank, combined


class ActorWorker(Teaches, TrainedRank[ActorSpec, PolicyModel]):
    role = "actor"

    def __init__(self, spec: ActorSpec, rank: Rank) -> None:
        super().__init__(spec, rank)
        self.share_prompts = spec.policy.share_prompts
        # Under adapters the head of the reference is the policy's own, which is at hand in every pass.
        needs_head = spec.objective.needs_full_kl and self.model.adapters is None
        self.ref_head: dict[str, Tensor | None] = self._reference_head() if needs_head else {}
        sender = spec.sender
        self._wire_dtype: torch.dtype | None = getattr(torch, sender.dtype) if sender.dtype else None
        self.sender = make_sender(sender.backend, sender.bucket_bytes, sender.verify, rank.rank, rank.timeout_s, sender.readers)
        self._buckets: Iterator[WeightBucket] | None = None
        self._mismatches: list[Callable[[], dict[str, Tensor]]] = []
        """What is to be computed of the passes of an optimizer step when it ends."""
        routing = self.model.routing
        self.routers = None if routing is None else RouterWatch(routing, spec, self.device, self._sequences)
        if spec.ema_decay is not None:
            keep_average(self.optimizer, spec.ema_decay)

    def build(self) -> PolicyModel:
        return build_policy(self.spec.policy, self.rank, self.device)

    def logprobs(self, shard: Batch, micro_batches: Sequence[Rows]) -> tuple[bool, dict[str, Any]]:
        logprobs_T = self.per_token(shard, micro_batches)
        if self.routers is not None:
            self.routers.keep_choices(shard, micro_batches)
        return as_block({"logprobs_T": logprobs_T})

    def reference_logprobs(self, *arguments: Any) -> tuple[bool, dict[str, Any]]:
        """By the base model under the adapters."""
        with lora.adapters_off(self.model):
            return self.teacher_logprobs(*arguments)

    def teacher_logprobs(self, *arguments: Any) -> tuple[bool, dict[str, Any]]:
        """By the policy as it is; arguments as those of `taught`."""
        self.memory.load_weights()
        columns = self._taught(*arguments)
        self.memory.release()
        return as_block(columns)

    def average_logprobs(self, *arguments: Any) -> tuple[bool, dict[str, Any]]:
        """By the moving average of the policy's weights."""
        self.files.wait_for_copy()  # of a checkpoint, which is to have the weights themselves
        self.memory.load_all()
        fsdp.reshard(self.model)
        with averaged(self.optimizer):
            columns = self._taught(*arguments)
            fsdp.reshard(self.model)
        self.memory.release()
        return as_block(columns)

    def _taught(self, *arguments: Any) -> dict[str, Tensor]:
        self.model.eval()
        columns = self.taught(self.model, *arguments)
        self.model.train()
        return columns

    def update(self, shard: Batch, update: Update) -> list[dict[str, float]]:
        if self.routers is not None and self.routers.replays:
            rows = [some for step in update.steps for some in (*step.micro_batches, *step.zero_advantage)]
            if rows and not self.routers.has_choices_of(shard):
                # A pass over other rollouts came in between; the weights are still those of the pass for old log-probs.
                self.logprobs(shard, rows)
            shard = shard.replace(experts_S=self.routers.choices if rows else None)
        return super().update(shard, update)

    def begin_step(self, batch: Batch, step: OptimizerStep) -> None:
        self._mismatches.clear()  # of a step that an error ended
        if self.routers is not None:
            self.routers.begin_step(batch, step, self.model)

    def end_step(self) -> dict[str, float]:
        stats = combined([mismatch() for mismatch in self._mismatches])
        self._mismatches.clear()
        return stats if self.routers is None else stats | self.routers.end_step()

    def measure(self, batch: Batch | None) -> Tensor:
        sequences = self._sequences(batch)
        choices = self.routers is not None and self.routers.replays
        logprobs_T: Tensor = self.model(sequences, choices=choices).logprobs_T
        if choices and batch is not None:
            assert self.routers is not None
            self.routers.note_choices(sequences.place_S)
        return logprobs_T

    def loss(self, batch: Batch | None, step: OptimizerStep) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = self._forward(batch)
        if batch is None:
            return outputs.logprobs_T.sum() * 0.0, {}
        if self.spec.old_from_engine:
            batch = batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        loss, stats = self.spec.objective(self._loss_input(outputs, batch), step.counts, entropy_coeff=step.entropy_coeff)
        if self.routers is not None:
            balance, router_stats = self.routers.loss(step.counts)
            loss, stats = loss + balance, stats | router_stats
        # The first pass with these weights has the sampling policy's log-probs: it measures the engine's distance.
        uses_own_logprobs = batch.old_logprobs_T is None or self.spec.old_from_engine
        trainer_logprobs_T = outputs.logprobs_T.detach() if uses_own_logprobs else optional_values(batch.old_logprobs_T)
        assert trainer_logprobs_T is not None
        # Computed on the CPU when the step ends: nothing waits for these log-probs until then.
        shares = uses_own_logprobs or self.spec.measures_engine
        self._mismatches.append(functools.partial(_mismatch, trainer_logprobs_T, batch, step.counts, shares=shares))
        return loss, stats

    def _sequences(self, batch: Batch | None) -> Sequences:
        return sequences_of(batch, self.device, share_prompts=self.share_prompts)

    def _forward(self, batch: Batch | None) -> TokenOutputs:
        objective = self.spec.objective
        sequences = self._sequences(batch)
        ref_hidden_TD = None
        if objective.needs_full_kl:
            size = len(sequences.target_T), int(self.model.lm.config.hidden_size)
            ref_hidden_TD = torch.zeros(size, device=self.device) if batch is None else _to(batch.ref_hidden_TD, self.device)
        top_ids_TK = None if batch is None else _to(batch.teacher_top_ids_TK, self.device)
        outputs: TokenOutputs = self.model(
            sequences,
            want_entropy=objective.needs_entropy,
            ref_hidden_TD=ref_hidden_TD,
            top_ids_TK=None if top_ids_TK is None else top_ids_TK.long(),
            balance=objective.router_aux_loss_coef > 0,
            **self.ref_head,
        )
        return outputs

    def _loss_input(self, outputs: TokenOutputs, batch: Batch) -> LossInput:
        # Demonstrations have no advantages: each of their tokens counts alike.
        advantages_T = batch.token_advantages()
        if advantages_T is None:
            advantages_T = torch.ones(batch.num_trained_tokens)
        return LossInput(
            policy_logprobs_T=outputs.logprobs_T,
            advantages_T=to_device(advantages_T, self.device),
            segments=Segments(to_device(batch.trained_lengths_N, self.device), batch.num_trained_tokens),
            group_N=to_device(batch.group_N, self.device),
            policy_top_logprobs_TK=outputs.top_logprobs_TK,
            entropy_T=outputs.entropy_T,
            full_kl_T=outputs.full_kl_T,
            **batch.loss_columns(lambda column: to_device(column, self.device)),
        )

    def _reference_head(self) -> dict[str, Tensor | None]:
        head = language_model(self.spec.policy).get_output_embeddings()
        bias_V = None if head.bias is None else head.bias.detach().clone().to(self.device)
        return {"ref_head_VD": head.weight.detach().clone().to(self.device), "ref_bias_V": bias_V}

    def connect(self, rendezvous: NcclRendezvous) -> None:
        self.sender.connect(rendezvous)

    def begin_weight_sync(self) -> int:
        """Return the size of the weights in bytes as float32."""
        if self.spec.sender.adapters_alone:
            adapters = fsdp.whole_adapters(self.model, self.device)
            self._buckets = self.sender.buckets(adapters.items())
            return sum(tensor.nbytes for tensor in adapters.values())
        # Nothing is loaded: each shard comes to the device by itself, when its tensor is gathered.
        full_tensors = fsdp.named_full_tensors(self.model, device=self.device, dtype=self._wire_dtype)
        self._buckets = self.sender.buckets(stored_tensors(full_tensors))
        return sum(p.numel() * 4 for name, p in self.model.named_parameters() if not lora.is_adapter(name))

    def next_bucket(self) -> tuple[bool, WeightBucket | None]:
        """Return whether there is another bucket, and that. A collective."""
        assert self._buckets is not None, "begin_weight_sync comes first"
        fault_point("actor.weights.bucket", rank=self.rank.rank)
        bucket = next(self._buckets, None)
        return bucket is not None, bucket

    def sent_digests(self) -> dict[str, str]:
        return self.sender.sent_digests()

    def end_weight_sync(self) -> None:
        """Release buckets, and the memory that the allocator kept for them."""
        self._buckets = None
        self.memory.release()

    def export(self, folder: str) -> None:
        """Without a tokenizer; adapters are merged, and in a peft folder inside. A collective."""
        try:
            with refusals(Path(folder), self.export_bytes()):
                fsdp.save_model(self.model, Path(folder), self.device, writes=self.rank.rank == 0)
        finally:
            adapters = fsdp.whole_adapters(self.model, self.device)
        if self.rank.rank == 0 and self.model.adapters is not None:
            with refusals(Path(folder), self.export_bytes()):
                lora.save_adapter(Path(folder) / lora.FOLDER, self.model.lm, self.model.adapters, adapters)
        self.memory.free_cache()


def _mismatch(trainer_logprobs_T: Tensor, batch: Batch, counts: Counts, *, shares: bool) -> dict[str, Tensor]:
    """Return how far the engine's log-probs are from the trainer's; with `shares`, in all its measures."""
    rollout_T = optional_values(batch.rollout_logprobs_T)
    if rollout_T is None or not len(rollout_T):
        return {}
    trainer_logprobs_T = trainer_logprobs_T.cpu()
    difference_T = (trainer_logprobs_T - rollout_T).abs().double()
    stats = {
        "sum/rollout/logprob_diff_mean": difference_T.sum(),
        "max/rollout/logprob_diff_max": difference_T.max(),
        # Minus the log-prob of a sampled token is an unbiased estimate of the entropy that it was sampled with.
        "sum/rollout/entropy": -rollout_T.double().sum(),
    }
    if shares:
        mismatch_values = mismatch_shares(trainer_logprobs_T, rollout_T, Segments(batch.trained_lengths_N), counts)
        stats |= {f"share/rollout_corr/{name}": torch.tensor(value) for name, value in mismatch_values.items()}
    return stats


def _to(column: Column | None, device: torch.device) -> Tensor | None:
    return None if column is None else to_device(values(column), device)
