"""What a schedule cannot do is refused, and verl's sft_trainer is answered with the keys to use."""

from __future__ import annotations

from typing import Any

import pytest
from compositions import compose
from config_tools import CPU, EIGHT_GPUS, RUNNABLE, A, R, config_of

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.derived import max_staleness, settled
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import decide
from grpo_rl.plan.make import make_plan, refusals
from grpo_rl.rollout.vllm.vllm_engine import engine_arguments

ROWS = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "sft", "data.response_key": "reward_model.ground_truth"}
RFT = {"data.responses": "initial_policy", f"{A}.policy_loss.loss_mode": "sft"}
COLLECTED_PAIRS = {"data.responses": "initial_policy", f"{A}.policy_loss.loss_mode": "dpo", f"{R}.n": 4}
VAL = {"data.val_files": ["task:arithmetic?num_rows=16&split=val"], "trainer.test_freq": 5}
ITERATE = {
    "trainer.schedule": "iterate",
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "builtin:arithmetic",
    f"{R}.n": 4,
}
REPLAY = {"algorithm.replay.max_age": 4}
FIXED = ITERATE | {"trainer.iterate.reward_model_steps": 0}
ASKED = {"data.val_prompt_files": ["task:arithmetic?num_rows=16&split=val"]}
PAIRS = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "dpo"}
SAMPLED_PAIRS = {f"{A}.policy_loss.loss_mode": "dpo"}
SCORER = {
    "trainer.schedule": "reward_model",
    "reward.reward_model.model_path": "builtin:arithmetic",
    "data.rejected_key": "extra_info.demonstration",
}
RATED = {k: v for k, v in SCORER.items() if k != "data.rejected_key"} | {"reward.reward_model.train.loss": "steps"}


def given_to_reward_model(given: dict[str, Any]) -> Config:
    """The smallest runnable configuration without its policy, and what is given."""
    bare = {key: leaves()[key].default for key in RUNNABLE if not key.startswith(("data.", "trainer."))}
    return config_of(bare | given)


def test_a_supervised_run_starts_the_actor_alone_and_engines_only_for_prompts_to_answer() -> None:
    assert check(config_of(ROWS | VAL), CPU) == [] == check(config_of(ROWS | ASKED), CPU)
    alone, asked = decide(config_of(ROWS | VAL), CPU), decide(config_of(ROWS | ASKED), CPU)
    assert [role.name for role in alone.roles] == ["actor"] and not alone.reward.scores and alone.engine is None
    assert [role.name for role in asked.roles] == ["rollout", "actor"] and asked.reward.rules
    assert alone.sizes.updates_per_step == 1 and not alone.objective.needs_ref
    assert alone.passes.old_logprobs == "none"


def test_a_collecting_run_has_a_plan_for_its_collection_with_the_sampling_that_was_asked_for() -> None:
    asked = {f"{R}.n": 4, f"{R}.temperature": 0.7, "data.gen_batch_size": 3, "algorithm.rejection.min_reward": 0.5}
    config = config_of(RFT | asked)
    assert check(config, CPU) == []
    plan = decide(config, CPU)
    assert [role.name for role in plan.roles] == ["actor"] and plan.engine is None and not plan.reward.scores
    rollout = plan.config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature, plan.config.data.gen_batch_size) == (1, 1.0, None)
    assert plan.collection is not None and plan.sizes.total_steps is None
    assert [role.name for role in plan.collection.roles] == ["rollout"] and plan.collection.reward.rules
    rollout, data = plan.collection.config.actor_rollout_ref.rollout, plan.collection.config.data
    assert (rollout.n, rollout.temperature, data.gen_batch_size) == (4, 0.7, 3)
    assert data.val_files == config.data.train_files and data.train_files == []
    assert decide(config_of(ROWS), CPU).collection is None
    pairs = decide(config_of(COLLECTED_PAIRS), CPU)
    assert pairs.objective.needs_pairs and pairs.collection is not None


