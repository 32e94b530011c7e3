"""Keys that a schedule does not read are refused, and verl's sft_trainer is answered with the keys to use."""

from __future__ import annotations

from typing import Any

import pytest
from config_tools import CPU, RUNNABLE, A, R, config_of

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import settled
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import decide

ROWS = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "sft", "data.response_key": "reward_model.ground_truth"}
VAL = {"data.val_files": ["task:arithmetic?num_rows=16&split=val"], "trainer.test_freq": 5}
ASKED = {"data.val_prompt_files": ["task:arithmetic?num_rows=16&split=val"]}


def test_a_supervised_run_starts_the_actor_alone_and_engines_only_for_prompts_to_answer() -> None:
    assert check(config_of(ROWS | VAL), CPU) == [] == check(config_of(ROWS | ASKED), CPU)
    alone, asked = decide(config_of(ROWS | VAL), CPU), decide(config_of(ROWS | ASKED), CPU)
    assert [role.name for role in alone.roles] == ["actor"] and not alone.reward.scores and alone.engine is None
    assert [role.name for role in asked.roles] == ["rollout", "actor"] and asked.reward.rules
    assert alone.sizes.updates_per_step == 1 and not alone.objective.needs_ref
    assert alone.passes.old_logprobs == "none"


def test_what_the_schedule_fixes_is_fixed_once_and_changes_no_other_schedule() -> None:
    config = settled(config_of(ROWS))
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size
    assert settled(config) == config
    assert settled(config_of({})) == config_of({})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ROWS | {f"{A}.policy_loss.loss_mode": "vanilla"}, "is made for sampled responses"),
        ({f"{A}.policy_loss.loss_mode": "sft"}, "reads no advantages, so the reward would have no effect"),
        ({"data.max_length": 64}, "data.max_length=64: is of data.responses=rows"),
        ({"trainer.early_stop_patience": 3}, "is of data.responses=rows"),
        (ROWS | {"trainer.early_stop_patience": 3}, "needs the loss on data.val_files every trainer.test_freq steps"),
        (ROWS | {"algorithm.gamma": 0.9}, "algorithm.gamma=0.9: has no effect with data.responses=rows"),
        (ROWS | ASKED | {f"{R}.n": 4}, "has no effect with data.responses=rows"),
        (ROWS | {"reward.num_workers": 7}, "reward.num_workers=7: needs data.val_prompt_files"),
        (ROWS | {f"{R}.name": "hf"}, "needs data.val_prompt_files"),
        (ROWS | {f"{A}.ppo_mini_batch_size": 3}, "takes one optimizer step on each batch"),
        (ROWS | VAL | {"trainer.val_only": True}, "data.responses=rows only trains"),
    ],
)
def test_a_key_that_the_schedule_does_not_read_is_refused(given: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in check(config_of(given), CPU))


SCORER = {
    "trainer.schedule": "reward_model",
    "reward.reward_model.model_path": "builtin:arithmetic",
    "data.rejected_key": "extra_info.demonstration",
}
RATED = {k: v for k, v in SCORER.items() if k != "data.rejected_key"} | {"reward.reward_model.train.loss": "steps"}


def test_a_reward_model_trains_without_a_policy_and_an_engine() -> None:
    for given in (SCORER, RATED | {"reward.reward_model.step_separator": "x"}):
        config = given_to_reward_model(given)
        assert check(config, CPU) == []
        plan = decide(config, CPU, num_train_rows=64)
        assert [(role.name, role.stateful) for role in plan.roles] == [("reward_model", True)] and plan.trains_reward_model
        assert plan.engine is None and not plan.reward.scores and plan.sizes.reward_model_updates == plan.sizes.total_steps > 0
        assert decide(config, CPU, resumes=True).roles == plan.roles, "a resumed one needs no actor either"
    assert decide(given_to_reward_model(SCORER), CPU).rows == "pairs"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SCORER | {f"{A}.optim.lr": 1e-4}, f"{A}.optim.lr=0.0001: has no effect with trainer.schedule=reward_model"),
        (SCORER | {f"{R}.n": 4}, "trains no policy"),
        (SCORER | {"algorithm.gamma": 0.9}, "trains no policy"),
        (SCORER | {"reward.num_workers": 7}, "trains no policy"),
        (SCORER | {"reward.reward_model.weight": 2.0}, "trains no policy"),
        (
            SCORER | {"reward.reward_model.step_separator": "x"},
            "has no effect with reward.reward_model.train.loss=bradley_terry",
        ),
        (SCORER | {"data.responses": "rows"}, "says what a policy learns from"),
        (SCORER | {"trainer.val_only": True}, "validates while it trains"),
        (SCORER | {"trainer.early_stop_patience": 3}, "needs the loss on data.val_files"),
        (SCORER | {"reward.reward_model.model_path": None}, "reward.reward_model.model_path is not set"),
        (SCORER | {"reward.reward_model.train.optim.min_lr_ratio": 0.1}, "train.optim.lr_scheduler_type=linear or cosine"),
        (RATED, "reward.reward_model.step_separator is not set"),
        (RATED | {"reward.reward_model.train.center_coef": 0.1}, "needs reward.reward_model.train.loss=bradley_terry"),
        (RATED | {"data.rejected_key": "worse"}, "has no effect with reward.reward_model.train.loss=steps"),
        ({"reward.reward_model.train.optim.lr": 1e-4}, "is of trainer.schedule=reward_model"),
    ],
)
def test_the_training_of_a_reward_model_refuses_what_it_does_not_read(given: dict[str, Any], message: str) -> None:
    config = given_to_reward_model(given) if "trainer.schedule" in given else config_of(given)
    assert any(message in problem for problem in check(config, CPU))


def given_to_reward_model(given: dict[str, Any]) -> Config:
    """The smallest runnable configuration without its policy, and what is given."""
    bare = {key: leaves()[key].default for key in RUNNABLE if not key.startswith(("data.", "trainer."))}
    return config_of(bare | given)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("model.partial_pretrain=m", "actor_rollout_ref.model.path"),
        ("optim.lr=1e-5", f"{A}.optim.lr"),
        ("optim.lr_scheduler=cosine", f"{A}.optim.lr_scheduler_type"),
        ("data.micro_batch_size_per_gpu=4", f"{A}.ppo_micro_batch_size_per_gpu"),
        ("data.multiturn.messages_key=talk", "data.messages_key"),
        ("trainer.max_ckpt_to_keep=2", "trainer.max_actor_ckpt_to_keep"),
    ],
)
def test_a_key_of_verls_sft_trainer_is_answered_with_ours(word: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["recipe=paradigm/sft", word])
    (problem,) = caught.value.problems
    assert problem.startswith(word.partition("=")[0]) and f"use {key}" in problem
