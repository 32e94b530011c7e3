"""Memory that runs out: what is said of it, and how micro-batches are halved."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_rl.cluster.recovery.out_of_memory import SPLIT, Cut, halved, out_of_memory, what_to_do
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.fields import leaves
from grpo_rl.errors import OutOfMemory

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.12 GiB is free. "
    "Process 1 has 78.03 GiB memory in use."
)


def test_torchs_own_refusal_on_a_cpu_is_told_with_what_was_asked_for_and_what_is_free() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    found = str(out_of_memory(caught.value))
    assert re.search(r"asked for [\d,.]+ GiB, [\d,.]+ GiB of [\d,.]+ GiB of the machine's memory are free$", found), found


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError(CUDA), "OutOfMemoryError: CUDA out of memory; asked for 2.50 GiB, "),
        (MemoryError("no room for rank 1"), "MemoryError: no room for rank 1; "),
        (MemoryError(), "MemoryError: no message; "),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "RuntimeError: CUDA error: CUBLAS"),
    ],
)
def test_every_way_to_say_it_is_understood(error: Exception, says: str) -> None:
    assert str(out_of_memory(error)).startswith(says)


def test_other_errors_are_not_taken_for_it() -> None:
    assert out_of_memory(RuntimeError("the size of tensor a (3) must match")) is None
    assert out_of_memory(ValueError("memory")) is None


CALLS = {
    "actor.update": ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu", True),
    "critic.values": ("critic.ppo_max_token_len_per_gpu", True),
    "reference.logprobs": ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", True),
    "start actor again": ("more ranks", False),
    "sampling": ("actor_rollout_ref.rollout.max_num_seqs", False),
    "start rollout0 again": ("actor_rollout_ref.rollout.max_num_seqs", False),
    "actor.export": ("actor_rollout_ref.actor.fsdp_config.param_offload", False),
    "tiny.work": ("more memory", False),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_keys_of_the_role_are_named_and_exist(call: str) -> None:
    words, may_split = CALLS[call]
    advice = what_to_do(call)
    assert words in advice and advice.endswith(SPLIT) == may_split
    assert [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice.replace("=split", "")) if key not in leaves()] == []


def cut(rollouts: int | None = None, tokens: int | None = None) -> MicroBatchRule:
    return MicroBatchRule(tokens, rollouts)


@pytest.mark.parametrize(
    ("rule", "lengths", "ranks", "expected"),
    [
        (cut(rollouts=4), [[5] * 8], 1, cut(rollouts=2)),
        (cut(rollouts=1), [[5] * 8], 1, None),
        # Only 3 of the 100 ever meet on a rank: half of 100 would be the same micro-batch again.
        (cut(rollouts=100), [[5] * 6, [5] * 2], 2, cut(rollouts=1)),
        (cut(tokens=1000), [[100] * 6], 1, cut(tokens=300)),
        (cut(tokens=1000), [[100] * 6], 2, cut(tokens=150)),
        # A sequence is never cut.
        (cut(tokens=150), [[100] * 6], 1, cut(tokens=100)),
        (cut(tokens=100), [[100] * 6], 1, None),
    ],
)
def test_a_rule_is_halved_down_to_one_sequence(rule: Any, lengths: Any, ranks: int, expected: Any) -> None:
    assert halved(rule, lengths, ranks) == expected


class Ranks:
    """Two ranks that have memory for so many rollouts at once."""

    role = "actor"

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[int] = []
        self.recovered: list[str] = []

    def __len__(self) -> int:
        return 2

    def call_each(self, method: str, arguments: list[int]) -> list[str]:
        self.asked.append(arguments[0])
        if arguments[0] > self.room:
            raise OutOfMemory("actor.update failed on actor1: too much")
        return [f"{method} {rank}" for rank in range(len(arguments))]

    def recover(self, error: Exception, what: str) -> None:
        self.recovered.append(what)


def rollouts_of(rule: MicroBatchRule) -> list[int | None]:
    return [rule.max_rollouts] * (2 // rule.sequence_ranks)


ASK: Callable[[MicroBatchRule], Any] = rollouts_of


def test_a_call_is_made_again_with_halves_until_there_is_room_and_later_ones_begin_there() -> None:
    ranks = Ranks(room=2)
    cut_ = Cut(ranks, cut(rollouts=8), splits=True)
    assert cut_.call("update", [[9] * 100], ASK) == ["update 0", "update 1"]
    assert cut_.call("update", [[9] * 100], ASK) == ["update 0", "update 1"]
    assert ranks.asked == [8, 4, 2, 2] and len(ranks.recovered) == 2
    assert ranks.recovered[0] == "actor.update with micro-batches of 4 rollouts per rank"


@pytest.mark.parametrize(("splits", "room"), [(False, 1), (True, 0)])
def test_without_the_setting_and_below_one_rollout_it_is_an_error(splits: bool, room: int) -> None:
    ranks = Ranks(room)
    with pytest.raises(OutOfMemory, match="actor1: too much"):
        Cut(ranks, cut(rollouts=2), splits).call("update", [[9] * 100], ASK)
    assert ranks.asked == ([2] if not splits else [2, 1])


def test_a_longer_sequence_than_the_halved_rule_has_room_for_still_goes_through() -> None:
    ranks: Any = Ranks(room=10**6)
    found: list[MicroBatchRule] = []
    Cut(ranks, cut(tokens=100), splits=True).call("update", [[50, 130]], lambda rule: [found.append(rule) or 1] * 2)
    assert found == [cut(tokens=130)]


def test_ranks_that_compute_a_pass_together_get_one_share_and_count_as_one() -> None:
    ranks = Ranks(room=1)
    rule = replace(cut(rollouts=4), sequence_ranks=2)
    assert Cut(ranks, rule, splits=True).call("update", [[9] * 4], ASK) == ["update 0"]
    assert ranks.asked == [4, 2, 1], "four rollouts meet on the one share of two ranks"
