"""The roles of a run added up on one GPU, and what the LM head really takes. No GPU has confirmed the estimates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, max_num_seqs
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.memory import GIB, Need, adapter_params, gpu_phases, load_of, memory_by_role, resident
from grpo_rl.plan.model_folder import model_size
from grpo_rl.plan.text import describe

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")
SIZES = {
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064,
           "num_attention_heads": 28, "num_key_value_heads": 4},
    "14b": {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13824, "vocab_size": 152064,
            "num_attention_heads": 40, "num_key_value_heads": 8},
}  # fmt: skip
BASE = ["data.train_files=task:arithmetic?num_rows=1000", "data.train_batch_size=64", f"{A}.ppo_mini_batch_size=16"]
BASE += [f"{R}.n=8", "trainer.total_epochs=1", "data.max_prompt_length=1024", "data.max_response_length=3072"]


def plan_of(tmp_path: Path, size: str, *words: str, machine: Machine = GPUS, **more: str) -> Plan:
    settings = (
        SIZES[size] | more | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
    )
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    composed = compose([*BASE, f"actor_rollout_ref.model.path={tmp_path}", *words])
    plan, model = decide(composed.config, machine, num_train_rows=1000), model_size(str(tmp_path))
    assert model is not None
    plan = dataclasses.replace(plan, model=model, memory=memory_by_role(plan, model))
    return dataclasses.replace(plan, text=describe(composed, plan))


def phases_of(plan: Plan) -> dict[str, Need]:
    assert plan.model is not None
    return {phase.what: phase for phase in gpu_phases(plan, plan.model)}


def test_adapters_need_neither_a_second_model_nor_moments_of_the_first(tmp_path) -> None:
    whole = plan_of(tmp_path, "7b")
    adapted = plan_of(tmp_path, "7b", "actor_rollout_ref.model.lora_rank=32")
    assert adapted.role("reference") is None and adapted.base_reference == "the KL in the loss"
    assert "reference" not in {need.role for need in adapted.memory}
    model = adapted.config.actor_rollout_ref.model
    assert adapted.model is not None
    # By peft's own count for Qwen2.5-7B at rank 32, all linear layers: 80,740,352.
    assert adapter_params(model, adapted.model) == 80_740_352
    states = [resident(size, load_of(plan, size, "actor")) for plan in (whole, adapted) if (size := plan.model)]
    params = adapted.model.num_params
    assert states[0] - states[1] == (params * 16) // 8 - (params * 4 + 80_740_352 * 16) // 8
    before, after = phases_of(whole), phases_of(adapted)
    assert list(after) == ["sampling", "weight transfer", "update"]
    for name in after:
        # Moments and the reference's weights, 8 + 4 bytes of each parameter over 8 ranks; in the update gradients besides.
        assert before[name].needed - after[name].needed > params * 11 / 8, name
    half = plan_of(tmp_path, "7b", "actor_rollout_ref.model.lora_rank=32", dtype="bfloat16")
    blocks = params - 2 * 152064 * 3584  # embedding and head stay in float32
    assert half.model is not None
    saved = states[1] - resident(half.model, load_of(half, half.model, "actor"))
    assert saved == pytest.approx(2 * blocks / 8, abs=8)
    page = " ".join(adapted.render().split())
    assert "the base model under the adapters" in page and "LoRA adapters of rank 32 at all-linear (80.7 M parameters)" in page


def test_every_phase_has_all_processes_of_the_gpu(tmp_path) -> None:
    phases = phases_of(plan_of(tmp_path, "7b"))
    assert list(phases) == ["sampling", "weight transfer", "update", "reference"]
    alone = phases_of(plan_of(tmp_path, "7b", f"{A}.use_kl_loss=false"))
    # The reference's weights, 7.6 billion in float32 over 8 ranks, and its process lie on the GPU while others work.
    for name in ("sampling", "weight transfer", "update"):
        added = phases[name].needed - alone[name].needed
        assert 7.6e9 * 4 / 8 < added < 7.6e9 * 4 / 8 * 1.2 + 2 * GIB, name
    assert phases["sampling"].share == 0.5 and phases["update"].share == 1
    # A sleeping engine's graphs and context, the embedding and head whole, with gradients: none of it was counted before.
    state_and_activations = next(need for need in plan_of(tmp_path, "7b").memory if need.role == "actor").num_bytes
    assert phases["update"].needed > state_and_activations + 2 * 2 * 152064 * 3584 * 4


def test_what_is_kept_in_host_memory_is_on_the_gpu_only_while_it_is_used(tmp_path) -> None:
    there = phases_of(plan_of(tmp_path, "14b"))
    offload = [f"{A}.fsdp_config.param_offload=true", f"{A}.fsdp_config.optimizer_offload=true"]
    away = phases_of(plan_of(tmp_path, "14b", *offload))
    assert there["update"].needed == away["update"].needed
    # 14.8 billion parameters, 12 bytes each, over 8 ranks.
    assert there["sampling"].needed - away["sampling"].needed > 14.7e9 * 12 / 8
    assert there["sampling"].least > 80 * GIB * 0.5 > away["sampling"].needed


def test_an_engine_that_keeps_its_memory_narrows_every_phase(tmp_path) -> None:
    phases = phases_of(plan_of(tmp_path, "7b", f"{R}.free_cache_engine=false"))
    assert all(phase.share == 0.5 for phase in phases.values())
    assert phases["update"].least == pytest.approx(2 * phases["update"].needed, rel=1e-6)


def test_a_cache_of_a_fixed_size_is_no_share_of_the_gpu(tmp_path) -> None:
    by_share = phases_of(plan_of(tmp_path, "7b"))
    fixed = phases_of(plan_of(tmp_path, "7b", f"{R}.kv_cache_memory_bytes={10 * GIB}"))
    added = fixed["sampling"].needed - by_share["sampling"].needed
    assert 10 * GIB + 7.6e9 * 2 < added < 10 * GIB + 7.7e9 * 2 + 2 * GIB and fixed["sampling"].share == 1
    assert fixed["update"] == by_share["update"], "the engine sleeps"
    awake = phases_of(plan_of(tmp_path, "7b", f"{R}.kv_cache_memory_bytes={10 * GIB}", f"{R}.free_cache_engine=false"))
    kept = awake["update"].needed - fixed["update"].needed
    assert 10 * GIB + 7.6e9 * 2 < kept < 10 * GIB + 7.7e9 * 2 and awake["update"].share == 1


def test_the_page_says_which_gpu_is_needed_and_what_to_do_on_a_smaller_one(tmp_path) -> None:
    small = dataclasses.replace(GPUS, gpu_memory=48 * GIB)
    page = " ".join(plan_of(tmp_path, "14b", machine=small).render().split())
    assert "fits no:" in page and "of 48.0 GiB" in page and "offload_policy=true" in page and "not run" in page
    page = " ".join(plan_of(tmp_path, "14b", machine=dataclasses.replace(GPUS, gpu_memory=500 * GIB)).render().split())
    assert "fits yes: " in page and "offload_policy" not in page
    assert "needs a GPU of" in plan_of(tmp_path, "14b").render()
    assert "needs a GPU" not in plan_of(tmp_path, "7b", machine=Machine(num_gpus=0, num_cpus=2, device="cpu")).render()


def test_more_responses_at_once_on_gpus_and_never_more_than_a_pass_has_tokens() -> None:
    config = compose([*BASE, "actor_rollout_ref.model.path=builtin:arithmetic"]).config
    assert (max_num_seqs(config, "cuda"), max_num_seqs(config, "cpu")) == (1024, 256)
    config = compose([*BASE, "actor_rollout_ref.model.path=builtin:arithmetic", f"{R}.max_num_batched_tokens=512"]).config
    assert max_num_seqs(config, "cuda") == 512
    config = compose([*BASE, "actor_rollout_ref.model.path=builtin:arithmetic", f"{R}.max_num_seqs=64"]).config
    assert max_num_seqs(config, "cuda") == max_num_seqs(config, "cpu") == 64
