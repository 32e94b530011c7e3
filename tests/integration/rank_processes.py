"""Actor ranks in real processes that meet over gloo, without Ray: what `WorkerGroup` is to `ActorRole`, but cheap to rebuild."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from sockets import free_port
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_rl import faults
from grpo_rl.algos.objective import Objective
from grpo_rl.checkpoint.tensors import HostMemory
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.models import fsdp, lm_head, sharded_load
from grpo_rl.models.linear import linear
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers import device_memory
from grpo_rl.workers.actor import ActorWorker
from grpo_rl.workers.critic import CriticWorker
from grpo_rl.workers.device_memory import in_host_memory
from grpo_rl.workers.reward_model import RewardModelWorker, TrainedRewardModelWorker
from grpo_rl.workers.specs import ActorSpec, CriticSpec, PolicySpec, Rank, RewardModelSpec, TrainedRewardModelSpec, Update

VOCAB = 64
DEADLINE_S = 120.0


READ = [0]
"""Bytes, as float32, of the rows that this process has read into shards since its last build."""


class Counting:
    """Stands before a safetensors file, or a tensor in one, and counts the rows that are cut out of it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> Counting:
        return Counting(self.inner.__enter__())

    def __exit__(self, *details: Any) -> None:
        self.inner.__exit__(*details)

    def get_slice(self, name: str) -> Counting:
        return Counting(self.inner.get_slice(name))

    def __getitem__(self, place: slice) -> Tensor:
        read: Tensor = self.inner[place]
        READ[0] += read.numel() * 4
        return read


