"""A plan for a machine that is not here: its name, the sizes of models by name, and what is refused for it."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from grpo_rl.config.compose import compose
from grpo_rl.config.schema.tree import ModelConfig
from grpo_rl.errors import ConfigError
from grpo_rl.models.load import load_lm
from grpo_rl.models.lora import add_adapters, is_adapter
from grpo_rl.plan.machine import DEVICES, named, probe_machine
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.memory import adapter_params, frozen_bytes, load_of
from grpo_rl.plan.model_folder import KNOWN, ModelSize, known_settings, model_size

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Published counts: "Total parameters" of the models' pages, the sum of the shapes in their safetensors files.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36_151_104_512,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
}


def size_of(name: str) -> ModelSize:
    size = model_size(name)
    assert size is not None
    return size


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


def test_a_machine_is_read_from_its_name() -> None:
    assert (named("8xH100-80GB").nodes, named("8xH100-80GB").gpus) == (1, 8)
    assert (named("4x8xh100-80gb").nodes, named("4x8xh100-80gb").gpus) == (4, 8)
    assert named("RTX4090-24GB").device is DEVICES["RTX4090-24GB"] and named("RTX4090-24GB").gpus == 1
    for wrong, hint in {
        "8xH100": "8xH100-80GB",
        "8xH100-90GB": "did you mean H100-80GB",
        "0xH100-80GB": "without GPUs",
        "many": "is written as",
        "8x": "is written as",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            named(wrong)


def test_the_name_sets_gpus_and_nodes_unless_they_are_given() -> None:
    config = compose(["machine=4x8xH100-80GB", "trainer.dry_run=true"]).config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (4, 8)
    machine = probe_machine(config)
    assert (machine.nodes, machine.num_gpus, machine.cluster, machine.device) == (4, 8, True, "cuda")
    config = compose(["trainer.n_gpus_per_node=2", "machine=8xH100-80GB", "trainer.machine_host_gib=100"]).config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 2)
    assert probe_machine(config).host_memory == 100 * 2**30


def test_a_plan_is_made_without_model_data_gpu_or_network() -> None:
    plan = make_plan(compose(["recipe=gsm8k/qwen2.5-7b", "machine=8xH100-80GB", "trainer.dry_run=true"]))
    assert plan.machine.device == "cuda" and plan.world_size == 8
    assert plan.model is not None and plan.model.num_params == PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(compose(["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", *words]))
    return "\n".join(caught.value.problems)


def test_what_depends_on_the_device_is_judged_on_the_machine_that_is_named() -> None:
    precise, dry = "actor_rollout_ref.model.lm_head_precision=bfloat16", "trainer.dry_run=true"
    assert "this run has none" in refused(precise, dry)
    words = ["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", precise, dry]
    make_plan(compose([*words, "machine=1xA100-80GB"]))
    assert "has 8 GPUs" in refused(dry, "machine=8xH100-80GB", "trainer.n_gpus_per_node=16")
    assert "it has 2" in refused(dry, "machine=2x8xH100-80GB", "trainer.nnodes=3")
    assert "must divide" in refused(dry, "machine=8xH100-80GB", f"{R}.tensor_model_parallel_size=3")
    assert "can only be planned" in refused("machine=8xH100-80GB")
    for key in ("machine_host_gib=8", "mean_response_length=100", "response_length_spread=0.5"):
        assert f"trainer.{key}: describes a run on the machine" in refused(dry, f"trainer.{key}")
    long = ["data.max_response_length=40000", f"{A}.ppo_max_token_len_per_gpu=65536"]
    assert "positions" in refused(dry, "machine=8xH100-80GB", *long)


def test_a_machine_named_without_a_count_has_one_gpu_whatever_the_recipe_says() -> None:
    config = compose(["recipe=gsm8k/qwen2.5-7b", "machine=A100-40GB", "trainer.dry_run=true"]).config
    assert config.trainer.n_gpus_per_node == 1
    config = compose(
        ["recipe=gsm8k/qwen2.5-7b", "machine=A100-40GB", "trainer.n_gpus_per_node=2", "trainer.dry_run=true"]
    ).config
    assert config.trainer.n_gpus_per_node == 2


def test_the_frozen_blocks_of_a_known_model_are_planned_in_bfloat16() -> None:
    words = [
        "data.train_files=x.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
        "actor_rollout_ref.model.lora_rank=32",
    ]
    plan = make_plan(compose([*words, "machine=A100-80GB", "trainer.dry_run=true"]))
    size = size_of("Qwen/Qwen2.5-7B")
    ends = 2 * size.vocab * size.hidden  # embedding and head, in float32
    assert frozen_bytes(size, load_of(plan, size, "actor")) == 4 * ends + 2 * (size.num_params - ends)


@pytest.mark.parametrize("name", ["microsoft/Phi-4-mini-instruct", "Qwen/Qwen2.5-0.5B"])
def test_the_parameters_of_adapters_are_those_that_peft_makes(name: str) -> None:
    model = ModelConfig(path=name, lora_rank=8)
    lm = load_lm("", AutoConfig.for_model(**known_settings(name)), on_meta=True)
    add_adapters(lm, model)
    made = sum(parameter.numel() for key, parameter in lm.named_parameters() if is_adapter(key))
    assert adapter_params(model, size_of(name)) == made
