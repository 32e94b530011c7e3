"""Refusals by a model's folder: found by the plan, in less than two seconds and before any process starts."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_sources

from grpo_rl import hub
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.model_folder import CPU_HEAD_SIZES, positions_of

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
GPU = Machine(num_gpus=8, num_cpus=64, device="cuda")
M, R = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SETTINGS = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
HEADER = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


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
    base += ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=64"]
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


@pytest.fixture(scope="module", autouse=True)
def transformers_is_loaded() -> Iterator[None]:
    """Its import takes seconds on a busy machine, once for a process: the time of the checks is measured without it."""
    from transformers import AutoConfig, Qwen3Config

    import grpo_rl.models.load

    assert AutoConfig and Qwen3Config and grpo_rl.models.load
    yield


def test_a_folder_that_can_be_used_is_planned_with_its_sizes(folder: Path) -> None:
    plan = plan_of(folder)
    assert plan.model is not None and (plan.model.hidden, plan.model.num_params) == (64, 2)
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
    pairs = ["actor_rollout_ref.actor.policy_loss.loss_mode=dpo", "actor_rollout_ref.actor.loss_agg_mode=prompt-mean"]
    with pytest.raises(ConfigError, match="the loss compares with a reference"):
        plan_of(folder, *words, *pairs, "actor_rollout_ref.actor.use_kl_loss=false")
    plan = plan_of(folder, *words, "actor_rollout_ref.actor.use_kl_loss=false")
    assert plan.base_reference is None and plan.role("reference") is None


def test_an_adapter_beside_the_weights_is_refused_for_two_ways_of_reading_would_differ(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "has a peft adapter beside the model" in problem_of(folder)


def test_prompts_are_shared_unless_the_model_drops_at_random_beside_which_sharing_is_refused() -> None:
    drops, key = f"{M}.override_config={{attention_dropout: 0.1}}", "actor_rollout_ref.actor.use_prefix_grouper"
    for words, shares in (([], True), ([f"{key}=false"], False), ([drops], False), ([drops, f"{key}=false"], False)):
        assert plan_of("builtin:arithmetic", *words).config.actor_rollout_ref.actor.use_prefix_grouper is shares
    with pytest.raises(ConfigError, match=r"training drops at random \(attention_dropout=0.1\)"):
        plan_of("builtin:arithmetic", drops, f"{key}=true")
