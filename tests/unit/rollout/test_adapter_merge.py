"""Adapters that arrive alone make the tensors that the actor would have sent merged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compositions import compose

from grpo_rl.config.schema.tree import ModelConfig
from grpo_rl.errors import ConfigError
from grpo_rl.models import fsdp, lora
from grpo_rl.models.experts import stored_tensors
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.plan.make import make_plan
from grpo_rl.rollout.adapter_merge import AdapterMerge
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.weights import WeightTransferError, pack_buckets
from grpo_rl.types import Request, Sampling
from grpo_rl.workers.rollout import RolloutWorker

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from tiny_models import make_folder


def trained(folder: Path) -> PolicyModel:
    """A policy whose adapters are not 0 any more."""
    lm = load_lm(str(folder), load_config(str(folder)))
    lora.add_adapters(lm, ModelConfig(path=str(folder), lora_rank=4, lora_alpha=8))
    lora.initialize(lm, seed=7)
    with torch.no_grad():
        for layer in lora.adapted_layers(lm).values():
            lora.factors(layer)[1].normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return PolicyModel(lm)


def spec(folder: Path, **options: object) -> EngineSpec:
    return EngineSpec(str(folder), 48, name="hf", adapter_scaling=2.0, bucket_bytes=20_000, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("llama", False), ("phi3", False), ("gemma3", True), ("qwen3_moe", False)]
)
def test_the_tensors_are_the_merged_ones_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_folder(tmp_path, family, tied)
    policy = trained(folder)
    sent = fsdp.whole_adapters(policy, torch.device("cpu"))
    merge = AdapterMerge(spec(folder))
    for bucket in pack_buckets(sent.items(), 3_000):
        merge.receive(bucket)
    found = {name: tensor for bucket in merge.buckets() for name, tensor in bucket.tensors()}
    wanted = dict(stored_tensors(fsdp.named_full_tensors(policy)))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_engine_samples_with_the_adapters_of_the_last_update(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama", False)
    policy = trained(folder)
    request = Request("r", (5, 6, 7), Sampling(12, seed=1, ignore_eos=True))
    answers = []
    for alone in (False, True):
        worker = RolloutWorker(spec(folder, verify_checksum=True) if alone else EngineSpec(str(folder), 48, name="hf"), 60, 60)
        tensors = fsdp.whole_adapters(policy, torch.device("cpu")) if alone else dict(fsdp.named_full_tensors(policy))
        for version in (1, 2):
            worker.start_weight_update(version)
            for bucket in pack_buckets(tensors.items(), 4_000):
                worker.load_bucket(bucket)
            assert worker.finish_weight_update() == version
        worker.submit([request])
        (completion,) = worker.poll(30)
        answers.append((completion.response_ids.tolist(), completion.logprobs.tolist(), completion.versions))
        assert not alone or worker.received_digests().keys() == tensors.keys()
        worker.close()
    assert answers[0] == answers[1]


def test_half_an_adapter_and_an_adapter_of_no_layer_are_errors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3", True)
    sent = fsdp.whole_adapters(trained(folder), torch.device("cpu"))
    first = next(iter(sent))
    for wrong, match in (
        (
            {name: tensor for name, tensor in sent.items() if name != first},
            "one of the two matrices of the adapter at model.lay",
        ),
        (sent | {f"model.nowhere{lora.A_NAME}": sent[first]}, "adapters of no layer of the model arrived: model.nowhere"),
    ):
        merge = AdapterMerge(spec(folder))
        for bucket in pack_buckets(wrong.items(), 1 << 20):
            merge.receive(bucket)
        with pytest.raises(WeightTransferError, match=match):
            list(merge.buckets())


def test_adapters_alone_need_adapters_and_no_other_way() -> None:
    with pytest.raises(ConfigError, match=r"lora_sync=adapter: has no effect in this run: needs .*lora_rank above 0"):
        make_plan(compose(["recipe=arithmetic/grpo", "actor_rollout_ref.rollout.lora_sync=adapter"]))
    plan = make_plan(compose(["recipe=arithmetic/lora", "actor_rollout_ref.rollout.lora_sync=adapter"]))
    assert plan.engine is not None and plan.engine.adapter_scaling == 2.0 and "engines get the adapters alone" in plan.render()
