"""Rewards by models: scores at any layout, and whole runs with a reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import DEADLINE_S, RankProcesses, make_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from whole_runs import train, without_ray

from grpo_rl.cluster.roles.reward_model_role import RewardModelRole
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.rewards.contract import RewardResult
from grpo_rl.rewards.models.rendering import ScorableRenderer
from grpo_rl.schedules import sync
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.types import Prompt, Rollout
from grpo_rl.workers.specs import RewardModelSpec

pytestmark = pytest.mark.timeout(1080)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reward model of the embedded tokenizer, both random."""
    root, tokenizer = tmp_path_factory.mktemp("models"), build_tokenizer(128)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = {name: root / name for name in ("policy", "scorer")}
    make_model(made["policy"], tied=False, vocab_size=128, max_position_embeddings=256, **ends)
    torch.manual_seed(4)
    config = Qwen3Config.from_pretrained(made["policy"], num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(made["scorer"])
    for folder in made.values():
        tokenizer.save_pretrained(folder)
    return made


def rollouts(texts: list[str]) -> list[Rollout]:
    tokenizer = build_tokenizer(128)
    prompt = Prompt("p", tuple(tokenizer("12+3")["input_ids"]), "12+3", "test")
    ids = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    return [
        Rollout(prompt, i, row, (0.0,) * len(row), "length", ((0, len(row)),), text=text)
        for i, (row, text) in enumerate(zip(ids, texts, strict=True))
    ]


def decode(ids: object) -> str:
    return build_tokenizer(128).decode(list(ids), skip_special_tokens=True)


@pytest.mark.parametrize("separator", [None, "."])
def test_scores_do_not_depend_on_ranks_and_passes(
    folders: dict[str, Path], ranks: dict[int, RankProcesses], separator: str | None
) -> None:
    items = rollouts(["1", "3.4.5", "", "98 x. y", "7777", "a.b.c.d.e.f.g.", "x" * 40])
    found: list[list[float]] = []
    for size, pass_tokens in ((1, 1000), (1, 44), (2, 44)):
        ranks[size].build(RewardModelSpec(str(folders["scorer"]), "float32"))
        ranks[size].call_timeout_s = DEADLINE_S
        worker_group = RewardModelRole(
            ranks[size], ScorableRenderer(decode, separator=separator), weight=1.0, pass_tokens=pass_tokens, max_length=44
        )
        results = worker_group.score(items)
        worker_group.close()
        assert all(isinstance(result, RewardResult) for result in results)
        found.append([value for result in results for value in ([r for _, r in result.steps] if separator else [result.score])])
    assert len(found[0]) == (7 if separator is None else 15) and max(found[0]) - min(found[0]) > 0.1
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[2] == pytest.approx(found[0], abs=1e-5)


def words(folders: dict[str, Path]) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={folders['policy']}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "data.train_files=task:arithmetic?split=train&num_rows=64",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "reward.functions=[]",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={folders['scorer']}",
    ]


@torch.no_grad()
def plain_scores(folder: Path, texts: list[str]) -> list[float]:
    """Return the score that transformers computes for each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]


@pytest.mark.parametrize(
    "schedule", ["sync", *(pytest.param(one, marks=pytest.mark.campaign) for one in ("one_step_off", "async"))]
)
def test_reward_model_and_critic_learn_and_score_in_every_schedule(
    folders: dict[str, Path], tmp_path: Path, schedule: str
) -> None:
    own = [
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=2",
        "critic.ppo_epochs=2",
        "trainer.total_training_steps=4",
    ]
    if schedule == "sync":
        own += ["trainer.critic_warmup=1"]
    else:
        own += [
            f"trainer.schedule={schedule}",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
        ]
        own += ["reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1"]
        own += ["reward.reward_model.n_gpus_per_node=2", "reward.reward_model.weight=0.5"]
    own += ["trainer.n_gpus_per_node=1", "data.max_response_length=4"]
    if schedule == "sync":
        run = without_ray(sync.train, tmp_path, schedule, *words(folders), *own)
    else:
        run = train(tmp_path, schedule, *words(folders), *own)
    rows = {int(row["step"]): row for row in read_metrics(run.path / "metrics.jsonl") if "critic/vf_loss" in row}
    assert sorted(rows) == [1, 2, 3, 4]
    assert all(row["critic/grad_norm"] > 0 and row["critic/vf_loss"] > 0 for row in rows.values())
    assert all(row["actor/grad_norm"] > 0 for row in run.steps.values())
    assert rows[1]["critic/values/mean"] == 0.0 != rows[2]["critic/values/mean"]
    if schedule == "sync":
        assert sorted(run.steps) == [2, 3, 4]
        # One update per batch, which only the actor's steps make a version of.
        assert [{record["weight_version"] for record in run.rollouts(step)} for step in rows] == [{0}, {0}, {1}, {2}]
        assert rows[3]["actor/ratio_max"] == 1.0
    else:
        assert max(row["staleness/max"] for row in rows.values()) == 1
        assert "model score 2 ranks in a pool of their own" in " ".join(run.output.split())
    records = [record for step in rows for record in run.rollouts(step)]
    whole = [r for r in records if r["finish_reason"] == "length" and len(r["response"]) == r["response_length"]]
    expected = plain_scores(folders["scorer"], [record["prompt"] + record["response"] for record in whole])
    # One token a character: what has as many of both has no special token, which its text would not show.
    assert len(whole) >= 8
    assert [record["reward_parts"]["reward_model"] for record in whole] == pytest.approx(expected, abs=1e-4)
    weight = 1.0 if schedule == "sync" else 0.5
    assert [record["reward"] for record in whole] == pytest.approx([weight * score for score in expected], abs=1e-4)
