"""verl's own example commands for text with FSDP and vLLM (its folder examples/): the words that each of them gives to main_ppo."""

from __future__ import annotations

A, R, REF, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"

COMMON = {
    "algorithm.adv_estimator": "grpo",
    "data.truncation": "error",
    "data.filter_overlong_prompts": "True",
    "data.max_prompt_length": "1024",
    "data.max_response_length": "2048",
    f"{M}.path": "Qwen/Qwen3-8B",
    f"{M}.enable_gradient_checkpointing": "True",
    f"{A}.optim.lr": "1e-6",
    f"{A}.fsdp_config.param_offload": "False",
    f"{A}.fsdp_config.optimizer_offload": "False",
    f"{R}.name": "vllm",
    f"{R}.tensor_model_parallel_size": "2",
    f"{R}.gpu_memory_utilization": "0.6",
    f"{REF}.fsdp_config.param_offload": "True",
    "trainer.critic_warmup": "0",
    "trainer.logger": "[console,wandb]",
    "trainer.project_name": "verl",
    "trainer.experiment_name": "example",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
    "trainer.save_freq": "20",
    "trainer.test_freq": "5",
    "trainer.total_epochs": "15",
}


def sized(batch: int, mini: int, n: int, tokens: int | None = 24576, **lengths: int) -> dict[str, str]:
    """Return the sizes of a command: its batches, its responses to a prompt, and the tokens of a micro-batch (None: it counts rollouts)."""
    sizes = {"data.train_batch_size": str(batch), f"{A}.ppo_mini_batch_size": str(mini), f"{R}.n": str(n)}
    sizes |= {f"data.max_{name}_length": str(length) for name, length in lengths.items()}
    return sizes | {f"{M}.use_remove_padding": "True", "trainer.balance_batch": "True"} | dynamic(tokens)


def dynamic(tokens: int | None) -> dict[str, str]:
    if tokens is None:
        return {}
    passes = {
        f"{role}.log_prob_{name}": value
        for role in (R, REF)
        for name, value in (("use_dynamic_bsz", "True"), ("max_token_len_per_gpu", str(tokens)))
    }
    return {f"{A}.use_dynamic_bsz": "True", f"{A}.ppo_max_token_len_per_gpu": str(tokens)} | passes


def micro(size: int) -> dict[str, str]:
    return {f"{A}.ppo_micro_batch_size_per_gpu": str(size)} | {
        f"{role}.log_prob_micro_batch_size_per_gpu": str(size) for role in (R, REF)
    }


TWO_FILES = {
    "data.train_files": "[gsm8k/train.parquet,math/train.parquet]",
    "data.val_files": "[gsm8k/test.parquet,math/test.parquet]",
}
ONE_FILE = {"data.train_files": "gsm8k/train.parquet", "data.val_files": "gsm8k/test.parquet"}
KL = {
    f"{A}.use_kl_loss": "True",
    f"{A}.kl_loss_coef": "0.001",
    f"{A}.kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": "False",
}
NO_KL = {f"{A}.use_kl_loss": "False", "algorithm.use_kl_in_reward": "False"}
ENTROPY = {f"{A}.entropy_coeff": "0"}
MAIN = sized(1024, 256, 5) | TWO_FILES | ENTROPY
OFFLOADED = {f"{A}.fsdp_config.param_offload": "True", f"{A}.fsdp_config.optimizer_offload": "True"}
FSDP2 = {f"{A}.strategy": "fsdp2", f"{REF}.strategy": "fsdp2"}
KL_IN_REWARD = {
    f"{A}.use_kl_loss": "False",
    "algorithm.use_kl_in_reward": "True",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": "0.001",
}
ADAPTER_LOADING = {f"{R}.load_format": "safetensors", f"{R}.layered_summon": "True"}
CORRECTED = {
    "data.train_files": "data/train.parquet",
    "data.val_files": "data/test.parquet",
    "data.truncation": "left",
    "data.train_batch_size": "128",
    "data.max_prompt_length": "2048",
    "data.max_response_length": "4096",
    f"{A}.ppo_mini_batch_size": "32",
    f"{A}.ppo_micro_batch_size_per_gpu": "8",
    f"{A}.ppo_epochs": "1",
    "algorithm.gamma": "1.0",
    f"{M}.path": "Qwen/Qwen2.5-7B",
    f"{R}.calculate_log_probs": "True",
    f"{R}.log_prob_micro_batch_size_per_gpu": "8",
    f"{C}.bypass_mode": "true",
    f"{C}.rollout_is_threshold": "2.0",
}
FEW_WORDS = {
    f"{M}.path",
    "data.truncation",
    "algorithm.adv_estimator",
    f"{A}.optim.lr",
    f"{R}.name",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.total_epochs",
}
PROFILED = {
    f"{A}.profiler.{name}": value
    for name, value in (
        ("enable", "True"),
        ("ranks", "[0]"),
        ("all_ranks", "False"),
        ("tool_config.torch.discrete", "False"),
        ("tool_config.torch.contents", "['cpu','cuda']"),
        ("tool_config.torch.schedule.skip_first", "0"),
        ("tool_config.torch.schedule.wait", "0"),
        ("tool_config.torch.schedule.warmup", "1"),
        ("tool_config.torch.schedule.active", "2"),
        ("tool_config.torch.schedule.repeat", "1"),
    )
} | {"global_profiler.tool": "torch", "global_profiler.steps": "[1,2]", "global_profiler.save_path": "profile_data"}

