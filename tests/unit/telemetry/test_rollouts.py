import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from grpo_rl.columns import Block, View
from grpo_rl.telemetry.rollout_log import RolloutLog, read_rollouts, write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Episode, PlayedTurn, Prompt, Rollout


def make_rollout(sample: int = 0, text: str = "55", reward: float | None = 1.0) -> Rollout:
    prompt = Prompt("row-7", (1, 2, 3), "47 + 8 =", "arithmetic", "55")
    return Rollout(prompt, sample, (4, 5), (-0.5, -1.5), "stop", ((9, 2),), text, reward, {"correct": 1.0, "format": 0.5})


def test_a_line_holds_everything_known_about_a_rollout(tmp_path: Path) -> None:
    log = RolloutLog(RunDir.create(tmp_path, "r"))
    path = log.write("rollouts", 3, [make_rollout()], advantages=[0.75])
    log.flush()
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
    log, mixed = RolloutLog(RunDir.create(tmp_path, "r")), make_rollout(reward=None)
    mixed.versions = ((8, 1), (9, 1))
    text = "a\nb\u2028c\x00\ud800\U0001f600"
    empty = Rollout(make_rollout().prompt, 1, (), (), "abort", (), text, math.nan)
    path = log.write("val", 0, [empty, mixed])
    log.flush()
    first, second = read_rollouts(path)
    assert first["response"] == text
    assert (first["reward"], first["rollout_logprob_mean"], first["advantage"]) == ("NaN", None, None)
    assert second["reward"] is None and second["weight_version"] == 8 and second["weight_versions"] == [[8, 1], [9, 1]]
    assert len(path.read_bytes().splitlines()) == 2


class SlowBlock:
    """A block of another process, which comes when it may."""

    def __init__(self) -> None:
        self.may_come = threading.Event()

    def read(self) -> Block:
        assert self.may_come.wait(120)
        return {"logprobs": np.array([-0.5, -1.5], np.float32)}


def slow_rollout(block: SlowBlock) -> Rollout:
    rollout = make_rollout()
    rollout.rollout_logprobs = View(block, "logprobs", 0, 2)
    return rollout


def test_a_step_goes_on_while_its_rollouts_are_written_and_at_most_two_wait(tmp_path: Path) -> None:
    log, block = RolloutLog(RunDir.create(tmp_path, "r")), SlowBlock()
    paths = [log.write("rollouts", step, [slow_rollout(block)]) for step in (1, 2)]
    assert not any(path.exists() for path in paths)
    third = threading.Thread(target=log.write, args=("rollouts", 3, [make_rollout()]))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "a third step is not taken while two wait"
    block.may_come.set()
    third.join(120)
    log.flush()
    expected = [write_rollouts(tmp_path / "plain.jsonl", [make_rollout()]).read_bytes()] * 3
    assert [(tmp_path / f"r/rollouts/step_{step}.jsonl").read_bytes() for step in (1, 2, 3)] == expected
    log.close()


def test_a_commit_and_the_next_step_wait_for_the_same_rollouts(tmp_path: Path) -> None:
    log, block = RolloutLog(RunDir.create(tmp_path, "r")), SlowBlock()
    log.write("rollouts", 1, [slow_rollout(block)])
    with ThreadPoolExecutor() as threads:
        flushes = [threads.submit(log.flush) for _ in range(4)]
        assert not wait(flushes, 0.2).done, "all wait"
        block.may_come.set()
        assert [flush.result(120) for flush in flushes] == [None] * 4
    log.close()


def test_rollouts_that_the_disk_refuses_are_left_out_with_one_warning_and_later_ones_are_there(tmp_path: Path) -> None:
    run_dir, warned = RunDir.create(tmp_path, "r"), list[str]()
    log = RolloutLog(run_dir, warn=warned.append)
    run_dir.rollouts.rmdir()
    for step in (1, 2):
        log.write("rollouts", step, [make_rollout()])
    log.flush()
    assert len(warned) == 1 and "step_1.jsonl cannot be written: No such file or directory" in warned[0]
    run_dir.rollouts.mkdir()
    log.write("rollouts", 3, [make_rollout()])
    log.flush()
    assert [path.name for path in run_dir.rollouts.iterdir()] == ["step_3.jsonl"]
    log.close()


def test_a_line_of_an_episode_has_its_conversation_and_which_tokens_were_sampled(tmp_path: Path) -> None:
    messages = (
        {"role": "assistant", "content": "5?"},
        {"role": "tool", "name": "add", "content": "no"},
        {"role": "assistant", "content": "7"},
    )
    turns = (PlayedTurn(0, 2, 0.0), PlayedTurn(4, 1, 1.0))
    episode = Episode(turns, messages, "turns", {"tool_calls": 1.0}, (0.25, 0.5), {"found": 1.0})
    ids, logprobs = (4, 5, 90, 91, 6), (-0.5, -1.5, 0.0, 0.0, -1.0)
    rollout = Rollout(make_rollout().prompt, 0, ids, logprobs, "stop", ((9, 3),), "5?\n\n7", 1.0, episode=episode)
    path = write_rollouts(tmp_path / "step_3.jsonl", [rollout], token_groups=1)
    (row,) = read_rollouts(path)
    assert row["rollout_logprob_mean"] == -1.0  # of the sampled tokens alone
    assert (row["ended"], row["num_turns"], row["response_length"], row["token_ids"]) == ("turns", 2, 5, list(ids))
    assert row["episode"] == {
        "messages": [messages[0] | {"tokens": 2, "reward": 0.0}, messages[1], messages[2] | {"tokens": 1, "reward": 1.0}],
        "spans": [[0, 2], [4, 1]],
        "ended": "turns",
        "counts": {"tool_calls": 1.0},
        "wait_s": 0.75,
        "info": {"found": 1.0},
    }
