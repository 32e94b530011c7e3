"""A rollout replica on plain transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_rl.errors import ConfigError
from grpo_rl.models.experts import stored_tensors
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, Wakeable, check_requests
from grpo_rl.rollout.hf.token_sampling import sample, support_of
from grpo_rl.rollout.model_info import load_config, stop_token_ids
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, WeightUpdate, with_digests_recorded
from grpo_rl.types import Completion, FinishReason, Request, Versions, extended


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    seed: int
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Versions = ()
    left: list[Tensor] = field(default_factory=list)

    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.response_ids)

    def token_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids.tolist(), *self.response_ids)


class HfEngine:
    """`batched`: requests are one batch. Otherwise each is its own, and its bits depend on no other."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.tensor_parallel_size != 1:
            raise ConfigError("rollout.name=hf runs on one device; set rollout.tensor_model_parallel_size=1 or use vllm")
        self._spec = spec
        self._device = torch.device(spec.device)
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        options = {"dtype": getattr(torch, spec.dtype), "trust_remote_code": spec.trust_remote_code, **spec.engine_kwargs}
        model: Any = AutoModelForCausalLM.from_pretrained(spec.model_path, config=load_config(spec), **options)
        self._model = model.to(self._device).eval()
        self._stop_ids = frozenset(stop_token_ids(spec))
        self._own = dict(stored_tensors(self._model.state_dict().items()))
        shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        self._update = WeightUpdate(shapes, in_flight=self.updates_in_flight)
        self._digests: dict[str, str] = {}
        self._seeds = torch.Generator().manual_seed(spec.seed)
        self._waiting: deque[Request] = deque()
        self._unread: list[_Running] = []
        """New requests, and after a weight update those that go on."""
        self._batches: list[_Batch] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def weight_version(self) -> int:
        return self._update.version

    @property
    def updates_in_flight(self) -> bool:
        return True

    @property
    def _running(self) -> list[_Running]:
        return [row for batch in self._batches for row in batch.rows] + self._unread

    def submit(self, requests: Sequence[Request]) -> None:
        self._update.check_can_sample()
        taken = {row.request.request_id for row in self._running} | {request.request_id for request in self._waiting}
        check_requests(requests, taken, self._spec.max_model_len)
        self._waiting.extend(requests)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        if self._update.active:
            return []
        num_running = len(self._running)
        while self._waiting and num_running < self._spec.max_num_seqs:
            request = self._waiting.popleft()
            seed = request.sampling.seed
            row_seed = int(torch.randint(2**62, (), generator=self._seeds)) if seed is None else seed
            self._unread.append(_Running(request, row_seed))
            num_running += 1
        for batch in self._batches:
            self._sample(batch.rows, batch.extend(self._model, self._device))
        for batch in self._read():
            if self._spec.batched and self._batches:
                self._batches[0].append(batch)
            else:
                self._batches.append(batch)
        return self._take_ended()

    def abort_all(self) -> None:
        self._waiting.clear()
        self._unread.clear()
        self._batches.clear()

    def connect(self, rendezvous: NcclRendezvous) -> None:
        raise WeightTransferError("the transformers engine takes weights from host memory: there is nothing to connect")

    def start_weight_update(self, version: int) -> None:
        self._update.start(version, self.num_unfinished)
        self._digests = {}

    @torch.no_grad()
    def load_bucket(self, bucket: WeightBucket) -> None:
        self._update.receive(bucket)
        for name, tensor in with_digests_recorded(bucket.tensors(), self._digests if self._spec.verify_checksum else None):
            # A tied head is the embedding under a second name: both are sent and hold the same values.
            self._own[name].copy_(tensor)

    def finish_weight_update(self, keep_cache: bool = False) -> None:
        self._update.finish()
        if not keep_cache:
            # Prompt and response so far are read again with the new weights before the next token is sampled.
            self._unread = self._running
            self._batches = []

    def received_digests(self) -> dict[str, str]:
        return dict(self._digests)

    def sleep(self) -> None: ...

    def wake_up(self, what: Wakeable = "all") -> None: ...

    def close(self) -> None:
        self.abort_all()
        self._model = None
        self._own = {}

    def _read(self) -> Iterator[_Batch]:
        """Read the unread requests, in batches of one length, and sample a token of each."""
        unread, self._unread = self._unread, []
        if self._spec.batched:
            unread = sorted(unread, key=_Running.num_tokens)
        for length, rows in groupby(unread, key=_Running.num_tokens):
            same, at_once = list(rows), max(1, self._spec.max_num_batched_tokens // length) if self._spec.batched else 1
            for start in range(0, len(same), at_once):
                batch, logits_BV = _Batch.read(self._model, same[start : start + at_once], self._device)
                self._sample(batch.rows, logits_BV)
                yield batch

    def _sample(self, rows: Sequence[_Running], logits_BV: Tensor) -> None:
        settings, seeds = [row.request.sampling for row in rows], [row.seed for row in rows]
        tokens_B, logprobs_B, left_B = sample(logits_BV, settings, seeds, [len(row.response_ids) for row in rows])
        for row, token, logprob, support_ids in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), left_B, strict=True):
            row.response_ids.append(token)
            row.logprobs.append(logprob)
            row.versions = extended(row.versions, self._update.version, 1)
            if support_ids is not None:
                row.left.append(support_ids)

    def _take_ended(self) -> list[Completion]:
        completions = []
        for batch in self._batches:
            reasons = [self._finish_reason(row) for row in batch.rows]
            completions += [_completion(row, reason) for row, reason in zip(batch.rows, reasons, strict=True) if reason]
            going_on = [place for place, reason in enumerate(reasons) if reason is None]
            if len(going_on) < len(reasons):
                batch.keep(going_on)
        self._batches = [batch for batch in self._batches if batch.rows]
        return completions

    def _finish_reason(self, row: _Running) -> FinishReason | None:
        sampling = row.request.sampling
        if row.response_ids[-1] in self._stop_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if len(row.response_ids) == sampling.max_tokens else None


