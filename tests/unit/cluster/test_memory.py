"""Memory that runs out: what is said of it, and how micro-batches are halved."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_rl.cluster.processes.out_of_memory import SPLIT, halved, out_of_memory, what_to_do
from grpo_rl.cluster.processes.worker_group import WorkerFailed, WorkerGroup
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
    "start actor": ("more ranks", False),
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


class Ranks(WorkerGroup):
    """Two ranks, without processes, that have memory for so many rollouts at once."""

    def __init__(self, room: int, smaller_passes: dict[str, MicroBatchRule] | None) -> None:
        self.role, self.workers, self.room, self.smaller_passes = "actor", [], room, smaller_passes
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 2

    def call_each(self, method: str, arguments: Any) -> list[str]:
        self.asked.append(arguments[0])
        if arguments[0] > self.room:
            raise OutOfMemory("actor.update failed on actor1: too much")
        return [f"{method} {rank}" for rank in range(len(arguments))]


def rollouts_of(rule: MicroBatchRule) -> list[int | None]:
    return [rule.max_rollouts] * (2 // rule.sequence_ranks)


ASK: Callable[[MicroBatchRule], Any] = rollouts_of


def test_ranks_are_lost_by_memory_that_runs_out_and_those_after_them_are_called_with_halves() -> None:
    ranks = Ranks(room=2, smaller_passes={})
    for half in (4, 2):
        with pytest.raises(WorkerFailed, match=rf"(?s)too much.*actor.update has micro-batches of {half} rollouts per rank"):
            ranks.call_in_passes("update", cut(rollouts=8), [[9] * 100], ASK)
        ranks = Ranks(2, ranks.smaller_passes)
    assert ranks.call_in_passes("update", cut(rollouts=8), [[9] * 100], ASK) == ["update 0", "update 1"]
    assert ranks.asked == [2]
    with pytest.raises(WorkerFailed):
        ranks.call_in_passes("logprobs", cut(rollouts=8), [[9] * 100], ASK)


@pytest.mark.parametrize("smaller", [None, {"update": cut(rollouts=1)}])
def test_without_the_setting_and_below_one_rollout_it_is_an_error(smaller: dict[str, MicroBatchRule] | None) -> None:
    ranks = Ranks(0, smaller)
    with pytest.raises(OutOfMemory, match="actor1: too much"):
        ranks.call_in_passes("update", cut(rollouts=2), [[9] * 100], ASK)
    assert len(ranks.asked) == 1


def test_a_longer_sequence_than_the_halved_rule_has_room_for_still_goes_through() -> None:
    ranks = Ranks(10**6, {"update": cut(tokens=100)})
    found: list[MicroBatchRule] = []

    def ask(rule: MicroBatchRule) -> list[int]:
        found.append(rule)
        return [1, 1]

    ranks.call_in_passes("update", cut(tokens=400), [[50, 130]], ask)
    assert found == [cut(tokens=130)]


def test_ranks_that_compute_a_pass_together_get_one_share_and_count_as_one() -> None:
    ranks = Ranks(1, {})
    rule = replace(cut(rollouts=8), sequence_ranks=2)
    with pytest.raises(WorkerFailed, match="micro-batches of 2 rollouts"):  # four rollouts meet on the one share of two ranks
        ranks.call_in_passes("update", rule, [[9] * 4], ASK)
    assert Ranks(2, ranks.smaller_passes).call_in_passes("update", rule, [[9] * 4], ASK) == ["update 0"]
