"""Which families of models a plan takes, what it refuses of the others, and how many parameters models with experts have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.model_folder import model_size

A = "actor_rollout_ref.actor"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
TAKEN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": 64},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 128},
    "phi3": {"sliding_window": 4096},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32},
    "olmoe": EXPERTS,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({"num_local_experts": 8}, "of models with experts, qwen3_moe and olmoe can be trained; this one is mixtral"),
    "deepseek_v3": ({"n_routed_experts": 8}, "this one is deepseek_v3"),
    "gpt_oss": ({"num_local_experts": 8}, "attention sinks"),
    "mamba": ({}, "carry a state from token to token"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"]}, "layers of the kind linear_attention"),
    "gpt2": ({}, "cannot be packed"),
    "gemma2": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "mistral": ({"sliding_window": 100}, "more than the 100 tokens of the sliding window"),
    "gemma3_text": (
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        "64 tokens of the sliding window",
    ),
}


def plan_of(folder: Path, family: str, settings: dict[str, Any], *words: str) -> Plan:
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": family} | settings))
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    base = [f"actor_rollout_ref.model.path={folder}", "data.train_files=task:arithmetic?num_rows=64", "data.train_batch_size=8"]
    base += [f"{A}.ppo_mini_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=64"]
    return make_plan(compose([*base, *words]), Machine(num_gpus=0, num_cpus=2, device="cpu"))


def problems_of(*arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(*arguments)
    return list(caught.value.problems)


@pytest.mark.parametrize("family", TAKEN)
def test_families_that_are_proved_are_taken(tmp_path: Path, family: str) -> None:
    assert plan_of(tmp_path, family, TAKEN[family]).world_size == 1


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_what_they_have(tmp_path: Path, family: str) -> None:
    settings, said = REFUSED[family]
    (problem,) = problems_of(tmp_path, family, settings)
    assert said in problem and str(tmp_path) in problem


@pytest.mark.parametrize("word", [f"{A}.router_aux_loss_coef=0.01", f"{A}.router_replay.mode=R2"])
def test_keys_for_experts_are_refused_without_experts(tmp_path: Path, word: str) -> None:
    two_updates = [f"{A}.ppo_mini_batch_size=4"]
    (problem,) = problems_of(tmp_path, "qwen3", {}, word, *two_updates)
    assert problem.startswith(f"{word}: is for models with experts")
    plan = plan_of(tmp_path, "olmoe", EXPERTS, word, *two_updates)
    assert plan.objective.router_aux_loss_coef == 0.01 or plan.passes.replays_routing


@pytest.mark.parametrize("word", ["ulysses_sequence_parallel_size=2", "fsdp_config.use_torch_compile=true"])
def test_keys_that_experts_do_not_take_are_refused(tmp_path: Path, word: str) -> None:
    two_ranks = ["trainer.n_gpus_per_node=2"]
    assert plan_of(tmp_path, "qwen3", {"num_key_value_heads": 2}, f"{A}.{word}", *two_ranks).world_size == 2
    (problem,) = problems_of(tmp_path, "olmoe", EXPERTS, f"{A}.{word}", *two_ranks)
    assert problem.startswith(f"{A}.{word}: ") and "has experts" in problem


def test_the_auxiliary_loss_leaves_no_rollout_without_a_gradient(tmp_path: Path) -> None:
    words = [f"{A}.use_kl_loss=false"]
    assert plan_of(tmp_path, "olmoe", EXPERTS, *words).objective.skips_zero_advantage
    balanced = plan_of(tmp_path, "olmoe", EXPERTS, *words, f"{A}.router_aux_loss_coef=0.01").objective
    assert not balanced.skips_zero_advantage
    assert "balance" in balanced.formula()


@pytest.mark.parametrize(
    ("family", "settings", "total", "active"),
    [
        # Qwen/Qwen3-30B-A3B and allenai/OLMoE-1B-7B-0924: 30.5 B and 6.9 B, as their cards say; 3.3 B and 1.3 B for each token, of which the embedding is no product.
        (
            "qwen3_moe",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "vocab_size": 151936,
            },
            30.5,
            3.0,
        ),
        (
            "olmoe",
            {
                "hidden_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": None,
                "intermediate_size": 1024,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "vocab_size": 50304,
            },
            6.9,
            1.2,
        ),
    ],
)
def test_parameters_are_those_of_transformers_model(
    tmp_path: Path, family: str, settings: dict[str, Any], total: float, active: float
) -> None:
    kept = {key: value for key, value in settings.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept | {"model_type": family}))
    size = model_size(str(tmp_path))
    assert size is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **kept))
    named = dict(model.named_parameters())
    assert size.num_params == sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    idle = experts * (size.experts - size.experts_per_token) // size.experts
    # Of embedding and head, which are not tied here, a token is multiplied with one.
    assert size.active_params == size.num_params - idle - size.vocab * size.hidden
    assert size.num_params / 1e9 == pytest.approx(total, abs=0.06)
    assert size.active_params / 1e9 == pytest.approx(active, abs=0.06)
