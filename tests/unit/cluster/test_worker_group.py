"""What a worker's process fetches, how it reports what failed in it, and what is said where its memory runs out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from grpo_rl.cluster.processes import worker_group
from grpo_rl.cluster.processes.worker_group import (
    RemoteError,
    Stored,
    WorkerHost,
    cause_line,
    is_broken,
    what_to_do,
)
from grpo_rl.cluster.session.ray_session import store_bytes
from grpo_rl.config.schema.fields import leaves
from grpo_rl.machine_memory import out_of_memory
from grpo_rl.workers.instruments import Instruments


class Echo:
    def both(self, one: Any, other: Any = None) -> tuple[Any, Any]:
        return one, other


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The references that were fetched, in order; each is fetched as itself in upper case."""
    found: list[str] = []

    def get(ref: str) -> str:
        if ref == "lost":
            raise OSError("the object is gone")
        found.append(ref)
        return ref.upper()

    monkeypatch.setattr(worker_group, "_get", get)
    return found


def make_host() -> WorkerHost:
    host = WorkerHost.__new__(WorkerHost)
    host._instruments = Instruments("host")
    host._worker, host._fetched, host._calls = Echo(), ("", None), {}
    return host


def test_calls_that_carry_a_stored_value_fetch_it_once_until_another_takes_its_place(fetched: list[str]) -> None:
    host, first, second = make_host(), Stored("a"), Stored("b")
    assert host.call("both", first, 5) == ("A", 5)
    assert host.call("both", first) == ("A", None)
    assert host.call("both", "plain", first) == ("plain", "A")
    assert fetched == ["a"]
    assert host.call("both", second) == ("B", None)
    assert host.call("both", first) == ("A", None)
    assert fetched == ["a", "b", "a"]


def test_a_value_that_is_gone_is_reported_as_any_other_failure_and_asked_for_again(fetched: list[str]) -> None:
    host = make_host()
    for _ in range(2):
        with pytest.raises(RemoteError, match="the object is gone"):
            host.call("both", Stored("lost"))
    assert host.call("both", Stored("a")) == ("A", None)


def test_the_object_store_grows_with_the_machine_its_shared_memory_and_its_container() -> None:
    cases = {(500, 1000, 500): 150, (500, 1000, 100): 80, (900, 100, 500): 30, (4, 8, 8): 2, (500, 1000, 0.06): 2}
    found = {sizes: store_bytes(*(size * 2**30 for size in sizes)) / 2**30 for sizes in cases}
    assert found == cases


def test_an_error_of_rays_is_told_by_the_line_that_says_what_happened():
    traceback = "\x1b[36mray::WorkerHost.build()\x1b[39m\n  File \"host.py\"\nModuleNotFoundError: No module named 'my_parts'\n"
    assert cause_line(traceback, at_end=True) == "ModuleNotFoundError: No module named 'my_parts'"
    assert (
        cause_line("\x1b[31mThe actor died\x1b[0m because of this.\n\nmore", at_end=False) == "The actor died because of this."
    )
    assert cause_line(" \n", at_end=True) == ""


def test_a_group_that_lost_a_member_is_made_anew_and_a_mistake_is_not_tried_again():
    lost = ("RuntimeError", "NCCL error: remote process exited or there was a network error"), ("DistBackendError", "aborted")
    mistake = "RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)"
    assert [is_broken(RemoteError(*one, user_error=False)) for one in (*lost, mistake)] == [True, True, False]


def test_torchs_own_refusal_on_a_cpu_is_told_with_what_was_asked_for_and_what_is_free() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    says = r"allocate \d+ bytes.*; [\d,.]+ GiB of [\d,.]+ GiB of the (machine|container)'s memory are free$"
    assert re.search(says, str(out_of_memory(caught.value)))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "OutOfMemoryError: CUDA .* 2.50 GiB.; "),
        (MemoryError("no room for rank 1"), "MemoryError: no room for rank 1; "),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "RuntimeError: CUDA error: CUBLAS"),
        (RuntimeError("the size of tensor a (3) must match"), None),
        (ValueError("memory"), None),
    ],
)
def test_every_way_to_say_it_is_understood_and_nothing_else(error: Exception, says: str | None) -> None:
    found = out_of_memory(error)
    assert found is None if says is None else re.match(says, str(found))


CALLS = {
    "actor.update": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu",
    "critic.values": "critic.ppo_max_token_len_per_gpu",
    "reference.logprobs": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "start actor": "actor_rollout_ref.actor.fsdp_config.param_offload",
    "sampling": "actor_rollout_ref.rollout.max_num_seqs",
    "start rollout0 again": "actor_rollout_ref.rollout.max_num_seqs",
    "tiny.work": "more memory",
}


def test_the_keys_of_the_role_are_named_and_exist() -> None:
    for call, words in CALLS.items():
        advice = what_to_do(call)
        assert words in advice
        assert [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice) if key not in leaves()] == []
