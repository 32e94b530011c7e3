"""All parts of vLLM that are replaced or read here without vLLM promising them, and what is done with a vLLM that lacks one.

| Part | Why | Without it |
|---|---|---|
| on CPUs `forward` of the sampler's `TopKTopPSampler` | a token must not depend on what else is in the batch, or on how a prompt is read | no seeds |
| `fused_gumbel_argmax` of vLLM's compiled part | draws with the noise of that sampler, in one operation | the noise of `counter_noise`, in torch |
| labels of weight versions beside tokens | responses that go on with new weights | responses end before an update |
| the `LogprobsProcessor` of each request | makes a Python number of each entry: 132 of a token take longer than all other work | vLLM's own |
| on CPUs the `moe_kernel` of unquantized experts | a second load copies weights over packed ones: no error, and other experts | no update |
| `store_timeout` of `StatelessProcessGroup.create` | gives up after 300 s, without a setting | 300 s |
| `torch.set_num_threads`, which vLLM's worker on CPUs replaces | other code of the process sets threads, too | |

Each is tried when an engine starts. `gaps` reads the sources of the installed vLLM for the plan, as an import takes half a minute.
What comes out is held by `tests/integration/rollout/`, which `scripts/test.sh compat` runs with the oldest and the newest vLLM.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_rl.rollout.counter_noise import exponential_noise, row_keys
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous
from grpo_rl.rollout.reports import joined
from grpo_rl.rollout.weights import WeightTransferError

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.v1.engine import EngineCoreOutput

SEED = "counter_seed"
"""Key of the request's seed in `SamplingParams.extra_args`: `SamplingParams.seed` would make a generator."""
_EXPERTS = ("model_executor/layers/fused_moe/unquantized_fused_moe_method.py", "moe_kernel")
_GAPS = {
    ("v1/sample/ops/topk_topp_sampler.py", "forward_cpu"): (
        "its sampler on CPUs is not the one that is replaced: tokens do not follow from seeds there, so a resumed run samples others"
    ),
    ("outputs.py", "weight_versions"): (
        "it does not say which weights sampled a token: responses end before engines take new weights, as with "
        "trainer.asynchronous.partial_rollout=false"
    ),
    ("v1/engine/output_processor.py", "logprobs_processor"): "top-k log-probs are read one by one, which takes longer",
    _EXPERTS: "a model with experts cannot get new weights on CPUs: sample it with actor_rollout_ref.rollout.name=hf",
    ("distributed/utils.py", "store_timeout"): "engines that receive weights by NCCL wait 300 s for each other, and no longer",
}
"""What follows from a missing part, by vLLM's file and its name there."""


def gaps() -> list[str]:
    """Return a sentence for each part that the installed vLLM lacks."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    return [sentence for (file, name), sentence in _GAPS.items() if name not in _text(folder / file)]


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


class CounterSampler:
    """The part of vLLM's sampler, on CPUs, that draws after temperature and min_p.

    vLLM draws by one operation over all rows (`fused_gumbel_argmax`) with a number per row from a generator
    for each request, which it cannot put back if a pass reads only a part of a prompt. Here that number is a
    hash of seed and position.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sampler = runner.sampler.topk_topp_sampler

    def install(self) -> bool:
        """Returns False if vLLM samples in another way here than its `forward_cpu` does."""
        try:
            if self._sampler.forward != self._sampler.forward_cpu or self._sampler.use_fp64_gumbel:
                return False
            self._keys(self._runner.input_batch)  # of no request yet
        except (AttributeError, TypeError, IndexError):
            return False
        self._sampler.forward = self
        return True

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        batch = self._runner.input_batch
        assert not generators and len(logits) == batch.num_reqs, "one row for each request, none with a generator"
        logits = apply_top_k_top_p(logits, k, p).float()
        returned = logits.log_softmax(-1) if self._sampler.logprobs_mode == "processed_logprobs" else None
        keys_B = self._keys(batch)
        if not hasattr(torch.ops._C, "fused_gumbel_argmax"):  # before vLLM 0.32
            return (logits.softmax(-1) / exponential_noise(keys_B, logits.shape[-1])).argmax(-1), returned
        # One number per row, of which the operation takes the low 64 bits as they are.
        return torch.ops._C.fused_gumbel_argmax(logits, torch.from_numpy(keys_B.view(np.int64))), returned

    def _keys(self, batch: Any) -> np.ndarray:
        count = batch.num_reqs
        requests = self._runner.requests
        extras = [requests[name].sampling_params.extra_args or {} for name in batch.req_ids[:count]]
        seeds = [int(extra[SEED] if SEED in extra else torch.randint(2**62, ())) for extra in extras]
        # Of a prompt that is read in part vLLM drops the token, and the next pass has the same position again.
        return row_keys(seeds, batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count])


