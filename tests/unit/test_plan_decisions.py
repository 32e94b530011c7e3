"""The plan's decisions as values, worlds larger than the machine, and that no other room decides anything."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, MicroBatchRule
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan, PoolPlan, decide
from grpo_rl.plan.make import make_plan

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
EIGHT_GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = ["data.train_files=task:arithmetic?num_rows=1000", "actor_rollout_ref.model.path=builtin:arithmetic"]
BASE += ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=16", f"{R}.n=8", "trainer.total_epochs=3"]
VALIDATES = ["trainer.val_only=true", "data.val_files=task:arithmetic?num_rows=16&split=val"]


def plan_of(*words: str, machine: Machine = CPU) -> Plan:
    return make_plan(compose([*BASE, *words]), machine)


def problems_of(*words: str, machine: Machine = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(*words, machine=machine)
    return caught.value.problems


def started(plan: Plan) -> list[str]:
    return [role.name for role in plan.roles]


# ---- roles and places ----------------------------------------------------------------------------------


def test_roles_start_in_their_order_each_where_and_with_what_the_plan_says() -> None:
    words = ["algorithm.adv_estimator=gae", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=4", f"{R}.tensor_model_parallel_size=2"]
    plan = plan_of(*words, "trainer.n_gpus_per_node=4", machine=EIGHT_GPUS)
    # 64 cores are shared by the processes of one role.
    assert [(role.name, role.pool, role.num_workers, role.devices_per_worker, role.threads) for role in plan.roles] == [
        ("rollout", "rollout", 2, 2, 32),
        ("actor", "actor", 4, 1, 16),
        ("reference", "actor", 4, 1, 16),
        ("critic", "actor", 4, 1, 16),
    ]
    assert plan.pools == (PoolPlan("actor", 1, 4), PoolPlan("rollout", 1, 4))
    assert [role.name for role in plan.roles if role.stateful] == ["actor", "critic"]
    assert plan.engine.threads == 32 and plan.engine.weight_backend == "nccl" and not plan.colocated


def test_the_same_configuration_and_machine_make_the_same_plan_which_can_be_sent_to_a_process() -> None:
    plan = plan_of()
    assert plan == plan_of() != plan_of(machine=EIGHT_GPUS)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_only_the_roles_that_the_schedule_drives_start(tmp_path: Path) -> None:
    file = tmp_path / "offline.py"
    file.write_text(
        "from grpo_rl.trainer.sync import SyncSchedule\n\n\n"
        "class Offline(SyncSchedule):\n    roles = frozenset({'actor', 'reference'})\n"
    )
    plan = plan_of(f"trainer.schedule={file}:Offline", machine=EIGHT_GPUS)
    assert started(plan) == ["actor", "reference"] and plan.engine is None
    assert not plan.reward.rules and [need.role for need in plan.memory] == ["actor", "reference"]
    assert not any(line.startswith("  rollout") for line in plan.render().splitlines())


# ---- passes and sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "computed_by", "readers"),
    [
        ([f"{A}.ppo_mini_batch_size=64"], "none", ()),
        ([f"{A}.ppo_mini_batch_size=16"], "actor", ()),
        ([f"{A}.ppo_mini_batch_size=64", f"{A}.policy_loss.loss_mode=kl_cov"], "actor", ("the choice of tokens by kl_cov",)),
        (
            [f"{A}.ppo_mini_batch_size=64", "algorithm.rollout_correction.rollout_is=token"],
            "actor",
            ("the correction of rollouts",),
        ),
        (
            [f"{A}.ppo_mini_batch_size=64", f"{A}.use_kl_loss=false", "algorithm.use_kl_in_reward=true"],
            "actor",
            ("the KL in the reward",),
        ),
        (["algorithm.rollout_correction.bypass_mode=true"], "engine", ()),
        # Losses over pairs have no ratio, however many updates there are.
        ([f"{A}.ppo_mini_batch_size=16", f"{A}.policy_loss.loss_mode=dpo", f"{A}.loss_agg_mode=prompt-mean"], "none", ()),
    ],
)
def test_old_logprobs_have_one_rule(words: list[str], computed_by: str, readers: tuple[str, ...]) -> None:
    passes = plan_of(*words).passes
    assert (passes.old_logprobs, passes.old_readers) == (computed_by, readers)


def test_every_pass_has_its_own_rule_for_micro_batches() -> None:
    words = [f"{A}.ppo_micro_batch_size_per_gpu=4", f"{R}.log_prob_micro_batch_size_per_gpu=2"]
    words += ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=5000"]
    passes = plan_of(*words).passes
    assert (passes.update, passes.old, passes.reference, passes.critic) == (
        MicroBatchRule(None, 4, True),
        MicroBatchRule(None, 2, True),
        MicroBatchRule(5000, None, True),
        MicroBatchRule(None, 4, True),
    )


def test_the_rows_that_the_data_turned_out_to_have_decide_the_steps() -> None:
    config = compose([*BASE, "trainer.critic_warmup=2", "critic.ppo_mini_batch_size=32", f"{A}.ppo_epochs=2"]).config
    sizes = decide(config, CPU).with_rows(130).sizes
    # 130 rows make 2 batches of 64, three times; the actor learns in all but two steps, 4 mini-batches twice.
    assert (sizes.num_train_rows, sizes.total_steps, sizes.actor_updates) == (130, 6, (6 - 2) * 4 * 2)
    assert sizes.critic_updates == 6 * 2 * 2


# ---- validation only -----------------------------------------------------------------------------------


def test_a_run_that_only_validates_starts_engines_alone_and_needs_no_training_data() -> None:
    words = [word for word in BASE if not word.startswith("data.train_files")]
    plan = make_plan(compose([*words, *VALIDATES, "algorithm.adv_estimator=gae"]), EIGHT_GPUS)
    assert started(plan) == ["rollout"] and plan.world_size == 0
    # Nothing else waits for the engines' memory, and no weights travel.
    assert not plan.engine.sleep_mode and plan.engine.weight_backend == "object_store"
    page = " ".join(plan.render().split())
    assert "actor not started: nothing is trained" in page and "validation only, of the model's folder" in page
    assert "one training step" not in page and "objective" not in page
    assert [need.role for need in plan.memory] == ["rollout"]


def test_validation_of_a_checkpoint_starts_an_actor_that_reads_it(tmp_path: Path) -> None:
    words = [*VALIDATES, f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=mine"]
    assert started(plan_of(*words)) == ["rollout"]
    (tmp_path / "mine" / "checkpoints" / "step_3").mkdir(parents=True)
    plan = plan_of(*words)
    assert started(plan) == ["rollout", "actor"] and plan.sizes.actor_updates == 0
    assert "for the checkpoint's weights, which it hands to the engines" in " ".join(plan.render().split())
    assert started(plan_of(*words, "trainer.resume_mode=disable")) == ["rollout"]
    folder = tmp_path / "mine" / "checkpoints" / "step_3"
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    assert started(plan_of(*VALIDATES, *named)) == ["rollout", "actor"]


def test_validation_without_data_is_refused_by_the_keys_name() -> None:
    (problem,) = problems_of("trainer.val_only=true")
    assert problem.startswith("trainer.val_only=true") and "data.val_files" in problem


# ---- the machine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trainer.n_gpus_per_node=64"],
            "trainer.n_gpus_per_node=64: this run has no GPU, so these are 64 processes on 2 cores",
        ),
        (["trainer.nnodes=1000"], "trainer.nnodes=1000: this run has no GPU, so these are 1000 processes"),
        ([f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1000"], f"{R}.n_gpus_per_node=1000: this run has no GPU"),
        ([f"{R}.cpu_threads=3"], f"{R}.cpu_threads=3: the machine has 2 cores"),
    ],
)
def test_worlds_larger_than_the_machine_are_refused_with_the_reason(words: list[str], said: str) -> None:
    (problem,) = problems_of(*words, "data.train_batch_size=512", f"{A}.ppo_mini_batch_size=256")
    assert problem.startswith(said) and "at most" in problem


# ---- the other rooms obey ------------------------------------------------------------------------------


def test_on_a_cpu_pools_apart_have_cores_of_their_own_under_every_schedule() -> None:
    for schedule in ("sync", "one_step_off", "async"):
        apart = plan_of(f"trainer.schedule={schedule}", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1", machine=CPU)
        assert {role.name: role.threads for role in apart.roles if role.name in ("rollout", "actor")} == {
            "rollout": 1,
            "actor": 1,
        }
    shared = plan_of(machine=CPU)
    assert {role.name: role.threads for role in shared.roles if role.name in ("rollout", "actor")} == {"rollout": 2, "actor": 2}
