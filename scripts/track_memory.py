"""Track the peak memory of one rank: the real model code on tensors without storage, region by region of an optimizer step.

    python scripts/track_memory.py Qwen/Qwen2.5-7B --world 8 --tokens 16384

Nothing is computed and no memory is taken: torch's FakeTensorMode runs every operation for its shapes, the process group is
torch's fake one, of which this process is rank 0, and `torch.distributed._tools.MemTracker` adds up the storages that live.
Sharding (`models/fsdp.py`), the policy with its head (`models/forward.py`), gradient clipping and the optimizer are those of a run.

torch's CPU build knows no CUDA device, so the tensors lie on the fake device `cpu`. If the code asks for the device's type,
the answer of a GPU is put in its place: the attention kernel, the shared prompts' keys, the head's products.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from grpo_rl.config.schema.tree import ModelConfig, OptimConfig
from grpo_rl.models import attention, fsdp, linear, load, lora
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.optim import make_optimizer
from grpo_rl.models.packing import Sequences
from grpo_rl.models.sequence_parallel import SequenceGroup
from grpo_rl.workers.trained_rank import clip_gradients

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many ranks, and one micro-batch of one of them."""

    settings: dict[str, Any]
    """The model's config.json."""
    world: int
    rollouts: int
    prompt: int
    """Tokens of each prompt."""
    response: int
    role: str = "actor"
    """actor: an update; logprobs: the actor's pass without gradients; reference: that of a frozen model."""
    dtype: str = "bfloat16"
    checkpointing: bool = True
    chunk: int = 2048
    """The LM head's chunk of trained tokens."""
    entropy: bool = False
    precision: str = "tf32"
    moments: bool = True
    """The optimizer's moments lie on the device."""
    accumulates: bool = True
    """Gradients of an earlier micro-batch lie on the device."""
    per_group: int = 1
    """Rollouts that share one prompt's states."""
    lora_rank: int = 0
    """The rank of adapters, which alone are trained; 0 if all parameters are."""
    half_base: bool = False
    """The blocks' frozen weights rest in bfloat16."""
    together: int = 1
    """Ranks that compute the micro-batch together, a slice of its tokens each."""

    @property
    def tokens(self) -> int:
        """Return the tokens that run through the model's body on this rank."""
        groups = self.rollouts // self.per_group
        return -(-groups * (self.prompt + self.per_group * self.response) // self.together)

    @property
    def trained(self) -> int:
        """Return the tokens that run through the LM head on this rank, if all slices have as many."""
        return -(-self.rollouts * self.response // self.together)


class Scalars(TorchDispatchMode):
    """Gives a number if the code reads one out of a tensor that has none, and a size if one depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.bincount.default and isinstance(args[0], FakeTensor):
            # As many counts as it says are wanted at least: of experts, all of them.
            return args[0].new_empty(args[2] if len(args) > 2 else (kwargs or {})["minlength"], dtype=torch.long)
        return func(*args, **(kwargs or {}))


class Tracker(MemTracker):
    """torch's tracker with the peak of each region of a step, instead of that of each module."""

    def __init__(self) -> None:
        super().__init__()
        self.region = "start"
        self.peaks: dict[str, int] = {}

    def _update_peak_stats(self, peak_state: Any) -> None:
        now = self._curr_mem_snap.get(CPU)
        if now is not None:
            self.peaks[self.region] = max(self.peaks.get(self.region, 0), now["Total"])

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        """Leave out what torch's tracker notes for each module: it takes most of the time, and refuses frozen parameters."""

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: Any, args: Any) -> None: ...

    def _post_bw_hook(self, module: Any, args: Any) -> None: ...

    @property
    def now(self) -> int:
        """Return the bytes that live."""
        return int(self._curr_mem_snap.get(CPU, {"Total": 0})["Total"])


@contextmanager
def as_on_a_gpu(world: int) -> Iterator[None]:
    """Put a GPU's answers if code asks for the device, and join a process group of `world` ranks that sends nothing."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        # DTensor works out shapes on whole tensors in the mode that it finds: one that the tracker does not see.
        with FakeTensorMode():
            return propagate(self, *args, **kwargs)

    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(attention, "takes_blocks_as_they_lie", lambda query, dropout: True))
        patch(mock.patch.object(linear, "_rounded_to_tf32", lambda x: x))
        patch(mock.patch.object(linear, "_has_onednn", lambda: False))
        patch(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", apart))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        stack.callback(dist.destroy_process_group)
        yield


def track(case: Case, layers: int | None = None) -> dict[str, int]:
    """Return the peak bytes of each region of one micro-batch, of a model with so many layers (None: all of them)."""
    settings = dict(case.settings) | ({} if layers is None else {"num_hidden_layers": layers})
    if layers is not None and settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:layers]
    trains = case.role != "reference"
    tracker = Tracker()
    with as_on_a_gpu(case.world):
        policy = build(case, settings, trains=trains)
        sequences = micro_batch(case)
        ranks = SequenceGroup.join(case.together, timeout_s=60.0)
        if ranks is not None:
            # Which tokens are this rank's is a matter of values, which fake tensors do not have. The last slice has the most.
            sequences = sequences.sliced(replace(ranks, rank=ranks.size - 1))
            policy.sliced = lambda sequences: sequences  # type: ignore[method-assign]
        mesh = init_device_mesh("cpu", (case.world,))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, Scalars():
            fsdp.shard(policy, mesh, DTYPES[case.dtype])
            with tracker:
                fsdp.materialize_from(policy, CPU, lambda: None)
                watch(policy, tracker)
                if case.role == "actor":
                    update(case, policy, on_device(sequences), tracker)
                else:
                    optimizer = make_optimizer(policy, OptimConfig()) if trains else None
                    if optimizer is not None:
                        give_state(case, policy, optimizer)
                    evaluate(policy, on_device(sequences), tracker)
                    del optimizer
    del policy
    # Modules, hooks and tensors refer to each other. They are young: all that Python holds takes half a second to walk through.
    gc.collect(1)
    return tracker.peaks


def build(case: Case, settings: dict[str, Any], *, trains: bool) -> PolicyModel:
    """Return the policy as a rank builds it, its parameters without storage."""
    config = AutoConfig.for_model(**settings)
    lm = load.load_lm("", config, on_meta=True)
    if trains and case.checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if case.lora_rank:
        lora.add_adapters(lm, ModelConfig(path="", lora_rank=case.lora_rank))
    if case.half_base:
        for layer in load.decoder_layers(lm):
            for name, parameter in layer.named_parameters():
                if not lora.is_adapter(name):
                    parameter.data = parameter.data.to(torch.bfloat16)
    policy = PolicyModel(lm, temperature=1.0, chunk_tokens=case.chunk, precision=case.precision)  # type: ignore[arg-type]
    policy.train(case.role == "actor")
    if not case.lora_rank:
        policy.requires_grad_(trains)
    return policy


def micro_batch(case: Case) -> Sequences:
    """Return the input of a forward pass in which every token of the responses is trained."""
    length = case.prompt + case.response
    lengths_N = torch.full((case.rollouts,), length)
    trained_N = torch.full((case.rollouts,), case.response)
    group_N = torch.arange(case.rollouts) // case.per_group
    ids_NL = torch.arange(case.rollouts)[:, None] + torch.arange(length)[None]
    ids_NL[:, : case.prompt] = torch.arange(case.prompt) + 7 * group_N[:, None]
    positions_T = (torch.arange(case.rollouts)[:, None] * length + torch.arange(case.prompt, length)[None]).flatten()
    shared = group_N if case.per_group > 1 else None
    of, meta = attention.Packing.of, torch.device("meta")
    with mock.patch.object(
        attention.Packing, "of", staticmethod(lambda lengths, device, continues=None: of(lengths, meta, continues))
    ):
        return Sequences.of(ids_NL.flatten() % 1000, lengths_N, positions_T, trained_N, CPU, group_N=shared)


def on_device(sequences: Sequences) -> Sequences:
    """Return the input with tensors of the mode, on the device."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=CPU)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(moved(entry) for entry in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{f.name: moved(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    return moved(sequences)


def watch(policy: PolicyModel, tracker: Tracker) -> None:
    """Let the tracker change its region if the step goes from one part of the model to another."""
    layers = load.decoder_layers(policy.lm)

    def enter(region: str) -> Any:
        def hook(*_: Any) -> None:
            # A layer that is recomputed runs forward in the middle of the backward pass.
            if region.endswith("backward") or torch._C._current_graph_task_id() == -1:
                tracker.region = region

        return hook

    def on_gradient(tensor: Any, region: str) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(enter(region))

    policy.register_forward_pre_hook(enter("gather"), prepend=True)
    layers[min(1, len(layers) - 1)].register_forward_pre_hook(enter("layers, forward"), prepend=True)

    def body_done(module: Any, args: Any, output: Any) -> None:
        tracker.region = "head"
        on_gradient(output.last_hidden_state, "layers, backward")

    policy.lm.base_model.register_forward_hook(body_done)
    embedding = policy.lm.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: on_gradient(output, "root, backward"))


