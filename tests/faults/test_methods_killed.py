"""Every method that samples from the policy as it is, by its recipe: killed by kill -9, it ends with the bits of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
from oracles import Training

from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
STEPS = 3
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]

POLICY = "actor_rollout_ref"
# A random model gets no sum right: these make a difference between its responses, and between their characters.
REWARDS = """\
def variety(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 10


def variety_of_steps(data_source, solution_str, ground_truth, extra_info):
    new = [float(character not in solution_str[:place]) for place, character in enumerate(solution_str)]
    return {"score": sum(new), "steps": [(place + 1, reward) for place, reward in enumerate(new)]}
"""
IN_UPDATE = "driver.phase:kill9@step=3,phase=update_actor,once"
KILLS = {
    "online_rft": [IN_UPDATE],
    "online_dpo": [IN_UPDATE],
    "grpo": [IN_UPDATE],
    "grpo_process": [IN_UPDATE],
    # The critic has learnt from the step, the policy has not; and both are of one checkpoint afterwards.
    "ppo": ["driver.phase:kill9@step=2,phase=update_critic,once", IN_UPDATE],
}
ITERATE = [
    "reward.reward_model.train.optim.lr=1e-2",
    "trainer.iterate.reward_model_steps=1",
    "trainer.iterate.steps_per_iteration=1",
    "trainer.total_training_steps=4",
]


def words(recipe: str, folder: Path, model: Path, function: str) -> list[str]:
    """The recipe's command with a random model, the smallest batches and a checkpoint after every step."""
    (folder / "my_rewards.py").write_text(REWARDS)
    return [
        f"recipe=paradigm/{recipe}",
        f"{POLICY}.model.path={model}",
        "data.train_files=task:arithmetic?split=train&num_rows=32",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        f"reward.functions=[{folder / 'my_rewards.py'}:{function}]",
        f"{POLICY}.actor.ppo_mini_batch_size=4",
        f"{POLICY}.rollout.n=4",
        f"{POLICY}.rollout.name=hf",
        f"{POLICY}.rollout.hf.batched=false",
        f"trainer.total_training_steps={STEPS}",
        *(["trainer.critic_warmup=1"] if recipe == "ppo" else []),
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        # In the background a checkpoint is committed some phases later: a kill in between goes one further back.
        f"{POLICY}.actor.checkpoint.async_save=false",
        "trainer.export_at_end=false",
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")


def killed_and_undisturbed(
    training: Callable[..., Training], command: list[str], kills: list[str], step: int
) -> tuple[Training, list[dict[str, Any]]]:
    """The run that was killed at each of these points and went on to the undisturbed one's bits, and its metrics."""
    calm, broken = training("calm", command), training("broken", command, ";".join(kills))
    assert calm.start().wait(END_S) == 0, calm.describe()
    for number in range(len(kills)):
        assert broken.start().wait(END_S) == -9, broken.describe()
        assert [fired["fault"] for fired in broken.fired()] == kills[: number + 1]
    assert broken.start().wait(END_S) == 0, broken.describe()
    for saved in range(1, step + 1):
        assert oracles.state_hash(broken.path, saved) == oracles.state_hash(calm.path, saved), f"step {saved}"
    assert oracles.learnt(broken.path) == oracles.learnt(calm.path)
    return broken, read_metrics(broken.path / "metrics.jsonl")


@pytest.mark.parametrize("recipe", KILLS)
def test_it_ends_with_the_bits_of_the_undisturbed_run(
    training: Callable[..., Training], model: Path, tmp_path: Path, recipe: str
) -> None:
    function = "variety_of_steps" if recipe == "grpo_process" else "variety"
    _, rows = killed_and_undisturbed(training, words(recipe, tmp_path, model, function), KILLS[recipe], STEPS)
    norms = [row.get("actor/grad_norm", 0.0) for row in rows]
    assert any(norm > 0.0 for norm in norms), "a run that learns nothing would compare nothing"


def test_iterations_killed_while_the_reference_or_the_reward_model_changes(
    training: Callable[..., Training], model: Path, tmp_path: Path
) -> None:
    """Steps 1 and 3 are the reward model's, each of which begins with the reference; 2 and 4 the policy's."""
    command = [*words("iterate", tmp_path, model, "variety"), f"reward.reward_model.model_path={model}", *ITERATE]
    kills = [
        "driver.phase:kill9@step=3,phase=refresh_reference,once",
        "driver.phase:kill9@step=3,phase=reward,once",  # the reference is the policy, the reward model is as it was
        "driver.phase:kill9@step=4,phase=ref,once",
    ]
    broken, rows = killed_and_undisturbed(training, command, kills, 4)
    output = (tmp_path / "broken.out").read_text()
    assert [line.rpartition(" ")[2] for line in output.splitlines() if "resumed from" in line] == ["2", "2", "3"]
    assert [row["step"] for row in rows if row.get("reward_model/new_pairs", 0) > 0] == [1, 3]
    folders = [broken.path / "checkpoints" / f"step_{step}" / "reference" for step in (2, 3)]
    before, after = ((folder / "weights_rank0.safetensors").read_bytes() for folder in folders)
    assert before != after, "the reference moved in step 3"
