"""LoRA adapters in one process: the function, its gradient, merging, and folders that peft reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import Ragged, make_folder, plain_model
from torch import Tensor

from grpo_rl.config.schema.tree import ModelConfig
from grpo_rl.errors import ConfigError
from grpo_rl.models import fsdp, lora
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm

DATA = Ragged([3, 5, 1, 4], [6, 2, 7, 1])
TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module", params=[("qwen3", True), ("llama", False)], ids=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param
    return make_folder(tmp_path_factory.mktemp("model"), family, tied)


def settings(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), **{"lora_rank": 4, "lora_alpha": 8, **options})


def adapted(folder: Path, *, moved: bool = True, **options: Any) -> PolicyModel:
    """The policy with adapters, as the workers build it; `moved`: B is not 0 any more."""
    model = settings(folder, **options)
    lm = load_lm(str(folder), load_config(str(folder)))
    lora.add_adapters(lm, model)
    policy = PolicyModel(lm)
    lora.initialize(lm, seed=7)
    policy.adapters = lora.describe(lm, model)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in lora.adapted_layers(lm).values():
                b_OR = lora.factors(layer)[1]
                b_OR.copy_(0.1 * torch.randn(b_OR.shape, generator=generator))
    return policy


def peft_twin(policy: PolicyModel, folder: Path, tmp_path: Path) -> Any:
    """The same adapters as peft itself computes them over the plain model of transformers."""
    tensors = fsdp.whole_adapters(policy, torch.device("cpu"))
    lora.save_adapter(tmp_path, policy.lm, policy.adapters, tensors)
    return PeftModel.from_pretrained(plain_model(folder), str(tmp_path), is_trainable=True)


def logprobs_of(logprobs_TV: Tensor) -> Tensor:
    return logprobs_TV.gather(1, DATA.targets_T()[:, None])[:, 0]


def test_logprobs_are_those_of_peft_over_the_plain_model_with_and_without_adapters(folder, tmp_path):
    policy = adapted(folder)
    plain = peft_twin(policy, folder, tmp_path)
    ours_T = policy(DATA.sequences()).logprobs_T
    torch.testing.assert_close(ours_T, logprobs_of(DATA.plain_logprobs_TV(plain)), atol=1e-5, rtol=1e-6)
    with lora.adapters_off(policy):
        base_T = policy(DATA.sequences()).logprobs_T
    with plain.disable_adapter():
        torch.testing.assert_close(base_T, logprobs_of(DATA.plain_logprobs_TV(plain)), atol=1e-5, rtol=1e-6)
    assert float((ours_T - base_T).abs().max()) > 0.01, "the adapters do nothing that this test could see"
    torch.testing.assert_close(policy(DATA.sequences()).logprobs_T, ours_T, atol=0, rtol=0)


def test_the_first_policy_is_the_base_model_to_the_bit(folder):
    policy = adapted(folder, moved=False)
    with lora.adapters_off(policy):
        base_T = policy(DATA.sequences()).logprobs_T
    assert torch.equal(policy(DATA.sequences()).logprobs_T, base_T)
    firsts = [lora.factors(layer)[0] for layer in lora.adapted_layers(policy.lm).values()]
    assert all(0.9 * a.shape[1] ** -0.5 < float(a.abs().max()) <= a.shape[1] ** -0.5 for a in firsts)


def test_gradients_are_the_chain_rule_of_the_whole_gradient_of_the_merged_model(folder):
    """dL/dB = s G A^T and dL/dA = s B^T G, with G the gradient of the plain model at W + s B A; only adapters have one."""
    rank = 48  # at least either side of every layer: the adapter can go in any direction
    policy = adapted(folder, lora_rank=rank, lora_alpha=rank // 2)
    weights_T = torch.randn(len(DATA.targets_T()), generator=torch.Generator().manual_seed(2))
    (policy(DATA.sequences()).logprobs_T * weights_T).sum().backward()
    merged = plain_model(folder)
    merged.load_state_dict(dict(fsdp.named_full_tensors(policy)))
    (logprobs_of(DATA.plain_logprobs_TV(merged)) * weights_T).sum().backward()
    layers = lora.adapted_layers(policy.lm)
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        (a_RI, b_OR), gradient_OI = lora.factors(layer), merged.get_submodule(name).weight.grad
        largest = float(gradient_OI.abs().max())
        torch.testing.assert_close(b_OR.grad, 0.5 * gradient_OI @ a_RI.T, atol=2e-5 * largest, rtol=1e-4)
        torch.testing.assert_close(a_RI.grad, 0.5 * b_OR.T @ gradient_OI, atol=2e-5 * largest, rtol=1e-4)
        # A step of gradient ascent on A and B raises the loss as one on W does: the directions agree.
        step_OI = b_OR.grad @ a_RI + b_OR @ a_RI.grad
        assert float((step_OI * gradient_OI).sum()) > 0
    assert all(p.grad is None for name, p in policy.named_parameters() if not lora.is_adapter(name))


def test_merged_weights_are_peft_s_and_the_base_stays_what_it_is(folder, tmp_path):
    policy = adapted(folder)
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    for _ in range(3):
        merged = dict(fsdp.named_full_tensors(policy))
    assert all(torch.equal(before[name], p) for name, p in policy.lm.named_parameters())
    expected = peft_twin(policy, folder, tmp_path).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys() == plain_model(folder).state_dict().keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    half = dict(fsdp.named_full_tensors(policy, dtype=torch.bfloat16))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in merged.items())


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["lm_head"], "the LM head"),
        (["embed_tokens"], "the embedding"),
        (["no_such"], "no_such"),
        (["self_attn"], "self_attn"),
        (["q_proj", "v_porj"], "target_modules: v_porj is the end of no"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(folder, targets, words):
    with pytest.raises(ConfigError, match=words):
        adapted(folder, target_modules=targets)


# ---- starting from an adapter ------------------------------------------------------------------------------------------


def foreign_adapter(folder: Path, target: Path, **options: Any) -> Path:
    """An adapter that peft itself made and saved."""
    torch.manual_seed(9)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    get_peft_model(plain_model(folder), config).save_pretrained(str(target))
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_rank": 8}, "lora_rank=8, and the adapter has 4"),
        ({"lora_alpha": 16}, "lora_alpha=16, and the adapter has 8"),
        ({"target_modules": ["q_proj"]}, "does not fit"),
        ({"target_modules": [*TARGETS, "k_proj"]}, "does not fit"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(folder, tmp_path, change, words):
    start = foreign_adapter(folder, tmp_path)
    options = {"target_modules": TARGETS, **change}
    policy = adapted(folder, **options)
    with pytest.raises(ConfigError, match=words):
        lora.load_adapter(policy.lm, settings(folder, lora_adapter_path=str(start), **options))


@pytest.mark.parametrize(
    "damage", ["no folder", "no weights", "rslora", "another method", "no json", "half a file", "another shape"]
)
def test_an_adapter_folder_that_cannot_be_used_is_refused(folder, tmp_path, damage):
    start = foreign_adapter(folder, tmp_path / "adapter", use_rslora=damage == "rslora")
    config, weights = start / lora.SETTINGS, start / lora.WEIGHTS
    if damage == "no folder":
        start = tmp_path / "nowhere"
    elif damage == "no weights":
        weights.unlink()
    elif damage == "another method":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "LOHA"}))
    elif damage == "no json":
        config.write_text("{")
    elif damage == "half a file":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "another shape":
        save_file({name: tensor[:1].contiguous() for name, tensor in load_file(weights).items()}, weights)
    policy = adapted(folder, target_modules=TARGETS)
    with pytest.raises(ConfigError, match="lora_adapter_path"):
        lora.load_adapter(policy.lm, settings(folder, target_modules=TARGETS, lora_adapter_path=str(start)))
