"""Whole runs that learn from teachers: a model of its own beside the policy itself, with adapters, stopped and resumed to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from whole_runs import Run, arithmetic, train

from grpo_rl.models import builtin

T, L = "distillation.teacher_models", "distillation.distillation_loss"
WORDS = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "reward.functions=[my_reward.py:odd]",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "distillation.enabled=true",
    f"{T}.other.weight=2",
    f"{T}.self.ema_decay=0.5",
    f"{T}.self.context='The answer is {{ground_truth}}. '",
    f"{L}.loss_mode=jsd",
    f"{L}.topk=5",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    student, teacher = (builtin.build(name, folder / name) for name in ("arithmetic_half", "arithmetic"))
    own = [word for word in arithmetic(student) if "kv_cache_gib" not in word and not word.startswith("reward.functions")]
    return [*own, *(word.replace("{{", "{").replace("}}", "}") for word in WORDS), f"{T}.other.model_path={teacher}"]


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("teachers"), "whole", *words, "trainer.total_training_steps=3")


def test_each_prompt_has_one_teacher_and_the_policy_moves_towards_them(whole: Run) -> None:
    assert "teacher" in (whole.path / "plan.txt").read_text() and list(whole.path.glob("logs/teacher0*"))
    for row in whole.steps.values():
        shares = [row.get(f"distillation/{name}/share", 0.0) for name in ("other", "self")]
        assert sum(shares) == 1 and row["actor/distillation_loss"] > 0 and row["actor/grad_norm"] > 0
        # The mean over all tokens is that of the teachers' own, as the policy of the update is the one that sampled.
        means = [row.get(f"distillation/{name}/kl", 0.0) for name in ("other", "self")]
        low, high = min(means), max(means)
        assert low - 1e-3 <= row["actor/distillation_kl"] <= high + 1e-3
    assert 0 < sum(row.get("distillation/other/share", 0.0) for row in whole.steps.values()) < 3


@pytest.mark.campaign
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(whole: Run, words: list[str]) -> None:
    folder = whole.path.parents[1]
    train(folder, "parts", *words, "trainer.total_training_steps=2")
    parts = train(folder, "parts", *words, "trainer.total_training_steps=3")
    one, other = whole.weights(), parts.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.steps[3]["actor/distillation_loss"] == parts.steps[3]["actor/distillation_loss"]


@pytest.mark.campaign
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


@pytest.mark.campaign
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
