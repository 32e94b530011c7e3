"""The plan: its decisions as values, sizes worked out by hand, names bound, and the page that a person reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from compositions import compose

from grpo_rl.config.derived import Machine, MicroBatchRule, max_num_seqs
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan, PoolPlan, decide
from grpo_rl.plan.machine import probe_machine
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.memory import load_of
from grpo_rl.plan.model_folder import model_size
from grpo_rl.plan.text import WIDTH, components

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
EIGHT_GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = [
    "data.train_files=task:arithmetic?num_rows=1000",
    "actor_rollout_ref.model.path=builtin:arithmetic",
    "data.train_batch_size=64",
    f"{A}.ppo_mini_batch_size=16",
    f"{R}.n=8",
    "trainer.total_epochs=3",
]
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
        "from grpo_rl.registry import needs\n\n\n@needs('actor', 'reference')\ndef train(session):\n    list(session.steps())\n"
    )
    plan = plan_of(f"trainer.schedule={file}:train", machine=EIGHT_GPUS)
    assert started(plan) == ["actor", "reference"] and plan.engine is None
    assert not plan.reward.rules and [need.role for need in plan.memory] == ["actor", "reference"]
    assert not any(line.startswith("  rollout") for line in plan.render().splitlines())


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ([], True),
        ([f"{A}.use_kl_loss=false"], False),
        ([f"{A}.kl_loss_coef=0"], False),
        ([f"{A}.use_kl_loss=false", "algorithm.use_kl_in_reward=true"], True),
    ],
)
def test_the_reference_starts_only_for_a_kl_term_with_a_weight(words: list[str], started: bool) -> None:
    plan = plan_of(*words)
    assert (plan.role("reference") is not None) is started
    assert ("not started" in plan.render()) is not started


@pytest.mark.parametrize(
    ("words", "machine", "ranks", "replicas", "backend"),
    [
        ([], CPU, 1, 1, "object_store"),
        (["trainer.n_gpus_per_node=2"], CPU, 2, 2, "object_store"),
        ([], EIGHT_GPUS, 8, 8, "ipc"),
        ([f"{R}.tensor_model_parallel_size=4"], EIGHT_GPUS, 8, 2, "ipc"),
        (["trainer.n_gpus_per_node=4", f"{R}.nnodes=1", f"{R}.tensor_model_parallel_size=2"], EIGHT_GPUS, 4, 2, "nccl"),
        (["trainer.n_gpus_per_node=2", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=6"], EIGHT_GPUS, 2, 6, "nccl"),
        ([f"{R}.name=hf"], EIGHT_GPUS, 8, 8, "object_store"),
    ],
)
def test_ranks_replicas_and_the_way_of_the_weights(
    words: list[str], machine: Machine, ranks: int, replicas: int, backend: str
) -> None:
    plan = plan_of(*words, machine=machine)
    assert (plan.world_size, plan.num_replicas, plan.engine.weight_backend) == (ranks, replicas, backend)
    assert plan.world_size == machine.world_size(compose([*BASE, *words]).config)


def test_on_a_cpu_pools_apart_have_cores_of_their_own_under_every_schedule() -> None:
    apart = [f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1"]
    for words, threads in (([], 2), *(([f"trainer.schedule={name}", *apart], 1) for name in ("sync", "one_step_off", "async"))):
        plan = plan_of(*words)
        assert [plan.role("rollout").threads, plan.role("actor").threads] == [threads, threads]


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


def test_sequences_split_over_ranks_divide_activations_and_are_on_the_page() -> None:
    # The arithmetic model has 4 heads, so that 4 ranks have one each.
    long = [f"{A}.ppo_max_token_len_per_gpu=4096"]
    plain, split = (plan_of(*long, *words, machine=EIGHT_GPUS) for words in ([], [f"{A}.ulysses_sequence_parallel_size=4"]))
    assert split.passes.update == MicroBatchRule(4 * 4096, None, True, 4) == split.passes.reference
    page = " ".join(split.render().split())
    assert "sequences split over 4" in page and "<= 16,384 tokens per 4 ranks together (update" in page
    assert "split" not in plain.render()
    size = model_size("builtin:arithmetic")
    assert size is not None
    rollouts = [f"{A}.ppo_micro_batch_size_per_gpu=8"]
    plain, split = (plan_of(*rollouts, *words, machine=EIGHT_GPUS) for words in ([], [f"{A}.ulysses_sequence_parallel_size=4"]))
    whole, quarter = (load_of(plan, size, "actor").tokens for plan in (plain, split))
    assert quarter == pytest.approx(whole / 4, rel=0.01)


def test_steps_follow_from_rows_batches_and_epochs_and_are_open_where_rows_may_be_dropped() -> None:
    plan = plan_of(f"{A}.ppo_epochs=2")
    # 1000 rows make 15 batches of 64, three times; each batch is 4 mini-batches, twice.
    assert (plan.sizes.num_train_rows, plan.sizes.total_steps, plan.sizes.updates_per_step) == (1000, 45, 8)
    assert plan_of("data.train_max_samples=130").sizes.total_steps == 3 * 2
    assert plan_of("data.filter_overlong_prompts=true").sizes.total_steps is None
    assert plan_of("data.filter_overlong_prompts=true", "trainer.total_training_steps=7").sizes.total_steps == 7


def test_the_rows_that_the_data_turned_out_to_have_decide_the_steps() -> None:
    config = compose([*BASE, "trainer.critic_warmup=2", "critic.ppo_mini_batch_size=32", f"{A}.ppo_epochs=2"]).config
    sizes = decide(config, CPU).with_rows(130).sizes
    # 130 rows make 2 batches of 64, three times; the actor learns in all but two steps, 4 mini-batches twice.
    assert (sizes.num_train_rows, sizes.total_steps, sizes.actor_updates) == (130, 6, (6 - 2) * 4 * 2)
    assert sizes.critic_updates == 6 * 2 * 2


def test_more_responses_at_once_on_gpus_and_never_more_than_a_pass_has_tokens() -> None:
    for words, on_gpu, on_cpu in (
        ([], 1024, 256),
        ([f"{R}.max_num_batched_tokens=512"], 512, 256),
        ([f"{R}.max_num_seqs=64"], 64, 64),
    ):
        config = compose([*BASE, *words]).config
        assert (max_num_seqs(config, "cuda"), max_num_seqs(config, "cpu")) == (on_gpu, on_cpu)


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


# ---- what is refused: names, and worlds larger than the machine ----------------------------------------


def test_the_machine_is_what_the_configuration_says_or_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machine = probe_machine(compose(["trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=3"]).config)
    assert machine == Machine(num_gpus=0, num_cpus=3, device="cpu", cluster=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert probe_machine(compose(["trainer.device=cpu"]).config).cluster


def test_all_unknown_names_are_refused_together_each_with_the_known_ones() -> None:
    problems = problems_of(
        "algorithm.adv_estimator=gropo",
        f"{A}.policy_loss.loss_mode=vanila",
        f"{A}.loss_agg_mode=token_mean",
        f"{R}.name=sglang",
        "reward.functions=[gsm9k,0.2*formt]",
        "actor_rollout_ref.model.path=builtin:nonsense",
        "data.val_files=task:nonsense",
    )
    expected = ["grpo", "vanilla", "token-mean", "vllm", "gsm8k", "format", "builtin:arithmetic", "arithmetic"]
    assert len(problems) == len(expected)
    for name in expected:
        assert any(name in problem for problem in problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.train_files=task:arithmetic?num_rows=63"], "larger than the training data, which has 63 rows"),
        (["data.train_files=task:arithmetic?nonsense=63"], "nonsense"),
        (
            [f"{R}.name=hf", f"{R}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "rollout.name=hf runs on one device",
        ),
        (["reward.functions=[no/such/file.py:score]"], "no/such/file.py"),
        (["trainer.val_only=true"], "data.val_files"),
        (
            ["trainer.n_gpus_per_node=64"],
            "trainer.n_gpus_per_node=64: this run has no GPU, so these are 64 processes on 2 cores",
        ),
        (["trainer.nnodes=32"], "trainer.nnodes=32: this run has no GPU, so these are 32 processes on 2 cores"),
        ([f"{R}.nnodes=1", f"{R}.n_gpus_per_node=64"], f"{R}.n_gpus_per_node=64: this run has no GPU"),
        ([f"{R}.cpu_threads=3"], f"{R}.cpu_threads=3: the machine has 2 cores"),
    ],
)
def test_names_that_do_not_fit_and_worlds_larger_than_the_machine_are_refused(words: list[str], said: str) -> None:
    (problem,) = problems_of(*words)
    assert said in problem


# ---- the page ------------------------------------------------------------------------------------------


def test_the_page_fits_on_a_terminal_and_says_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Apart from runs that lie below the current folder, by whose times the page would predict this one's.
    monkeypatch.chdir(tmp_path)
    text = plan_of("trainer.test_freq=-1", f"{A}.entropy_coeff=0.01").render()
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 100 and len(lines) <= 36
    joined = " ".join(text.split())
    assert "needs a GPU" not in text and "needs a GPU of" in plan_of(machine=EIGHT_GPUS).render()
    for said in (
        "64 prompts x 8 responses = 512 rollouts",
        "4 mini-batches of 16 prompts (128 rollouts) x 1 pass = 4 optimizer steps",
        "45 training steps, 180 optimizer steps",
        "A = (R - mean(R of group)) / (std(R of group) + 1e-06) [grpo]",
        "loss = avg(pg) - 0.01·avg(H) + 0.001·avg(KL)",
        "clip(r, 0.8, 1.2)",
        "[low_var_kl]",
        "[token-mean]",
    ):
        assert said in joined, said


@pytest.mark.parametrize(
    ("words", "machine", "said"),
    [
        (["trainer.n_gpus_per_node=4"], CPU, "4 actor processes share 2 cores"),
        (["trainer.save_freq=5"], CPU, "trainer.experiment_name"),
        ([f"{A}.optim.lr_warmup_steps=1000"], CPU, "longer than the run"),
        ([f"{R}.cpu_threads=2"], EIGHT_GPUS, "has no effect in this run: it is for CPUs"),
        ([], Machine(0, 2, "cpu", cluster=True), "looked at this machine"),
    ],
)
def test_surprises_are_noted(words: list[str], machine: Machine, said: str) -> None:
    assert said in " ".join(plan_of(*words, machine=machine).render().split())
    assert said not in plan_of().render()


# ---- the three components of a method ------------------------------------------------------------------


def rows_of(*words: str) -> dict[str, str]:
    config = compose(list(words) if words and words[0].startswith("recipe=") else ["recipe=arithmetic/grpo", *words]).config
    plan: Plan = decide(config, CPU)
    return dict(components(plan))


def test_grpo_has_the_papers_coefficient() -> None:
    rows = rows_of(f"{A}.kl_loss_coef=0.04", f"{A}.ppo_mini_batch_size=16")
    assert rows["D"] == "8 responses to each prompt, sampled by the policy as it is (data.responses=policy)"
    assert rows["π_rf"] == "auto"
    assert rows["GC"].startswith("= r A, but 0 where A > 0 and r > 1.2")
    assert rows["GC"].endswith("; and - 0.04 (1 - π_ref/π, but 0 where a bound acts)")
    assert rows["gradient"] == "= token-mean of GC ∇log π"


def test_with_one_update_per_batch_the_coefficient_is_the_advantage() -> None:
    assert "r = 1, so it is A" in rows_of(f"{A}.use_kl_loss=false")["GC"]
    assert "r = 1" not in rows_of(f"{A}.ppo_mini_batch_size=16")["GC"]


def test_given_answers_have_the_coefficient_1_and_no_reward() -> None:
    rows = rows_of("recipe=paradigm/sft")
    assert rows["D"] == "the answers that stand in the rows (data.responses=rows)"
    assert rows["π_rf"] == "none: each row is right" and rows["GC"] == "= 1"


def test_iterated_training_is_rewarded_by_the_model_alone() -> None:
    rows = rows_of("recipe=paradigm/iterate", "reward.functions=[arithmetic]", "reward.reward_model.weight=2")
    assert rows["π_rf"] == "2*reward_model alone, trained on samples of the policy that arithmetic labels"
    fixed = ["trainer.iterate.reward_model_steps=0", "~reward.reward_model.train"]
    assert rows_of("recipe=paradigm/iterate", *fixed)["π_rf"] == "reward_model alone"


def test_a_loss_of_the_users_own_has_its_coefficient_from_the_docstring_or_as_a_derivative(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    head = "from grpo_rl.algos.losses.contract import TokenLoss\n\n\n"
    body = "    return TokenLoss(-inputs.advantages_T * inputs.policy_logprobs_T)\n"
    file.write_text(f'{head}def plain(inputs):\n{body}\n\ndef said(inputs):\n    """Mine.\n\n    Gradient: A\n    """\n{body}')
    for name, coefficient in (("plain", "= -∂pg/∂log π"), ("said", "= A")):
        rows = rows_of(f"{A}.policy_loss.loss_mode={file}:{name}", f"{A}.use_kl_loss=false")
        assert rows["GC"] == coefficient


def test_a_micro_batch_is_never_estimated_larger_than_the_mini_batch_is_whose_prompts_are_computed_once() -> None:
    """8 prompts of 384 tokens with 8 responses of 48 each: 8 (384 + 8 x 48) = 6,144 tokens, whatever a pass may have."""
    words = ["recipe=arithmetic/grpo", "trainer.device=cpu", "data.max_prompt_length=384", "data.max_response_length=48"]
    words += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]

    def activations(*more: str) -> list[tuple[str, int]]:
        plan = make_plan(compose([*words, *more]), Machine(num_gpus=0, num_cpus=2, device="cpu"))
        return [(one.role, one.num_bytes) for one in plan.memory if one.role == "actor"]

    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert activations(f"{budget}=16384") == activations(f"{budget}=6144") != activations(f"{budget}=6000")
    apart = "actor_rollout_ref.actor.use_prefix_grouper=false"
    assert (
        activations(f"{budget}=27648", apart) == activations(f"{budget}=40000", apart) != activations(f"{budget}=16384", apart)
    )
