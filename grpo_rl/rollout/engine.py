"""The rollout engine: the protocol of one replica, what it is built from, and what every engine checks of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo_rl.config.derived import max_num_seqs, updates_in_flight
from grpo_rl.config.schema.tree import Config
from grpo_rl.rollout.weights import WeightBucket
from grpo_rl.types import Completion, Request

WeightBackend = Literal["object_store", "ipc", "nccl"]
Device = Literal["cpu", "cuda"]
Wakeable = Literal["weights", "kv_cache", "all"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is built from; plain values, so that it can be sent to another process."""

    model_path: str
    max_model_len: int
    """Longest prompt plus response, in tokens."""
    name: str = "vllm"
    """The engine's name in `rollout.engines.ENGINES`."""
    batched: bool = True
    """hf: requests share forward passes; without, each has its own and its bits depend on no other request."""
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face config, the same as the trainer applies."""
    tensor_parallel_size: int = 1
    num_nodes: int = 1
    """Nodes over which the engine is spread; on several, vLLM starts its processes over Ray, in the placement group of this one."""
    quantization: str | None = None
    """vLLM on GPUs: its way of quantizing weights as they arrive; None: as they are."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = True
    use_torch_compile: bool = True
    """vLLM on GPUs, if not `enforce_eager`: compile the model; False: CUDA graphs of the model as it is."""
    engines_per_device: int = 1
    """Engines that share a device, this one among them."""
    gpu_memory_utilization: float = 0.5
    """GPU: this engine's share of the device's memory."""
    kv_cache_memory_bytes: int | None = None
    """GPU: the size of the key-value cache on each device; None: what gpu_memory_utilization leaves."""
    kv_cache_gib: float = 1.0
    """CPU: most memory for keys and values; an engine takes less if max_num_seqs full-length rollouts need less."""
    enable_prefix_caching: bool = True
    sleep_mode: bool = False
    """GPU: the engine can give its memory back (sleep, wake_up)."""
    separate_process: bool = False
    """vLLM: schedule and sample in a child process."""
    updates_in_flight: bool = False
    """Weights come while requests are unfinished: vLLM on GPUs hands each token over in the step that samples it."""
    weight_backend: WeightBackend = "object_store"
    bucket_bytes: int = 512 << 20
    verify_checksum: bool = False
    adapter_scaling: float | None = None
    """alpha / rank of adapters that arrive alone, to be added to the model's own weights; None: whole weights arrive."""
    fp32_lm_head: bool = False
    """vLLM: compute the logits in float32 whatever `dtype` is."""
    deterministic: bool = False
    """vLLM on GPUs: kernels whose results do not depend on what else is in the batch."""
    seed: int = 0
    """The seed of requests that bring none of their own."""
    threads: int = 1
    """CPU: OpenMP threads."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's own constructor; they win over everything above."""

    @classmethod
    def from_config(cls, cfg: Config, device: Device, model_path: str | None = None, cores: int = 1) -> EngineSpec:
        """Return the spec of one replica of `actor_rollout_ref.rollout`.

        `model_path` is the folder where `model.path` is not one yet (`builtin:...`); `cores` is how many
        CPU cores one replica may use when `rollout.cpu_threads` leaves that open.
        """
        rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
        on_gpu, colocated = device == "cuda", rollout.nnodes == 0
        dtype = rollout.dtype if rollout.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
        verify = rollout.checkpoint_engine.verify_checksum
        return cls(
            model_path=model_path or model.path,
            max_model_len=rollout.max_model_len or cfg.data.max_prompt_length + cfg.data.max_response_length,
            name=rollout.name,
            batched=rollout.hf.batched,
            device=device,
            dtype=dtype,
            tokenizer_path=model.tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            override_config=dict(model.override_config),
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            quantization=rollout.quantization,
            max_num_seqs=max_num_seqs(cfg, device),
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enforce_eager=not on_gpu if rollout.enforce_eager is None else rollout.enforce_eager,
            use_torch_compile=rollout.use_torch_compile,
            engines_per_device=rollout.engines_per_device,
            gpu_memory_utilization=rollout.gpu_memory_utilization / rollout.engines_per_device,
            kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
            kv_cache_gib=rollout.kv_cache_gib,
            enable_prefix_caching=rollout.enable_prefix_caching,
            sleep_mode=on_gpu and colocated and rollout.free_cache_engine,
            separate_process=rollout.separate_process and rollout.tensor_model_parallel_size == 1,
            updates_in_flight=updates_in_flight(cfg),
            weight_backend=weight_backend(cfg, device),
            bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
            verify_checksum=on_gpu if verify is None else verify,
            adapter_scaling=model.lora_alpha / model.lora_rank if sends_adapters(cfg) else None,
            fp32_lm_head=rollout.fp32_lm_head,
            deterministic=cfg.trainer.deterministic,
            seed=rollout.seed,
            threads=rollout.cpu_threads or max(1, cores),
            engine_kwargs=dict(rollout.engine_kwargs.get(rollout.name, {})),
        )