COMMANDS: dict[str, dict[str, str]] = {
    "grpo_trainer/run_qwen3_8b": COMMON | MAIN | KL,
    "grpo_trainer/run_qwen3_8b gb200": COMMON
    | MAIN
    | KL
    | {
        f"{R}.enforce_eager": "True",
        f"{R}.free_cache_engine": "True",
        f"{A}.fsdp_config.model_dtype": "bfloat16",
        "+ray_kwargs.ray_init.num_gpus": "8",
    },
    "grpo_trainer/run_qwen3_30b_a3b": COMMON
    | sized(512, 128, 8, 32768, prompt=2048, response=4096)
    | TWO_FILES
    | ENTROPY
    | KL
    | OFFLOADED
    | {f"{M}.path": "Qwen/Qwen3-30B-A3B", f"{A}.strategy": "fsdp2", f"{R}.tensor_model_parallel_size": "4"},
    "grpo_trainer/run_qwen2_5_32b": COMMON
    | sized(1024, 128, 5, None, response=1024)
    | micro(2)
    | ONE_FILE
    | ENTROPY
    | KL
    | {
        f"{M}.path": "Qwen/Qwen2.5-32B",
        f"{M}.use_remove_padding": "False",
        f"{R}.tensor_model_parallel_size": "8",
        f"{R}.gpu_memory_utilization": "0.4",
        f"{R}.enable_chunked_prefill": "False",
        f"{R}.enforce_eager": "False",
        f"{R}.free_cache_engine": "True",
        f"{R}.checkpoint_engine.update_weights_bucket_megabytes": "4096",
        "trainer.nnodes": "2",
    },
    "grpo_trainer/run_seed_oss_36b": COMMON
    | sized(64, 8, 2, None, prompt=512, response=1024)
    | micro(2)
    | ONE_FILE
    | ENTROPY
    | KL
    | FSDP2
    | {
        f"{M}.path": "ByteDance-Seed/Seed-OSS-36B-Base",
        f"{M}.use_fused_kernels": "True",
        f"{A}.use_dynamic_bsz": "True",
        f"{R}.log_prob_use_dynamic_bsz": "True",
        f"{REF}.log_prob_use_dynamic_bsz": "True",
        f"{A}.fsdp_config.param_offload": "True",
        f"{R}.free_cache_engine": "True",
        "trainer.val_before_train": "False",
    },
    "grpo_trainer/run_mistral_nemo_12b_skyworkrm": COMMON
    | sized(512, 128, 5, None, prompt=4096)
    | {
        "data.train_files": "full_hh_rlhf/rl/train.parquet",
        "data.val_files": "full_hh_rlhf/rl/train.parquet",
        "data.prompt_key": "prompt",
        "data.return_raw_chat": "True",
        f"{M}.path": "mistralai/Mistral-Nemo-Instruct-2407",
        **NO_KL,
        f"{A}.ppo_micro_batch_size_per_gpu": "10",
        f"{R}.log_prob_micro_batch_size_per_gpu": "10",
        f"{R}.gpu_memory_utilization": "0.7",
        f"{R}.tensor_model_parallel_size": "4",
        "reward.num_workers": "8",
        "reward.reward_model.enable": "True",
        "reward.reward_model.model_path": "Skywork/Skywork-Reward-Llama-3.1-8B",
        "reward.reward_model.rollout.name": "vllm",
        "reward.reward_model.rollout.gpu_memory_utilization": "0.8",
        "reward.reward_model.rollout.tensor_model_parallel_size": "1",
        "reward.reward_model.rollout.prompt_length": "8192",
        "reward.reward_model.rollout.response_length": "4096",
        "trainer.val_before_train": "False",
        "trainer.test_freq": "-1",
        "trainer.save_freq": "10",
    },
    "ppo_trainer/run_qwen3_8b": COMMON
    | sized(1024, 256, 1)
    | TWO_FILES
    | ENTROPY
    | {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": "Qwen/Qwen3-8B",
        "critic.model.use_remove_padding": "True",
        "critic.model.enable_gradient_checkpointing": "True",
        "critic.optim.lr": "1e-5",
        "critic.use_dynamic_bsz": "True",
        "critic.ppo_max_token_len_per_gpu": "24576",
        "critic.fsdp.param_offload": "False",
        "critic.fsdp.optimizer_offload": "False",
    },
    "gdpo_trainer/run_qwen3_8b": COMMON
    | sized(128, 32, 4, prompt=2048)
    | {
        "data.train_files": "rlla_4k/train.parquet",
        "data.val_files": "rlla_4k/test.parquet",
        "algorithm.adv_estimator": "gdpo",
        "+algorithm.gdpo_reward_keys": '["accuracy_reward", "format_reward"]',
        "algorithm.kl_ctrl.kl_coef": "0.001",
        f"{A}.use_kl_loss": "False",
        f"{A}.kl_loss_coef": "0.001",
        f"{A}.kl_loss_type": "low_var_kl",
        "reward.custom_reward_function.path": "REWARD_FILE",
        "reward.custom_reward_function.name": "compute_score",
        "reward.reward_manager.name": "gdpo",
        "trainer.val_before_train": "False",
    },
    "cispo_trainer/run_qwen3_8b": COMMON
    | MAIN
    | KL
    | {f"{A}.policy_loss.loss_mode": "cispo", f"{A}.clip_ratio_low": "10", f"{A}.clip_ratio_high": "0.2"},
    "codapo_trainer/run_qwen2_5_math_1_5b": COMMON
    | sized(16, 16, 8, None, response=3072)
    | NO_KL
    | {
        "data.train_files": "math/train.parquet",
        "data.val_files": "math/test.parquet",
        f"{M}.path": "Qwen/Qwen2.5-Math-1.5B",
        "algorithm.adv_estimator": "codapo",
        "+algorithm.codapo_top_k": "4",
        "+algorithm.codapo_weight_offset": "0.1",
        "+algorithm.codapo_accuracy_key": "acc",
        f"{A}.use_dynamic_bsz": "True",
        f"{A}.ppo_max_token_len_per_gpu": "16384",
        f"{A}.loss_agg_mode": "token-mean",
        f"{R}.temperature": "1.0",
        f"{R}.do_sample": "True",
        "reward.reward_manager.name": "dapo",
        "trainer.use_v1": "True",
        "trainer.v1.trainer_mode": "sync",
        "trainer.n_gpus_per_node": "2",
        "trainer.total_training_steps": "1000",
    },
    "gmpo_trainer/run_qwen3_8b": COMMON
    | MAIN
    | KL
    | {f"{A}.policy_loss.loss_mode": "geo_mean", f"{A}.clip_ratio_low": "0.4", f"{A}.clip_ratio_high": "0.4"},
    "gpg_trainer/run_qwen3_8b": COMMON | MAIN | NO_KL | {"algorithm.adv_estimator": "gpg", f"{A}.policy_loss.loss_mode": "gpg"},
    "gspo_trainer/run_qwen3_8b": COMMON
    | sized(512, 128, 16, 20480, prompt=2048, response=8192)
    | TWO_FILES
    | ENTROPY
    | NO_KL
    | OFFLOADED
    | {
        f"{A}.policy_loss.loss_mode": "gspo",
        f"{A}.loss_agg_mode": "seq-mean-token-mean",
        f"{A}.clip_ratio_low": "3e-4",
        f"{A}.clip_ratio_high": "4e-4",
        f"{A}.clip_ratio_c": "10.0",
    },
    "gspo_trainer/run_qwen3_8b npu validation": COMMON
    | sized(512, 128, 16, 20480, prompt=2048, response=8192)
    | TWO_FILES
    | ENTROPY
    | NO_KL
    | OFFLOADED
    | FSDP2
    | {
        f"{A}.policy_loss.loss_mode": "gspo",
        f"{A}.loss_agg_mode": "seq-mean-token-mean",
        f"{A}.clip_ratio_low": "3e-4",
        f"{A}.clip_ratio_high": "4e-4",
        f"{A}.clip_ratio_c": "10.0",
        f"{A}.use_torch_compile": "False",
        f"{A}.fsdp_config.forward_prefetch": "True",
        f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4",
        f"{A}.entropy_checkpointing": "True",
        f"{A}.entropy_from_logits_with_chunking": "True",
        f"{R}.val_kwargs.n": "1",
        f"{R}.val_kwargs.temperature": "1.0",
        f"{R}.val_kwargs.top_p": "0.7",
        f"{REF}.use_torch_compile": "False",
        f"{REF}.fsdp_config.ulysses_sequence_parallel_size": "4",
        "trainer.val_before_train": "False",
    },
    "sapo_trainer/run_qwen3_8b": COMMON
    | sized(256, 64, 16, 20480, prompt=2048, response=8192)
    | TWO_FILES
    | ENTROPY
    | NO_KL
    | OFFLOADED
    | FSDP2
    | {
        f"{A}.policy_loss.loss_mode": "sapo",
        f"{A}.tau_pos": "1.0",
        f"{A}.tau_neg": "1.05",
        f"{R}.gpu_memory_utilization": "0.7",
        "trainer.val_before_train": "False",
        "trainer.test_freq": "-1",
    },
    "sapo_trainer/run_qwen3_30b_a3b": COMMON
    | sized(256, 32, 16, 20480, prompt=2048, response=8192)
    | ENTROPY
    | NO_KL
    | OFFLOADED
    | FSDP2
    | {
        "data.train_files": "['dapo-math-17k/train.parquet']",
        "data.val_files": "['aime-2024/test.parquet']",
        f"{M}.path": "Qwen/Qwen3-30B-A3B-Base",
        f"{A}.policy_loss.loss_mode": "sapo",
        f"+{A}.policy_loss.tau_pos": "1.0",
        f"+{A}.policy_loss.tau_neg": "1.05",
        f"{R}.gpu_memory_utilization": "0.8",
        f"{R}.tensor_model_parallel_size": "4",
        "trainer.val_before_train": "False",
    },
    "otb_trainer/run_qwen3_8b": COMMON
    | sized(128, 128, 8)
    | TWO_FILES
    | ENTROPY
    | NO_KL
    | {
        "algorithm.adv_estimator": "optimal_token_baseline",
        f"{A}.calculate_sum_pi_squared": "True",
        f"{R}.gpu_memory_utilization": "0.75",
    },
    "topr_trainer/run_qwen3_8b": COMMON
    | MAIN
    | NO_KL
    | {
        f"{A}.policy_loss.loss_mode": "topr",
        f"{A}.policy_loss.topr_negative_ratio_lower": "0.0",
        f"{A}.policy_loss.topr_negative_ratio_upper": "1.0",
    },
    "remax_trainer/run_qwen3_8b": COMMON
    | sized(1024, 256, 4)
    | TWO_FILES
    | ENTROPY
    | KL_IN_REWARD
    | {"algorithm.adv_estimator": "remax"},
    "remax_trainer/run_qwen2.5_math_7b_sync": COMMON
    | sized(128, 64, 4)
    | TWO_FILES
    | ENTROPY
    | KL_IN_REWARD
    | {
        "algorithm.adv_estimator": "remax",
        "algorithm.kl_ctrl.kl_coef": "0.0",
        f"{M}.path": "Qwen/Qwen2.5-Math-7B",
        f"{A}.ulysses_sequence_parallel_size": "2",
        f"{R}.gpu_memory_utilization": "0.7",
        f"{REF}.fsdp_config.param_offload": "False",
        "+ray_kwargs.ray_init.runtime_env.env_vars.TRANSFER_QUEUE_ENABLE": "1",
    },
    "reinforce_plus_plus_trainer/run_qwen3_8b": COMMON
    | sized(1024, 1024, 8)
    | TWO_FILES
    | ENTROPY
    | {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": "True",
        f"{A}.use_kl_loss": "False",
        f"{A}.optim.lr": "3e-6",
    },
    "rloo_trainer/run_qwen3_8b": COMMON | MAIN | KL_IN_REWARD | {"algorithm.adv_estimator": "rloo"},
    "rollout_correction/run_qwen2_5_7b": {key: value for key, value in COMMON.items() if key in FEW_WORDS}
    | CORRECTED
    | {
        "algorithm.adv_estimator": "rloo",
        f"{C}.rollout_is": "sequence",
        f"{C}.rollout_is_batch_normalize": "true",
        f"{C}.rollout_rs": "null",
        f"{C}.rollout_rs_threshold": "null",
        f"{C}.loss_type": "reinforce",
        f"{A}.optim.lr": "5e-7",
    },
    "rollout_correction/run_qwen2_5_7b multi_rs": {key: value for key, value in COMMON.items() if key in FEW_WORDS}
    | CORRECTED
    | {
        f"{C}.rollout_is": "token",
        f"{C}.rollout_is_batch_normalize": "false",
        f"{C}.rollout_rs": "'token_k1,seq_max_k2'",
        f"{C}.rollout_rs_threshold": "'0.6_1.6,2.5'",
        f"{C}.loss_type": "ppo_clip",
        f"{A}.optim.lr": "3e-6",
    },
    "prefix_grouper/run_qwen3_8b": COMMON
    | sized(1024, 256, 5, 12288, prompt=512, response=1024)
    | ONE_FILE
    | ENTROPY
    | KL
    | {f"{M}.use_remove_padding": "False", f"{A}.use_prefix_grouper": "True"},
    "profile/run_qwen2_5_7b_torch_profile": COMMON
    | sized(32, 16, 4, 8192, response=1024)
    | ONE_FILE
    | ENTROPY
    | KL
    | PROFILED
    | {f"{M}.path": "Qwen/Qwen2.5-7B-Instruct", f"{R}.enable_chunked_prefill": "False", "trainer.save_freq": "-1"},
    "tuning/lora/run_qwen3_8b": COMMON
    | sized(64, 32, 5, 12288, prompt=512, response=1024)
    | ONE_FILE
    | ENTROPY
    | KL
    | ADAPTER_LOADING
    | {
        f"{M}.lora_rank": "64",
        f"{M}.lora_alpha": "32",
        f"{A}.optim.lr": "3e-6",
        "trainer.n_gpus_per_node": "2",
        "trainer.val_before_train": "False",
    },
    "tuning/lora/run_qwen3_8b_merge": COMMON
    | sized(128, 64, 8, response=1024)
    | ONE_FILE
    | ENTROPY
    | KL
    | ADAPTER_LOADING
    | FSDP2
    | {
        f"+{M}.lora.merge": "True",
        f"{M}.lora_rank": "32",
        f"{M}.lora_alpha": "64",
        f"{A}.fsdp_config.model_dtype": "bf16",
        f"{REF}.fsdp_config.model_dtype": "bf16",
        f"{A}.optim.lr": "1e-5",
        "trainer.logger": '["console","tensorboard","file"]',
        "trainer.val_before_train": "True",
    },
    "tuning/lora/run_qwen3_8b_from_adapter": COMMON
    | sized(1024, 256, 5, 12288, prompt=512, response=1024)
    | ONE_FILE
    | ENTROPY
    | KL
    | ADAPTER_LOADING
    | {f"{M}.use_shm": "True", f"{M}.lora_adapter_path": "ADAPTER", f"{A}.optim.lr": "3e-6"},
    "tuning/scaling/run_qwen2_5_72b": COMMON
    | sized(1024, 256, 5)
    | TWO_FILES
    | ENTROPY
    | KL
    | OFFLOADED
    | {f"{M}.path": "Qwen/Qwen2.5-72B-Instruct", f"{R}.tensor_model_parallel_size": "16", "trainer.nnodes": "4"},
}
"""The words of each example by its place, those that stand in several of them once above; sizes and places as verl's files have them."""
# The scripts leave out what the common words have for them alone: a reward model's script has no reference to offload, and so on.
for name, missing in (
    ("grpo_trainer/run_mistral_nemo_12b_skyworkrm", (f"{REF}.fsdp_config.param_offload",)),
    (
        "topr_trainer/run_qwen3_8b",
        (f"{REF}.fsdp_config.param_offload", f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_max_token_len_per_gpu"),
    ),
    ("codapo_trainer/run_qwen2_5_math_1_5b", (f"{REF}.fsdp_config.param_offload",)),
):
    for key in missing:
        del COMMANDS[name][key]
