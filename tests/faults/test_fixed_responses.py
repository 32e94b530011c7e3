"""Whole trainings on fixed responses, killed in the middle: given answers (SFT), and those of the initial policy (RFT)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
from oracles import Training

from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.errors import DataError
from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
KILLED = -signal.SIGKILL
pytestmark = pytest.mark.timeout(1200)

POLICY = "actor_rollout_ref"
IN_TRAINING = "driver.phase:kill9@step=3,phase=update_actor,once"
IN_COLLECTION = "collection.part:kill9@number=1,once"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")


def words_of(model: Path, responses: str, *more: str) -> list[str]:
    return [
        f"data.responses={responses}",
        f"{POLICY}.actor.policy_loss.loss_mode=sft",
        f"{POLICY}.model.path={model}",
        f"{POLICY}.actor.optim.lr=1e-3",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "trainer.save_freq=2",
        *more,
    ]


def broken_and_whole(training: Callable[..., Training], words: list[str], faults: list[str]) -> tuple[Training, Training]:
    """The same command killed at each of the faults in turn, and left alone."""
    whole, broken = training("whole", words).start(), training("broken", words)
    assert whole.wait(END_S) == 0, whole.describe()
    for fault in faults:
        broken.faults = fault
        assert broken.start().wait(END_S) == KILLED, broken.describe()
    broken.faults = ""
    assert broken.start().wait(END_S) == 0, broken.describe()
    assert [fired["fault"] for fired in broken.fired()] == faults
    return broken, whole


def assert_same(broken: Training, whole: Training, step: int) -> None:
    assert oracles.state_hash(broken.path, step) == oracles.state_hash(whole.path, step)
    assert oracles.learnt(broken.path) == oracles.learnt(whole.path)
    for file in ("model.safetensors", "config.json"):
        assert (broken.path / "model" / file).read_bytes() == (whole.path / "model" / file).read_bytes()


@pytest.mark.campaign
def test_a_killed_supervised_training_ends_with_the_bits_of_an_undisturbed_one(
    training: Callable[..., Training], model: Path, tmp_path: Path
) -> None:
    rows = [json.dumps(row) for row in task_rows("task:arithmetic?split=train&num_rows=24")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:16]) + "\n")
    (tmp_path / "val.jsonl").write_text("\n".join(rows[16:]) + "\n")
    files = [f"data.train_files={tmp_path / 'rows.jsonl'}", f"data.val_files={tmp_path / 'val.jsonl'}"]
    more = [*files, "data.response_key=reward_model.ground_truth", "trainer.total_epochs=1", "trainer.test_freq=2"]
    broken, whole = broken_and_whole(training, words_of(model, "rows", *more), [IN_TRAINING])
    assert_same(broken, whole, 4)
    metrics = {row["step"]: row for row in read_metrics(whole.path / "metrics.jsonl")}
    assert metrics[4]["val/loss"] < metrics[0]["val/loss"] and metrics[4]["val/perplexity"] < metrics[0]["val/perplexity"]
    assert set(whole.status["workers"]) == {"actor0"}, "nothing is sampled, so nothing that samples starts"


def test_a_killed_rejection_sampling_training_ends_with_the_bits_of_an_undisturbed_one(
    training: Callable[..., Training], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 2)\n"
    )
    words = words_of(
        model,
        "initial_policy",
        "data.train_files=task:arithmetic?split=train&num_rows=12",
        "data.gen_batch_size=4",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        f"{POLICY}.rollout.n=4",
        f"{POLICY}.rollout.name=hf",
        f"{POLICY}.rollout.hf.batched=false",
        "algorithm.rejection.max_per_prompt=2",
        "trainer.total_epochs=1",
    )
    broken, whole = broken_and_whole(training, words, [IN_COLLECTION, IN_TRAINING])
    collected = [json.loads(line) for line in (whole.path / "collected/train.jsonl").read_text().splitlines()]
    assert (broken.path / "collected/train.jsonl").read_bytes() == (whole.path / "collected/train.jsonl").read_bytes()
    assert {row["reward"] for row in collected} == {1.0} and len(collected) <= 24
    steps = len(collected) // 4
    assert whole.status["step"] == steps >= 3, "the steps follow from the rows that were kept"
    assert_same(broken, whole, steps)
    first = read_metrics(whole.path / "metrics.jsonl")[0]
    assert (first["step"], first["collect/kept"], first["collect/sampled"]) == (0, len(collected), 48)
    # The first start was killed before its second part: later ones sampled what was missing, and nothing twice.
    assert set(whole.status["workers"]) == {"actor0"}, "engines and rewards end with the collection"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1="}, "there is no column 'response'"),
        ({"prompt": "1+1=", "response": " "}, "column 'response'"),
        ({"messages": [{"role": "user", "content": "1+1="}]}, "no assistant turn"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line_before_anything_starts(
    training: Callable[..., Training], model: Path, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "1+1=", "response": "2"})
    file.write_text("\n".join([*[good] * 6, json.dumps(row), good]) + "\n")
    run = training("bad", words_of(model, "rows", f"data.train_files={file}")).start()
    assert run.wait(END_S) == DataError.exit_code, run.describe()
    assert any(f"{file}, line 7: " in line for line in run.error_lines()), run.error_lines()
    assert any(said in line for line in run.error_lines()), run.error_lines()
    assert not (run.path / "session.json").exists(), "nothing was started"