@contextmanager
def own_threads(spec: EngineSpec) -> Iterator[None]:
    """Give back to torch the number of threads that vLLM's CPU worker replaces."""
    set_num_threads = torch.set_num_threads
    if spec.device == "cpu":
        set_num_threads(spec.threads)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


class Reported(NamedTuple):
    """A response's entries as vLLM's `FlatLogprobs` names them."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    start_indices: np.ndarray


class ReportedArrays:
    """One request's log-probs as the arrays that vLLM's workers send, in place of its `LogprobsProcessor`.

    That makes a Python number of each: 7 microseconds a token instead of 0.1 with one entry, and with 132
    longer than all other work of the engine's thread.
    """

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None

    def __init__(self, num_logprobs: int) -> None:
        self._width = 1 + num_logprobs
        self._token_ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Copy the request's rows unless they are narrow: they are views of the step's report."""
        rows = output.new_logprobs
        if rows is None:
            return
        logprobs, token_ids = rows.logprobs, rows.logprob_token_ids
        if logprobs.shape[1] > 1:
            logprobs, token_ids = logprobs[:, : self._width].astype(np.float32), token_ids[:, : self._width].astype(np.int32)
        self._logprobs.append(logprobs)
        self._token_ids.append(token_ids)

    @property
    def logprobs(self) -> Reported:
        token_ids, logprobs = (
            joined([*map(np.ravel, self._token_ids)], np.int32),
            joined([*map(np.ravel, self._logprobs)], np.float32),
        )
        return Reported(token_ids, logprobs, np.arange(0, len(logprobs), self._width))


def pack_experts_again(model: torch.nn.Module) -> None:
    """Make the next load of experts on a CPU end as the first one did: packed for the grouped matrix product.

    vLLM packs them once (`UnquantizedFusedMoEMethod._setup_kernel`); a second load copies over them. Raises
    WeightTransferError if this vLLM keeps no kernel there.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            if not hasattr(method, "moe_kernel"):
                raise WeightTransferError(f"with this vLLM {_GAPS[_EXPERTS]}")
            method.moe_kernel = None


_CLASSES = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}
"""Classes at these places of the handle of torch's `reduce_tensor`."""


def plain_handle(handle: Sequence[Any]) -> list[Any]:
    """Return a CUDA IPC handle as plain values. Raises WeightTransferError if it is no buffer of bytes."""
    if any(handle[place] is not value for place, value in _CLASSES.items()):
        raise WeightTransferError(
            f"torch describes a buffer by {[handle[place] for place in _CLASSES]}, not {[*_CLASSES.values()]}"
        )
    return [
        None if place in _CLASSES else list(value) if isinstance(value, tuple) else value for place, value in enumerate(handle)
    ]


def whole_handle(plain: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_CLASSES.get(place, tuple(value) if isinstance(value, list) else value) for place, value in enumerate(plain))


@contextmanager
def store_waits(timeout_s: float) -> Iterator[None]:
    """Set how long vLLM's group waits for its members."""
    from vllm.distributed.utils import StatelessProcessGroup

    create = StatelessProcessGroup.create
    if "store_timeout" not in inspect.signature(create).parameters:
        yield
        return
    StatelessProcessGroup.create = staticmethod(partial(create, store_timeout=math.ceil(timeout_s)))  # type: ignore[method-assign]
    try:
        yield
    finally:
        StatelessProcessGroup.create = staticmethod(create)  # type: ignore[method-assign]


def join_as_trainer(rendezvous: NcclRendezvous) -> PyNcclCommunicator:
    """Return rank 0 of the group that weights are broadcast in, once all have come."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    place = {"master_address": rendezvous.master_address, "master_port": rendezvous.master_port}
    with store_waits(rendezvous.timeout_s):
        return able(trainer_init(place | {"world_size": rendezvous.world_size}))


def able(communicator: PyNcclCommunicator) -> PyNcclCommunicator:
    """vLLM's communicator may switch itself off silently; its broadcast then does nothing."""
    if communicator.disabled or not communicator.available:
        raise WeightTransferError(
            "vLLM's NCCL communicator is switched off in this process, so weights cannot travel by NCCL: unset VLLM_DISABLE_PYNCCL, "
            "see that libnccl.so.2 can be loaded, or set actor_rollout_ref.rollout.checkpoint_engine.backend=object_store"
        )
    return communicator
