from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.config.schema.tree import ActorRolloutRefConfig, Config, DataConfig, ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engine_environment import engine_environment
from grpo_rl.rollout.vllm.vllm_engine import engine_arguments


def config(backend: str = "auto", **rollout: Any) -> Config:
    return Config(
        data=DataConfig(max_prompt_length=100, max_response_length=28),
        actor_rollout_ref=ActorRolloutRefConfig(
            model=ModelConfig(path="some/folder", override_config={"rope_theta": 2.0}),
            rollout=RolloutConfig(checkpoint_engine=WeightSyncConfig(backend=backend), **rollout),  # type: ignore[arg-type]
        ),
    )


def test_on_cpu_a_replica_is_eager_float32_and_fed_through_the_object_store() -> None:
    spec = EngineSpec.from_config(config(), "cpu")
    assert (spec.dtype, spec.enforce_eager, spec.weight_backend, spec.sleep_mode) == (
        "float32", True, "object_store", False,
    )  # fmt: skip
    assert spec.max_model_len == 128
    assert spec.override_config == {"rope_theta": 2.0}
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_on_gpu_a_colocated_replica_sleeps_and_takes_weights_by_ipc_and_one_apart_by_nccl() -> None:
    together, apart = EngineSpec.from_config(config(), "cuda"), EngineSpec.from_config(config(nnodes=1), "cuda")
    assert (together.dtype, together.enforce_eager) == ("bfloat16", False)
    assert (together.weight_backend, together.sleep_mode) == ("ipc", True)
    assert (apart.weight_backend, apart.sleep_mode) == ("nccl", False)


def test_explicit_settings_win_over_what_the_device_suggests() -> None:
    cfg = config("object_store", dtype="float16", enforce_eager=True, max_model_len=300, cpu_threads=3)
    spec = EngineSpec.from_config(cfg, "cuda", model_path="resolved", cores=8)
    assert (spec.dtype, spec.enforce_eager, spec.max_model_len) == ("float16", True, 300)
    assert (spec.threads, spec.model_path, spec.weight_backend) == (3, "resolved", "object_store")


def test_engine_arguments_are_those_of_the_chosen_engine() -> None:
    kwargs = {"vllm": {"block_size": 32}, "hf": {"attn_implementation": "eager"}}
    assert EngineSpec.from_config(config(engine_kwargs=kwargs), "cpu").engine_kwargs == {"block_size": 32}
    hf = EngineSpec.from_config(config(engine_kwargs=kwargs, name="hf"), "cpu")
    assert hf.engine_kwargs == {"attn_implementation": "eager"}


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_gpu_transfers_are_refused_on_cpu_and_by_the_transformers_engine(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"backend={backend} needs GPUs"):
        EngineSpec.from_config(config(backend), "cpu")
    with pytest.raises(ConfigError, match=f"backend={backend} is not for rollout.name=hf"):
        EngineSpec.from_config(config(backend, name="hf"), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_engine_takes_pickled_functions(device: str) -> None:
    assert engine_environment(EngineSpec("m", 10, device=device))["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_a_pass_is_as_large_as_configured_and_longer_prompts_are_read_in_parts(tmp_path: Path) -> None:
    model = str(build("builtin:arithmetic", tmp_path / "model"))
    spec = dataclasses.replace(
        EngineSpec.from_config(config(max_num_batched_tokens=40, max_num_seqs=4), "cpu"), model_path=model
    )
    spec = dataclasses.replace(spec, override_config={})
    arguments = engine_arguments(spec)
    assert "enable_chunked_prefill" not in arguments and arguments["max_num_batched_tokens"] == 40
    on_gpu = engine_arguments(dataclasses.replace(spec, device="cuda"))
    assert "enable_chunked_prefill" not in on_gpu and on_gpu["max_num_batched_tokens"] == 40
