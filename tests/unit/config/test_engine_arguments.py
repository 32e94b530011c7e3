"""`rollout.engine_kwargs` passes settings of speed and memory, never what the configuration owns or what loads code."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from config_tools import CPU, R, config_of

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.checks.engine_arguments import HF_ALLOWED, VLLM_ALLOWED, VLLM_OWNED
from grpo_rl.config.schema.fields import leaves, sections


def refusals(engine: str, arguments: Any) -> list[str]:
    return check(config_of({f"{R}.name": engine, f"{R}.engine_kwargs": {engine: arguments}}), CPU)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, whose arguments it looks at")
def test_every_argument_that_is_owned_or_allowed_is_one_of_vllms() -> None:
    # Read, not imported: importing vLLM takes seconds.
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = ast.parse((Path(spec.origin).parent / "engine/arg_utils.py").read_text())
    (engine_args,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = {
        node.target.id for node in engine_args.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert len(fields) > 100
    assert not set(VLLM_OWNED) & set(VLLM_ALLOWED) and {*VLLM_OWNED, *VLLM_ALLOWED} <= fields


def test_what_the_program_gives_vllm_cannot_be_passed() -> None:
    from grpo_rl.rollout.engine import EngineSpec
    from grpo_rl.rollout.vllm.vllm_engine import engine_arguments

    spec = EngineSpec.from_config(config_of({}), "cuda", model_path="nowhere")
    # The sizes of graphs are a default, which a user may replace.
    assert {*engine_arguments(spec), "kv_cache_memory_bytes"} & set(VLLM_ALLOWED) == {"cudagraph_capture_sizes"}
    named = dataclasses.replace(spec, engine_kwargs={"max_cudagraph_capture_size": 64})
    assert "cudagraph_capture_sizes" not in engine_arguments(named)


@pytest.mark.parametrize("argument", sorted(VLLM_OWNED))
def test_what_another_key_owns_is_refused_with_that_key(argument: str) -> None:
    (problem,) = refusals("vllm", {argument: "value-that-is-not-shown"})
    assert problem.startswith(f"{R}.engine_kwargs.vllm.{argument}: ") and "value-that-is-not-shown" not in problem
    named = [word.strip(",") for word in problem.split() if word.startswith("actor_rollout_ref")][1:]
    assert named and all(word in leaves() or word in sections() for word in named)


@pytest.mark.parametrize("argument", ["worker_extension_cls", "load_format", "compilation_config", "hf_token", "master_addr"])
def test_what_loads_code_or_changes_the_run_is_refused(argument: str) -> None:
    (problem,) = refusals("vllm", {argument: "x"})
    assert problem.startswith(f"{R}.engine_kwargs.vllm.{argument}: ") and "may load code" in problem


def test_a_misspelt_argument_is_refused_with_the_nearest_ones() -> None:
    (problem,) = refusals("vllm", {"blok_size": 16})
    assert "Did you mean block_size" in problem
    assert len(refusals("vllm", {"host": "0.0.0.0", "port": 1, "api_key": "secret"})) == 3


@pytest.mark.parametrize("argument", VLLM_ALLOWED)
def test_a_setting_of_speed_or_memory_is_passed_but_no_mapping(argument: str) -> None:
    for value in (1, "text", True, None, [1, 2]):
        assert refusals("vllm", {argument: value}) == []
    for nested in ({"a": 1}, [{"a": 1}]):
        (problem,) = refusals("vllm", {argument: nested})
        assert "takes a number" in problem


def test_the_hf_engine_takes_its_attention_and_nothing_else() -> None:
    for name in HF_ALLOWED["attn_implementation"]:
        assert refusals("hf", {"attn_implementation": name}) == []
    assert "one of eager" in refusals("hf", {"attn_implementation": "somebody/kernels"})[0]
    for argument in ("trust_remote_code", "device_map"):
        assert "the configuration owns" in refusals("hf", {argument: True})[0]


def test_arguments_that_are_no_mapping_are_refused() -> None:
    assert "by name" in refusals("vllm", [1])[0]
