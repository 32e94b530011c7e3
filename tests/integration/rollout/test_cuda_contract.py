"""The arguments that every recipe gives vLLM on GPUs, as vLLM itself takes them on a CUDA platform that is only pretended."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.config.recipes import known_recipes
from grpo_rl.plan.decisions import decide
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.vllm.vllm_engine import engine_arguments

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, whose arguments these are"),
]
GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")
OTHERS: dict[str, list[str]] = {
    "fp8": ["actor_rollout_ref.rollout.quantization=fp8"],
    "bytes of cache": ["actor_rollout_ref.rollout.kv_cache_memory_bytes=1073741824"],
    "eager": ["actor_rollout_ref.rollout.enforce_eager=true"],
    "not compiled": ["actor_rollout_ref.rollout.use_torch_compile=false"],
    "engines apart": ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"],
    "few at once": ["actor_rollout_ref.rollout.max_num_seqs=24"],
    "drained": ["trainer.schedule=async", "trainer.asynchronous.partial_rollout=false"],
    "without sleep": ["actor_rollout_ref.rollout.free_cache_engine=false"],
}


def spec_of(words: list[str]) -> EngineSpec | None:
    """The engine of a configuration on GPUs; None if it samples nothing, or with another engine."""
    plan = decide(compose([*words, "trainer.device=cuda", "trainer.n_gpus_per_node=8"]).config, GPUS)
    return plan.engine if plan.engine is not None and plan.engine.name == "vllm" else None


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[EngineSpec, dict[str, Any]]]:
    """What vLLM makes of every recipe and of some changes to one, with one GPU for an engine and with two."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=40_960)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = {recipe: [f"recipe={recipe}"] for recipe in known_recipes()}
    words |= {name: ["recipe=arithmetic/grpo", *more] for name, more in OTHERS.items()}
    specs: dict[tuple[str, int], EngineSpec] = {}
    for name, given in words.items():
        if (spec := spec_of(given)) is not None:
            for parallel in (1, 2):
                own = {"model_path": str(folder), "tokenizer_path": None, "override_config": {}}
                specs[name, parallel] = dataclasses.replace(spec, tensor_parallel_size=parallel, **own)
    assert len(specs) > 2 * len(OTHERS) + 10
    file = folder / "arguments.json"
    # Most recipes give an engine what another one gives it, too: vLLM is asked once.
    written = {key: json.dumps(engine_arguments(spec), sort_keys=True) for key, spec in specs.items()}
    distinct = list(dict.fromkeys(written.values()))
    file.write_text(f"[{', '.join(distinct)}]")
    environment = os.environ | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("pretended_cuda.py")), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found = dict(zip(distinct, json.loads(lines[0].removeprefix("FOUND")), strict=True))
    return {key: (spec, found[written[key]]) for key, spec in specs.items()}


def test_every_recipe_is_taken_on_one_gpu_and_on_two(taken: Any) -> None:
    for (name, parallel), (spec, found) in taken.items():
        assert "unknown" not in found, (name, found)
        assert (found["parallel"], found["device"]) == (parallel, "cuda"), name
        assert found["executor"] == ("uni" if parallel == 1 else "mp"), name
        assert found["dtype"] == "torch.bfloat16" and found["longest"] == spec.max_model_len, name
        assert found["most"] == spec.max_num_seqs and found["tokens"] >= found["most"], name
        assert found["share"] == spec.gpu_memory_utilization, name
        assert "gpu_worker" in found["worker"] or "Worker" in found["worker"], name


def test_engines_that_share_gpus_can_sleep_and_others_need_not(taken: Any) -> None:
    for (name, _), (spec, found) in taken.items():
        assert found["sleeps"] == spec.sleep_mode, name
    for parallel in (1, 2):
        assert taken["arithmetic/grpo", parallel][1]["sleeps"]
        assert not taken["engines apart", parallel][1]["sleeps"] and not taken["without sleep", parallel][1]["sleeps"]


def test_graphs_are_captured_up_to_what_is_sampled_at_once(taken: Any) -> None:
    for (name, _), (spec, found) in taken.items():
        sizes = found["graph_sizes"]
        if spec.enforce_eager:
            assert not sizes, name
        else:
            assert sizes == sorted(set(sizes)) and min(sizes) == 1, name
            assert max(sizes) == min(spec.max_num_seqs, 1024), name
    assert max(taken["few at once", 1][1]["graph_sizes"]) == 24
    assert taken["eager", 1][1]["eager"]
    kinds = {name: taken[name, 1][1]["graphs"] for name in ("eager", "not compiled", "arithmetic/grpo")}
    assert kinds == {
        "eager": "NONE NONE",
        "not compiled": "NONE FULL_DECODE_ONLY",
        "arithmetic/grpo": "VLLM_COMPILE FULL_AND_PIECEWISE",
    }


def test_vllm_schedules_ahead_except_where_weights_come_under_unfinished_requests(taken: Any) -> None:
    for parallel in (1, 2):
        ahead = {
            name: taken[name, parallel][1]["schedules_ahead"] for name in ("arithmetic/grpo", "arithmetic/async", "drained")
        }
        assert ahead == {"arithmetic/grpo": True, "arithmetic/async": False, "drained": True}


def test_the_keys_for_gpus_arrive_in_vllm(taken: Any) -> None:
    for parallel in (1, 2):
        assert taken["fp8", parallel][1]["quantization"] == "fp8"
        assert taken["arithmetic/grpo", parallel][1]["quantization"] is None
        assert taken["bytes of cache", parallel][1]["cache_bytes"] == 1 << 30
        assert taken["arithmetic/grpo", parallel][1]["cache_bytes"] is None


def test_an_engine_over_nodes_is_started_over_ray() -> None:
    spec = spec_of(["recipe=arithmetic/grpo"])
    assert spec is not None
    assert (
        engine_arguments(dataclasses.replace(spec, tensor_parallel_size=16, num_nodes=2))["distributed_executor_backend"]
        == "ray"
    )
