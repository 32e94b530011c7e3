"""Models in the plan: their sizes, and what of a folder, or of a family, is refused, in seconds and before any process starts."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_sources
from compositions import compose
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_rl import hub
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import ModelConfig
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build
from grpo_rl.models.load import load_lm
from grpo_rl.models.lora import add_adapters, is_adapter
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.memory import adapter_params
from grpo_rl.plan.model_folder import CPU_HEAD_SIZES, KNOWN, ModelSize, known_settings, model_size, positions_of

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
GPU = Machine(num_gpus=8, num_cpus=64, device="cuda")
SETTINGS = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
HEADER = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


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


def safetensors(header: dict[str, Any], num_bytes: int) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + bytes(num_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model's, with weights of two numbers."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SETTINGS))
    (path / "model.safetensors").write_bytes(safetensors(HEADER, 8))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def plan_of(path: Path | str, *words: str, machine: Machine = CPU) -> Plan:
    base = [f"{M}.path={path}", "data.train_files=task:arithmetic?num_rows=64", "data.train_batch_size=8"]
    base += [f"{A}.ppo_mini_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=64"]
    return make_plan(compose([*base, *words]), machine)


def problem_of(path: Path | str, *words: str, machine: Machine = CPU) -> str:
    started = time.process_time()  # what other processes do is not its own time
    with pytest.raises(ConfigError) as caught:
        plan_of(path, *words, machine=machine)
    assert time.process_time() - started < 4
    (problem,) = caught.value.problems
    return problem


def write(folder: Path, **settings: Any) -> None:
    kept = {key: value for key, value in (SETTINGS | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_a_folder_that_can_be_used_is_planned_with_its_sizes_and_the_parameters_of_its_weight_files(folder: Path) -> None:
    (folder / "second.safetensors").write_bytes(safetensors(HEADER | {"__metadata__": {}}, 8))
    plan = plan_of(folder)
    assert plan.model is not None and (plan.model.hidden, plan.model.num_params) == (64, 4)
    assert [need.role for need in plan.memory] == ["actor", "reference", "rollout"]


# ---- positions -----------------------------------------------------------------------------------------


def test_more_tokens_than_positions_are_refused(folder: Path) -> None:
    problem = problem_of(folder, "data.max_prompt_length=512", "data.max_response_length=512")
    assert problem.startswith("data.max_prompt_length + data.max_response_length=1024: more tokens")
    assert "max_position_embeddings=512" in problem and "at most 512" in problem
    assert plan_of(folder, "data.max_prompt_length=256", "data.max_response_length=256")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"max_position_embeddings": 512}, ("max_position_embeddings", 512)),
        ({"n_positions": 256, "max_position_embeddings": 512}, ("n_positions", 256)),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, ("max_position_embeddings", 512)),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, None),
        ({}, None),
    ],
)
def test_positions_are_read_only_where_no_scaling_makes_them_uncertain(settings: Any, found: Any) -> None:
    assert positions_of(settings) == found


# ---- attention heads -----------------------------------------------------------------------------------


def test_heads_that_vllms_cpu_kernels_do_not_take_are_refused(folder: Path) -> None:
    write(folder, head_dim=8)
    problem = problem_of(folder)
    assert problem.startswith(f"{M}.path={folder}: its attention heads have size 8") and "rollout.name=hf" in problem
    assert plan_of(folder, f"{R}.name=hf")
    assert plan_of(folder, machine=GPU)


def test_the_list_of_head_sizes_is_vllms_own() -> None:
    assert vllm_sources.returned_list("v1/attention/backends/cpu_attn.py", "get_supported_head_sizes") == list(CPU_HEAD_SIZES)


def test_heads_that_cannot_be_shared_by_the_devices_of_an_engine_are_refused(folder: Path) -> None:
    words = (f"{R}.tensor_model_parallel_size=8",)
    assert problem_of(folder, *words, machine=GPU).startswith(f"{R}.tensor_model_parallel_size=8: must divide the 4")


# ---- override_config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key"), [("{hidden_sizes: 3}", "hidden_sizes"), ("{num_hidden_layers: two}", "num_hidden_layers")]
)
def test_an_override_of_no_field_or_of_the_wrong_type_is_refused(folder: Path, override: str, key: str) -> None:
    assert problem_of(folder, f"{M}.override_config={override}").startswith(f"{M}.override_config.{key}")
    assert problem_of("builtin:arithmetic", f"{M}.override_config={override}").startswith(f"{M}.override_config.{key}")


# ---- broken folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b'{"model_type": ', "config.json is no JSON"),
        ("config.json", b"[1]", "config.json holds a list"),
        ("config.json", b"\xff\xfe", "config.json is no JSON"),
        ("config.json", json.dumps(SETTINGS | {"model_type": "qwen99"}).encode(), "qwen99"),
        ("config.json", json.dumps({}).encode(), "no model configuration there"),
        ("model.safetensors", b"", "model.safetensors is no safetensors file"),
        ("model.safetensors", safetensors(HEADER, 7), "model.safetensors is cut short"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json cannot be read"),
    ],
)
def test_a_broken_file_of_the_folder_is_named(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / name).write_bytes(content)
    problem = problem_of(folder)
    assert problem.startswith(f"{M}.path={folder}") and said in problem


# ---- hub -----------------------------------------------------------------------------------------------


def test_a_model_on_a_hub_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    problem = problem_of("nobody/no-such-model")
    assert problem.startswith(f"{M}.path=nobody/no-such-model: no such folder") and "cannot be reached" in problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([f"{M}.target_modules=[q_porj]"], "q_porj"),
        ([f"{M}.target_modules=[lm_head]"], "the LM head"),
        ([f"{M}.lora_adapter_path=/no/such/folder"], "adapter_config.json"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused_by_the_plan(folder: Path, words: list[str], problem: str) -> None:
    for path in (folder, "builtin:arithmetic"):
        with pytest.raises(ConfigError, match=problem):
            plan_of(path, f"{M}.lora_rank=4", *words)


def test_adapters_over_quantized_weights_are_refused_by_the_plan(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ConfigError, match="QLoRA"):
        plan_of(folder, f"{M}.lora_rank=4")


def test_under_adapters_that_were_trained_before_the_kl_is_to_the_base_model_and_a_loss_that_compares_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 16}))
    (adapter / "adapter_model.safetensors").write_bytes(safetensors(HEADER, 8))
    words = [f"{M}.lora_rank=4", f"{M}.lora_adapter_path={adapter}"]
    assert "(the KL is to the base model without them)" in " ".join(plan_of(folder, *words).render().split())
    pairs = [f"{A}.policy_loss.loss_mode=dpo", f"{A}.loss_agg_mode=prompt-mean"]
    with pytest.raises(ConfigError, match="the loss compares with a reference"):
        plan_of(folder, *words, *pairs, f"{A}.use_kl_loss=false")
    plan = plan_of(folder, *words, f"{A}.use_kl_loss=false")
    assert plan.base_reference is None and plan.role("reference") is None


def test_an_adapter_beside_the_weights_is_refused_for_two_ways_of_reading_would_differ(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "has a peft adapter beside the model" in problem_of(folder)


def test_prompts_are_shared_unless_the_model_drops_at_random_beside_which_sharing_is_refused() -> None:
    drops, key = f"{M}.override_config={{attention_dropout: 0.1}}", f"{A}.use_prefix_grouper"
    for words, shares in (([], True), ([f"{key}=false"], False), ([drops], False), ([drops, f"{key}=false"], False)):
        assert plan_of("builtin:arithmetic", *words).config.actor_rollout_ref.actor.use_prefix_grouper is shares
    with pytest.raises(ConfigError, match=r"training drops at random \(attention_dropout=0.1\)"):
        plan_of("builtin:arithmetic", drops, f"{key}=true")


# ---- families -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TAKEN)
def test_families_that_are_proved_are_taken(folder: Path, family: str) -> None:
    write(folder, model_type=family, **TAKEN[family])
    assert plan_of(folder).world_size == 1


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_what_they_have(folder: Path, family: str) -> None:
    settings, said = REFUSED[family]
    write(folder, model_type=family, **settings)
    problem = problem_of(folder)
    assert said in problem and str(folder) in problem


@pytest.mark.parametrize("word", [f"{A}.router_aux_loss_coef=0.01", f"{A}.router_replay.mode=R2"])
def test_keys_for_experts_are_refused_without_experts(folder: Path, word: str) -> None:
    words = [word, f"{A}.ppo_mini_batch_size=4"]
    assert problem_of(folder, *words).startswith(f"{word}: is for models with experts")
    write(folder, model_type="olmoe", **EXPERTS)
    plan = plan_of(folder, *words)
    assert plan.objective.router_aux_loss_coef == 0.01 or plan.passes.replays_routing


@pytest.mark.parametrize("word", ["ulysses_sequence_parallel_size=2", "fsdp_config.use_torch_compile=true"])
def test_keys_that_experts_do_not_take_are_refused(folder: Path, word: str) -> None:
    words = [f"{A}.{word}", "trainer.n_gpus_per_node=2"]
    assert plan_of(folder, *words).world_size == 2
    write(folder, model_type="olmoe", **EXPERTS)
    problem = problem_of(folder, *words)
    assert problem.startswith(f"{A}.{word}: ") and "has experts" in problem


def test_the_auxiliary_loss_leaves_no_rollout_without_a_gradient(folder: Path) -> None:
    write(folder, model_type="olmoe", **EXPERTS)
    words = [f"{A}.use_kl_loss=false"]
    assert plan_of(folder, *words).objective.skips_zero_advantage
    balanced = plan_of(folder, *words, f"{A}.router_aux_loss_coef=0.01").objective
    assert not balanced.skips_zero_advantage and "balance" in balanced.formula()


# ---- models that are known by their name -----------------------------------------------------------------


def size_of(name: str) -> ModelSize:
    size = model_size(name)
    assert size is not None
    return size


# Published counts: "Total parameters" of the models' pages, the sum of the shapes in their safetensors files.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36_151_104_512,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_counted_from_the_sizes_are_those_that_are_published(name) -> None:
    assert size_of(name).num_params == PUBLISHED[name]


def test_every_entry_has_sizes_and_names_of_other_models_have_none() -> None:
    for pattern in KNOWN:
        size = size_of(pattern.replace("-*", "-x").replace("*", ""))
        assert size.num_params > 1e8 and size.heads % size.kv_heads == 0, pattern
    for other in (
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-71B",
        "Qwen/Qwen2.5-VL-7B",
        "x/y",
    ):
        assert known_settings(other) is None, other


@pytest.mark.parametrize(
    ("name", "total", "active"), [("Qwen/Qwen3-30B-A3B", 30.5, 3.0), ("allenai/OLMoE-1B-7B-0924", 6.9, 1.2)]
)
def test_parameters_of_experts_are_those_of_transformers_model(name: str, total: float, active: float) -> None:
    """As their cards say, 30.5 B and 6.9 B; 3.3 B and 1.3 B for each token, of which the embedding is no product."""
    size = size_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known_settings(name)))
    named = dict(model.named_parameters())
    assert size.num_params == sum(p.numel() for p in named.values())
    experts = sum(p.numel() for key, p in named.items() if ".experts." in key)
    idle = experts * (size.experts - size.experts_per_token) // size.experts
    # Of embedding and head, which are not tied here, a token is multiplied with one.
    assert size.active_params == size.num_params - idle - size.vocab * size.hidden
    assert (size.num_params / 1e9, size.active_params / 1e9) == (
        pytest.approx(total, abs=0.06),
        pytest.approx(active, abs=0.06),
    )


@pytest.mark.parametrize("name", ["microsoft/Phi-4-mini-instruct", "Qwen/Qwen2.5-0.5B"])
def test_the_parameters_of_adapters_are_those_that_peft_makes(name: str) -> None:
    model = ModelConfig(path=name, lora_rank=8)
    lm = load_lm("", AutoConfig.for_model(**known_settings(name)), on_meta=True)
    add_adapters(lm, model)
    made = sum(parameter.numel() for key, parameter in lm.named_parameters() if is_adapter(key))
    assert adapter_params(model, size_of(name)) == made


def test_what_the_engine_refuses_is_no_problem_where_none_starts_and_its_advice_is_taken_where_one_does(tmp_path: Path) -> None:
    odd = "actor_rollout_ref.model.override_config.head_dim=24"
    rows = ["data.responses=rows", "actor_rollout_ref.actor.policy_loss.loss_mode=sft", "trainer.device=cpu", odd]
    folder = build("builtin:arithmetic", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 100)
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=1"]
    words = [f"actor_rollout_ref.model.path={folder}", f"data.train_files=[{tmp_path}/rows.jsonl]", *sizes]
    machine = Machine(0, 2, "cpu", cluster=False)
    assert make_plan(compose([*words, *rows]), machine).engine is None
    sampled = ["recipe=arithmetic/grpo", "trainer.device=cpu", f"actor_rollout_ref.model.path={folder}", odd]
    with pytest.raises(ConfigError, match=r"heads have size 24.*rollout\.name=hf, which samples with any"):
        make_plan(compose(sampled), machine)
    engine = make_plan(compose([*sampled, "actor_rollout_ref.rollout.name=hf"]), machine).engine
    assert engine is not None and engine.name == "hf"