def sends_adapters(cfg: Config) -> bool:
    """Return whether the engines get adapters alone, which they add to the model's own weights."""
    return cfg.actor_rollout_ref.model.lora_rank > 0 and cfg.actor_rollout_ref.rollout.lora_sync == "adapter"


def weight_backend(cfg: Config, device: Device) -> WeightBackend:
    """Return how weights travel under this configuration."""
    rollout = cfg.actor_rollout_ref.rollout
    backend = rollout.checkpoint_engine.backend
    if backend == "object_store" or device == "cpu" or rollout.name == "hf" or sends_adapters(cfg):
        return "object_store"
    return "ipc" if rollout.nnodes == 0 else "nccl"


@dataclass(frozen=True, slots=True)
class NcclRendezvous:
    """The meeting point of the trainer's sending rank (rank 0) and all engine processes, and a replica's ranks.

    The fields have the names that vLLM gives them.
    """

    master_address: str
    master_port: int
    world_size: int
    """1 + the engine processes of all replicas."""
    rank_offset: int = 1
    """Rank of the replica's first process: 1 + the processes of the replicas before it."""
    timeout_s: float = 300.0
    """The longest wait for the others, one of which may be in a step that compiles."""


class RolloutEngine(Protocol):
    """One replica. It is used from one thread.

    A request is answered by exactly one Completion, unless it is aborted. Log-probabilities are those of
    the distribution that was sampled from: after temperature, min-p, top-k and top-p (greedy: temperature 1). A request
    whose sampling returns its support gets the tokens that were left of it too, exactly those.

    A weight update is `start_weight_update`, every tensor once by `load_bucket`, `finish_weight_update`. Between start
    and finish some tensors are old and some are new, so nothing is sampled: `step` returns at once. What was sampled
    before the update keeps its tokens and their version, and what is sampled afterwards has the new one.
    """

    @property
    def num_unfinished(self) -> int:
        """The number of requests that were submitted and have not ended."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that are live; 0 are those of the model folder."""

    @property
    def updates_in_flight(self) -> bool:
        """Return whether weights may be updated while requests are unfinished, which then go on with the new ones."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of the requests, or none of them and raise.

        ValueError: one does not fit the engine, or its id is taken. WeightTransferError: a weight update
        has begun, or the weights were given up by `sleep`.
        """

    def step(self) -> list[Completion]:
        """Advance every running request by one token and return those that ended; do nothing during a weight update."""

    def abort_all(self) -> None:
        """Forget every unfinished request; no Completion comes for them."""

    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Join the group that weights are broadcast in, in place of an earlier one; only with weight_backend=nccl.

        Also after an update has begun: members are lost then, too.
        """

    def start_weight_update(self, version: int) -> None:
        """Begin to receive weights `version`, which must not be below the present one.

        WeightTransferError: requests are unfinished and not `updates_in_flight`, an update has begun already, or the
        version is older.
        """

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Take over some tensors; when it returns, the sender may use their memory again.

        WeightTransferError: no update has begun, or a tensor is unknown, has another shape, or came before.
        """

    def finish_weight_update(self, keep_cache: bool = False) -> None:
        """Put the new weights live; from now on tokens are sampled with them.

        The keys and values of unfinished requests were computed with the old weights. They are computed anew, so that
        log-probs are exactly those of the new weights, or with `keep_cache` kept, which is cheaper and makes the next
        tokens those of a mixture: new weights that attend to old keys and values (PipelineRL, section 4). No request
        that is submitted later reads old ones in either case.

        WeightTransferError, naming them: tensors are missing. Then the update goes on.
        """

    def received_digests(self) -> dict[str, str]:
        """Return the digest of every tensor as it arrived in the last update; empty unless verify_checksum is on."""

    def sleep(self) -> None:
        """Give device memory back: the weights are lost and come again by wake_up and a weight update.

        Without sleep_mode, and on CPU, where memory is not what phases compete for, nothing happens.
        """

    def wake_up(self, what: Wakeable = "all") -> None:
        """Take memory again: for the weights before an update, for the key-value cache before sampling."""

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""


def check_requests(requests: Sequence[Request], taken: Collection[str], max_model_len: int) -> None:
    """Raise ValueError for the first request that an engine cannot answer as asked.

    `taken` are the ids that are in use. A prompt and its longest response must fit into `max_model_len`:
    an engine would cut the response short and call it `length`.
    """
    seen = set(taken)
    for request in requests:
        sampling = request.sampling
        where = f"request {request.request_id!r}"
        if request.request_id in seen:
            raise ValueError(f"{where} is already being answered; ids must be unique")
        seen.add(request.request_id)
        if not len(request.prompt_ids):
            raise ValueError(f"{where} has an empty prompt")
        if sampling.max_tokens < 1:
            raise ValueError(f"{where} asks for {sampling.max_tokens} tokens; at least 1 is needed")
        longest = len(request.prompt_ids) + sampling.max_tokens
        if longest > max_model_len:
            raise ValueError(
                f"{where}: {len(request.prompt_ids)} prompt tokens and up to {sampling.max_tokens} response tokens make "
                f"{longest}, more than the engine's max_model_len of {max_model_len}"
            )
