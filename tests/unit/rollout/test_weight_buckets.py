from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.rollout import weights
from grpo_rl.rollout.senders import ObjectStoreSender, make_sender
from grpo_rl.rollout.weights import (
    WeightTransferError,
    check_digests,
    describe,
    digest,
    group_by_bytes,
    merge_ranks,
    pack,
    pack_buckets,
)

FLOATS = torch.arange(6, dtype=torch.float32).view(2, 3)
HALVES = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
SCALAR = torch.tensor(4, dtype=torch.int64)


def test_tensors_come_out_of_a_bucket_bit_by_bit_as_views_of_its_buffer() -> None:
    source = {"f": FLOATS, "h": HALVES, "s": SCALAR, "none": torch.empty(0, 4)}
    [bucket] = pickle.loads(pickle.dumps(list(pack_buckets(source.items(), 1000))))
    out = dict(bucket.tensors())
    for name, tensor in source.items():
        assert out[name].dtype == tensor.dtype and torch.equal(out[name], tensor)
    assert bucket.data is not None
    start = sum(bucket.sizes[: bucket.names.index("f")])
    bucket.data[start : start + 4] = np.frombuffer(np.float32(99).tobytes(), dtype=np.uint8)
    assert out["f"][0, 0] == 99
    bucket.data.flags.writeable = False
    assert torch.equal(dict(bucket.tensors())["h"], HALVES)


def test_buckets_are_filled_up_to_their_size_and_larger_tensors_get_their_own() -> None:
    sizes = [10, 20, 30, 100, 5, 60, 1]
    named = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    groups = [[name for name, _ in group] for group in group_by_bytes(named, 60)]
    assert groups == [["10", "20", "30"], ["100"], ["5"], ["60"], ["1"]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.integers(0, 40)), max_size=12),
       st.integers(1, 200))  # fmt: skip
def test_whatever_goes_in_comes_out_once_and_unchanged(tensors: list[tuple[str, int]], bucket_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    named = {
        f"{i}": torch.randint(0, 100, (size,), generator=generator).to(getattr(torch, dtype))
        for i, (dtype, size) in enumerate(tensors)
    }
    buckets = list(pack_buckets(named.items(), bucket_bytes))
    out = [entry for bucket in buckets for entry in bucket.tensors()]
    assert sorted(name for name, _ in out) == sorted(named)
    assert all(digest(tensor) == digest(named[name]) for name, tensor in out)
    assert all(bucket.nbytes <= bucket_bytes or len(bucket.names) == 1 for bucket in buckets)


def test_digests_tell_one_flipped_bit_the_shape_and_the_type() -> None:
    flipped = FLOATS.clone()
    flipped.view(torch.uint8)[1, 4] ^= 1
    digests = {digest(t) for t in (FLOATS, flipped, FLOATS.view(3, 2), FLOATS.view(torch.int32))}
    assert len(digests) == 4
    assert digest(FLOATS.clone()) == digest(FLOATS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_digests_tell_rows_that_changed_places_and_any_element_that_changed(dtype: torch.dtype, monkeypatch) -> None:
    # Few bits are set in each number, and the number of bytes is no multiple of a word.
    tensor = torch.zeros(1 << 12, 33, dtype=dtype)
    tensor[::256, 3] = torch.arange(16).to(dtype)
    tensor = tensor[:-1, :]
    digests = {digest(tensor), digest(tensor.flip(0)), digest(tensor.roll(1, 0)), digest(tensor[::2])}
    swapped = tensor.clone()
    swapped[[256, 1 << 11]] = tensor[[1 << 11, 256]]
    digests.add(digest(swapped))
    for place in (0, 1, tensor.numel() // 2, tensor.numel() - 1):
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        digests.add(digest(changed))
    assert len(digests) == 9
    whole = digest(tensor)
    monkeypatch.setattr(weights, "DIGEST_BYTES", 1 << 10)
    assert digest(tensor) == whole, "pieces are summed at their places"


def test_the_bytes_of_a_digest_do_not_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert digest(FLOATS).startswith("torch.float32(2, 3) ")


def test_damaged_missing_and_additional_tensors_are_named() -> None:
    check_digests({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, "replica 0")
    with pytest.raises(WeightTransferError, match=r"replica 1: 3 of 3 tensors .*: b, c, d"):
        check_digests({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}, "replica 1")


def test_ranks_are_merged_into_one_bucket_with_all_their_handles_unless_they_sent_different_tensors() -> None:
    group = [("f", FLOATS)]
    one, two = (replace(describe(group), ipc_handles={f"GPU-{n}": (n,)}) for n in (1, 2))
    assert merge_ranks([one, two]).ipc_handles == {"GPU-1": (1,), "GPU-2": (2,)}
    merged = merge_ranks([None, describe(group), pack(group)])
    assert merged.data is not None and merged.ipc_handles is None
    for wrong in ([describe(group), describe([("h", HALVES)])], [None]):
        with pytest.raises(WeightTransferError, match="different tensors"):
            merge_ranks(wrong)


def test_a_sender_has_the_digests_of_its_last_update() -> None:
    sender = make_sender("object_store", 1 << 10, verify=True)
    list(sender.buckets([("h", HALVES)]))
    out = {name: t for b in sender.buckets([("f", FLOATS.bfloat16()), ("s", SCALAR)]) for name, t in b.tensors()}
    assert out["f"].dtype == torch.bfloat16 and out["s"].dtype == torch.int64
    assert sender.sent_digests() == {"f": digest(FLOATS.bfloat16()), "s": digest(SCALAR)}


def test_a_rank_that_is_not_the_source_cuts_the_same_buckets_without_bytes() -> None:
    named = [(str(i), torch.full((10,), float(i))) for i in range(5)]
    source = list(ObjectStoreSender(90, is_source=True).buckets(named))
    other = list(ObjectStoreSender(90, is_source=False).buckets(named))
    assert [bucket.names for bucket in source] == [bucket.names for bucket in other] == [("0", "1"), ("2", "3"), ("4",)]
    assert all(bucket.data is None for bucket in other)
