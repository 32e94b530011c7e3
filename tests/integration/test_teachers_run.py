"""More runs that learn from teachers than that of test_commands.py: with adapters, resumed to the bit, in other schedules, on rows.

Their roles are in this process: a session without Ray has the bits of one with it (test_sessions.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_commands import TAUGHT, TEACHERS
from whole_runs import Run, arithmetic, without_ray

from grpo_rl.models import builtin
from grpo_rl.schedules import asynchronous, offline, sync

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


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    student, teacher = (builtin.build(name, tmp_path / name) for name in ("arithmetic_half", "arithmetic"))
    return arithmetic(student, *WORDS, f"{TEACHERS}.other.model_path={teacher}")


def train(loop: Any, name: str, *words: str) -> Run:
    return without_ray(loop, Path.cwd(), name, *words)


def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(words: list[str]) -> None:
    whole = train(sync.train, "whole", *words, "trainer.total_training_steps=3")
    train(sync.train, "parts", *words, "trainer.total_training_steps=2")
    parts = train(sync.train, "parts", *words, "trainer.total_training_steps=3")
    mine, theirs = (run.weights() for run in (whole, parts))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert whole.steps[3]["actor/distillation_loss"] == parts.steps[3]["actor/distillation_loss"]


def test_k1_trains_a_schedule_that_overlaps(words: list[str]) -> None:
    ours = [word for word in words if "jsd" not in word and "topk" not in word and not word.startswith("trainer.save_freq")]
    k1 = [f"{L}.loss_mode=k1", f"{L}.use_policy_gradient=true", f"{L}.discount=0.9", f"{L}.distillation_loss_coef=0.5"]
    run = train(asynchronous.train, "async", *ours, *k1, "trainer.schedule=async", "trainer.total_training_steps=2")
    assert all(row["actor/grad_norm"] > 0 and row["actor/nonfinite"] == 0 for row in run.steps.values())


def test_rows_learn_a_divergence(words: list[str]) -> None:
    others = (".self.", "reward.", "rollout.", "use_kl", "mini", "weight", "val_")
    rows = [
        *(word for word in words if not any(part in word for part in others)),
        "data.responses=rows",
        "data.response_key=reward_model.ground_truth",
        "actor_rollout_ref.actor.policy_loss.loss_mode=sft",
    ]
    run = train(offline.train, "rows", *rows, "trainer.test_freq=-1", "trainer.total_training_steps=2")
    assert all(row["distillation/other/cross_entropy"] > 0 < row["actor/distillation_loss"] for row in run.steps.values())
