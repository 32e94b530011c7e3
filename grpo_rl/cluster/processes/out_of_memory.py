"""Memory that ran out: what was asked for, what is free, which keys to turn, and micro-batches of half the size."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.errors import OutOfMemory
from grpo_rl.machine_memory import machine_memory

GIB = 2**30
SPLIT = "trainer.on_out_of_memory=split"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_ACTOR = "actor_rollout_ref.actor"
_KEYS = {
    "actor": f"{_ACTOR}.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, {_ACTOR}.fsdp_config.param_offload and "
    "optimizer_offload, actor_rollout_ref.rollout.gpu_memory_utilization",
    "critic": "critic.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, critic.fsdp.param_offload and optimizer_offload",
    "reference": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu or log_prob_micro_batch_size_per_gpu, "
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "rollout": "actor_rollout_ref.rollout.max_num_seqs, gpu_memory_utilization (GPU) or kv_cache_gib (CPU)",
    "reward_model": "reward.reward_model.max_token_len_per_gpu, param_offload",
}
_MAY_SPLIT = ("update", "logprobs", "reference_logprobs", "values")


def out_of_memory(error: Exception) -> OutOfMemory | None:
    """Return an error with what was asked for and what is free in this process, where `error` is of memory that ran out; else None."""
    text = str(error)
    kind = type(error).__name__
    if kind not in ("OutOfMemoryError", "MemoryError") and not any(words in text for words in _WORDS):
        return None
    found = _ASKED.search(text)
    asked = f"asked for {_gib(float(found[1]) * _UNITS[found[2]])}, " if found else ""
    first = re.split(r"\. |\n", text, maxsplit=1)[0].strip() or "no message"
    where, free, total = _room(error)
    return OutOfMemory(f"{kind}: {first[:200]}; {asked}{_gib(free)} of {_gib(total)} of the {where} are free")


def what_to_do(call: str) -> str:
    """Return which keys to change when memory ran out in `role.method`."""
    role, _, method = call.removeprefix("start ").removesuffix(" again").rstrip("0123456789").partition(".")
    role = "rollout" if role == "sampling" else role
    advice = f"turn down {_KEYS[role]}" if role in _KEYS else "give the run more memory"
    if call.startswith("start ") and role in ("actor", "critic", "reference", "reward_model"):
        return "the model and its optimizer need more memory than there is: more ranks, or " + advice.removeprefix("turn down ")
    return f"{advice}, or set {SPLIT}" if method in _MAY_SPLIT and role != "reward_model" else advice


def halved(rule: MicroBatchRule, lengths: Sequence[Sequence[int]], num_ranks: int) -> MicroBatchRule | None:
    """Half of the rule, or of what can meet in a micro-batch where that is less; None where each holds one sequence."""
    if rule.max_rollouts is not None:
        most = min(rule.max_rollouts, max(-(-len(some) // num_ranks) for some in lengths))
        return replace(rule, max_rollouts=most // 2) if most > 1 else None
    assert rule.max_tokens is not None
    longest = max(max(some) for some in lengths)
    most = min(rule.max_tokens, max(-(-sum(some) // num_ranks) for some in lengths))
    limit = max(most // 2, longest)
    return replace(rule, max_tokens=limit) if limit < rule.max_tokens else None


def at_least(rule: MicroBatchRule, longest: int) -> MicroBatchRule:
    """The rule, with room for a sequence of this length."""
    return rule if rule.max_tokens is None else replace(rule, max_tokens=max(rule.max_tokens, longest))


def _room(error: Exception) -> tuple[str, float, float]:
    """Return the memory that ran out (the GPU's, or the machine's), its free bytes and all its bytes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return "GPU's memory", free, total
    has = machine_memory()
    return f"{has.owner}'s memory", has.free, has.total


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
