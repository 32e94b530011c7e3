"""The protocol of a rollout engine, its spec, and the checks that every engine makes of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field
from typing import Any, Literal, Protocol

from grpo_rl.config.derived import max_num_seqs, updates_in_flight
from grpo_rl.config.schema.tree import Config
from grpo_rl.frozen import frozen
from grpo_rl.rollout.weights import WeightBucket
from grpo_rl.types import Completion, Request

WeightBackend = Literal["object_store", "ipc", "nccl"]
Device = Literal["cpu", "cuda"]
Wakeable = Literal["weights", "kv_cache", "all"]
_SAME_NAMED_KEYS = (
    *("name", "seed", "quantization", "max_num_batched_tokens", "use_torch_compile", "engines_per_device", "fp32_lm_head"),
    *("enable_prefix_caching", "kv_cache_memory_bytes", "kv_cache_gib"),
)
"""Keys of `actor_rollout_ref.rollout` that are the spec's under the same names."""


@frozen
class EngineSpec:
    """What an engine is built from, as plain values: most are keys of `actor_rollout_ref.rollout`."""

    model_path: str
    max_model_len: int
    """Prompt plus response, in tokens."""
    name: str = "vllm"
    batched: bool = True
    """hf: requests share forward passes; without, the bits of each depend on no other."""
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    num_nodes: int = 1
    """vLLM spreads over them by Ray, in the placement group of this one."""
    quantization: str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = True
    use_torch_compile: bool = True
    engines_per_device: int = 1
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_bytes: int | None = None
    kv_cache_gib: float = 1.0
    """CPU: less if max_num_seqs full-length rollouts need less."""
    enable_prefix_caching: bool = True
    sleep_mode: bool = False
    separate_process: bool = False
    updates_in_flight: bool = False
    """Weights come while requests are unfinished: vLLM hands each token over in the step that samples it."""
    weight_backend: WeightBackend = "object_store"
    bucket_bytes: int = 512 << 20
    verify_checksum: bool = False
    adapter_scaling: float | None = None
    """alpha / rank of adapters that arrive alone; None: whole weights arrive."""
    fp32_lm_head: bool = False
    deterministic: bool = False
    seed: int = 0
    threads: int = 1
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, cfg: Config, device: Device, model_path: str | None = None, cores: int = 1) -> EngineSpec:
        """`model_path`: the folder of an embedded model; `cores`: the default of `rollout.cpu_threads`."""
        rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
        on_gpu, colocated = device == "cuda", rollout.nnodes == 0
        dtype = rollout.dtype if rollout.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
        verify = rollout.checkpoint_engine.verify_checksum
        return cls(
            model_path=model_path or model.path,
            max_model_len=rollout.max_model_len or cfg.data.max_prompt_length + cfg.data.max_response_length,
            batched=rollout.hf.batched,
            device=device,
            dtype=dtype,
            tokenizer_path=model.tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            override_config=dict(model.override_config),
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            max_num_seqs=max_num_seqs(cfg, device),
            enforce_eager=not on_gpu if rollout.enforce_eager is None else rollout.enforce_eager,
            gpu_memory_utilization=rollout.gpu_memory_utilization / rollout.engines_per_device,
            sleep_mode=on_gpu and colocated and rollout.free_cache_engine,
            separate_process=rollout.separate_process and rollout.tensor_model_parallel_size == 1,
            updates_in_flight=updates_in_flight(cfg),
            weight_backend=weight_backend(cfg, device),
            bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
            verify_checksum=on_gpu if verify is None else verify,
            adapter_scaling=model.lora_alpha / model.lora_rank if sends_adapters(cfg) else None,
            deterministic=cfg.trainer.deterministic,
            threads=rollout.cpu_threads or max(1, cores),
            engine_kwargs=dict(rollout.engine_kwargs.get(rollout.name, {})),
            **{name: getattr(rollout, name) for name in _SAME_NAMED_KEYS},
        )


def sends_adapters(cfg: Config) -> bool:
    return cfg.actor_rollout_ref.model.lora_rank > 0 and cfg.actor_rollout_ref.rollout.lora_sync == "adapter"


def weight_backend(cfg: Config, device: Device) -> WeightBackend:
    rollout = cfg.actor_rollout_ref.rollout
    backend = rollout.checkpoint_engine.backend
    if backend == "object_store" or device == "cpu" or rollout.name == "hf" or sends_adapters(cfg):
        return "object_store"
    return "ipc" if rollout.nnodes == 0 else "nccl"


@frozen
class NcclRendezvous:
    """The meeting point of the trainer's rank 0 and all engine processes. vLLM's names of fields."""

    master_address: str
    master_port: int
    world_size: int
    """1 + the engine processes of all replicas."""
    rank_offset: int = 1
    """1 + the processes of the replicas before."""
    timeout_s: float = 300.0


class RolloutEngine(Protocol):
    """One replica. It is used from one thread.

    Each request gets one Completion, unless it is aborted. Log-probabilities are those after temperature,
    min-p, top-k and top-p (greedy: temperature 1).

    A weight update is `start_weight_update`, every tensor once by `load_bucket`, `finish_weight_update`;
    nothing is sampled in between. Tokens keep the version that they were sampled with.
    """

    @property
    def num_unfinished(self) -> int: ...

    @property
    def weight_version(self) -> int:
        """0 is that of the model folder."""

    @property
    def updates_in_flight(self) -> bool:
        """Whether unfinished requests go on with new weights."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of the requests, or none of them and raise.

        ValueError: one does not fit the engine, or its id is taken. WeightTransferError: a weight update has
        begun, or `sleep` gave the weights up.
        """

    def step(self) -> list[Completion]:
        """Advance every request by one token and return those that ended; nothing during a weight update."""

    def abort_all(self) -> None: ...

    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Join the group that NCCL broadcasts weights in, also in the middle of an update."""

    def start_weight_update(self, version: int) -> None:
        """WeightTransferError: `version` is older, an update has begun, or requests may not be in flight."""

    def load_bucket(self, bucket: WeightBucket) -> None:
        """Copy tensors: when it returns, the sender may use their memory again.

        WeightTransferError: no update has begun, or a tensor is unknown, has another shape, or came before.
        """

    def finish_weight_update(self, keep_cache: bool = False) -> None:
        """Put the new weights live.

        Keys and values of unfinished requests are computed anew, so that log-probs are exactly those of the
        new weights, or with `keep_cache` kept: cheaper, and the next tokens attend to old keys and values
        (PipelineRL, section 4).

        WeightTransferError, naming them: tensors are missing. Then the update goes on.
        """

    def received_digests(self) -> dict[str, str]:
        """Digests of the last update's tensors; empty unless verify_checksum is on."""

    def sleep(self) -> None:
        """Give device memory back: weights come again by wake_up and a weight update."""

    def wake_up(self, what: Wakeable = "all") -> None:
        """Take memory for the weights before an update, for the cache before sampling."""

    def close(self) -> None: ...


def check_requests(requests: Sequence[Request], taken: Collection[str], max_model_len: int) -> None:
    """An engine would cut a prompt and response longer than `max_model_len`, and call it `length`."""
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
