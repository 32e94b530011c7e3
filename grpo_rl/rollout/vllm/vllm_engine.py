"""A rollout replica on vLLM."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_rl.errors import ClusterError, ConfigError
from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, Wakeable, check_requests
from grpo_rl.rollout.engine_environment import engine_environment, set_missing, temporary_files
from grpo_rl.rollout.model_info import expected_tensors, kv_bytes_per_token, load_config, stop_token_ids
from grpo_rl.rollout.vllm.sampling_support import num_logprobs, sampled_logprobs, support_of
from grpo_rl.rollout.vllm.vllm_patches import SEED, ReportedArrays, own_threads, plain_handle
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, WeightUpdate
from grpo_rl.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class VllmEngine:
    """`EngineSpec.separate_process`: vLLM samples in a child while this process reads what it sampled."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._stop_ids = stop_token_ids(spec)
        self._llm = build_llm_engine(spec)
        if spec.separate_process:
            self._rpc("end_with", parent=os.getpid())
        from vllm.outputs import CompletionOutput  # after the variables that vLLM reads on import are set

        self._counts = spec.device == "cpu" and all(self._rpc("sample_by_counters"))
        self._labels = "weight_versions" in CompletionOutput.__dataclass_fields__
        self._update = WeightUpdate(expected_tensors(spec), in_flight=self.updates_in_flight)
        self._label_tokens()
        self._unfinished: dict[str, Sampling] = {}
        if spec.weight_backend == "ipc":
            # No rendezvous: this only says that buckets come packed, to be copied out of one buffer.
            self._rpc("init_weight_transfer_engine", init_info={"packed": True})
        self._warm_up()

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def weight_version(self) -> int:
        return self._update.version

    @property
    def updates_in_flight(self) -> bool:
        """Whether every token is labelled with the weights that sampled it, also if an update comes in
        between.

        A separate process labels tokens (vLLM 0.32 or newer); otherwise they must be handed over in the step
        that samples them, and vLLM's asynchronous scheduling hands the newest over one step later.
        """
        at_once = self._spec.separate_process or not self._llm.vllm_config.scheduler_config.async_scheduling
        return self._labels and at_once

    def submit(self, requests: Sequence[Request]) -> None:
        from vllm.inputs.engine import tokens_input

        self._update.check_can_sample()
        check_requests(requests, self._unfinished, self._spec.max_model_len)
        for request in requests:
            # Prefixes are shared under the same salt only: never across weight versions.
            prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self.weight_version))
            params = self._sampling_params(request.sampling)
            own_id = self._llm.add_request(request.request_id, prompt, params)
            assert params.logprobs is not None
            state: Any = self._llm.output_processor.request_states[own_id]
            if hasattr(state, "logprobs_processor"):
                state.logprobs_processor = ReportedArrays(params.logprobs)
            self._unfinished[request.request_id] = request.sampling

    def step(self) -> list[Completion]:
        if not self._unfinished or self._update.active:
            return []
        return [self._completion(output) for output in self._llm.step() if output.finished]  # type: ignore[arg-type]

    def abort_all(self) -> None:
        self._llm.abort_request(list(self._unfinished))
        self._unfinished.clear()

    def connect(self, rendezvous: NcclRendezvous) -> None:
        if self._spec.weight_backend != "nccl":
            raise WeightTransferError(f"weights come by {self._spec.weight_backend}: there is nothing to connect")
        packed = {"packed": True, "packed_buffer_size_bytes": self._spec.bucket_bytes}
        self._rpc("init_weight_transfer_engine", init_info=asdict(rendezvous) | packed)

    def start_weight_update(self, version: int) -> None:
        self._update.start(version, self.num_unfinished)
        if self._spec.separate_process:
            # It goes on sampling by itself otherwise. Requests stay where they are.
            self._core("pause_scheduler", "keep", False)
        self._rpc("start_weight_update")

    def load_bucket(self, bucket: WeightBucket) -> None:
        self._update.receive(bucket)
        self._rpc("update_weights", update_info=update_info(bucket, self._spec))

    def finish_weight_update(self, keep_cache: bool = False) -> None:
        self._update.check_complete()
        self._rpc("finish_weight_update")
        # Kept, the old prefixes are no danger to later requests, whose salt is another.
        keeps = keep_cache and bool(self._unfinished)
        # Running requests are put back among the waiting ones, and read again as a whole when their turn comes.
        if not keeps and not self._llm.reset_prefix_cache(reset_running_requests=bool(self._unfinished)):
            raise WeightTransferError("vLLM kept its prefix cache, which was computed with the old weights")
        self._update.finish()
        self._label_tokens()
        if self._spec.separate_process:
            self._core("resume_scheduler")

    def received_digests(self) -> dict[str, str]:
        by_worker: list[dict[str, str]] = self._rpc("received_weight_digests")
        if any(digests != by_worker[0] for digests in by_worker):
            raise WeightTransferError("the tensor-parallel processes of one engine received different tensors")
        return by_worker[0]

    def sleep(self) -> None:
        if not self._spec.sleep_mode:
            return
        self._update.lose()
        self.abort_all()
        # Level 2 drops the weights instead of keeping a copy in host memory: an update follows anyway.
        self._llm.sleep(level=2)

    def wake_up(self, what: Wakeable = "all") -> None:
        if self._spec.sleep_mode:
            self._llm.wake_up(None if what == "all" else [what])

    def close(self) -> None:
        if self._llm is None:
            return
        self._llm.engine_core.shutdown()
        self._llm = None  # type: ignore[assignment]
        gc.collect()

    def _label_tokens(self) -> None:
        if self._labels:
            self._llm.set_weight_version(str(self._update.version))

    def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(method, kwargs=arguments)

    def _core(self, method: str, *arguments: Any) -> Any:
        """Call the engine core in its separate process: vLLM's synchronous client cannot pause it."""
        return self._llm.engine_core.call_utility(method, *arguments)  # type: ignore[attr-defined]

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            # On CPUs torch cannot put a generator back, which vLLM does if it reads a prompt in parts.
            seed=None if self._spec.device == "cpu" else sampling.seed,
            extra_args={SEED: sampling.seed} if self._counts and sampling.seed is not None else None,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else list(self._stop_ids),
            logprobs=num_logprobs(sampling, self._llm.model_config.get_vocab_size()),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: RequestOutput) -> Completion:
        sampled = output.outputs[0]
        reason: Any = sampled.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {reason!r}")
        logprobs: Any = sampled.logprobs
        sampling = self._unfinished.pop(output.request_id)
        return Completion(
            request_id=output.request_id,
            response_ids=np.array(sampled.token_ids, dtype=np.int32),
            logprobs=sampled_logprobs(logprobs),
            finish_reason=reason,
            versions=self._versions(sampled),
            support=support_of(logprobs) if sampling.returns_support else None,
            cached_tokens=output.num_cached_tokens,
        )

    def _versions(self, sampled: CompletionOutput) -> tuple[tuple[int, int], ...]:
        """Return the tokens' labels; without them no request has seen an update."""
        if self._labels:
            return tuple((int(span.version), span.end - span.start) for span in sampled.weight_versions or ())
        return ((self.weight_version, len(sampled.token_ids)),) if sampled.token_ids else ()

    def _warm_up(self) -> None:
        """Run two tokens through: the first step allocates and compiles."""
        sampling = Sampling(max_tokens=min(2, self._spec.max_model_len - 1), seed=0, ignore_eos=True)
        self.submit([Request(request_id="warm-up", prompt_ids=np.zeros(1, dtype=np.int32), sampling=sampling)])
        while self.num_unfinished:
            self.step()
        self._llm.reset_prefix_cache()


