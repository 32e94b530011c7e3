"""A small real run that learns from teachers too, of whole weights and with LoRA; and the commands on its folder: exact exports,
eval that goes on, generate, chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import Run, arithmetic, assert_trains_like_its_engine, command, train

from grpo_rl.__main__ import main
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.training_rows.conversations import DemonstrationSet
from grpo_rl.models import builtin, lora
from grpo_rl.models.load import load_tokenizer

DATA = "task:arithmetic?split=val&num_rows=6"
TEACHERS = "distillation.teacher_models"
TAUGHT = [
    "distillation.enabled=true",
    f"{TEACHERS}.other.weight=2",
    f"{TEACHERS}.self.ema_decay=0.5",
    f"{TEACHERS}.self.context='The answer is {{ground_truth}}. '",
    "distillation.distillation_loss.loss_mode=jsd",
    "distillation.distillation_loss.topk=5",
]
"""A model of its own, and the policy itself as it was."""


@pytest.fixture(scope="module", params=[0, pytest.param(4, marks=pytest.mark.campaign)], ids=["whole", "adapters"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("commands")
    model, teacher = builtin.build("arithmetic", folder / "model"), builtin.build("arithmetic_half", folder / "teacher")
    words = arithmetic(
        model,
        *TAUGHT,
        f"{TEACHERS}.other.model_path={teacher}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.kv_cache_gib=1.0",
        "reward.functions=[my_reward.py:odd]",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
    )
    return train(folder, "small", *words, f"actor_rollout_ref.model.lora_rank={request.param}")


def test_with_adapters_the_reference_has_no_processes_and_the_sampler_agrees_with_the_trainer(run: Run) -> None:
    adapted = "the base model under the adapters" in (run.path / "plan.txt").read_text()
    assert adapted == (not list(run.path.glob("logs/reference*"))) and list(run.path.glob("logs/actor*"))
    assert_trains_like_its_engine(run, last=2)
    assert run.steps[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and run.steps[2]["actor/kl_loss"] > 0


def test_each_prompt_has_one_teacher_and_the_policy_moves_towards_them(run: Run) -> None:
    assert "teacher" in (run.path / "plan.txt").read_text() and list(run.path.glob("logs/teacher0*"))
    for row in run.steps.values():
        assert sum(row.get(f"distillation/{name}/share", 0.0) for name in ("other", "self")) == 1
        assert row["actor/distillation_loss"] > 0
        # The mean over all tokens is that of the teachers' own, as the policy of the update is the one that sampled.
        low, high = sorted(row.get(f"distillation/{name}/kl", 0.0) for name in ("other", "self"))
        assert low - 1e-3 <= row["actor/distillation_kl"] <= high + 1e-3
    assert 0 < sum(row.get("distillation/other/share", 0.0) for row in run.steps.values()) < 2


def test_an_exported_checkpoint_has_the_bits_of_the_runs_own_export(run: Run, tmp_path: Path) -> None:
    assert main(["export", f"{run.path}@2", "--output", str(tmp_path / "two")]) == 0
    mine, theirs = load_file(tmp_path / "two" / "model.safetensors"), run.weights()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (tmp_path / "two" / "config.json").read_text() == (run.path / "model" / "config.json").read_text()
    assert "the checkpoint of step 2" in (tmp_path / "two" / "README.md").read_text()
    assert main(["export", f"{run.path}@1"]) == 0
    before = load_file(run.path / "exports" / "step_1" / "model.safetensors")
    assert any(not torch.equal(before[name], theirs[name]) for name in theirs)
    if (run.path / "model" / lora.FOLDER).is_dir():
        folder = tmp_path / "adapter"
        assert main(["export", str(run.path), "--adapter", "--output", str(folder)]) == 0
        assert {file.name for file in folder.iterdir()} >= {lora.WEIGHTS, lora.SETTINGS, "README.md"}
        base = AutoModelForCausalLM.from_pretrained(run.path.parents[1] / "model", dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict()
        for name, tensor in theirs.items():
            torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)


def test_an_evaluation_that_was_cut_goes_on_and_models_stand_side_by_side(run: Run, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "out"), "--data", DATA, "-n", "4"]
    command(run, "eval", "--trust-run", f"{run.path}@start", *output)
    [responses] = (tmp_path / "out" / "models").glob("*start/responses.jsonl")
    whole = responses.read_text().splitlines(keepends=True)
    assert len(whole) == 24
    responses.write_text("".join(whole[:18])[:-30])  # four prompts, and a line of the fifth that was cut

    screen, _ = command(run, "eval", "--trust-run", f"{run.path}@start", str(run.path), *output)
    assert "goes on, 4 of 6 prompts are answered already" in screen
    again = [json.loads(line) for line in responses.read_text().splitlines() if line.endswith("}")]
    kept = {(line["row"], line["sample"]): line["response"] for line in again}
    assert kept == {(line["row"], line["sample"]): line["response"] for line in map(json.loads, whole)}, "the same seeds"

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    [source] = summary["results"]
    labels = [f"{run.path}@start", str(run.path)]
    assert source["num_prompts"] == 6 and list(source["metrics"]["mean@4"]) == labels
    values = [[line["reward"] for line in map(json.loads, whole)][start : start + 4] for start in range(0, 24, 4)]
    mean = sum(map(sum, values)) / 24
    assert source["metrics"]["mean@4"][labels[0]]["mean"] == pytest.approx(mean)
    assert source["metrics"]["pass@4"][labels[0]]["mean"] == pytest.approx(sum(map(any, values)) / 6)
    assert 0 < source[f"differences to {labels[0]}"]["mean@4"][labels[1]]["p"] <= 1
    assert "differences" in screen and "written: " in screen


@pytest.mark.campaign
def test_generated_rows_are_learnt_from(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "good.parquet"
    screen, _ = command(run, "generate", "--trust-run", str(run.path), "--data", DATA, "-n", "8", "--output", str(output))
    assert f"written: {output}" in screen and not output.with_name("good.parquet.work").exists()
    rows = DemonstrationSet(
        [str(output)], Config(data=DataConfig(responses="rows")), load_tokenizer(str(run.path / "model"))
    ).checked()
    assert 0 < len(rows) <= 48


def test_a_conversation_through_a_pipe(run: Run) -> None:
    typed = "1+1=\n/nothing\n/reset\n1+1=\n"
    answers, notes = command(run, "chat", f"{run.path}@2", "--temperature", "0", "--max-tokens", "6", typed=typed)
    lines = answers.splitlines()
    assert len(lines) % 2 == 0 and lines[: len(lines) // 2] == lines[len(lines) // 2 :], "greedy: the same answer again"
    assert "there is no /nothing" in notes and "forgotten" in notes
    tokenizer, own = load_tokenizer(str(run.path / "model")), AutoModelForCausalLM.from_pretrained(run.path / "model")
    messages = [{"role": "user", "content": "1+1="}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = own.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
    assert lines[0].strip() == tokenizer.decode(ids, skip_special_tokens=True).strip() != "", "of the exported model"
