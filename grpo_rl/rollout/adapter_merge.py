"""Weights of adapters alone: an engine's process adds what arrived to the base model, whose files it has
anyway.

`W + (alpha / rank) B A` is made in float32, as in the actor's ranks (`models/fsdp.py`): log-probs are of
merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_rl.errors import ConfigError
from grpo_rl.models.lora import A_NAME, B_NAME
from grpo_rl.models.sharded_load import WeightFiles
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.model_info import model_on_meta
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, first_names, pack_buckets, with_digests_recorded


class AdapterMerge:
    """The adapters of an update. Raises ConfigError if the model's files lack its tensors' names."""

    def __init__(self, spec: EngineSpec) -> None:
        assert spec.adapter_scaling is not None
        self._spec, self._scaling = spec, spec.adapter_scaling
        self._lm = model_on_meta(spec)
        files = WeightFiles.find(spec.model_path)
        if files is None or not files.fits(self._lm):
            raise ConfigError(
                f"actor_rollout_ref.rollout.lora_sync=adapter: the files of {spec.model_path} have not the model's tensors by their "
                "names, so that engines cannot add adapters to them; use lora_sync=merged"
            )
        self._files = files
        self._adapters: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}

    def receive(self, bucket: WeightBucket) -> None:
        named = with_digests_recorded(bucket.tensors(), self.digests if self._spec.verify_checksum else None)
        self._adapters |= {name: tensor.clone() for name, tensor in named}

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the merged model once. Raises WeightTransferError for half an adapter."""
        dtype = getattr(torch, self._spec.dtype)
        merged = ((name, tensor.to(dtype)) for name, tensor in self._merged())
        yield from pack_buckets(merged, self._spec.bucket_bytes)
        if self._adapters:
            raise WeightTransferError(f"adapters of no layer of the model arrived: {first_names(sorted(self._adapters))}")

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._files.whole_tensors(self._lm):
            layer = name.removesuffix(".weight")
            a_RI, b_OR = self._adapters.pop(layer + A_NAME, None), self._adapters.pop(layer + B_NAME, None)
            if a_RI is None or b_OR is None:
                if a_RI is not b_OR:
                    raise WeightTransferError(f"one of the two matrices of the adapter at {layer} did not arrive")
                yield name, weight
            else:
                yield name, torch.addmm(weight.float(), b_OR, a_RI, alpha=self._scaling)