def update_info(bucket: WeightBucket, spec: EngineSpec) -> dict[str, Any]:
    """Return the bucket as plain values for our transfer engine."""
    info: dict[str, Any] = {
        "names": list(bucket.names),
        "dtype_names": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
    }
    if spec.weight_backend == "object_store":
        # vLLM's messages between processes hold bytes, its calls of workers arrays.
        info["data"] = memoryview(bucket.data) if spec.separate_process else bucket.data  # type: ignore[arg-type]
    if spec.weight_backend == "ipc":
        handles = {uuid: plain_handle(handle) for uuid, (handle,) in (bucket.ipc_handles or {}).items()}
        info |= {"ipc_handles": handles, "tensor_sizes": list(bucket.sizes)}
    return info


_CPU_BLOCK_TOKENS = 128


def build_llm_engine(spec: EngineSpec) -> LLMEngine:
    """Sets missing environment variables. Raises ConfigError for an argument that vLLM does not have."""
    set_missing(engine_environment(spec))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_rl.rollout.vllm.weight_receiver import transfer_config

    arguments = engine_arguments(spec)
    arguments["weight_transfer_config"] = transfer_config(spec.weight_backend, spec.verify_checksum)
    unknown = [key for key in spec.engine_kwargs if key not in EngineArgs.__dataclass_fields__]
    if unknown:
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: vLLM has no argument {', '.join(unknown)}")
    if spec.device == "cpu":
        check_compiled_part()
    with own_threads(spec), temporary_files():
        return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=spec.separate_process)


