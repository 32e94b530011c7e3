"""Weights by NCCL with a communicator that fails or hangs in the middle of a transfer: a stand-in that notes what it is given."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_rl.rollout.engine import NcclRendezvous
from grpo_rl.rollout.senders import NcclSender
from grpo_rl.rollout.weights import WeightTransferError

pytest.importorskip("vllm", reason="needs vLLM, by whose function the sender connects")

TENSORS = {f"w{number}": torch.full((4,), float(number)) for number in range(4)}
BUCKET_BYTES = 32
"""Two of them."""


class Communicator:
    """A group of processes. Broadcast number `fails` raises, number `hangs` never ends."""

    available, disabled = True, False

    def __init__(self, fails: int | None = None, hangs: int | None = None) -> None:
        self.fails, self.hangs = fails, hangs
        self.sent: list[list[float]] = []
        self.released = threading.Event()
        self.destroyed = False

    def broadcast(self, flat: torch.Tensor, src: int, stream: Any) -> None:
        number = len(self.sent)
        if number == self.fails:
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        if number == self.hangs:
            self.released.wait(60)
        self.sent.append(flat.view(torch.float32).tolist())

    def destroy(self) -> None:
        self.destroyed = True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicator]]:
    """The groups that the next connections make, and torch.cuda as far as the sender uses it."""
    made: list[Communicator] = []
    coming: list[Communicator] = []
    from vllm.distributed.weight_transfer import nccl_common

    def connect(settings: dict[str, Any]) -> Communicator:
        made.append(coming.pop(0))
        return made[-1]

    monkeypatch.setattr(nccl_common, "trainer_init", connect)
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, stand_in in (
        ("current_device", lambda: "cpu"),
        ("current_stream", lambda: stream),
        ("Stream", lambda: stream),
        ("device", lambda device: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield coming
    for group in made:
        if isinstance(group, Communicator):
            group.released.set()


def sender_to(groups: list[Communicator], *coming: Communicator, timeout_s: float = 30.0) -> NcclSender:
    groups.extend(coming)
    sender = NcclSender(BUCKET_BYTES, timeout_s=timeout_s)
    sender.connect(NcclRendezvous("127.0.0.1", 1, world_size=2))
    return sender


def test_a_broadcast_that_fails_ends_the_walk_and_a_new_group_gets_every_tensor(groups: list[Communicator]) -> None:
    broken, whole = Communicator(fails=1), Communicator()
    unconnected = NcclSender(BUCKET_BYTES).buckets(TENSORS.items())
    next(unconnected)
    with pytest.raises(WeightTransferError, match="not connected"):
        next(unconnected)
    sender = sender_to(groups, broken, whole)
    walk = sender.buckets(TENSORS.items())
    assert next(walk).names == ("w0", "w1")
    assert next(walk).names == ("w2", "w3")
    with pytest.raises(RuntimeError, match="remote process exited"):
        next(walk)
    assert broken.sent == [[0.0] * 4 + [1.0] * 4]
    sender.connect(NcclRendezvous("127.0.0.1", 2, world_size=2))
    assert broken.destroyed
    assert [bucket.names for bucket in sender.buckets(TENSORS.items())] == [("w0", "w1"), ("w2", "w3")]
    assert whole.sent == [[0.0] * 4 + [1.0] * 4, [2.0] * 4 + [3.0] * 4]
    sender.close()


def test_a_broadcast_that_never_ends_is_given_up_at_the_deadline_and_names_a_tensor(groups: list[Communicator]) -> None:
    sender = sender_to(groups, Communicator(hangs=1), timeout_s=0.2)
    walk = sender.buckets(TENSORS.items())
    next(walk), next(walk)
    with pytest.raises(WeightTransferError, match=r"did not receive the bucket with w2 within 0\.2 s"):
        next(walk)
    sender.close()


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own communicator of two processes, as VLLM_DISABLE_PYNCCL=1 or a missing libnccl makes it."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    group = StatelessProcessGroup(rank=0, world_size=2, store=None)
    return PyNcclCommunicator(group, "cpu")


def test_a_communicator_that_switched_itself_off_is_refused_by_the_sender(switched_off: Any, groups: list[Any]) -> None:
    with pytest.raises(WeightTransferError, match=r"switched off in this process.*VLLM_DISABLE_PYNCCL.*backend=object_store"):
        sender_to(groups, switched_off)


def test_a_communicator_that_switched_itself_off_is_refused_by_the_engine(
    switched_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    from grpo_rl.rollout.vllm.weight_receiver import NcclEngine, NcclInitInfo

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda *_: switched_off)
    engine = NcclEngine.__new__(NcclEngine)
    engine.model_update_group, engine.parallel_config = None, None  # type: ignore[assignment]
    place = {"master_address": "127.0.0.1", "master_port": 1}
    with pytest.raises(WeightTransferError, match="switched off in this process"):
        engine.init_transfer_engine(NcclInitInfo(**place, rank_offset=1, world_size=2, timeout_s=1.0))
