"""A whole run with LoRA: its reference without processes, and its model as the commands see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import Run, arithmetic, command, train

from grpo_rl.__main__ import main
from grpo_rl.models import builtin, lora
from grpo_rl.models.load import load_tokenizer

pytestmark = pytest.mark.campaign

WORDS = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.kl_loss_coef=0.05",
    "reward.functions=[my_reward.py:odd]",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.build("arithmetic", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("lora")
    words = [word for word in arithmetic(model) if "kv_cache_gib" not in word and not word.startswith("reward.functions")]
    words += WORDS
    return train(folder, "whole", *words, "trainer.total_training_steps=3")


def test_the_reference_has_no_processes_and_the_sampler_agrees_with_the_trainer(whole: Run) -> None:
    assert not list(whole.path.glob("logs/reference*")) and list(whole.path.glob("logs/actor*"))
    assert "the base model under the adapters" in (whole.path / "plan.txt").read_text()
    steps = whole.steps
    assert steps[1]["actor/kl_loss"] == 0 and steps[3]["actor/kl_loss"] > 0
    for row in steps.values():
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0


def test_export_writes_the_merged_model_and_the_adapter(whole: Run, model: Path, tmp_path: Path) -> None:
    assert main(["export", f"{whole.path}@3", "--output", str(tmp_path / "merged")]) == 0
    exported, own = load_file(tmp_path / "merged" / "model.safetensors"), whole.weights()
    assert exported.keys() == own.keys() and all(torch.equal(exported[name], own[name]) for name in own)
    assert main(["export", str(whole.path), "--adapter", "--output", str(tmp_path / "adapter")]) == 0
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {lora.WEIGHTS, lora.SETTINGS, "README.md"}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    for name, tensor in own.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)


def test_eval_and_chat_answer_with_the_adapters_merged(whole: Run, tmp_path: Path) -> None:
    """Of a checkpoint, which has adapters alone: other log-probs than the base model's, and the merged model's own answer."""
    targets, data = [f"{whole.path}@start", f"{whole.path}@3"], "task:arithmetic?split=val&num_rows=4"
    command(whole, "eval", *targets, "--trust-run", "--data", data, "-n", "2", "--output", str(tmp_path / "out"))
    logprobs = []
    for ending in ("start", "3"):
        [file] = (tmp_path / "out" / "models").glob(f"*{ending}/responses.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        logprobs.append([line["rollout_logprob_mean"] for line in lines if "row" in line])
    base, merged = logprobs
    assert len(base) == len(merged) == 8 and not set(base) & set(merged)
    answer, _ = command(whole, "chat", targets[1], "--temperature", "0", "--max-tokens", "6", typed="1+1=\n")
    tokenizer, own = load_tokenizer(str(whole.path / "model")), AutoModelForCausalLM.from_pretrained(whole.path / "model")
    messages = [{"role": "user", "content": "1+1="}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = own.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
    assert answer.strip() == tokenizer.decode(ids, skip_special_tokens=True).strip() != ""
