"""More runs that learn from teachers than that of test_commands.py: with adapters, resumed to the bit, in other schedules, on rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_commands import TAUGHT, TEACHERS
from whole_runs import arithmetic, train

from grpo_rl.models import builtin

pytestmark = pytest.mark.campaign
L = "distillation.distillation_loss"
WORDS = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.kv_cache_gib=1.0",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "reward.functions=[my_reward.py:odd]",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    *TAUGHT,
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    student, teacher = (builtin.build(name, folder / name) for name in ("arithmetic_half", "arithmetic"))
    return arithmetic(student, *WORDS, f"{TEACHERS}.other.model_path={teacher}")


def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(words: list[str], tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", *words, "trainer.total_training_steps=3")
    train(tmp_path, "parts", *words, "trainer.total_training_steps=2")
    parts = train(tmp_path, "parts", *words, "trainer.total_training_steps=3")
    one, other = whole.weights(), parts.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.steps[3]["actor/distillation_loss"] == parts.steps[3]["actor/distillation_loss"]


def test_k1_trains_a_schedule_that_overlaps(words: list[str], tmp_path: Path) -> None:
    ours = [word for word in words if "jsd" not in word and "topk" not in word and not word.startswith("trainer.save_freq")]
    overlapping = [
        "trainer.schedule=async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ]
    k1 = [f"{L}.loss_mode=k1", f"{L}.use_policy_gradient=true", f"{L}.discount=0.9", f"{L}.distillation_loss_coef=0.5"]
    run = train(tmp_path, "async", *ours, *overlapping, *k1, "trainer.total_training_steps=2")
    assert all(row["actor/grad_norm"] > 0 and row["actor/nonfinite"] == 0 for row in run.steps.values())


def test_rows_learn_a_divergence(words: list[str], tmp_path: Path) -> None:
    others = (".self.", "reward.", "rollout.", "use_kl", "mini", "weight", "val_")
    rows = [
        *(word for word in words if not any(part in word for part in others)),
        "data.responses=rows",
        "data.response_key=reward_model.ground_truth",
        "actor_rollout_ref.actor.policy_loss.loss_mode=sft",
    ]
    run = train(tmp_path, "rows", *rows, "trainer.test_freq=-1", "trainer.total_training_steps=2")
    assert all(row["distillation/other/cross_entropy"] > 0 < row["actor/distillation_loss"] for row in run.steps.values())
