"""Rules between keys: what contradicts itself is refused with the key, the rule and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_tools import CPU, EIGHT_GPUS, A, R, config_of

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.derived import Machine

V = f"{R}.val_kwargs"
VAL = {"data.val_files": ["task:arithmetic"]}
ONE_GPU = Machine(num_gpus=1, num_cpus=8, device="cuda")
NO_GPU_FOUND = Machine(num_gpus=0, num_cpus=8, device="cuda")
CLUSTER = Machine(num_gpus=0, num_cpus=8, device="cuda", cluster=True)

CONTRADICTIONS: list[tuple[dict[str, Any], Machine, str, str]] = [
    # data and model
    ({"data.train_files": []}, CPU, "data.train_files", "not set"),
    ({"data.train_files": ["no/such.parquet"]}, CPU, "data.train_files=no/such.parquet", "there is no file"),
    ({"data.train_files": ["task:arithmetic", "hf:openai/gsm8k"]}, CPU, "data.train_files=hf:openai/gsm8k", "split=train"),
    ({"data.custom_cls.path": "mine.py"}, CPU, "data.custom_cls.path=mine.py", "data.custom_cls.name"),
    ({"data.chat_template": "no/such.jinja"}, CPU, "data.chat_template=no/such.jinja", "nor a file"),
    # Longer than a file's name can be.
    ({"data.train_files": ["x" * 300]}, CPU, "data.train_files=xxx", "there is no file"),
    ({"data.chat_template": "x" * 5000}, CPU, "data.chat_template=xxx", "nor a file"),
    ({"actor_rollout_ref.model.path": ""}, CPU, "actor_rollout_ref.model.path", "not set"),
    ({"actor_rollout_ref.model.path": "./no/folder"}, CPU, "actor_rollout_ref.model.path=./no/folder", "no such folder"),
    ({"actor_rollout_ref.model.path": str(Path(__file__).parent)}, CPU, "actor_rollout_ref.model.path", "no config.json"),
    # batches
    ({f"{A}.ppo_mini_batch_size": 64}, CPU, f"{A}.ppo_mini_batch_size=64", "nearest: 32"),
    ({f"{A}.ppo_mini_batch_size": 12}, CPU, f"{A}.ppo_mini_batch_size=12", "nearest: 8 or 16"),
    (
        {"data.train_batch_size": 2, f"{A}.ppo_mini_batch_size": 2, f"{R}.n": 3},
        EIGHT_GPUS,
        f"{A}.ppo_mini_batch_size=2",
        "at least 3",
    ),
    ({f"{A}.use_dynamic_bsz": False}, CPU, f"{A}.use_dynamic_bsz=false", "ppo_micro_batch_size_per_gpu"),
    ({f"{A}.ppo_max_token_len_per_gpu": 1023}, CPU, f"{A}.ppo_max_token_len_per_gpu=1023", "at least 1024"),
    ({"reward.overlong_buffer.len": 513}, CPU, "reward.overlong_buffer.len=513", "at most 512"),
    ({"reward.on_failure": "value"}, CPU, "reward.on_failure=value", "reward.failure_value, which is not set"),
    ({f"{R}.max_num_batched_tokens": 100, f"{R}.max_num_seqs": 256}, CPU, f"{R}.max_num_batched_tokens=100", "at least 256"),
    # algorithm
    ({"algorithm.use_kl_in_reward": True}, CPU, "algorithm.use_kl_in_reward=true", f"{A}.use_kl_loss=false"),
    # optimizer
    ({f"{A}.optim.betas": [0.9]}, CPU, f"{A}.optim.betas=[0.9]", "two numbers"),
    # validation
    ({**VAL, f"{V}.n": 4}, CPU, f"{V}.n=4", "do_sample=true"),
    ({f"{R}.top_k": 0}, CPU, f"{R}.top_k=0", "-1"),
    ({f"{R}.top_p": 0.8}, CPU, f"{R}.top_p=0.8", "top_k"),
    ({f"{R}.fp32_lm_head": True}, CPU, f"{R}.fp32_lm_head=true", "no effect"),
    ({"trainer.test_freq": 5}, CPU, "trainer.test_freq=5", "data.val_files"),
    ({"trainer.val_only": True}, CPU, "trainer.val_only=true", "data.val_files"),
    # rewards
    ({"reward.functions": []}, CPU, "reward.functions=[]", "auto"),
    ({"reward.functions": ["gsm8k", "gsm8k"]}, CPU, "reward.functions=[gsm8k,gsm8k]", "twice"),
    # checkpoints and loggers
    (
        {"trainer.save_freq": 5, f"{A}.checkpoint.save_contents": ["model", "hf_model"]},
        CPU,
        f"{A}.checkpoint.save_contents=[model,hf_model]",
        "optimizer and extra",
    ),
    ({"trainer.resume_mode": "resume_path"}, CPU, "trainer.resume_mode=resume_path", "resume_from_path"),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "no/folder"},
        CPU,
        "trainer.resume_from_path=no/folder",
        "there is no folder",
    ),
    # devices and places
    ({}, NO_GPU_FOUND, "trainer.device=cuda", "no GPU"),
    ({}, CLUSTER, "trainer.n_gpus_per_node", "not set"),
    ({"trainer.n_gpus_per_node": 4}, ONE_GPU, "trainer.n_gpus_per_node=4", "machine has 1"),
    ({f"{R}.nnodes": 1}, EIGHT_GPUS, "trainer.n_gpus_per_node=null", "16 GPUs are asked for"),
    ({f"{R}.tensor_model_parallel_size": 3}, EIGHT_GPUS, f"{R}.tensor_model_parallel_size=3", "1, 2, 4, 8"),
    ({f"{A}.ulysses_sequence_parallel_size": 3}, EIGHT_GPUS, f"{A}.ulysses_sequence_parallel_size=3", "1, 2, 4, 8"),
    ({f"{A}.fsdp_config.fsdp_size": 3}, EIGHT_GPUS, f"{A}.fsdp_config.fsdp_size=3", "1, 2, 4, 8"),
    (
        {f"{A}.ulysses_sequence_parallel_size": 4, f"{A}.ppo_max_token_len_per_gpu": 128, "data.max_response_length": 1000},
        EIGHT_GPUS,
        f"{A}.ppo_max_token_len_per_gpu=128",
        "shorter than one sequence on 4 ranks together",
    ),
]


@pytest.mark.parametrize(
    ("keys", "machine", "named", "said"), CONTRADICTIONS, ids=[f"{entry[2]}: {entry[3]}" for entry in CONTRADICTIONS]
)
def test_a_contradiction_is_refused_with_its_key_and_what_to_do(
    keys: dict[str, Any], machine: Machine, named: str, said: str
) -> None:
    problems = check(config_of(keys), machine)
    about_it = [problem for problem in problems if problem.startswith(named)]
    assert len(about_it) == 1 and said in about_it[0] and "\n" not in about_it[0], problems


def test_a_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check(config_of({"trainer.logger": ["console", "wandb"]}), CPU)
    assert problem.startswith("trainer.logger: wandb") and "trainer.logger=[console]" in problem
    assert "python -m pip install wandb==" in problem
    # What is only planned here may run elsewhere: the plan names the command instead (tests/unit/test_plan.py).
    assert check(config_of({"trainer.logger": ["console", "wandb"], "trainer.dry_run": True}), CPU) == []


def test_a_model_folder_needs_config_weights_and_tokenizer(tmp_path: Path) -> None:
    def problems() -> list[str]:
        return check(config_of({"actor_rollout_ref.model.path": str(tmp_path)}), CPU)

    assert "no config.json" in problems()[0]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert "no weights" in problems()[0]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "no tokenizer" in problems()[0]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert problems() == []


def test_a_misspelt_file_is_refused_with_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"")
    (problem,) = check(config_of({"data.train_files": str(tmp_path / "trian.parquet")}), CPU)
    assert str(tmp_path / "train.parquet") in problem


RUNS: list[tuple[dict[str, Any], Machine]] = [
    ({}, CPU),
    ({}, EIGHT_GPUS),
    ({"actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}, CPU),
    ({f"{A}.use_kl_loss": False, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}, CPU),
    ({**VAL, f"{V}.do_sample": True, f"{V}.temperature": 1.0, f"{V}.top_p": 0.7, f"{V}.n": 4}, CPU),
    ({f"{R}.top_p": 0.8, f"{R}.min_p": 0.05, f"{R}.top_k": 50}, CPU),
    ({f"{R}.fp32_lm_head": True, f"{R}.dtype": "bfloat16"}, CPU),
    ({f"{R}.nnodes": 1, "trainer.n_gpus_per_node": 4}, EIGHT_GPUS),
    (
        {f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 6, "trainer.n_gpus_per_node": 2, f"{R}.tensor_model_parallel_size": 3},
        EIGHT_GPUS,
    ),
    ({f"{R}.tensor_model_parallel_size": 4, "actor_rollout_ref.ref.fsdp_config.param_offload": True}, EIGHT_GPUS),
    (
        {f"{A}.ulysses_sequence_parallel_size": 4, f"{A}.ppo_max_token_len_per_gpu": 512, "data.max_response_length": 1000},
        EIGHT_GPUS,
    ),
    ({f"{A}.ulysses_sequence_parallel_size": 2, f"{A}.fsdp_config.fsdp_size": 4}, EIGHT_GPUS),
    # As in verl, groups larger than the set are the set.
    ({f"{A}.fsdp_config.fsdp_size": 16, f"{A}.fsdp_config.offload_policy": True}, EIGHT_GPUS),
    ({"trainer.n_gpus_per_node": 8, "trainer.nnodes": 4}, CLUSTER),
    ({"data.train_files": [], "data.val_files": "task:arithmetic", "trainer.val_only": True}, CPU),
    ({"trainer.save_freq": 5, f"{A}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]}, CPU),
    ({f"{A}.optim.lr_scheduler_type": "cosine", f"{A}.optim.min_lr_ratio": 0.1, f"{A}.optim.lr_warmup_steps": 10}, CPU),
]


@pytest.mark.parametrize(("keys", "machine"), RUNS, ids=[str(keys) for keys, _ in RUNS])
def test_a_configuration_that_can_run_is_not_refused(keys: dict[str, Any], machine: Machine) -> None:
    assert check(config_of(keys), machine) == []
