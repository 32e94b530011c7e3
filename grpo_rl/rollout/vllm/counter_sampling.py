"""Random numbers of vLLM's sampler on CPUs, as a function of a request's seed and the number of its tokens.

vLLM 0.32 samples on CPUs with one operation over all rows (`fused_gumbel_argmax`), whose noise depends on a number per row and on
the token. It draws that number from a generator that it keeps for each request with a seed, one call per row and step. Where a
pass reads only a part of a prompt, it puts the generator back, which torch cannot do on CPUs. Here that number is
a hash of seed and position, so there is no generator, and prompts may be read in parts.

On GPUs vLLM's model runner (its version 2) hashes seed and position by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_rl.rollout.counter_noise import row_keys

SEED = "counter_seed"
"""The request's seed among vLLM's `SamplingParams.extra_args`. With `SamplingParams.seed` vLLM would make a generator."""


class CounterSampler:
    """The part of vLLM's sampler, on CPUs, that draws from logits to which temperature and min_p have been applied."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sampler = runner.sampler.topk_topp_sampler
        self._before = self._sampler.forward_cpu

    def install(self) -> None:
        """Take the place of vLLM's own method. Raises RuntimeError where this vLLM has another one there."""
        if self._sampler.forward != self._before or self._sampler.use_fp64_gumbel:
            raise RuntimeError(
                f"this vLLM samples with {self._sampler.forward}, and not with TopKTopPSampler.forward_cpu, which draws in one "
                "operation: install the version of vLLM that pyproject.toml names"
            )
        self._sampler.forward = self

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the drawn tokens, and the log-probs that they were drawn by, as `forward_cpu` does."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        batch = self._runner.input_batch
        assert not generators and len(logits) == batch.num_reqs, "one row for each request, none with a generator"
        logits = apply_top_k_top_p(logits, k, p)
        returned = logits.log_softmax(-1, dtype=torch.float32) if self._sampler.logprobs_mode == "processed_logprobs" else None
        # One number per row, of which the operation takes the low 64 bits as they are.
        rows_B = torch.from_numpy(self._keys(batch).view(np.int64))
        return torch.ops._C.fused_gumbel_argmax(logits.float(), rows_B), returned

    def _keys(self, batch: Any) -> np.ndarray:
        count = batch.num_reqs
        requests = self._runner.requests
        given = [(requests[name].sampling_params.extra_args or {}).get(SEED) for name in batch.req_ids[:count]]
        seeds = [int(torch.randint(2**62, ())) if seed is None else seed for seed in given]
        # Of a prompt that is read in part vLLM drops the token, and the next pass has the same position again.
        return row_keys(seeds, batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count])
