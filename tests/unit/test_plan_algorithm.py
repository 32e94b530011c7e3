"""The algorithm in the plan: what fits together, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compositions import compose

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.models import builtin
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = [
    "data.train_files=task:arithmetic?num_rows=1000",
    "actor_rollout_ref.model.path=builtin:arithmetic",
    "data.train_batch_size=16",
    f"{A}.ppo_mini_batch_size=16",
    f"{R}.n=8",
    "trainer.total_epochs=1",
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
E = "algorithm.adv_estimator"
KL_IN_REWARD = [f"{A}.use_kl_loss=false", "algorithm.use_kl_in_reward=true"]
GAE = [f"{E}=gae", "algorithm.gamma=0.99", "algorithm.lam=0.95"]
P, C, FILTER = f"{A}.policy_loss", "algorithm.rollout_correction", "algorithm.filter_groups"
NO_GROUP = {"reinforce_plus_plus", "remax", "gae", "rft"}
TURNS = [f"{R}.multi_turn.{word}" for word in ("enable=true", "environment.name=arithmetic")]
WORDS = {"grpo_process": ["reward.functions=[arithmetic_process]"], "gigpo": TURNS}
"""Words that an estimator needs beside its name."""


def plan_of(*words: str) -> Plan:
    return make_plan(compose([*BASE, *words]), CPU)


def page_of(*words: str) -> str:
    return " ".join(plan_of(*words).render().split())


def problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(*words)
    return caught.value.problems


# ---- estimators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_one_response_per_prompt_is_refused_by_whoever_compares_the_responses_to_a_prompt(name: str) -> None:
    if name in NO_GROUP:
        plan_of(f"{E}={name}", f"{R}.n=1")
        return
    (problem,) = problems_of(f"{E}={name}", f"{R}.n=1", *WORDS.get(name, []))
    assert "at least 2" in problem and f"{R}.n=1" in problem


def test_ones_own_estimator_is_taken_with_its_needs_and_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from grpo_rl.algos.advantages.registered import AdvantageOutput, needs\n"
        "@needs('values')\ndef with_critic(inp):\n    return AdvantageOutput(inp.values_T, inp.token_rewards_T)\n"
        "def plain(inp, *, scale: float = 1.0):\n    return AdvantageOutput(scale * inp.token_rewards_T)\n"
    )
    assert plan_of(f"{E}={file}:with_critic").role("critic")
    assert "has no option size" in problems_of(f"{E}={file}:plain", "algorithm.adv_options={size: 2}")[0]
    plan_of(f"{E}={file}:plain", "algorithm.adv_options={scale: 2.0}", f"{R}.n=1")


def test_ones_own_function_that_cannot_be_called_as_it_will_be_is_refused_with_its_signature(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def three(policy_logprobs_T, old_logprobs_T, advantages_T): ...\n"
        "def needy(inputs, *, clip_low): ...\n"
        "def good(inputs, *, size: float = 1.0): return size * inputs.policy_logprobs_T, {}\n"
        "def two(inp, more): ...\n"
    )
    for name, missing in (("three", "old_logprobs_T"), ("needy", "clip_low")):
        (problem,) = problems_of(f"{A}.policy_loss.loss_mode={file}:{name}")
        assert f"missing a required argument: '{missing}'" in problem and "is called as (inputs)" in problem
    plan_of(f"{A}.policy_loss.loss_mode={file}:good")
    (problem,) = problems_of(f"{E}={file}:two")
    assert "takes (inp, more)" in problem and "missing a required argument: 'more'" in problem


# ---- the critic ----------------------------------------------------------------------------------------


def test_gae_brings_its_critic_its_steps_and_its_loss() -> None:
    words = [f"critic.{word}" for word in ("ppo_mini_batch_size=8", "ppo_epochs=3", "cliprange_value=0.25")]
    page = page_of(*GAE, *words, "trainer.critic_warmup=2", "trainer.total_training_steps=10")
    assert "critic 1 rank on the actor's devices" in page and "a copy of the actor's model" in page
    assert "2 mini-batches of 8 prompts x 3 passes = 6 optimizer steps; it learns alone in the first 2 training steps" in page
    assert " = 0.99, λ = 0.95; whiten(x)" in page
    assert "critic loss = 1/num_tokens Σ_tokens max((V - R)², (clip(V, V_old - 0.25, V_old + 0.25) - R)²) / 2" in page
    assert "10 training steps, 8 optimizer steps" in page
    assert "critic 0." in page.partition("memory, estimated")[2]


def test_the_critic_is_cut_like_the_actor_unless_it_has_sizes_of_its_own() -> None:
    assert "<= 16,384 tokens per rank (update, reference, critic)" in page_of(*GAE)
    assert "4 rollouts per rank (critic)" in page_of(*GAE, "critic.ppo_micro_batch_size_per_gpu=4")
    own = page_of(*GAE, f"{A}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_max_token_len_per_gpu=2048")
    assert "<= 2,048 tokens per rank (critic)" in own
    assert f"{A}.ppo_micro_batch_size_per_gpu=" not in own


def test_rewards_of_whole_responses_are_refused_where_steps_are_read(tmp_path: Path) -> None:
    for functions in ("[auto]", "[gsm8k,0.2*format]"):
        (problem,) = problems_of(f"{E}=grpo_process", f"reward.functions={functions}")
        assert problem.startswith(f"{E}: grpo_process reads the rewards of reasoning steps, and reward.functions=")
        assert "name arithmetic_process, or your own path.py:function" in problem
    plan_of(f"{E}=grpo_process", "reward.functions=[format,arithmetic_process]")
    file = tmp_path / "mine.py"
    file.write_text("def steps(data_source, solution_str, ground_truth, extra_info):\n    return {'score': 0.0, 'steps': []}\n")
    plan_of(f"{E}=grpo_process", f"reward.functions=[{file}:steps]")
    (problem,) = problems_of(f"{E}=grpo_process", *WORDS["grpo_process"], "reward.overlong_buffer.len=8")
    assert "reads steps of the reward, so reward.overlong_buffer would have no effect" in problem


# ---- losses and averages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([f"{P}.loss_mode=sapo", f"{P}.tau_pos=2.5"], "= 2.5 where A > 0, else 1.05"),
        ([f"{P}.loss_mode=dro", f"{P}.options.dro_beta=0.3"], "0.3/2"),
        ([f"{P}.loss_mode=clip_cov", f"{P}.clip_cov_lb=-2"], "-2 < (A - mean A)"),
        ([f"{P}.loss_mode=kl_cov", f"{P}.ppo_kl_coef=0.7", f"{P}.kl_cov_ratio=0.1"], "0.7 |log"),
        ([f"{P}.loss_mode=kl_cov"], "computed for the choice of tokens by kl_cov only"),
        ([f"{P}.loss_mode=dppo_tv", f"{P}.options.max_ratio=7"], "min(r, 7)"),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=96"], "1/(num_sequences 96)"),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=33"], "1/(num_sequences 33)"),
        ([f"{A}.loss_agg_mode=prompt-mean"], "[prompt-mean]"),
        ([f"{A}.loss_agg_mode=token-sum"], "[token-sum]"),
        ([f"{A}.kl_loss_type=k3+"], "[k3+]"),
        ([f"{A}.kl_loss_type=k3_unbiased"], "[k3_unbiased]"),
    ],
)
def test_options_of_losses_and_averages_are_in_the_objective(words: list[str], shown: str) -> None:
    assert shown in page_of(*words)


# ---- refusals -------------------------------------------------------------------------------------------

REFUSED: list[tuple[list[str], str]] = [
    # estimators
    ([f"{E}=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "norm_adv_by_std_in_grpo=false"),
    (["algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_options={std: batch}"], "give one of them"),
    (["algorithm.gamma=0.9"], "algorithm.gamma=0.9: has no effect with algorithm.adv_estimator=grpo"),
    ([f"{E}=reinforce_plus_plus", "algorithm.adv_options={gamma: 0.9}"], "is set by algorithm.gamma"),
    (["algorithm.adv_options={sdt: batch}"], "has no option sdt. Did you mean std?"),
    (["algorithm.adv_options={std: bach}"], "std='bach': group, batch, batch_rewards or none"),
    (["algorithm.adv_options={epsilon: small}"], "epsilon='small'"),
    ([f"{E}=gdpo", "algorithm.adv_options={weights: [1.0]}"], "factors in reward.functions"),
    ([f"{E}=gigpo"], "compares turns that episodes take in the same state"),
    ([f"{E}=gigpo", *TURNS, *KL_IN_REWARD], "algorithm.use_kl_in_reward=true would have no effect"),
    ([f"{E}=gigpo", *TURNS, "algorithm.adv_options={epsilon: 1e-4}"], "with gigpo and mode=mean_norm"),
    (["algorithm.gigpo.step_advantage_w=2"], "has no option step_advantage_w"),
    (["algorithm.gigpo.mode=mean_std_norm"], "has no option mode"),
    ([f"{E}=gdpo", *KL_IN_REWARD], "algorithm.use_kl_in_reward=true would have no effect"),
    # the critic
    (["critic.optim.lr=1e-4"], "critic.optim.lr=0.0001: has no effect in this run: algorithm.adv_estimator=grpo needs no"),
    ([*GAE, "critic.enable=false"], "critic.enable=false: algorithm.adv_estimator=gae learns from a critic"),
    ([*GAE, "critic.ppo_mini_batch_size=5"], "must divide data.train_batch_size=16; nearest: 4 or 8"),
    ([*GAE, "critic.use_dynamic_bsz=false"], "needs critic.ppo_micro_batch_size_per_gpu"),
    ([*GAE, "critic.ppo_max_token_len_per_gpu=64"], "shorter than one sequence"),
    ([*GAE, "critic.model.path=/nowhere"], "critic.model.path=/nowhere: there is no such folder"),
    ([*GAE, "critic.model.path=builtin:other"], "an embedded model has to be the actor's too"),
    ([*GAE, "trainer.critic_warmup=9", "trainer.total_training_steps=9"], "the actor would learn in none"),
    # losses and averages
    ([f"{P}.tau_pos=2"], f"{P}.options: policy loss 'vanilla' has no option tau_pos"),
    ([f"{P}.loss_mode=kl_cov", f"{P}.clip_cov_ratio=0.1"], "no option clip_cov_ratio. Did you mean kl_cov_ratio?"),
    ([f"{P}.loss_mode=clip_cov", f"{P}.clip_cov_lb=7"], "clip_cov_lb=7 must be below clip_cov_ub=5"),
    ([f"{P}.loss_mode=clip_cov", f"{P}.clip_cov_lb=7", f"{C}.bypass_mode=true"], "clip_cov_lb=7 must be below clip_cov_ub=5"),
    ([f"{A}.loss_scale_factor=33"], f"{A}.loss_agg_mode=token-mean, which has no option loss_scale_factor"),
    # bounds
    ([f"{P}.loss_mode=sapo", f"{A}.clip_ratio_high=0.3"], f"clip_ratio_high=0.3: has no effect with {P}.loss_mode=sapo"),
    ([f"{P}.loss_mode=reinforce", f"{A}.clip_ratio=0.1"], f"clip_ratio=0.1: has no effect with {P}.loss_mode=reinforce"),
    ([f"{P}.loss_mode=cispo", f"{A}.clip_ratio_c=10"], f"clip_ratio_c=10: has no effect with {P}.loss_mode=cispo"),
    # correction of rollouts
    ([f"{C}.rollout_rs=[token_k1]"], f"{C}.rollout_rs_threshold has 0 entries; one for each of the 1"),
    ([f"{C}.rollout_rs_threshold=[2.0]"], "rollout_rs_threshold has 1 entries"),
    (
        [f"{C}.rollout_rs=[token_k2]", f"{C}.rollout_rs_threshold=[1]", f"{C}.rollout_rs_threshold_lower=[0.5]"],
        "one for each k1 entry",
    ),
    # What 0.5_5 of a verl command is read as.
    ([f"{C}.rollout_rs=[token_k1]", f"{C}.rollout_rs_threshold=[0.55]"], "must have 1 between them"),
    ([f"{C}.bypass_mode=true", f"{C}.rollout_is=token", f"{C}.rollout_is_batch_normalize=true"], "how the batch is cut"),
    ([f"{C}.bypass_mode=true", f"{P}.loss_mode=gpg"], "has no effect with"),
    ([f"{E}=gdpo", "reward.overlong_buffer.len=32"], "reward.overlong_buffer would have no effect"),
    ([f"{E}=gdpo", "reward.on_failure=value", "reward.failure_value=0"], "reward.on_failure=value cannot stand for them"),
    # selection
    ([f"{FILTER}.enable=true", f"{FILTER}.metric=nothing"], "algorithm.filter_groups.metric=nothing: no part"),
    ([f"{FILTER}.enable=true", f"{R}.n=1", f"{E}=reinforce_plus_plus"], "never has a signal"),
    (["data.retire_above=0.9", "data.retire_metric=nothing"], "data.retire_metric=nothing: no part"),
    (["data.curriculum=absent.py:next_rows"], "data.curriculum: curriculum 'absent.py:next_rows': there is no file"),
    ([f"data.curriculum={EXAMPLES}/own_reward.py:main"], ", and is called as (draw)"),
    ([f"data.curriculum={EXAMPLES}/by_pass_rate.py:next_rows", "data.shuffle=false"], "data.shuffle=false: has no effect"),
    ([f"{R}.function={EXAMPLES}/own_reward.py:main"], ", and is called as (sampler, prompts)"),
    ([f"{R}.function={EXAMPLES}/best_of_n.py:play", f"{E}=remax"], "compares with greedy responses"),
    ([f"{R}.function={EXAMPLES}/best_of_n.py:play", f"{R}.nnodes=1", "trainer.schedule=async"], "asks for single responses"),
    ([f"{FILTER}.enable=true", "data.gen_batch_size=2000"], "data.gen_batch_size=2000: larger than the training data"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_does_not_fit_together_or_has_no_effect_is_refused(words: list[str], said: str) -> None:
    (problem,) = problems_of(*words)
    assert said in problem


# ---- teachers -------------------------------------------------------------------------------------------

T, L = "distillation.teacher_models", "distillation.distillation_loss"


def test_the_page_has_the_source_the_teacher_its_coefficient_and_its_memory() -> None:
    plan = make_plan(compose(["recipe=teacher/on_policy"]), CPU)
    page = " ".join(plan.render().split())
    assert "64 prompts x 1 responses" in page and "sampled by the policy as it is" in page
    assert "π_rf none: the teacher's distribution is the goal" in page
    assert "teacher teacher_model: builtin:arithmetic_teacher (1 frozen rank in the actor's pool)" in page
    assert "A = 1 (log τ - log π)" in page and "reference not started" in page
    memory = {need.role: need.num_bytes for need in plan.memory}
    assert 0 < memory["teacher"] < memory["actor"] and plan.role("teacher") is not None
    more = make_plan(compose(["recipe=teacher/on_policy", f"{T}.other.model_path=builtin:arithmetic"]), CPU)
    assert {need.role: need.num_bytes for need in more.memory}["teacher"] > memory["teacher"]
    added = ["actor_rollout_ref.rollout.n=4", f"{L}.use_task_rewards=true", f"{L}.distillation_loss_coef=0.3"]
    both = make_plan(compose(["recipe=teacher/gkd", *added]), CPU)
    assert "loss = avg(pg) + 0.3·avg(D)" in " ".join(both.render().split())
    own = make_plan(compose(["recipe=teacher/gkd", "distillation.nnodes=1", "distillation.n_gpus_per_node=2"]), CPU)
    assert own.role("teacher").num_workers == 2 == own.pool("teacher").devices_per_node  # type: ignore[union-attr]


TEACHERS_REFUSED: list[tuple[list[str], str]] = [
    (["distillation.enabled=false"], "needs distillation.enabled=true"),
    ([f"{T}.teacher_model.path=x"], "unknown key. There are: model_path"),
    ([f"{T}.teacher_model.model_path=null"], "teaches nothing"),
    ([f"{T}.teacher_model.ema_decay=2"], "ema_decay=2: is out of range"),
    ([f"{T}.teacher_model.ema_decay=0.9"], "this teacher has a model_path"),
    ([f"{L}.loss_mode=k3"], "loss_mode=k1, or use_policy_gradient=false"),
    ([f"{L}.use_policy_gradient=false"], "has no gradient from the teacher"),
    ([f"{L}.topk=8"], "looks at the sampled token alone"),
    ([f"{L}.jsd_beta=0.1"], "needs distillation.distillation_loss.loss_mode=jsd"),
    ([f"{L}.distillation_loss_coef=2"], "learns from teachers alone"),
    (["algorithm.adv_estimator=rloo"], "learns from teachers alone"),
    (
        ["actor_rollout_ref.actor.policy_loss.loss_mode=dpo", "actor_rollout_ref.rollout.n=4"],
        "a teacher teaches single responses",
    ),
    (["actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"], "chooses tokens by the advantages of rewards"),
    (["distillation.teacher_key=index"], "a teacher's key is a data_source"),
]


@pytest.mark.parametrize(("words", "message"), TEACHERS_REFUSED)
def test_what_a_teacher_does_not_go_with_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(compose(["recipe=teacher/on_policy", *words]), CPU)
    assert message in str(error.value)


def test_a_teacher_with_other_tokens_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    folder = builtin.build("arithmetic", tmp_path / "teacher")
    words = ["recipe=teacher/on_policy", f"{T}.teacher_model.model_path={folder}"]
    make_plan(compose(words), CPU)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["8"], vocabulary["9"] = vocabulary["9"], vocabulary["8"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as error:
        make_plan(compose(words), CPU)
    assert "its token 14 is '9', and the policy's is '8'" in str(error.value)
