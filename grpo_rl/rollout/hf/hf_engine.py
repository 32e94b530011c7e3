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
from grpo_rl.rollout.hf.token_sampling import sample, support_of
from grpo_rl.rollout.model_info import load_config, stop_token_ids
from grpo_rl.rollout.request_checks import check_requests
from grpo_rl.rollout.weights.buckets import WeightBucket, WeightTransferError, digest
from grpo_rl.rollout.weights.update_order import WeightUpdate
from grpo_rl.types import Completion, FinishReason, Request


@dataclass(slots=True)
class _Running:
    """A request that is being answered."""

    request: Request
    generator: torch.Generator
    next_ids: list[int]
    """What the model has not read yet: the prompt, then the newest token."""
    cache: DynamicCache = field(default_factory=DynamicCache)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    """Ids that each token was sampled from, where the request wants to know."""


class HfEngine:
    """`AutoModelForCausalLM` behind the RolloutEngine protocol.

    Each request goes through the model by itself: the last bits of a matrix product depend on its shape, and of attention on
    padding, so that beside others a response would depend on who they are, which is a matter of timing. This way it
    depends on weights, prompt and seed alone, in whichever replica it is sampled. There is no prefix cache and nothing to sleep.
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
        self._running: list[_Running] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def weight_version(self) -> int:
        return self._update.version

    def submit(self, requests: Sequence[Request]) -> None:
        self._update.check_can_sample()
        taken = {one.request.request_id for one in self._running} | {request.request_id for request in self._waiting}
        check_requests(requests, taken, self._spec.max_model_len)
        self._waiting.extend(requests)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        while self._waiting and len(self._running) < self._spec.max_num_seqs:
            request = self._waiting.popleft()
            self._running.append(_Running(request, self._generator(request), list(request.prompt_ids)))
        for one in self._running:
            self._advance(one)
        reasons = [self._finish_reason(one) for one in self._running]
        ended = [self._completion(one, reason) for one, reason in zip(self._running, reasons, strict=True) if reason]
        self._running = [one for one, reason in zip(self._running, reasons, strict=True) if reason is None]
        return ended

    def abort_all(self) -> None:
        self._waiting.clear()
        self._running.clear()

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

    def _advance(self, one: _Running) -> None:
        """Sample one more token."""
        logits_1V = self._model(
            input_ids=torch.tensor([one.next_ids], device=self._device),
            past_key_values=one.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_1, logprobs_1, [left] = sample(logits_1V, [one.request.sampling], [one.generator])
        one.next_ids = tokens_1.tolist()
        one.response_ids += one.next_ids
        one.logprobs += logprobs_1.tolist()
        if left is not None:
            one.left.append(left)

    def _generator(self, request: Request) -> torch.Generator:
        seed = request.sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        return torch.Generator(self._device).manual_seed(seed)

    def _finish_reason(self, one: _Running) -> FinishReason | None:
        sampling = one.request.sampling
        if one.response_ids[-1] in self._stop_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if len(one.response_ids) == sampling.max_tokens else None

    def _completion(self, one: _Running, reason: FinishReason) -> Completion:
        return Completion(
            request_id=one.request.request_id,
            response_ids=tuple(one.response_ids),
            logprobs=tuple(one.logprobs),
            finish_reason=reason,
            weight_version=self._update.version,
            support=support_of(one.left) if one.left else None,
        )


def _load_model(spec: EngineSpec) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        spec.model_path,
        config=load_config(spec),
        dtype=getattr(torch, spec.dtype),
        trust_remote_code=spec.trust_remote_code,
        **spec.engine_kwargs,
    )
