"""The plan: sizes worked out by hand, names bound, and the page that a person reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, MicroBatchRule
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.machine import probe_machine
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.memory import load_of, memory_by_role
from grpo_rl.plan.model_folder import model_size
from grpo_rl.plan.text import WIDTH

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
# config.json of Qwen2.5-0.5B, the entries that count.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def plan_of(*words: str, machine: Machine = CPU) -> Plan:
    return make_plan(compose([*BASE, *words]), machine)


def problems_of(*words: str, machine: Machine = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(*words, machine=machine)
    return caught.value.problems


# ---- axes of parallelism -------------------------------------------------------------------------------


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


# ---- numbers -------------------------------------------------------------------------------------------


def test_steps_follow_from_rows_batches_and_epochs_and_are_open_where_rows_may_be_dropped() -> None:
    plan = plan_of(f"{A}.ppo_epochs=2")
    # 1000 rows make 15 batches of 64, three times; each batch is 4 mini-batches, twice.
    assert (plan.sizes.num_train_rows, plan.sizes.total_steps, plan.sizes.updates_per_step) == (1000, 45, 8)
    assert plan_of("data.train_max_samples=130").sizes.total_steps == 3 * 2
    assert plan_of("data.filter_overlong_prompts=true").sizes.total_steps is None
    assert plan_of("data.filter_overlong_prompts=true", "trainer.total_training_steps=7").sizes.total_steps == 7


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


def test_the_machine_is_what_the_configuration_says_or_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machine = probe_machine(compose(["trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=3"]).config)
    assert machine == Machine(num_gpus=0, num_cpus=3, device="cpu", cluster=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert probe_machine(compose(["trainer.device=cpu"]).config).cluster


# ---- names ---------------------------------------------------------------------------------------------


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
    ],
)
def test_names_that_do_not_fit_are_refused(words: list[str], said: str) -> None:
    (problem,) = problems_of(*words)
    assert said in problem


# ---- memory --------------------------------------------------------------------------------------------


def test_parameters_are_taken_from_the_weight_files_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": "anything"}))
    assert model_size(str(tmp_path)) is None
    for name, rows in (("a", 3), ("b", 5)):
        header = json.dumps({"__metadata__": {}, name: {"dtype": "F32", "shape": [rows, 10], "data_offsets": [0, 0]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    size = model_size(str(tmp_path))
    assert size is not None and size.num_params == 80


def test_the_actors_state_takes_sixteen_bytes_per_parameter_shared_by_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    size = model_size(str(tmp_path))
    assert size is not None
    words = [*BASE, "data.max_prompt_length=1", "data.max_response_length=1", "actor_rollout_ref.model.lm_head_chunk_tokens=1"]
    actor, reference, rollout = memory_by_role(decide(compose(words).config, EIGHT_GPUS), size)
    # Of few tokens what lies there besides is the embedding (tied): whole, while gathered a second time, and its gradients.
    root = 151936 * 896 * 4
    assert actor.role == "actor" and 4 * root < actor.num_bytes - 494_032_768 * 16 / 8 < 4.5 * root
    assert reference.role == "reference" and 2 * root < reference.num_bytes - 494_032_768 * 4 / 8 < 2.5 * root
    assert rollout.num_bytes == 494_032_768 * 2


# ---- the page ------------------------------------------------------------------------------------------


def test_the_page_fits_on_a_terminal_and_says_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Apart from runs that lie below the current folder, by whose times the page would predict this one's.
    monkeypatch.chdir(tmp_path)
    text = plan_of("trainer.test_freq=-1", f"{A}.entropy_coeff=0.01").render()
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 100 and len(lines) <= 36
    joined = " ".join(text.split())
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
