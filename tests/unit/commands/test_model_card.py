"""The model card, and what is refused before a model is pushed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from run_folders import make_run
from transformers import AutoModelForCausalLM

from grpo_rl.__main__ import main
from grpo_rl.commands.export import model_card
from grpo_rl.commands.targets import run_config
from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.report import plot_curves
from grpo_rl.telemetry.rundir import RunDir


def test_the_card_says_what_was_trained_on_what_and_how_to_repeat_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "carded", "trainer.seed=7", "data.val_files=['hf:owner/sums?split=test']")
    first, *_, last = (one["val/arithmetic/mean@1"] for one in read_metrics(run / "metrics.jsonl")[::4])
    card = model_card(RunDir(run), run_config(run), None, has_curve=True)
    _, head, body = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["tags"] == ["grpo_rl", "reinforcement-learning", "grpo"] and "base_model" not in metadata
    assert "# carded" in body and "`builtin:arithmetic`" in body and "after 8 steps" in body
    assert f"| validation arithmetic/mean@1 | {first:.4g} (step 0) | {last:.4g} (step 8) |" in body
    assert "![curves](curves.png)" in body and "hf:owner/sums?split=test" in body
    assert "trainer.seed: 7" in body and str(tmp_path) not in body


def test_a_checkpoints_card_ends_at_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "half")
    card = model_card(RunDir(run), run_config(run), 4, has_curve=False)
    assert "the checkpoint of step 4" in card and "(step 8)" not in card and "curves.png" not in card


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, "named")
    config = run_config(run)
    config["actor_rollout_ref"]["model"]["path"] = "/m`\n# owned\x1b[2J"
    config["data"]["train_files"] = ["a\n```\n# owned"]
    card = model_card(RunDir(run), config, None, has_curve=False)
    assert "\n# owned" not in card and "\x1b" not in card


def test_an_export_has_the_type_of_choice_and_no_code_that_was_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "typed")
    builtin.build("builtin:arithmetic", run / "model")
    for name in ("modeling_own.py", "extra.pkl", "pytorch_model.bin"):
        (run / "model" / name).write_text("")
    whole = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert main(["export", str(run), "--dtype", "bfloat16", "--output", str(tmp_path / "half")]) == 0
    assert "left out, as they are code" in " ".join(capsys.readouterr().out.split())
    assert not any((tmp_path / "half" / name).exists() for name in ("modeling_own.py", "extra.pkl", "pytorch_model.bin"))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16 and half.config.dtype == torch.bfloat16
    assert all(torch.equal(tensor, whole[name].to(torch.bfloat16)) for name, tensor in half.state_dict().items())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (run / "model", tmp_path / "half")]
    print(f"bytes in float32 and bfloat16: {sizes}")
    assert sizes[1] < 0.6 * sizes[0]
    assert main(["export", str(run), "--trust-run", "--output", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "modeling_own.py").exists()


def test_the_exported_folder_has_card_configuration_and_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "whole")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    plot_curves(RunDir(run))
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert f"written: {tmp_path / 'out'} (" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "README.md", "run_config.yaml", "metrics.jsonl", "curves.png"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert main(["export", str(run), "--output", str(tmp_path / "mine")]) == 2