def give_state(case: Case, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its moments, and the parameters gradients of an earlier micro-batch, as the case says."""
    for parameter in filter(lambda parameter: parameter.requires_grad, policy.parameters()):
        if case.moments:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        if case.accumulates and case.role == "actor":
            parameter.grad = torch.zeros_like(parameter)


def update(case: Case, policy: PolicyModel, sequences: Sequences, tracker: Tracker) -> None:
    """Run forward, backward, clipping and the optimizer's step on one micro-batch."""
    optimizer = make_optimizer(policy, OptimConfig())
    give_state(case, policy, optimizer)
    outputs = policy(sequences, want_entropy=case.entropy)
    loss = outputs.logprobs_T.sum() if outputs.entropy_T is None else (outputs.logprobs_T + outputs.entropy_T).sum()
    loss.backward()
    del outputs, loss
    tracker.region = "optimizer"
    clip_gradients(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    fsdp.reshard(policy)
    tracker.peaks["rest"] = tracker.now


@torch.no_grad()
def evaluate(policy: PolicyModel, sequences: Sequences, tracker: Tracker) -> None:
    """Run one pass without gradients."""
    outputs = policy(sequences)
    del outputs
    fsdp.reshard(policy)
    tracker.peaks["rest"] = tracker.now


TRACED = (3, 4)
"""The numbers of layers of the two models from which the peaks of a deeper one follow."""


def track_few(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peaks of the two models with few layers."""
    return track(case, TRACED[0]), track(case, TRACED[1])


def scaled(peaks: tuple[dict[str, int], dict[str, int]], layers: int) -> dict[str, int]:
    """Return the peaks of a model with so many layers: each region's bytes are linear in the layers."""
    few, more = peaks
    step = TRACED[1] - TRACED[0]
    return {region: few[region] + (more[region] - few[region]) * (layers - TRACED[0]) // step for region in few}