def test_what_the_schedule_fixes_is_fixed_once_and_changes_no_other_schedule() -> None:
    config = settled(config_of(ROWS))
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size
    assert settled(config) == config
    assert settled(config_of({})) == config_of({})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (ROWS | {f"{A}.policy_loss.loss_mode": "vanilla"}, "is made for responses of the policy as it is"),
    ({f"{A}.policy_loss.loss_mode": "sft"}, "reads no advantages, so the reward would have no effect"),
    (ROWS | {f"{A}.ppo_mini_batch_size": 3}, "one optimizer step on each batch"),
    (ROWS | VAL | {"trainer.val_only": True}, "trains on the answers in the data"),
    (RFT | {"reward.functions": []}, "without a reward there is nothing to learn from"),
    (RFT | {f"{A}.policy_loss.loss_mode": "vanilla"}, "initial_policy trains on fixed ones"),
    (COLLECTED_PAIRS | {f"{R}.n": 1}, "compares the best and the worst of a group; 2 or more"),
    ({"trainer.schedule": "iterate"}, "trains on the score of a reward model"),
    (ITERATE | {"reward.functions": []}, "whose reward labels the reward model's pairs"),
    (ITERATE | {"reward.judge.base_url": "http://a/v1", "reward.judge.model": "m"}, "reward model's score alone"),
    (ITERATE | VAL | {"trainer.val_only": True}, "builtin:arithmetic has no head before"),
    (ITERATE | {"trainer.critic_warmup": 3}, "trainer.critic_warmup=3: counts first steps"),
    (ITERATE | {f"{R}.n": 1}, "the best and the worst of a group"),
    (ITERATE | {"reward.reward_model.step_separator": "x"}, "trains the reward model on pairs of whole responses"),
    (ITERATE | {"algorithm.adv_estimator": "gdpo"}, "reads the parts of the reward"),
    (ITERATE | {"algorithm.adv_estimator": "grpo_process"}, "come from the reward model alone"),
    ({f"{A}.policy_loss.loss_mode": "kto"}, "loss_mode=kto: learns labelled answers; data.responses=rows"),
    (REPLAY | {f"{R}.top_p": 0.9}, "algorithm.replay.max_age=4: does not go with top_p, top_k and min_p"),
    (REPLAY | {"algorithm.rollout_correction.bypass_mode": False}, "bypass_mode=false: with algorithm.replay.max_age=4"),
    (
        REPLAY | {f"{A}.policy_loss.loss_mode": "reinforce"},
        "rollout_is=null: algorithm.replay trains tokens that older weights",
    ),
    (REPLAY | {"algorithm.replay.max_age": 0, "algorithm.replay.share": 0.5}, "needs algorithm.replay.max_age above 0"),
    (
        COLLECTED_PAIRS | {f"{A}.policy_loss.loss_mode": "kto"},
        "loss_mode=kto: learns labelled answers; data.responses=rows",
    ),
    (PAIRS | {"data.truncation": "left"}, "compares whole answers"),
    (PAIRS | {f"{A}.loss_agg_mode": "token-sum"}, "makes no mean over pairs"),
    (PAIRS | {"data.max_length": 10_000, f"{A}.ppo_max_token_len_per_gpu": 16_384}, "shorter than a pair"),
    (SAMPLED_PAIRS | {f"{R}.n": 1}, "compares the best and the worst response"),
    (SAMPLED_PAIRS | {f"{A}.clip_ratio": 0.3}, "clip_ratio"),
    (SCORER | {"data.responses": "rows"}, "data.responses=rows: has no effect in this run: trainer.schedule=reward_model"),
    (
        SCORER | {"trainer.val_only": True},
        "trainer.val_only=true: has no effect in this run: trainer.schedule=reward_model",
    ),
    (SCORER | {"reward.reward_model.model_path": None}, "reward.reward_model.model_path is not set"),
    (RATED, "reward.reward_model.step_separator is not set"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_go_with_the_schedule_is_refused(given: dict[str, Any], message: str) -> None:
    config = given_to_reward_model(given) if given.get("trainer.schedule") == "reward_model" else config_of(given)
    # What depends on a function is told by the plan, which looks it up.
    problems = [*check(config, CPU), *refusals(config, CPU)]
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("loss", ["dpo", "ipo", "dpo_hinge", "simpo", "kto"])
def test_pairs_in_rows_need_the_actor_alone_also_for_the_reference(loss: str) -> None:
    given = PAIRS | VAL | {f"{A}.policy_loss.loss_mode": loss, f"{A}.use_kl_loss": True}
    assert check(config_of(given), CPU) == []
    plan = decide(config_of(given), CPU)
    assert [role.name for role in plan.roles] == ["actor"] and plan.passes.old_logprobs == "none"
    assert plan.objective.needs_ref == (loss != "simpo") and plan.objective.kl_loss_type is None
    # A mean over pairs, a whole batch of which is one optimizer step.
    assert plan.objective.loss_agg_mode == "seq-mean-token-mean" and plan.sizes.updates_per_step == 1
    assert plan.sizes.rollouts_per_step == 2 * plan.config.data.train_batch_size


@pytest.mark.parametrize(("loss", "reference"), [("dpo", True), ("ipo", True), ("simpo", False), ("orpo", False)])
def test_sampled_pairs_need_a_reference_where_the_loss_reads_one_and_never_old_logprobs(loss: str, reference: bool) -> None:
    given = {f"{A}.policy_loss.loss_mode": loss, f"{A}.ppo_epochs": 2}
    assert check(config_of(given), CPU) == []
    plan = decide(config_of(given), CPU)
    assert (plan.role("reference") is not None) == reference and plan.role("critic") is None
    assert plan.passes.old_logprobs == "none" and plan.objective.kl_loss_type is None
    assert plan.objective.loss_agg_mode == "seq-mean-token-mean"


def test_a_dpo_without_its_reference_starts_none() -> None:
    free = SAMPLED_PAIRS | {f"{A}.policy_loss.options": {"reference_free": True}}
    assert check(config_of(free), CPU) == [] and decide(config_of(free), CPU).role("reference") is None


def test_a_reward_model_trains_without_a_policy_and_an_engine() -> None:
    for given in (SCORER, RATED | {"reward.reward_model.step_separator": "x"}):
        config = given_to_reward_model(given)
        assert check(config, CPU) == []
        plan = decide(config, CPU, num_train_rows=64)
        assert [(role.name, role.stateful) for role in plan.roles] == [("reward_model", True)] and plan.trains_reward_model
        assert plan.engine is None and not plan.reward.scores and plan.sizes.reward_model_updates == plan.sizes.total_steps > 0
        assert decide(config, CPU, resumes=True).roles == plan.roles, "a resumed one needs no actor either"
    assert decide(given_to_reward_model(SCORER), CPU).rows == "pairs"


def test_an_iterated_run_counts_its_steps_by_phase_and_its_reference_moves() -> None:
    steps = {
        "trainer.total_training_steps": 27,
        "trainer.iterate.reward_model_steps": 4,
        "trainer.iterate.steps_per_iteration": 6,
    }
    plan = decide(config_of(ITERATE | steps), CPU)
    assert plan.sizes.policy_steps == 15 == plan.sizes.actor_updates // plan.sizes.updates_per_step
    roles = {role.name: role for role in plan.roles}
    assert roles["reference"].stateful and roles["reward_model"].stateful and plan.sizes.reward_model_updates == 12
    fixed = decide(config_of(FIXED | {"trainer.total_training_steps": 27}), CPU)
    assert fixed.sizes.policy_steps == 27 and fixed.sizes.reward_model_updates == 0
    assert {role.name: role.stateful for role in fixed.roles}["reward_model"] is False
    assert not {role.name: role for role in decide(config_of({}), CPU).roles}["reference"].stateful


# ---- schedules that sample while they train --------------------------------------------------------------

APART = {f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 1}
ASYNC = {"trainer.schedule": "async"} | APART
CORRECTION = "algorithm.rollout_correction"
OWN = "trainer.asynchronous"


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_engines_need_devices_of_their_own(schedule: str) -> None:
    [problem] = check(config_of({"trainer.schedule": schedule}), CPU)
    assert problem.startswith(f"trainer.schedule={schedule}: samples while it trains")
    assert f"{R}.nnodes=1 {R}.n_gpus_per_node" in problem
    assert check(config_of({"trainer.schedule": schedule} | APART), CPU) == []
    apart = {"trainer.schedule": schedule, "trainer.device": "cuda", "trainer.n_gpus_per_node": 4, f"{R}.nnodes": 1}
    assert check(config_of(apart), EIGHT_GPUS) == []


@pytest.mark.parametrize(
    ("given", "old"),
    [
        ({}, "engine"),
        ({f"{OWN}.max_staleness": 0}, "none"),
        ({f"{CORRECTION}.rollout_is": "token"}, "actor"),
        ({f"{CORRECTION}.bypass_mode": True}, "engine"),
        ({f"{CORRECTION}.bypass_mode": False, f"{CORRECTION}.rollout_is": "sequence"}, "actor"),
        ({f"{A}.policy_loss.loss_mode": "dpo"}, "none"),
    ],
)
def test_the_ratio_is_never_taken_against_another_policy_than_the_one_that_sampled(given: dict[str, Any], old: str) -> None:
    config = config_of(ASYNC | given)
    assert check(config, CPU) == [] and decide(config, CPU).passes.old_logprobs == old


def test_a_ratio_against_the_wrong_policy_is_refused() -> None:
    given = {f"{CORRECTION}.bypass_mode": False}
    [problem] = check(config_of(ASYNC | given), CPU)
    assert problem.startswith(f"{CORRECTION}.bypass_mode=false: ") and "rollout_is=token" in problem
    assert check(config_of(ASYNC | given | {f"{OWN}.max_staleness": 0}), CPU) == []
    words = ["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=builtin:arithmetic", "data.train_batch_size=4"]
    words += [f"{A}.ppo_mini_batch_size=4", f"{A}.policy_loss.loss_mode=gpg", *(f"{k}={v}" for k, v in ASYNC.items())]
    with pytest.raises(ConfigError, match=r"rollout_correction.rollout_is=null: .* has no ratio that corrects for that"):
        make_plan(compose(words), CPU)
    plan = make_plan(compose([*words, f"{CORRECTION}.rollout_is=token"]), CPU)
    assert plan.recomputes_old_logprobs
    said = " ".join(plan.render().split())
    assert "async: 2 batches of prompts in flight, no token more than 1 version old" in said
    assert "the policy of at most 1 training step before" in said


@pytest.mark.parametrize(
    ("more", "passed", "said"),
    [
        ([], {"async_scheduling": False}, None),
        ([f"{OWN}.partial_rollout=false"], {}, None),
        ([f"+{R}.engine_kwargs.vllm.async_scheduling=true"], {"async_scheduling": True}, "responses end before each update"),
    ],
)
def test_engines_that_get_weights_under_unfinished_requests_hand_tokens_over_at_once(more, passed, said) -> None:
    words = ["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=builtin:arithmetic", "trainer.schedule=async"]
    words += ["trainer.n_gpus_per_node=4", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=4", *more]
    plan = make_plan(compose(words), EIGHT_GPUS)
    assert plan.engine is not None
    assert {key: value for key, value in engine_arguments(plan.engine).items() if key == "async_scheduling"} == passed
    text = " ".join(plan.render().split())
    assert (said is None and "end before each" not in text) or (said is not None and said in text)


def test_weights_that_are_sent_too_rarely_for_the_bound_are_refused() -> None:
    [problem] = check(config_of(ASYNC | {f"{OWN}.sync_every": 3}), CPU)
    assert problem.startswith(f"{OWN}.sync_every=3: the weights would be older than max_staleness=1")


def test_the_engines_log_probs_are_the_old_ones_only_where_weights_may_be_stale() -> None:
    assert settled(config_of({})).algorithm.rollout_correction.bypass_mode is None
    assert settled(config_of(ASYNC)).algorithm.rollout_correction.bypass_mode is True
    staleness = [max_staleness(config_of(given)) for given in ({}, {"trainer.schedule": "one_step_off"}, ASYNC)]
    assert staleness == [0, 1, 1]
