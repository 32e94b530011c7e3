"""Responses that are there already: logs of a run and files of `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_folders import make_run, rollout

from grpo_rl.__main__ import main
from grpo_rl.telemetry.rollouts.rollout_log import write_rollouts


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())["results"][0]


def test_two_validations_of_a_run_are_compared_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "measured", solved=range(9))
    before = write_rollouts(run / "val" / "step_0.jsonl", [rollout(row, float(row < 2)) for row in range(20)])
    after = run / "val" / "step_3.jsonl"
    assert main(["eval", str(before), str(after), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    found = summary(tmp_path / "out")
    assert found["metrics"]["mean@1"][str(after)]["mean"] == pytest.approx(9 / 20)
    difference = found[f"differences to {before}"]["mean@1"][str(after)]
    assert difference["mean"] == pytest.approx(7 / 20) and difference["p"] == pytest.approx(2 / 2**7)
    assert "differences" in out and f"written: {tmp_path / 'out' / 'summary.json'}" in out


def test_files_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_rollouts(tmp_path / "one.jsonl", [rollout(0, 1.0), rollout(1, 1.0)])
    other = write_rollouts(tmp_path / "other.jsonl", [rollout(7, 1.0)])
    uneven = write_rollouts(tmp_path / "uneven.jsonl", [rollout(0, 1.0), rollout(1, 1.0), rollout(1, 0.0, sample=1)])
    (tmp_path / "bare.jsonl").write_text('{"reward": 1.0}\n')
    output = ["--output", str(tmp_path / "out")]
    for words, code, said in (
        ([one, other], 3, "no prompt in common"),
        ([uneven], 3, "between 1 and 2 responses"),
        ([tmp_path / "bare.jsonl"], 3, "has no uid, prompt, response, data_source"),
        ([one, "builtin:arithmetic"], 2, "builtin:arithmetic is no file of responses"),
        ([one, one], 2, "the same file is named twice"),
        ([one, "data.prompt_key=p"], 2, "without a configuration"),
    ):
        assert main(["eval", *map(str, words), *output]) == code
        assert said in capsys.readouterr().err
