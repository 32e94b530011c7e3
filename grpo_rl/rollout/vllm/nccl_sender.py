"""The trainer's side of a weight update over NCCL, for engines on GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_rl.rollout.engine import NcclRendezvous
from grpo_rl.rollout.senders import BaseSender
from grpo_rl.rollout.vllm.vllm_patches import check_version, store_waits
from grpo_rl.rollout.weights import NamedTensor, WeightBucket, WeightTransferError, describe, write_flat

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator


class NcclSender(BaseSender):
    """A sender whose source rank broadcasts each bucket to all engine processes; it yields descriptions only.

    A broadcast meets the engines in their `load_bucket`, so it starts before the description is yielded,
    in a thread of its own: the first one sets connections up and blocks until the others come. vLLM cuts
    what it receives by `bucket_bytes` as the groups are cut here: one bucket is one broadcast.
    """

    def __init__(
        self,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        verify: bool = False,
        is_source: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(bucket_bytes, dtype, verify, is_source)
        self.timeout_s = timeout_s
        self._communicator: PyNcclCommunicator | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-nccl")

    def connect(self, rendezvous: NcclRendezvous) -> None:
        if not self.is_source:
            return
        check_version()
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
        place = {"master_address": rendezvous.master_address, "master_port": rendezvous.master_port}
        with store_waits(rendezvous.timeout_s):
            self._communicator = trainer_init(place | {"world_size": rendezvous.world_size})

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        for group in self.groups(named_full_tensors):
            bucket = describe(group)
            if not self.is_source:
                yield bucket
                continue
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
            write_flat(group, flat)
            torch.cuda.current_stream().synchronize()
            sent = self._thread.submit(self._broadcast, flat)
            yield bucket
            try:
                sent.result(timeout=self.timeout_s)
            except TimeoutError as error:
                raise WeightTransferError(
                    f"the engines did not receive the bucket with {bucket.names[0]} within {self.timeout_s:g} s"
                ) from error

    def close(self) -> None:
        # Without waiting: a broadcast whose receiver died never returns.
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None

    def _broadcast(self, flat: Tensor) -> None:
        """Send the bytes, and return when they have left."""
        if self._communicator is None:
            raise WeightTransferError("the sender is not connected to the engines: call connect first")
        with torch.cuda.device(flat.device):
            stream = torch.cuda.Stream()
            self._communicator.broadcast(flat, src=0, stream=stream)
            stream.synchronize()
