import json
import math
from pathlib import Path

import pytest

from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog, first_and_last, read_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Prompt, Rollout


def make_rollout(sample: int = 0, text: str = "55", reward: float | None = 1.0) -> Rollout:
    prompt = Prompt("row-7", (1, 2, 3), "47 + 8 =", "arithmetic", "55")
    return Rollout(prompt, sample, (4, 5), (-0.5, -1.5), "stop", ((9, 2),), text, reward, {"correct": 1.0, "format": 0.5})


def test_a_line_holds_everything_known_about_a_rollout(tmp_path: Path) -> None:
    path = RolloutLog(RunDir.create(tmp_path, "r")).write("rollouts", 3, [make_rollout()], advantages=[0.75])
    assert path == tmp_path / "r/rollouts/step_3.jsonl"
    assert read_rollouts(path) == [
        {
            "prompt": "47 + 8 =",
            "response": "55",
            "ground_truth": "55",
            "data_source": "arithmetic",
            "reward": 1.0,
            "reward_parts": {"correct": 1.0, "format": 0.5},
            "advantage": 0.75,
            "uid": "row-7",
            "sample": 0,
            "finish_reason": "stop",
            "weight_version": 9,
            "prompt_length": 3,
            "response_length": 2,
            "rollout_logprob_mean": -1.0,
        }
    ]


def test_hostile_text_and_missing_values_are_kept_exactly(tmp_path: Path) -> None:
    log = RolloutLog(RunDir.create(tmp_path, "r"))
    text = "a\nb\u2028c\x00\ud800\U0001f600"
    empty = Rollout(make_rollout().prompt, 1, (), (), "abort", (), text, math.nan)
    path = log.write("val", 0, [empty, make_rollout(reward=None)])
    first, second = read_rollouts(path)
    assert first["response"] == text
    assert (first["reward"], first["rollout_logprob_mean"], first["advantage"]) == ("NaN", None, None)
    assert second["reward"] is None
    assert len(path.read_bytes().splitlines()) == 2


def test_advantages_must_be_one_per_rollout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 rollouts but 2 advantages"):
        RolloutLog(RunDir.create(tmp_path, "r")).write("rollouts", 1, [make_rollout()], advantages=[1.0, 2.0])


def test_resuming_removes_the_files_of_later_steps_only(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    log = RolloutLog(run_dir)
    for step in (0, 2, 10):
        log.write("val", step, [make_rollout()])
        log.write("rollouts", step, [make_rollout()])
    (run_dir.val / "notes.txt").write_text("mine")
    log.truncate_after(2)
    assert sorted(path.name for path in run_dir.rollouts.iterdir()) == ["step_0.jsonl", "step_2.jsonl"]
    assert sorted(path.name for path in run_dir.val.iterdir()) == ["notes.txt", "step_0.jsonl", "step_2.jsonl"]


def test_first_and_last_go_by_number_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / f"step_{step}.jsonl").write_text(json.dumps({}))
    ends = first_and_last(tmp_path)
    assert ends is not None and (ends[0][0], ends[1][0]) == (9, 100)
    assert first_and_last(tmp_path / "absent") is None