def _completion(row: _Running, reason: FinishReason) -> Completion:
    return Completion(
        request_id=row.request.request_id,
        response_ids=np.array(row.response_ids, dtype=np.int32),
        logprobs=np.array(row.logprobs, dtype=np.float32),
        finish_reason=reason,
        versions=row.versions,
        support=support_of(row.left) if row.left else None,
    )


class _Batch:
    """Requests that share forward passes, with the keys and values of all their tokens but the newest of each.

    They are [rows, heads, width, head dim] for each layer, with rows aligned at their ends: a shorter row has
    masked columns at the front. Rows of equal length need no mask.
    """

    def __init__(self, rows: list[_Running], cache: DynamicCache) -> None:
        self.rows = rows
        self._cache: Any = cache
        """Its layers have `keys` and `values`, as a DynamicCache's."""

    @classmethod
    def read(cls, model: Any, rows: list[_Running], device: torch.device) -> tuple[_Batch, Tensor]:
        """Read requests of one length, equal ones once; return the batch and the next logits, [rows, V]."""
        places: dict[tuple[int, ...], int] = {}
        place_of_row = [places.setdefault(row.token_ids(), len(places)) for row in rows]
        cache = DynamicCache()
        logits_BV = model(
            input_ids=torch.tensor(list(places), device=device), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        if len(places) < len(rows):
            index = torch.tensor(place_of_row, device=device)
            cache.batch_select_indices(index)
            logits_BV = logits_BV[index]
        return cls(rows, cache), logits_BV

    def extend(self, model: Any, device: torch.device) -> Tensor:
        """Read the newest token of each row; return the next logits, [rows, V]."""
        lengths, mixed = [row.num_tokens() - 1 for row in self.rows], {}
        width = max(lengths)
        if min(lengths) < width:
            lengths_B1 = torch.tensor(lengths, device=device)[:, None]
            columns = torch.arange(width + 1, device=device)
            mixed = {"attention_mask": (columns >= width - lengths_B1).long(), "position_ids": lengths_B1}
        input_ids = torch.tensor([row.response_ids[-1] for row in self.rows], device=device)[:, None]
        logits = model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **mixed).logits
        return logits[:, -1]

    def keep(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        # Of the columns, those of the newest tokens are not there yet.
        width = max((row.num_tokens() for row in self.rows), default=1) - 1
        index = torch.tensor(places, dtype=torch.long)
        for layer in self._cache.layers:
            unused = layer.keys.shape[-2] - width
            layer.keys, layer.values = layer.keys[index, :, unused:], layer.values[index, :, unused:]

    def append(self, other: _Batch) -> None:
        for layer, added in zip(self._cache.layers, other._cache.layers, strict=True):
            width = max(layer.keys.shape[-2], added.keys.shape[-2])
            layer.keys = torch.cat([_widened(layer.keys, width), _widened(added.keys, width)])
            layer.values = torch.cat([_widened(layer.values, width), _widened(added.values, width)])
        self.rows += other.rows


def _widened(states: Tensor, width: int) -> Tensor:
    return pad(states, (0, 0, width - states.shape[-2], 0))
