"""Comparing runs: groups of seeds, differing keys, tests by what there is, equal steps, tokens and seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_folders import make_run

from grpo_rl.__main__ import main
from grpo_rl.commands.compare_runs import compare, config_differences, grouped, read_run

VAL = "val/arithmetic/mean@1"
DAPO = "actor_rollout_ref.actor.clip_ratio_high=0.28"


def test_runs_that_differ_in_seeds_and_names_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"a{seed}", f"trainer.seed={seed}", f"data.seed={seed}") for seed in range(3)]
    runs.append(make_run(tmp_path, "b", DAPO))
    groups = grouped([read_run(run) for run in runs])
    assert [len(group) for group in groups] == [3, 1]
    assert config_differences(groups) == [("actor_rollout_ref.actor.clip_ratio_high", [None, 0.28])]


def test_values_are_compared_where_both_have_got_to(tmp_path: Path) -> None:
    short = grouped([read_run(make_run(tmp_path, "short", rewards=[0.1, 0.2], tokens=300.0))])[0]
    long = grouped([read_run(make_run(tmp_path, "long", DAPO, rewards=[0.0, 0.2, 0.4, 0.6], tokens=100.0))])[0]
    at_steps = compare(short, long, "reward/mean", "step")
    assert at_steps is not None and at_steps.at == 2.0
    assert (at_steps.first, at_steps.second) == (pytest.approx(0.15), pytest.approx(0.1))
    # 400 tokens: one step of the first (300), all four of the second.
    at_tokens = compare(short, long, "reward/mean", "tokens")
    assert at_tokens is not None and (at_tokens.at, at_tokens.first, at_tokens.second) == (400.0, 0.1, pytest.approx(0.3))
    at_seconds = compare(short, long, "reward/mean", "seconds")
    assert at_seconds is not None and at_seconds.at == 4.0 and at_seconds.difference is None


def test_several_seeds_are_tested_over_runs(tmp_path: Path) -> None:
    sides = []
    for name, words, solved in (("a", [], 4), ("b", [DAPO], 8)):
        runs = [
            make_run(tmp_path, f"{name}{seed}", f"trainer.seed={seed}", *words, solved=range(solved + seed))
            for seed in range(3)
        ]
        sides.append(grouped([read_run(run) for run in runs])[0])
    found = compare(*sides, VAL, "step")
    assert found is not None and found.difference is not None
    assert found.difference.p == pytest.approx(0.1) == found.difference.least_p


def test_the_command_shows_keys_and_results_and_names_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "a", solved=range(4))
    make_run(tmp_path / "runs", "b", DAPO, solved=range(9))
    assert main(["compare", "a", "b"]) == 0
    out = capsys.readouterr().out
    for said in (
        "clip_ratio_high",
        "nothing about another seed",
        "grpo-rl eval RUN/val/step_N.jsonl",
        f"grpo-rl page {tmp_path}/runs/a {tmp_path}/runs/b",
    ):
        assert said in out


def test_seeds_of_one_method_have_nothing_to_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(make_run(tmp_path, f"a{seed}", f"trainer.seed={seed}")) for seed in range(2)]
    assert main(["compare", *runs]) == 0
    assert "there is one method, and nothing to test" in capsys.readouterr().out
    assert main(["compare", runs[0], runs[0]]) == 2
