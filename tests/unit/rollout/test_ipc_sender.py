"""Weights by CUDA IPC as far as a CPU can tell: what the buffer is allocated with, and how often it is exported."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_rl import gpu_allocator
from grpo_rl.rollout.senders import IpcSender
from grpo_rl.rollout.vllm.vllm_patches import plain_handle, whole_handle
from grpo_rl.rollout.weights import WeightTransferError

TENSORS = {f"w{number}": torch.full((4,), float(number)) for number in range(4)}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that the allocator was given, one after the other."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for name in gpu_allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return given


@pytest.mark.parametrize(
    ("user", "ranks", "buffer"),
    [
        ("", "expandable_segments:True", "expandable_segments:False"),
        ("expandable_segments:False", "expandable_segments:False", "expandable_segments:False"),
        (
            "max_split_size_mb:512, expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8]",
            "max_split_size_mb:512,expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8]",
            "max_split_size_mb:512,expandable_segments:False,roundup_power2_divisions:[256:1,512:2,>:8]",
        ),
    ],
)
@pytest.mark.parametrize("variable", gpu_allocator.VARIABLES)
def test_segments_grow_except_for_the_buffer_that_engines_open(
    user: str, ranks: str, buffer: str, variable: str, allocator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, user)
    gpu_allocator.use_expandable_segments()
    with gpu_allocator.shareable_memory():
        assert allocator == [ranks, buffer]
    assert allocator == [ranks, buffer, ranks]


def test_torch_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8]")
    with gpu_allocator.shareable_memory():
        pass
    torch._C._accelerator_setAllocatorSettings(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


@pytest.mark.parametrize("readers", [1, 2])
def test_the_buffer_is_not_of_expandable_segments_and_exported_once_for_each_engine_on_the_gpu(
    readers: int, allocator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[int] = []

    def export(flat: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        exported.append(len(allocator))
        return None, (0, len(exported) - 1)

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", export)
    for name, stand_in in (
        ("ipc_collect", lambda: None),
        ("current_device", lambda: "cpu"),
        ("get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")),
        ("current_stream", lambda: SimpleNamespace(synchronize=lambda: None)),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    buckets = list(IpcSender(bucket_bytes=32, readers=readers).buckets(TENSORS.items()))
    assert [bucket.names for bucket in buckets] == [("w0", "w1"), ("w2", "w3")]
    assert allocator == ["expandable_segments:False", "expandable_segments:True"]
    assert len(exported) == readers and buckets[0].ipc_handles == buckets[1].ipc_handles
    # Each engine on the GPU opens a handle of its own.
    opened = [bucket.of_reader(number).ipc_handles for bucket in buckets[:1] for number in range(readers)]
    assert opened == [{"GPU-1": ((0, number),)} for number in range(readers)]


def test_a_handle_travels_between_processes_as_plain_values() -> None:
    msgspec = pytest.importorskip("msgspec", reason="comes with vLLM, which sends with it")
    flat = torch.zeros(8, dtype=torch.uint8)
    kinds = type(flat), flat.size(), flat.stride(), 0, type(flat._typed_storage()), flat.dtype
    handle = (*kinds, 3, b"handle", 8, 0, False, b"counter", 64, b"event", True)
    assert whole_handle(msgspec.msgpack.decode(msgspec.msgpack.encode(plain_handle(handle)))) == handle
    with pytest.raises(WeightTransferError, match=r"float16.*not"):
        plain_handle((*kinds[:5], torch.float16, *handle[6:]))