class Recording:
    """A rank that remembers the gradients of every optimizer step, and shows what it holds."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR

    def arm(self, spec: str) -> None:
        """Arm faults in this process."""
        faults.arm(spec)

    def __init__(self, spec: Any, rank: Rank) -> None:
        super().__init__(spec, rank)
        self.steps: list[dict[str, Tensor]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.steps.append(self._gradients()))

    def _gradients(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: fsdp.full_tensor(p.grad).clone() for name, p in named if p.grad is not None}

    def gradients(self) -> list[dict[str, Tensor]]:
        """Whole gradients of every optimizer step so far."""
        return self.steps

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters. A collective."""
        return {name: fsdp.full_tensor(p.detach()).clone() for name, p in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's whole state by parameter name. A collective."""
        return {
            f"{key}:{name}": fsdp.full_tensor(value).clone()
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }

    def next_random(self) -> float:
        """The next number of this rank's generator, which stays where it is."""
        with torch.random.fork_rng(devices=[]):
            return float(torch.rand(()))

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's model."""
        return dict(self.model.named_buffers())

    def read_bytes(self) -> tuple[int, int]:
        """Return how many bytes of weights this rank read when it was built, and how many it holds, as float32."""
        held = sum(parameter.to_local().numel() * 4 for parameter in self.model.parameters())  # type: ignore[operator]
        return READ[0], held

    def schedule(self) -> tuple[int, list[float], list[float]]:
        """Return the schedule's step, the rates that it gives, and those that the optimizer will use."""
        return self.scheduler.last_epoch, self.scheduler.get_last_lr(), [g["lr"] for g in self.optimizer.param_groups]


class RecordingActor(Recording, ActorWorker):
    """An actor rank."""

    def update_counting_head_rows(self, *args: Any) -> int:
        """Make an update; return how many hidden states the LM head was multiplied with."""
        rows = []

        def counting(x: Tensor, *rest: Tensor | None) -> Tensor:
            rows.append(len(x))
            return linear(x, *rest)

        lm_head.linear = counting
        try:
            self.update(*args)
        finally:
            lm_head.linear = linear
        return sum(rows)

    def update_counting_tokens(self, *args: Any) -> int:
        """Make an update; return how many tokens ran through the body with a gradient, recomputed layers not counted."""
        tokens: list[int] = []
        embedding = self.model.lm.get_input_embeddings()
        hook = embedding.register_forward_hook(
            lambda _, inputs, __: tokens.append(inputs[0].numel() if torch.is_grad_enabled() else 0)
        )
        try:
            self.update(*args)
        finally:
            hook.remove()
        return sum(tokens)

    def as_on_a_gpu(self) -> None:
        """From now on, give memory back after each phase, as a rank on a GPU does, and note every move.

        The device is called `cpu:0` here and host memory `cpu`: a move makes new tensors, as one to a GPU would.
        """
        self.memory.gives_back, self.memory.device = True, torch.device("cpu", 0)
        self.moves: list[str] = []

        def moving(name: str, move: Callable[[], None]) -> Callable[[torch.device], None]:
            def noted(device: torch.device) -> None:
                self.moves.append(f"{name} to {'host' if device.index is None else 'device'}")
                move()

            return noted

        host = HostMemory()

        def new_weights() -> None:
            self.model._apply(lambda tensor: in_host_memory(tensor.clone(), host, id(tensor)))

        def new_moments() -> None:
            for parameter, state in self.optimizer.state.items():
                moments = {key: value for key, value in state.items() if key != "step"}
                state.update({key: in_host_memory(value.clone(), host, (parameter, key)) for key, value in moments.items()})

        self.memory.move_weights = moving("weights", new_weights)  # type: ignore[method-assign]
        self.memory.move_moments = moving("moments", new_moments)  # type: ignore[method-assign]

    def moves_of(self, method: str, *args: Any) -> tuple[list[str], list[str]]:
        """Call a method; return the moves that it made, and the names of parameters that are whole after it."""
        self.moves.clear()
        getattr(self, method)(*args)
        whole = [name for name, parameter in self.model.named_parameters() if not isinstance(parameter, DTensor)]
        return list(self.moves), whole

    def answer_and_moves(self, method: str, *args: Any) -> tuple[Any, tuple[list[str], list[str]]]:
        """Call a method; return its answer, and what `moves_of` returns, if moves are noted."""
        if not hasattr(self, "moves"):
            return getattr(self, method)(*args), ([], [])
        answers: list[Any] = []
        self.answering = lambda *given: answers.append(getattr(self, method)(*given))
        moved = self.moves_of("answering", *args)
        return answers[0], moved

    def sends_weights(self) -> tuple[list[str], list[str]]:
        """Hand all weights out; return the types in which slices travelled, and those of the tensors in the buckets."""
        travelled: list[str] = []
        whole = DTensor.full_tensor

        def noted(tensor: DTensor, **options: Any) -> Tensor:
            travelled.append(str(tensor.to_local().dtype))
            return whole(tensor, **options)

        DTensor.full_tensor = noted  # type: ignore[method-assign, assignment]
        try:
            self.begin_weight_sync()
            types = {dtype for bucket in iter(lambda: self.next_bucket()[1], None) for dtype in bucket.dtypes}
            self.end_weight_sync()
        finally:
            DTensor.full_tensor = whole  # type: ignore[method-assign]
        return sorted(set(travelled)), sorted(types)

    def same_objects(self) -> bool:
        """Return whether the optimizer still refers to the model's parameters, and head and embedding are one, if tied."""
        parameters = {id(parameter) for parameter in self.model.parameters()}
        optimized = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        lm = self.model.lm
        tied = not lm.config.tie_word_embeddings or lm.lm_head.weight is lm.get_input_embeddings().weight
        return tied and parameters == optimized

    def offloads_and_moves(self) -> tuple[bool, int]:
        """Return whether FSDP keeps the shards in host memory, and how often a phase or an engine's start moves tensors."""
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        (offloaded,) = {param.offload_to_cpu for m in modules for param in m._get_fsdp_state()._fsdp_param_group.fsdp_params}
        whole, calls = device_memory._finish, []
        device_memory._finish = lambda *_: calls.append(1)  # type: ignore[assignment]
        try:
            self.memory.gives_back = True
            for phase in (self.vacate, self.occupy, self.memory.load_all, self.memory.release):
                phase()
        finally:
            device_memory._finish = whole
        return offloaded, len(calls)


class RecordingCritic(Recording, CriticWorker):
    """A critic rank."""


class RecordingRewardModel(Recording, TrainedRewardModelWorker):
    """A rank of a reward model that is trained."""


KINDS = {
    ActorSpec: RecordingActor,
    CriticSpec: RecordingCritic,
    RewardModelSpec: RewardModelWorker,
    TrainedRewardModelSpec: RecordingRewardModel,
}


class RankProcesses(WorkerGroup):
    """`world_size` processes that live as long as the tests; each `build` makes new actors in them."""

    def __init__(self, world_size: int) -> None:
        # A server process imports torch and transformers once; the ranks are forked from it before it computes anything.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers.models.qwen3.modeling_qwen3"])
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __len__(self) -> int:
        return len(self.pipes)

    def build(self, spec: ActorSpec | CriticSpec | RewardModelSpec | TrainedRewardModelSpec) -> None:
        """New actors, critics or reward models in all processes, in a new process group."""
        kinds: dict[type, str] = {ActorSpec: "actor", CriticSpec: "critic"}
        self.role = kinds.get(type(spec), "reward_model")
        port = free_port()
        ranks = [Rank(i, len(self), "127.0.0.1", port, "cpu", DEADLINE_S) for i in range(len(self))]
        self._send("build", [(spec, rank) for rank in ranks])

    def store(self, values: Sequence[Any]) -> Sequence[Any]:
        return values

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.call_each(method, [args] * len(self))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._send(method, [[_here(value) for value in some] for some in arguments])

    call_for_two = call_each

    def shutdown(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def _send(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for pipe, args in zip(self.pipes, arguments, strict=True):
            pipe.send((method, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} did not answer {method}"
            answers.append(pipe.recv())
        for kind, answer in answers:
            if kind is not None:
                raise kind(answer)
        return [answer for _, answer in answers]


def _here(value: Any) -> Any:
    """A batch or an update as a rank gets it: what other ranks answered is here."""
    return value.local(lambda _: ()) if isinstance(value, Batch | Update) else value


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    sharded_load.safe_open = lambda *words, **options: Counting(safe_open(*words, **options))
    worker: RecordingActor | RecordingCritic | RecordingRewardModel | RewardModelWorker | None = None
    while True:
        method, args = pipe.recv()
        try:
            if method == "build":
                # FSDP's modules refer to each other in circles, and each holds the process group: left to themselves, its
                # threads and some fifty sockets live on until a collection of garbage that may come amid the next group's
                # collectives. Here they end before the next group is made.
                worker = None
                gc.collect()
                if dist.is_initialized():
                    dist.destroy_process_group()
                gc.collect()
                READ[0] = 0
                worker = KINDS[type(args[0])](*args)
                answer = None
            else:
                answer = getattr(worker, method)(*args)
            pipe.send((None, answer))
        except Exception as error:
            reported = type(error) if type(error).__module__.startswith("grpo_rl") else AssertionError
            pipe.send((reported, str(error) if reported is not AssertionError else traceback.format_exc()))


WHOLE = MicroBatchRule(None, 1000)


@dataclass(frozen=True)
class Layout:
    """A way to cut the work of an update."""

    ranks: int = 1
    rule: MicroBatchRule = WHOLE
    checkpointing: bool = False
    chunk_tokens: int = 10_000
    reshard: bool = True
    share: bool = False
    """Prompts are computed once for all their responses in a micro-batch."""
    shard_ranks: int = -1
    in_host_memory: bool = False
    prefetch: bool = False


ALONE = Layout()


@dataclass(frozen=True)
class Trained:
    """What a training leaves: the gradients of each optimizer step, the parameters, the metrics of each update."""

    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    metrics: list[Metrics]


def spec_for(path: Path, layout: Layout, objective: Objective, clip_grad: float = 1e6, **model: Any) -> ActorSpec:
    """The spec of an actor's ranks. `model` are fields of the model's section."""
    settings = {"enable_gradient_checkpointing": layout.checkpointing, "lm_head_chunk_tokens": layout.chunk_tokens, **model}
    # AdamW divides by the root of the squared gradient: if a gradient is 0 up to rounding, its noise still makes
    # a step of the size of lr. With lr = 1e-5 a layout that is right stays within 1e-6 if the gradient is not 0.
    return ActorSpec(
        PolicySpec(
            ModelConfig(path=str(path), **settings),
            temperature=0.9,
            dtype="float32",
            reshard_after_forward=layout.reshard,
            train=True,
            share_prompts=layout.share,
            seed=4,
            sequence_ranks=layout.rule.sequence_ranks,
            shard_ranks=layout.shard_ranks,
            in_host_memory=layout.in_host_memory,
            forward_prefetch=layout.prefetch,
        ),
        objective,
        OptimConfig(lr=1e-5, clip_grad=clip_grad),
        total_optimizer_steps=100,
        seed=1,
    )


def train(
    ranks: dict[int, RankProcesses],
    spec: ActorSpec,
    layout: Layout,
    batches: Sequence[Batch],
    config: ActorConfig | None = None,
    choose: Callable[[Batch], Batch] = lambda batch: batch,
) -> Trained:
    """Train on the batches, of each of which `choose` takes what is trained once the old log-probs are there."""
    processes, config = ranks[layout.ranks], config or ActorConfig()
    processes.build(spec)
    updates = config.ppo_epochs * -(-batches[0].group_N.unique().numel() // config.ppo_mini_batch_size)
    rule = replace(layout.rule, shares_prompts=layout.share)
    actor = actor_group(processes, config, rule, spec.objective, updates_per_step=updates)
    metrics = [actor.update(choose(actor.old_logprobs(batch))) for batch in batches]
    return Trained(processes.call("gradients")[0], processes.call("parameters")[0], metrics)


def actor_group(
    processes: RankProcesses, config: ActorConfig, rule: MicroBatchRule, objective: Objective, *, updates_per_step: int = 1
) -> Any:
    """The actor's role over these processes, as the trainer drives it."""
    from grpo_rl.cluster.roles.trained_roles import ActorRole

    old = "actor" if updates_per_step > 1 or objective.needs_selection else "none"
    return ActorRole(processes, config, train_rule=rule, forward_rule=rule, old_logprobs=old, objective=objective)


def largest(tensors: dict[str, Tensor]) -> float:
    """The largest absolute value in them."""
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float, where: str = "") -> None:
    """Each tensor is the expected one up to `atol`."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{where} {name}: {text}"
        )


def assert_same(one: Trained, other: Trained, smallest: float = 1e-3, scale: int = 0) -> None:
    """First gradients to 1e-6 of the largest entry of step number `scale`, parameters after all steps to 1e-6, metrics alike."""
    assert largest(one.gradients[0]) > smallest, "without gradients this comparison would see nothing"
    assert_close(other.gradients[0], one.gradients[0], 1e-6 * largest(one.gradients[scale]))
    assert_close(other.parameters, one.parameters, 1e-6)
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)


def state(processes: RankProcesses) -> dict[str, Tensor]:
    """Whole parameters and moments of the trained model."""
    return processes.call("parameters")[0] | processes.call("moments")[0]


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different[:5]


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
"""Of a model whose distributions are far from uniform."""


def make_model(folder: Path, *, tied: bool, seed: int = 5, **sizes: int) -> Path:
    """A random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES | sizes, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_pairs(seed: int, num_pairs: int) -> Batch:
    """Ragged pairs in any order, their chosen rollout before or after the rejected one; of two groups fewer, as one has an empty side."""
    num_groups = num_pairs + 2
    batch = make_batch(seed, num_groups, group_size=2)
    generator = torch.Generator().manual_seed(seed)
    chosen_G = torch.randint(0, 2, (num_groups,), generator=generator)
    batch = batch.replace(
        chosen_N=torch.arange(batch.num_rollouts) % 2 == chosen_G[batch.group_N],
        margins_N=torch.rand(num_groups, generator=generator)[batch.group_N],
        kl_N=torch.full((batch.num_rollouts,), 0.5),
    )
    empty_N = torch.isin(batch.group_N, batch.group_N[batch.trained_lengths_N == 0])
    rows = (~empty_N).nonzero()[:, 0][: 2 * num_pairs]
    return batch.select(rows[torch.randperm(len(rows), generator=generator)])


def make_batch(seed: int, num_groups: int = 4, group_size: int = 3, *, one_prompt: bool = False) -> Batch:
    """Ragged random rollouts, among them one of a single token and one without any; with `one_prompt` a group has one prompt."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    num_rollouts = num_groups * group_size
    prompt_lengths_N = integers(1, 9, num_rollouts)
    if one_prompt:
        prompt_lengths_N = (3 + prompt_lengths_N[:num_groups]).repeat_interleave(group_size)
    response_lengths_N = integers(2, 24, num_rollouts)
    response_lengths_N[0], response_lengths_N[num_rollouts // 2] = 1, 0
    num_trained = int(response_lengths_N.sum())
    logprobs_T = -3 * torch.rand(num_trained, generator=generator)
    advantages_N = torch.randn(num_rollouts, generator=generator)
    lengths_N = prompt_lengths_N + response_lengths_N
    ids_S = integers(2, VOCAB, int(lengths_N.sum()))
    if one_prompt:
        ids = ids_S.split(lengths_N.tolist())
        for number in range(num_rollouts):
            prompt_length = int(prompt_lengths_N[number])
            ids[number][:prompt_length] = ids[number - number % group_size][:prompt_length]
    return Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=response_lengths_N,
        group_N=torch.arange(num_groups).repeat_interleave(group_size),
        token_ids_S=ids_S,
        rewards_N=torch.rand(num_rollouts, generator=generator),
        rollout_logprobs_T=logprobs_T,
        ref_logprobs_T=logprobs_T - 0.3 * torch.rand(num_trained, generator=generator),
        advantages_T=advantages_N.repeat_interleave(response_lengths_N),
    )
