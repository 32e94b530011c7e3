"""Iterated training whose controller is killed in every phase of two iterations ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import oracles
import pytest
from oracles import Training

from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
STEPS, BATCH_SIZE, SAMPLES = 10, 4, 4
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]

# Steps 1, 2 and 6, 7 are the reward model's, 3 to 5 and 8 to 10 the policy's; each second one is saved.
KILLS = [
    "driver.phase:kill9@step=2,phase=update_reward_model,once",  # from the beginning
    "driver.phase:kill9@step=5,phase=update_actor,once",  # from step 4: the reference is older than the policy
    "driver.phase:kill9@step=6,phase=gen,once",  # the reference has just become the policy
    "driver.phase:kill9@step=7,phase=update_reward_model,once",  # from step 6, between two batches of the reward model
    "ckpt.before_rename:kill9@step=8,once",  # while all parts are written and none counts
]
# A random model never gets a sum right: this one makes a difference between its responses.
REWARD = """\
def variety(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 10
"""


def words(model: Path, reward: Path) -> list[str]:
    policy, scorer = "actor_rollout_ref", "reward.reward_model"
    return [
        f"{policy}.model.path={model}",
        "data.train_files=task:arithmetic?split=train&num_rows=64",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        f"reward.functions=[{reward}:variety]",
        f"{scorer}.enable=true",
        f"{scorer}.model_path={model}",
        f"{scorer}.train.optim.lr=1e-2",
        f"{policy}.actor.ppo_mini_batch_size={BATCH_SIZE}",
        f"{policy}.actor.kl_loss_coef=0.1",
        f"{policy}.actor.optim.lr=1e-3",
        f"{policy}.rollout.n={SAMPLES}",
        f"{policy}.rollout.name=hf",
        f"{policy}.rollout.hf.batched=false",
        "trainer.schedule=iterate",
        "trainer.iterate.reward_model_steps=2",
        "trainer.iterate.steps_per_iteration=3",
        "trainer.iterate.replay_share=0.4",
        "trainer.iterate.replay_pairs=12",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        # In the background a checkpoint is committed some phases later: a kill in between goes one further back.
        f"{policy}.actor.checkpoint.async_save=false",
        "trainer.export_at_end=false",
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Training, list[int]]]:
    """The undisturbed run, the one that was killed again and again, and the steps from which that one went on."""
    folder = tmp_path_factory.mktemp("iterate")
    model = builtin.build("builtin:arithmetic", folder / "random")
    (folder / "my_reward.py").write_text(REWARD)
    command = words(model, folder / "my_reward.py")
    undisturbed, killed = Training(folder, "undisturbed", command), Training(folder, "killed", command, ";".join(KILLS))
    try:
        assert undisturbed.start().wait(END_S) == 0, undisturbed.describe()
        for number in range(len(KILLS)):
            assert killed.start().wait(END_S) == -9, killed.describe()
            assert [fired["fault"] for fired in killed.fired()] == KILLS[: number + 1]
        assert killed.start().wait(END_S) == 0, killed.describe()
        output = (folder / "killed.out").read_text()
        yield undisturbed, killed, [int(line.rpartition(" ")[2]) for line in output.splitlines() if "resumed from" in line]
    finally:
        undisturbed.end()
        killed.end()


def test_it_went_on_from_the_newest_checkpoint_each_time(runs: tuple[Training, Training, list[int]]) -> None:
    assert runs[2] == [4, 4, 6, 6]


def test_all_weights_moments_and_random_states_are_those_of_the_undisturbed_run(
    runs: tuple[Training, Training, list[int]],
) -> None:
    undisturbed, killed, _ = runs
    for step in (2, 4, 6, 8, 10):
        assert oracles.state_hash(killed.path, step) == oracles.state_hash(undisturbed.path, step)
    folder = undisturbed.path / "checkpoints" / "step_8"
    assert {path.parent.name for path in folder.rglob("weights_rank0.safetensors")} == {"step_8", "reference", "reward_model"}
    # In step 8 the policy has moved away from the reference that it was when the iteration began, after step 5.
    weights = [(folder / place / "weights_rank0.safetensors").read_bytes() for place in (".", "reference")]
    assert weights[0] != weights[1]
    assert weights[1] == (undisturbed.path / "checkpoints" / "step_6" / "weights_rank0.safetensors").read_bytes()


def test_the_history_and_the_metrics_are_those_of_the_undisturbed_run(runs: tuple[Training, Training, list[int]]) -> None:
    undisturbed, killed, _ = runs
    histories = [(run.path / "checkpoints" / f"step_{STEPS}" / "replay.jsonl").read_text() for run in (undisturbed, killed)]
    assert histories[0] == histories[1]
    head, *pairs = [json.loads(line) for line in histories[0].splitlines()]
    assert len(pairs) == 12 < head["num_seen"] and {pair["iteration"] for pair in pairs} == {1, 2}
    assert all(pair["rewards"][0] > pair["rewards"][1] for pair in pairs)
    assert oracles.learnt(killed.path) == oracles.learnt(undisturbed.path)
    rows = {int(row["step"]): row for row in read_metrics(undisturbed.path / "metrics.jsonl")}
    assert [rows[step]["iterate/policy_phase"] for step in range(1, STEPS + 1)] == [0.0, 0.0, 1.0, 1.0, 1.0] * 2
    assert rows[6]["reward_model/replayed_pairs"] + rows[7]["reward_model/replayed_pairs"] > 0
