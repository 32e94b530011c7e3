"""Ways for weights into a vLLM worker, registered with vLLM's own weight-transfer interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_rl.processes.family import die_with
from grpo_rl.rollout.vllm.vllm_patches import CounterSampler, able, pack_experts_again, store_waits, whole_handle
from grpo_rl.rollout.weights import WeightBucket, WeightTransferError, with_digests_recorded

ENGINE_PREFIX = "grpo_rl_"
VERIFY_SUFFIX = "_verified"


def transfer_config(backend: str, verify: bool) -> WeightTransferConfig:
    return WeightTransferConfig(backend=f"{ENGINE_PREFIX}{backend}{VERIFY_SUFFIX if verify else ''}")


class RolloutWorkerExtension:
    """Methods for collective_rpc; its import in a worker registers this module's engines."""

    weight_transfer_engine: Any
    model_runner: Any

    def end_with(self, parent: int) -> None:
        """Have the kernel end this process with `parent`: vLLM's engine core would wait for ever."""
        die_with(parent)

    def sample_by_counters(self) -> bool:
        return CounterSampler(self.model_runner).install()

    def received_weight_digests(self) -> dict[str, str]:
        return dict(getattr(self.weight_transfer_engine, "received_digests", {}))


class _Verified:
    """Keeps a digest of each tensor that is loaded into the model."""

    model: Any
    received_digests: dict[str, str]

    def start_weight_update(self) -> None:
        self.received_digests = {}
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        load = self.model.load_weights
        self.model.load_weights = lambda weights: load(with_digests_recorded(weights, self.received_digests))
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            del self.model.load_weights


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """The object store needs no rendezvous."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    data: np.ndarray | bytes


class ObjectStoreEngine(WeightTransferEngine[NoInitInfo, BucketUpdateInfo]):
    """vLLM's layerwise reload rebuilds each layer: workers that packed weights dropped the originals."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketUpdateInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        raise WeightTransferError("weights that come through the object store need no connection")

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        shapes = tuple(tuple(shape) for shape in update_info.shapes)
        data = np.frombuffer(update_info.data, dtype=np.uint8)
        bucket = WeightBucket(tuple(update_info.names), tuple(update_info.dtype_names), shapes, data)
        self.model.load_weights(bucket.tensors())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


class IpcEngine(IPCWeightTransferEngine):
    """vLLM's own, for handles without classes (`plain_handle`)."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        handles = {uuid: whole_handle(handle) for uuid, handle in update_info["ipc_handles"].items()}
        super().update_weights(update_info | {"ipc_handles": handles})


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    """A meeting point, and how long a member waits there."""

    timeout_s: float


class NcclEngine(NCCLWeightTransferEngine):
    """vLLM's own, which may connect anew at any time: members can be lost in an update."""

    init_info_cls = NcclInitInfo  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:  # type: ignore[override]
        # vLLM's own `shutdown_weight_transfer_engine` is refused during an update; before 0.32 it only forgot the group.
        if self.model_update_group is not None:
            self.model_update_group.destroy()
            self.model_update_group = None
        with store_waits(init_info.timeout_s):
            super().init_transfer_engine(init_info)
        assert self.model_update_group is not None
        able(self.model_update_group)


for _name, _engine in (("object_store", ObjectStoreEngine), ("ipc", IpcEngine), ("nccl", NcclEngine)):
    WeightTransferEngineFactory.register_engine(f"{ENGINE_PREFIX}{_name}", _engine)
    _verified = type(f"Verified{_engine.__name__}", (_Verified, _engine), {})
    WeightTransferEngineFactory.register_engine(f"{ENGINE_PREFIX}{_name}{VERIFY_SUFFIX}", _verified)
