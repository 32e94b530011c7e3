"""Memory that runs out: what is said of it."""

from __future__ import annotations

import re

import pytest
import torch

from grpo_rl.cluster.processes.worker_group import out_of_memory, what_to_do
from grpo_rl.config.schema.fields import leaves


def test_torchs_own_refusal_on_a_cpu_is_told_with_what_was_asked_for_and_what_is_free() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    found = str(out_of_memory(caught.value))
    assert re.search(
        r"allocate \d+ bytes.*; [\d,.]+ GiB of [\d,.]+ GiB of the (machine|container)'s memory are free$", found
    ), found


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


@pytest.mark.parametrize("call", CALLS)
def test_the_keys_of_the_role_are_named_and_exist(call: str) -> None:
    advice = what_to_do(call)
    assert CALLS[call] in advice
    assert [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice) if key not in leaves()] == []
