"""A rollout replica on plain transformers: slow, short, and easy to step through with a debugger."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_rl.errors import ConfigError
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, Wakeable
from grpo_rl.rollout.model_info import load_config, stop_token_ids
from grpo_rl.rollout.requests import check_requests
from grpo_rl.rollout.sampling import sample, support_of
from grpo_rl.rollout.update import WeightUpdate
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, digest
from grpo_rl.types import Completion, FinishReason, Request


@dataclass(slots=True)
class _Row:
    """A running request: one row of the batch."""

    request: Request
    generator: torch.Generator
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    """Ids that each token was sampled from, where the request wants to know."""


class HfEngine:
    """`AutoModelForCausalLM` behind the RolloutEngine protocol.

    Waiting requests are taken as one left-padded batch when the last batch has ended; a row leaves the
    batch and its cache when it ends. There is no prefix cache and nothing to sleep.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tensor_parallel_size != 1:
            raise ConfigError("rollout.name=hf runs on one device; set rollout.tensor_model_parallel_size=1 or use vllm")
        self._spec = spec
        self._device = torch.device(spec.device)
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        self._model = _load_model(spec).to(self._device).eval()
        self._stop_ids = frozenset(stop_token_ids(spec))
        self._update = WeightUpdate({name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()})
        self._digests: dict[str, str] = {}
        self._seeds = torch.Generator().manual_seed(spec.seed)
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._next_BL = self._mask_BL = torch.empty(0, 0, dtype=torch.long)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._rows)

    @property
    def weight_version(self) -> int:
        return self._update.version

    def submit(self, requests: Sequence[Request]) -> None:
        self._update.check_can_sample()
        taken = {row.request.request_id for row in self._rows} | {request.request_id for request in self._waiting}
        check_requests(requests, taken, self._spec.max_model_len)
        self._waiting.extend(requests)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        if not self._rows:
            if not self._waiting:
                return []
            self._start_batch()
        tokens_B, logprobs_B, left = sample(
            self._last_logits(), [row.request.sampling for row in self._rows], [row.generator for row in self._rows]
        )
        for row, token, logprob, ids in zip(self._rows, tokens_B.tolist(), logprobs_B.tolist(), left, strict=True):
            row.response_ids.append(token)
            row.logprobs.append(logprob)
            if ids is not None:
                row.left.append(ids)
        reasons = [self._finish_reason(row) for row in self._rows]
        ended = [self._completion(row, reason) for row, reason in zip(self._rows, reasons, strict=True) if reason]
        self._next_BL = tokens_B[:, None]
        self._keep([index for index, reason in enumerate(reasons) if reason is None])
        return ended

    def abort_all(self) -> None:
        self._waiting.clear()
        self._keep([])

    def connect(self, rendezvous: NcclRendezvous) -> None:
        raise WeightTransferError("the transformers engine takes weights from host memory: there is nothing to connect")

    def start_weight_update(self, version: int) -> None:
        self._update.start(version, self.num_unfinished)
        self._digests = {}

    @torch.no_grad()
    def load_bucket(self, bucket: WeightBucket) -> None:
        self._update.receive(bucket)
        own = self._model.state_dict()
        for name, tensor in bucket.tensors():
            if self._spec.verify_checksum:
                self._digests[name] = digest(tensor)
            # A tied head is the embedding under a second name: both are sent and hold the same values.
            own[name].copy_(tensor)

    def finish_weight_update(self) -> None:
        self._update.finish()

    def received_digests(self) -> dict[str, str]:
        return dict(self._digests)

    def sleep(self) -> None:
        """Nothing: this engine holds no memory that a phase could use better."""

    def wake_up(self, what: Wakeable = "all") -> None:
        """Nothing: see sleep."""

    def close(self) -> None:
        self.abort_all()
        self._model = None

    def _start_batch(self) -> None:
        """Take up to max_num_seqs waiting requests, prompts padded on the left to one length."""
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._spec.max_num_seqs))]
        longest = max(len(request.prompt_ids) for request in taken)
        padding = [longest - len(request.prompt_ids) for request in taken]
        ids = [[0] * pad + list(request.prompt_ids) for pad, request in zip(padding, taken, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        self._rows = [_Row(request, self._generator(request)) for request in taken]
        self._next_BL = torch.tensor(ids, device=self._device)
        self._mask_BL = torch.tensor(mask, device=self._device)
        self._cache = DynamicCache()

    def _last_logits(self) -> Tensor:
        """Logits [B, V] of the next token of every row, with the cache brought up to date."""
        num_new = self._next_BL.shape[1]
        positions_BL = (self._mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -num_new:]
        output = self._model(
            input_ids=self._next_BL,
            attention_mask=self._mask_BL,
            position_ids=positions_BL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _keep(self, index: list[int]) -> None:
        """Go on with these rows of the batch only, one token longer."""
        if len(index) < len(self._rows):
            self._rows = [self._rows[i] for i in index]
            if not index:
                self._cache = DynamicCache()
                return
            index_K = torch.tensor(index, device=self._device)
            self._next_BL, self._mask_BL = self._next_BL[index_K], self._mask_BL[index_K]
            self._cache.batch_select_indices(index_K)
        self._mask_BL = torch.nn.functional.pad(self._mask_BL, (0, 1), value=1)

    def _generator(self, request: Request) -> torch.Generator:
        seed = request.sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        return torch.Generator(self._device).manual_seed(seed)

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        sampling = row.request.sampling
        if row.response_ids[-1] in self._stop_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if len(row.response_ids) == sampling.max_tokens else None

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        return Completion(
            request_id=row.request.request_id,
            response_ids=tuple(row.response_ids),
            logprobs=tuple(row.logprobs),
            finish_reason=reason,
            weight_version=self._update.version,
            support=support_of(row.left) if row.left else None,
        )


def _load_model(spec: EngineSpec) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        spec.model_path,
        config=load_config(spec),
        dtype=getattr(torch, spec.dtype),
        trust_remote_code=spec.trust_remote_code,
        **spec.engine_kwargs,
    )
