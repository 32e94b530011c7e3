"""The script that measures the doctor: every run of it is one that would start, and its table counts as it says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.kinds import Illness

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def ill_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("ill_runs")


def write_run(folder: Path, name: str, reward: float) -> None:
    """Write a run of ten steps in which every response gets this reward, or one that learns where it is 0.5."""
    place = folder / name.replace("/", "-")
    place.mkdir(parents=True)
    spread = 0.5 if reward == 0.5 else 0.0
    records = [
        {
            "step": step,
            "time": 0.0,
            "reward/mean": reward + spread * step / 20,
            "reward/min": reward - spread,
            "reward/max": reward + spread,
            "advantage/zero_group_fraction": 0.2 if spread else 1.0,
        }
        for step in range(1, 11)
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "config.yaml").write_text(yaml.safe_dump({"data": {"train_batch_size": 4}}))
    (place / "ended.json").write_text('{"exit_code": 0, "seconds": 31.5}')


@pytest.mark.campaign
def test_every_run_is_one_that_the_checks_let_start(ill_runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ill_runs.write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (*ill_runs.MISTAKES, *ill_runs.HEALTHY):
        config = compose(ill_runs.words_of(name)).config
        assert check(config, Machine(0, 2, "cpu", cluster=False)) == [], name
    assert set(ill_runs.MISTAKES) <= set(get_args(Illness))
    assert len(ill_runs.MISTAKES) >= 20 and len(ill_runs.HEALTHY) == 10


@pytest.mark.campaign
def test_its_data_are_what_they_are_named(ill_runs: Any, tmp_path: Path) -> None:
    ill_runs.write_inputs(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("easy.jsonl", "wrong.jsonl")
    }
    sums = {name: [sum(ill_runs.problem_of(row)[::2]) for row in of_file] for name, of_file in rows.items()}
    right = {name: [row["reward_model"]["ground_truth"] for row in of_file] for name, of_file in rows.items()}
    assert right["easy.jsonl"] == [str(value) for value in sums["easy.jsonl"]]
    assert all(given != str(value) for given, value in zip(right["wrong.jsonl"], sums["wrong.jsonl"], strict=True))


def test_a_run_is_judged_by_what_the_doctor_names_first_and_a_healthy_one_by_silence(ill_runs: Any, tmp_path: Path) -> None:
    for name, reward in (("reward_constant", 1.0), ("reward_never_seen", 1.0), ("arithmetic/grpo", 0.5), ("paradigm/sft", 1.0)):
        write_run(tmp_path, name, reward)
    names = ("reward_constant", "reward_never_seen", "arithmetic/grpo", "paradigm/sft", "arithmetic/ppo")
    judged = [verdict for name in names if (verdict := ill_runs.judge(tmp_path, name))]
    assert [one.is_right for one in judged] == [True, False, True, False]
    assert judged[0].alarm == "reward_constant at 3" and judged[0].seconds == 31.5
    text = ill_runs.table(judged)
    assert text.count("**wrong**") == 2 and "| `arithmetic/grpo` | healthy | nothing |" in text
    shown, met = ill_runs.summary(judged)
    assert shown.startswith("right first in 1 of 2 ill runs; nothing raised in 1 of 2 healthy ones; ") and not met
