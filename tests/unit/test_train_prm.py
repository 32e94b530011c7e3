"""The script that trains a process reward model: its figure, its split, and a model that learns what can be learnt."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.models.heads import ScoreModel, load_score_config, load_scorer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_prm.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_prm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_prm"] = module
    spec.loader.exec_module(module)
    return module


def test_the_auc_is_the_share_of_pairs_in_the_right_order(script):
    assert script.auc([3.0, 2.0, 1.0], [True, True, False]) == 1.0
    assert script.auc([1.0, 2.0, 3.0], [True, True, False]) == 0.0
    # Pairs (good, bad): 2 > 1, 2 < 3, 0 < 1, 0 < 3.
    assert script.auc([2.0, 0.0, 1.0, 3.0], [True, True, False, False]) == 0.25
    assert script.auc([5.0, 5.0, 5.0], [True, False, False]) == 0.5
    with pytest.raises(ValueError, match="good and bad"):
        script.auc([1.0], [True])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_rows_without_a_clear_rating_and_rows_that_are_too_long_are_left_out_and_problems_stay_whole(script, tmp_path):
    row = {"responses": ["a\n\nb"], "next_response": "ok"}
    rows = [{"instruction": f"p{i % 5}", "rating": (1, -1, 0, None)[i % 4], **row} for i in range(20)]
    rows.append({"instruction": "p0", "rating": 1, "responses": [], "next_response": "x" * 500})
    tokenizer = build_tokenizer(128)
    steps = script.read_steps(write(tmp_path / "s.parquet", rows), tokenizer, "\n\n", 100)
    assert len(steps) == 10 and sum(step.good for step in steps) == 5
    # A separator within a step would have made two of it.
    assert tokenizer.decode(steps[0].token_ids) == "<|user|>p0<|assistant|>a b\n\nok\n\n"
    parts = script.split(steps, 1)
    known = {step.problem for step in [*parts.training, *parts.new_steps]}
    assert known.isdisjoint({step.problem for step in parts.new_problems}) and len(known) == 4
    assert not set(parts.training) & set(parts.new_steps)
    assert [len(some) for some in (parts.training, parts.new_steps, parts.new_problems)] == [7, 1, 2]


def test_it_learns_what_makes_a_step_good_and_writes_a_reward_model(script, tmp_path, monkeypatch, capsys):
    words = {1: "yes", -1: "no"}
    rows = [
        {"instruction": f"p{i % 10}", "responses": ["so"] * (i % 3), "next_response": f"{words[rating]} {i}", "rating": rating}
        for i in range(150)
        for rating in (1, -1)
    ]
    data, out = write(tmp_path / "s.parquet", rows), tmp_path / "prm"
    options = {"hidden": 16, "layers": 1, "epochs": 3, "lr": 0.02, "batch-tokens": 600}
    monkeypatch.setattr(
        sys, "argv", ["train_prm", f"--data={data}", f"--out={out}", *(f"--{k}={v}" for k, v in options.items())]
    )
    script.main()
    printed = capsys.readouterr().out
    assert float(printed.rpartition("new problems")[2].split()[0]) > 0.95, printed
    config = load_score_config(str(out))
    assert isinstance(ScoreModel(load_scorer(str(out), config)), ScoreModel) and config.num_labels == 1