def check_compiled_part() -> None:
    """Raise ClusterError if vLLM's compiled part is not loaded, which vLLM only logs."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(torch.ops._C, "init_cpu_memory_env"):
        return
    causes = []
    for library in sorted(Path(str(importlib.util.find_spec("vllm").origin)).parent.glob("_C*.so")):  # type: ignore[union-attr]
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            causes.append(str(error))
    remedy = ": sudo apt-get install libnuma1 (Debian, Ubuntu), or numactl-libs (Fedora)" if "libnuma" in str(causes) else ""
    raise ClusterError(f"vLLM's compiled part cannot be loaded: {'; '.join(causes) or 'no reason is given'}{remedy}")


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    parallel = spec.tensor_parallel_size
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": spec.trust_remote_code,
        "hf_overrides": dict(spec.override_config) | ({"head_dtype": "float32"} if spec.fp32_lm_head else {}),
        # Sampling is what the request says; stop tokens are passed with it.
        "generation_config": "vllm",
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": max(spec.max_num_batched_tokens, spec.max_num_seqs),
        "enable_prefix_caching": spec.enable_prefix_caching,
        "enforce_eager": spec.enforce_eager,
        "tensor_parallel_size": parallel,
        "quantization": spec.quantization,
        # Said outright: inside a Ray actor vLLM would otherwise start Ray workers of its own, which only several nodes need.
        "distributed_executor_backend": "ray" if spec.num_nodes > 1 else "mp" if parallel > 1 else "uni",
        "worker_extension_cls": "grpo_rl.rollout.vllm.weight_receiver.RolloutWorkerExtension",
        "logprobs_mode": "processed_logprobs",
        # No limit of its own: how many are asked for follows from the request (sampling_support.num_logprobs).
        "max_logprobs": -1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.device == "cpu":
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(spec)
    else:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        arguments["enable_sleep_mode"] = spec.sleep_mode
        if not (spec.enforce_eager or {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & set(spec.engine_kwargs)):
            arguments["cudagraph_capture_sizes"] = graph_sizes(spec.max_num_seqs)
        if not (spec.enforce_eager or spec.use_torch_compile):
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if spec.updates_in_flight and not spec.separate_process:
            # Its default: tokens are handed over a step late, so that all requests would have to end before an update.
            arguments["async_scheduling"] = False
        if spec.kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_memory_bytes
    return arguments | spec.engine_kwargs


def graph_sizes(most: int) -> list[int]:
    """vLLM's up to 512, then to 1,024, where an H100's step took 50 ms with a graph and 57 ms without."""
    sizes, most = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 128)], min(most, 1024)
    return [size for size in sizes if size < most] + [most]


def cpu_cache_bytes(spec: EngineSpec) -> int:
    """Return `kv_cache_gib`, or less if max_num_seqs full rollouts fill less: vLLM touches all of it."""
    limit = int(spec.kv_cache_gib * 2**30)
    blocks_per_rollout = -(-spec.max_model_len // _CPU_BLOCK_TOKENS)
    # One rollout more than can run: vLLM keeps a block for itself.
    tokens = (spec.max_num_seqs + 1) * blocks_per_rollout * _CPU_BLOCK_TOKENS
    return min(limit, tokens * kv_bytes_per_token(load_config(spec), spec.dtype))
