"""A rollout replica on vLLM."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, Wakeable, check_requests
from grpo_rl.rollout.model_info import expected_tensors, stop_token_ids
from grpo_rl.rollout.vllm.build import build_llm_engine
from grpo_rl.rollout.vllm.sampling_support import num_logprobs, sampled_logprobs, support_of
from grpo_rl.rollout.vllm.vllm_patches import SEED, ReportedArrays
from grpo_rl.rollout.weights.buckets import WeightBucket, WeightTransferError
from grpo_rl.rollout.weights.update_order import WeightUpdate
from grpo_rl.types import Completion, FinishReason, Request, Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmEngine:
    """vLLM's engine behind the RolloutEngine protocol: in this process, workers beside it for tensor parallelism.

    A request with a seed gives the same tokens whenever the weights are the same.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._stop_ids = stop_token_ids(spec)
        self._llm = build_llm_engine(spec)
        self._counts = spec.device == "cpu"
        """True where requests have their seeds in `extra_args`: see vllm_patches."""
        if self._counts:
            self._rpc("sample_by_counters")
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
        """Return whether tokens are handed over in the step that samples them, as on CPU.

        With vLLM's asynchronous scheduling, its default on GPUs and switched off where `EngineSpec.updates_in_flight` asks
        for it, the newest tokens are handed over one step later and would get the version of the weights that are live by then.
        """
        return not self._llm.vllm_config.scheduler_config.async_scheduling

    def submit(self, requests: Sequence[Request]) -> None:
        from vllm.inputs.engine import tokens_input

        self._update.check_can_sample()
        check_requests(requests, self._unfinished, self._spec.max_model_len)
        for request in requests:
            # Prefixes are shared under the same salt only: never across weight versions.
            prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self.weight_version))
            params = self._sampling_params(request.sampling)
            own_id = self._llm.add_request(request.request_id, prompt, params)
            if request.sampling.returns_support:
                assert params.logprobs is not None
                state: Any = self._llm.output_processor.request_states[own_id]
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
        self._rpc(
            "init_weight_transfer_engine",
            init_info={
                "master_address": rendezvous.master_address,
                "master_port": rendezvous.master_port,
                "rank_offset": rendezvous.rank_offset,
                "world_size": rendezvous.world_size,
                "timeout_s": rendezvous.timeout_s,
                "packed": True,
                "packed_buffer_size_bytes": self._spec.bucket_bytes,
            },
        )

    def start_weight_update(self, version: int) -> None:
        self._update.start(version, self.num_unfinished)
        self._rpc("start_weight_update")

    def load_bucket(self, bucket: WeightBucket) -> None:
        self._update.receive(bucket)
        self._rpc("update_weights", update_info=_update_info(bucket, self._spec.weight_backend))

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
        """Make vLLM note the live version beside every token that it samples from now on."""
        self._llm.set_weight_version(str(self._update.version))

    def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(method, kwargs=arguments)

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=None if self._counts else sampling.seed,
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
        reason = _FINISH_REASONS.get(sampled.finish_reason)
        if reason is None:
            raise RuntimeError(f"vLLM ended request {output.request_id} with {sampled.finish_reason!r}")
        logprobs: Any = sampled.logprobs
        sampling = self._unfinished.pop(output.request_id)
        return Completion(
            request_id=output.request_id,
            response_ids=np.array(sampled.token_ids, dtype=np.int32),
            logprobs=sampled_logprobs(logprobs),
            finish_reason=reason,
            versions=tuple((int(span.version), span.end - span.start) for span in sampled.weight_versions or ()),
            support=support_of(logprobs) if sampling.returns_support else None,
            cached_tokens=output.num_cached_tokens,
        )

    def _warm_up(self) -> None:
        """Run two tokens through: the first step allocates and compiles, and should not be part of a rollout."""
        sampling = Sampling(max_tokens=min(2, self._spec.max_model_len - 1), seed=0, ignore_eos=True)
        self.submit([Request(request_id="warm-up", prompt_ids=np.zeros(1, dtype=np.int32), sampling=sampling)])
        while self.num_unfinished:
            self.step()
        self._llm.reset_prefix_cache()


def _update_info(bucket: WeightBucket, backend: str) -> dict[str, Any]:
    """Return the bucket as the arguments of vLLM's transfer engine of this backend."""
    if backend == "object_store":
        return {"bucket": bucket}
    info: dict[str, Any] = {
        "names": list(bucket.names),
        "dtype_names": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
    }
    if backend == "ipc":
        info |= {"ipc_handles": bucket.ipc_handles, "tensor_sizes": list(bucket.sizes)}
    return info
