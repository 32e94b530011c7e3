"""Configurations that must be refused: the words of a command line, the key that is named, a phrase of the rule."""

from __future__ import annotations

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
Bad = tuple[list[str], str, str]


def _each(key: str, said: str, *values: str) -> list[Bad]:
    return [([f"{key}={value}"], key, said) for value in values]


# Numbers and words as YAML, shells and people write them; values of the right form are in test_config_values.py.
_VALUES: list[Bad] = [
    *_each(f"{R}.n", "whole number", "8.5", "2026-01-01", ".inf", "0x10", "8h", "''", "{a: 1}", "true"),
    *_each(f"{R}.n", "several values", "1,2", "range(1,3)", "choice(1,2)", "glob(*)"),
    *_each(f"{R}.n", "out of range", "0", "99999999999999999999"),
    *_each(f"{R}.n", "cannot be read", "9" * 5000, "[1", "a=b"),
    *_each(f"{A}.optim.lr", "not finite", "1e400", "-inf"),
    *_each(f"{A}.optim.lr", "several values", "1e-6,1e-5"),
    *_each("data.train_files", "[a,b]", "a.parquet,b.parquet"),
    *_each("data.shuffle", "true or false", "yes", "off", "1", "null"),
    *_each(f"{A}.kl_loss_type", "unknown KL estimator", "k33"),
    *_each("algorithm.adv_estimator", "unknown advantage estimator", "grop", "''"),
    *_each(f"{A}.policy_loss.loss_mode", "unknown policy loss", "vanila", "bypass_mode"),
    *_each(f"{A}.loss_agg_mode", "unknown loss_agg_mode", "token_mean"),
    *_each(f"{R}.name", "unknown rollout engine", "sglang"),
    *_each("data.train_files", "unknown task", "task:aritmetic"),
    *_each("reward.functions", "there is no file", "[auto,0.5*no/such.py:f]"),
    *_each("algorithm.adv_estimator", "there is no file", "no/such.py:f"),
    *_each(f"{A}.policy_loss.loss_mode", "there is no file", "no/such.py:f"),
    *_each(f"{R}.name", "there is no file", "no/such.py:f"),
    ([f"{R}.multi_turn.enable=true"], f"{R}.multi_turn.enable", "nothing answers the policy"),
    ([f"{R}.multi_turn.enable=true", f"{R}.multi_turn.environment.name=no/such.py:G"], "no/such.py:G", "there is no file"),
    ([f"{R}.multi_turn.enable=true", f"{R}.multi_turn.tool_config_path=no.yaml"], "tool_config_path", "No such file"),
    (["data.train_weights=[1,2]"], "data.train_weights", "give one weight for each entry"),
    (["data.train_weights=[0]"], "data.train_weights", "out of range"),
    (["data.custom_cls.path=no/such.py", "data.custom_cls.name=Rows"], "data.custom_cls.path", "there is no file"),
    *_each("trainer.total_epochs", "has no value yet", "???"),
    *_each("trainer.experiment_name", "not text", "{a: 1}"),
]
_KEYS: list[Bad] = [
    (
        ["+reward.function_kwargs.format._target_=os.system"],
        "reward.function_kwargs.format._target_",
        "no function has such an option",
    ),
    (["trainer.save_frq=10"], "trainer.save_frq", "Did you mean trainer.save_freq"),
    (["algoritm.gamma=1"], "algoritm.gamma", "Did you mean algorithm.gamma"),
    (["n=4"], "n: unknown key", "actor_rollout_ref.rollout.n"),
    (["nonsense.deep.key=1"], "nonsense.deep.key", "conf/base"),
    (["++algorithm.cliip=1"], "algorithm.cliip", "unknown key"),
    (["~trainer.seed=1"], "~trainer.seed=1", "back to the default"),
    (["trainer/seed=1"], "trainer/seed", "not a key"),
    (["trainer save_freq=3"], "'trainer save_freq'", "not a key"),
    (["--trainer.save_freq=5"], "--trainer.save_freq=5", "not a key"),
    ([""], "not understood", "key=value"),
    (["--multirun"], "--multirun", "python -m grpo_rl.main"),
    (["--config-name=x"], "--config-name", "recipe=FOLDER/x.yaml"),
    (["x" * 10_000 + "=1"], "xxx", "10000 characters"),
    (["algorithm.\u0441lip=1"], "algorithm", "\\u0441lip"),
    (["trainer.total_epochs=\uff11\uff10"], "trainer.total_epochs", "cannot be read"),
    (["algorithm.gamma=0.5\x00"], "algorithm.gamma", "cannot be read"),
    (["trainer=null"], "trainer=null", "group of keys"),
    (["trainer={save_frq: 3}"], "trainer.save_frq", "trainer.save_freq"),
    (["trainer.seed.x=1"], "trainer.seed.x", "nothing lies below"),
    (["data@trainer=1"], "data@trainer", "not a key"),
    (["hydra.job.chdir=true"], "hydra.job.chdir=true", "in which the command is given"),
    (["hydra/job_logging=default"], "hydra/job_logging=default", "logs of its own"),
    (["algoritm=dapo"], "algoritm", "Did you mean algorithm"),
    (["algorithm=dappo"], "algorithm=dappo", "Did you mean dapo"),
    (["algorithm=dapo", "algorithm=grpo"], "algorithm=grpo", "algorithm=dapo was given before"),
    (["-cd", "no/such"], "--config-dir", "no such folder"),
    (["--cfgg"], "--cfgg", "not understood"),
    (["recipe=arithmetic/grop"], "recipe=arithmetic/grop", "Did you mean arithmetic/grpo"),
    (["recipe=../schema"], "recipe=../schema", "unknown recipe"),
    (["recipe=no/such.yaml"], "recipe=no/such.yaml", "there is no file"),
    (["~recipe"], "recipe", "recipe=NAME"),
    (["recipe=arithmetic/grpo", "recipe=x"], "recipe=x", "one recipe"),
]
_EXPRESSIONS: list[Bad] = [
    (["trainer.seed=${trainer.nnodes}", "trainer.nnodes=${trainer.seed}"], "trainer.", "Recursive"),
    (["trainer.project_name=${oc.env:NO_SUCH_VARIABLE}"], "trainer.project_name", "not found"),
    (["trainer.project_name=${no.such.key}"], "trainer.project_name", "cannot be resolved"),
    ([f"{R}.n=${{oc.env:HOME}}"], f"{R}.n=", "whole number"),
    (["trainer.project_name=${eval:1+1}"], "trainer.project_name", "cannot be resolved"),
    (["data._target_=os.system"], "data._target_", "unknown key"),
    (["algorithm.adv_options._target_=os.system"], "algorithm.adv_options", "no option _target_"),
    ([f"+{R}.engine_kwargs.vllm._target_=os.system"], f"{R}.engine_kwargs.vllm._target_", "may load code"),
]
_PATHS: list[Bad] = [
    *_each("trainer.experiment_name", "folder below", "../x", "/abs", "a/../../b", "a\x00b", "''", "~/x", ".", "a\nb"),
    *_each("trainer.project_name", "folder below", "../../x", "/etc", "a/./b", "x" * 201),
    *_each("trainer.default_local_dir", "control characters", "''", "a\x00b"),
    *_each("trainer.default_local_dir", "is a file", "/dev/null/x"),
    (["trainer.resume_from_path=/no/such"], "trainer.resume_from_path", "has no effect"),
]
_CONTRADICTIONS: list[Bad] = [
    ([f"{R}.n=1"], "algorithm.adv_estimator", "at least 2"),
    (["actor_rollout_ref.model.lm_head_precision=tf32"], "actor_rollout_ref.model.lm_head_precision=tf32", "GPUs only"),
    ([f"{A}.policy_loss.loss_mode=gpg", f"{A}.clip_ratio=0.1"], f"{A}.clip_ratio=0.1", "no option clip_low or clip_high"),
    (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "norm_adv_by_std_in_grpo", "no option std"),
    (["algorithm.gamma=0.9"], "algorithm.gamma", "no option gamma"),
    (["algorithm.lam=0.9"], "algorithm.lam", "no option lam"),
    (["algorithm.adv_options={nonsense: 1}"], "algorithm.adv_options", "no option nonsense"),
    (["algorithm.adv_estimator=gae", "critic.enable=false"], "critic.enable", "learns from a critic"),
    (
        ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce_plus_plus", f"{R}.n=1"],
        "filter_groups",
        "signal",
    ),
    ([f"{R}.quantization=fp8"], f"{R}.quantization", "compute capability"),
    ([f"{R}.quantization=fp8", f"{R}.dtype=float32"], f"{R}.quantization", "16 bits"),
    ([f"{R}.num_replicas=3"], f"{R}.num_replicas", "there is room for 1"),
    ([f"{R}.min_replicas=2"], f"{R}.min_replicas", "the run starts with 1"),
    ([f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2", f"{R}.max_replicas=1"], f"{R}.max_replicas", "the run starts with 2"),
    ([f"{R}.engines_per_device=2", f"{R}.num_replicas=3"], f"{R}.num_replicas", "there is room for 2"),
    ([f"{R}.max_replicas=2", "trainer.recover=off"], f"{R}.max_replicas", "needs trainer.recover=auto"),
    ([f"{A}.profiler.enable=true"], f"{A}.profiler.enable", "needs global_profiler.tool"),
    (["global_profiler.tool=torch_memory"], "global_profiler.tool=torch_memory", "perf/memory"),
    (
        ["reward.custom_reward_function.path=x.py", "reward.functions=[gsm8k]"],
        "reward.custom_reward_function",
        "x.py:compute_score",
    ),
]
# What verl takes without a word on its default path, or reads nowhere.
_SILENT_IN_VERL: list[Bad] = [
    (["custom_reward_function.path=x.py"], "x.py:compute_score", "there is no file"),
    (["reward_model.enable=true"], "reward.reward_model.model_path", "not set"),
    ([f"{A}.use_rollout_log_probs=true"], f"{A}.use_rollout_log_probs", "bypass_mode"),
    ([f"{R}.full_determinism=true"], f"{R}.full_determinism", "only false"),
    ([f"{R}.over_sample_rate=0.5"], f"{R}.over_sample_rate", "only 0"),
    (["trainer.default_hdfs_dir=x"], "trainer.default_hdfs_dir", "verl"),
    ([f"{A}.fsdp_config.strategy=fsdp9"], f"{A}.fsdp_config.strategy", "only fsdp"),
    ([f"{R}.data_parallel_size=2"], f"{R}.data_parallel_size", "only 1"),
    (["algorithm.use_pf_ppo=true"], "algorithm.use_pf_ppo", "only false"),
    ([f"{M}.lora_rank=8", f"{M}.target_modules=[]"], f"{M}.target_modules", ""),
    ([f"{M}.lora_rank=8", f"{M}.target_modules=[all-linear,q_proj]"], f"{M}.target_modules", "all-linear stands alone"),
    ([f"{M}.lora_rank=8", f"+{M}.override_config.quantization_config={{bits: 4}}"], "quantization_config", "no such field"),
    ([f"{M}.load_in_4bit=true"], f"{M}.load_in_4bit", "QLoRA"),
    (["critic.model.lora_rank=8"], "critic.model.lora_rank", "only 0"),
    (
        [
            f"{M}.lora_rank=8",
            "trainer.schedule=iterate",
            "reward.reward_model.enable=true",
            "reward.reward_model.model_path=builtin:arithmetic",
        ],
        f"{M}.lora_rank",
        "moves the reference",
    ),
    (["distillation.enabled=true"], "distillation.teacher_models", "names no teacher"),
]
BAD: list[Bad] = [*_VALUES, *_KEYS, *_EXPRESSIONS, *_PATHS, *_CONTRADICTIONS, *_SILENT_IN_VERL]

# Recipes of a user's own, as text.
BAD_RECIPES: list[tuple[str, str]] = [
    ("trainer: !!python/object/apply:os.system ['touch CANARY']", "cannot be read as YAML"),
    ("trainer:\n\tseed: 1", "cannot be read as YAML"),
    ("trainer: {seed: 1}\ntrainer: {seed: 2}", "line 2, column 1: found duplicate key trainer"),
    ("trainer: {seed: 1, seed: 2}", "found duplicate key seed"),
    ("actor_rollout_ref: {model: {trust_remote_code: true}}", "has to be typed"),
    ("trainer: {project_name: '${oc.env:NO_SUCH_VARIABLE}'}", "not found"),
    ("trainer: {seed: .nan}", "whole number"),
    ("data: {shuffle: 2026-01-01}", "true or false"),
    ("[1, 2", "cannot be read as YAML"),
    ("\x00", "cannot be read as YAML"),
    ("a: &a [x,x]\nb: &b [*a,*a]", "aliases"),
    ("trainer: " + "[" * 3000, "cannot be read as YAML"),
    ("trainer:\n  seed: 1\n  save_freq: [1\ndata:\n", "line 4, column 5"),
    ("", "holds no keys"),
    ("just text", "holds no keys"),
    ("trainer: {save_frq: 1}", "trainer.save_freq"),
    ("hydra: {run: {dir: x}}", "hydra.run.dir"),
    ("defaults: [/recipe/nonsense]\ntrainer: {seed: 1}", "unknown recipe"),
    ("defaults: [other]\ntrainer: {seed: 1}", "/recipe/arithmetic/grpo"),
    ("trainer: {save_freq: 1.5}", "write 2"),
    ("trainer: 3", "group of keys"),
]
