from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.config.schema.tree import ActorRolloutRefConfig, Config, DataConfig, ModelConfig, RolloutConfig, WeightSyncConfig
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


def test_the_device_decides_what_is_left_open_and_explicit_settings_win() -> None:
    def chosen(cfg: Config, device: Any, **more: Any) -> tuple[Any, ...]:
        spec = EngineSpec.from_config(cfg, device, **more)
        assert pickle.loads(pickle.dumps(spec)) == spec and spec.override_config == {"rope_theta": 2.0}
        return spec.dtype, spec.enforce_eager, spec.weight_backend, spec.sleep_mode, spec.max_model_len

    assert chosen(config(), "cpu") == ("float32", True, "object_store", False, 128)
    assert chosen(config(), "cuda") == ("bfloat16", False, "ipc", True, 128)
    assert chosen(config(nnodes=1), "cuda") == ("bfloat16", False, "nccl", False, 128)
    cfg = config("object_store", dtype="float16", enforce_eager=True, max_model_len=300, cpu_threads=3)
    assert chosen(cfg, "cuda") == ("float16", True, "object_store", True, 300)
    spec = EngineSpec.from_config(cfg, "cuda", model_path="resolved", cores=8)
    assert (spec.threads, spec.model_path) == (3, "resolved")


def test_weights_are_verified_on_gpus_unless_the_configuration_says_otherwise() -> None:
    def verified(device: Any, **settings: Any) -> bool:
        rollout = RolloutConfig(checkpoint_engine=WeightSyncConfig(**settings))
        cfg = Config(actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(path="m"), rollout=rollout))
        return EngineSpec.from_config(cfg, device).verify_checksum

    assert verified("cuda") and not verified("cpu")
    assert not verified("cuda", verify_checksum=False) and verified("cpu", verify_checksum=True)


def test_engine_arguments_are_those_of_the_chosen_engine() -> None:
    kwargs = {"vllm": {"block_size": 32}, "hf": {"attn_implementation": "eager"}}
    assert EngineSpec.from_config(config(engine_kwargs=kwargs), "cpu").engine_kwargs == {"block_size": 32}
    hf = EngineSpec.from_config(config(engine_kwargs=kwargs, name="hf"), "cpu")
    assert hf.engine_kwargs == {"attn_implementation": "eager"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_engine_takes_pickled_functions(device: str) -> None:
    assert engine_environment(EngineSpec("m", 10, device=device))["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_a_pass_is_as_large_as_configured_and_longer_prompts_are_read_in_parts(tmp_path: Path) -> None:
    model = str(build("builtin:arithmetic", tmp_path / "model"))
    spec = EngineSpec.from_config(config(max_num_batched_tokens=40, max_num_seqs=4), "cpu")
    for device in ("cpu", "cuda"):
        arguments = engine_arguments(dataclasses.replace(spec, model_path=model, override_config={}, device=device))
        assert "enable_chunked_prefill" not in arguments and arguments["max_num_batched_tokens"] == 40
