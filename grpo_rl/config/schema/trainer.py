"""Options of the run and of Ray: `trainer.*`, `ray_kwargs.*`."""

# ruff: noqa: F403, F405, RUF009

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_rl.config.schema.kinds import *

_IS_PROFILED = (
    "actor_rollout_ref.actor.profiler.enable or actor_rollout_ref.ref.profiler.enable or critic.profiler.enable | "
    "no role is profiled: actor_rollout_ref.actor.profiler.enable=true"
)
_VALIDATES = "data.val_files or data.val_prompt_files | there is nothing to validate on, such as data.val_files"


@dataclass(frozen=True, slots=True)
class IterateConfig:
    steps_per_iteration: Count = 100
    """Training steps of the policy in one iteration, each rewarded by the reward model's score alone."""
    reward_model_steps: CountOrZero = 20
    """Training steps of the reward model at the beginning of each iteration, each on data.train_batch_size new groups of the
    policy that reward.functions labels; 0: the reward model stays as it is, and only the reference is refreshed."""
    replay_share: MinorShare = field(0.1, needs="reward_model_steps above 0")
    """The share of the pairs in the reward model's batches that comes from earlier iterations."""
    replay_pairs: Pairs = field(4096, needs=["reward_model_steps above 0", "replay_share above 0"])
    """The most pairs that are kept to replay: of more, an even sample of all iterations."""


@dataclass(frozen=True, slots=True)
class AsynchronousConfig:
    max_staleness: Staleness = 1
    """The most versions (training steps) by which the weights that sampled a trained token may be older than those that it
    trains, a hard bound: max_staleness + 1 batches of prompts are in flight; 0: the weights are those of schedule=sync."""
    sync_every: Updates = 1
    """Training steps between two transfers of weights to the engines; at most max_staleness + 1."""
    partial_rollout: bool = field(True, needs="max_staleness above 0")
    """Update weights under unfinished responses, which go on with the new ones; false: those that have begun end first."""
    keep_cache: bool = field(False, needs=["max_staleness above 0", "partial_rollout=true"])
    """Let unfinished responses keep the keys and values of the old weights; false: they are computed anew, so that log-probs are
    exactly those of the new weights."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    project_name: str = "grpo_rl"
    """Folder of the runs, and project of W&B or MLflow."""
    experiment_name: str | None = None
    """Name of this run; null: a new one with the date. A named run resumes where it stopped (resume_mode)."""
    default_local_dir: str = "runs/${trainer.project_name}"
    """The folder in which the run's folder is made."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow"]] = field(lambda: ["console", "tensorboard"])
    """The receivers of metrics beside metrics.jsonl in the run's folder, which is always written: `file` adds nothing."""
    metrics_port: Port | None = None
    """Serve the newest step's metrics and phase times to Prometheus at http://metrics_host:PORT/metrics; null: do not."""
    metrics_host: str = field("127.0.0.1", needs="metrics_port")
    """The address that answers: this machine alone, or 0.0.0.0 for a Prometheus on another one. Nobody is asked for a password."""
    log_val_generations: TableRows = field(8, needs="logger=wandb or mlflow", harmless=True)
    """Responses in the table that W&B gets at each validation."""
    schedule: str = field("sync", part="policy")
    """The course of one training step with data.responses=policy. sync: sample with the current policy, score, train on it;
    one_step_off: sample the next batch while this one is trained; async: sample all the time, within a bound on staleness
    (asynchronous.*); iterate: sync in iterations, each of which begins with the reference and the reward model (iterate.*); or your own,
    `path/to/file.py:train`."""
    asynchronous: AsynchronousConfig = field(AsynchronousConfig, needs="schedule=async")
    iterate: IterateConfig = field(IterateConfig, needs="schedule=iterate")
    total_epochs: Count = field(30, needs="total_training_steps=null | {total_training_steps} says when it ends", harmless=True)
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Training steps; null: total_epochs of the data."""
    nnodes: Nodes = 1
    """Nodes of the actor's pool."""
    n_gpus_per_node: Devices | None = None
    """Actor ranks per node: GPUs on a GPU machine, processes on a CPU one; null: all GPUs, or 1 process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device of the models; auto: cuda if there is a GPU."""
    deterministic: bool = False
    """Compute by kernels whose results have the same bits every time, slower: torch.use_deterministic_algorithms in all ranks,
    batch-invariant kernels in vLLM on GPUs. What it promises where is in docs/gpus.md."""
    device_tflops: Tflops | None = None
    """Dense bfloat16 TFLOP/s of one device, of which perf/mfu is a share; null: by the name of the GPU, and on CPUs no perf/mfu."""
    seed: Seed = 1
    """Seed of everything in the trainer that is not data order or sampling (dropout, new weights)."""
    critic_warmup: CountOrZero = field(0, part="critic")
    """First training steps in which only the critic learns."""
    val_before_train: bool = field(True, needs=_VALIDATES, harmless=True)
    """Validate before the first step."""
    val_only: bool = field(False, part="policy")
    """Validate and stop."""
    test_freq: CountOrOff = field(-1, needs=_VALIDATES)
    """Validate every so many steps, and at the end; -1: only before and at the end."""
    save_freq: CountOrOff = -1
    """Write a checkpoint every so many steps, and at the end; -1: only at the end (save_at_end)."""
    save_at_end: bool = field(True, needs="save_freq=-1")
    """With save_freq=-1: commit the run's last state to <run>/checkpoints, from which a longer run goes on."""
    on_save_error: Literal["stop", "continue"] = field("stop", needs="save_freq above 0 or keep_best=true")
    """The reaction to a checkpoint that cannot be written (disk full, read-only, failing): stop, or train on and try
    again at the next save point. Earlier checkpoints are untouched either way."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """The start of a named run. auto: go on from its newest checkpoint; resume_path: from resume_from_path."""
    resume_from_path: str | None = field(None, needs="resume_mode=resume_path")
    """A checkpoint folder (.../checkpoints/step_N)."""
    max_actor_ckpt_to_keep: Count | None = field(None, needs="save_freq above 0 or save_at_end=true or keep_best=true")
    """Keep only the newest so many checkpoints; null: all."""
    keep_best: bool = field(False, needs="test_freq above 0 | only validations while training are compared")
    """Save each step whose validation is the best so far, and keep that checkpoint beside the newest ones."""
    export_at_end: bool = True
    """Write the trained policy to <run>/model, a Hugging Face folder."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = field("float32", needs="export_at_end=true")
    """The number type of the weights in that folder."""
    save_rollouts: bool = field(True, part="policy")
    """Write every rollout to <run>/rollouts/step_N.jsonl."""
    log_token_groups: CountOrZero = field(2, part="policy")
    """The first so many groups of each step are logged with the id and the log-prob of every token, which the run's page colours;
    0: none."""
    page_freq: CountOrOff = 10
    """Write the run's page, <run>/page.html, every so many steps and at the end, in a process beside the run; -1: never
    (`python -m grpo_rl page` writes it at any time)."""
    dry_run: bool = False
    """Print the plan and stop."""
    machine: str | None = None
    """The machine that a dry run plans for, instead of this one: 8xH100-80GB, several as 4x8xH100-80GB; `machine=` for short. It sets
    n_gpus_per_node, and several set nnodes, unless they are given. Devices: docs/gpus.md."""
    machine_host_gib: Gib | None = None
    """Host memory of each such machine; null: what is usual beside these GPUs."""
    mean_response_length: Length | None = None
    """Mean tokens of a response, for the time of a step on such a machine; null: half of data.max_response_length.
    `grpo-rl plan --lengths RUN` takes it, and the spread, from a run's log."""
    response_length_spread: LogSpread | None = None
    """Standard deviation of the logarithm of the responses' lengths; null: 0.8; 0: all are equally long."""
    start_timeout_s: Seconds = 600.0
    """Longest time for workers to start (loading the model and the engine), and for what is slow once: a step of an engine that
    compiles kernels, the first copy into page-locked memory."""
    step_timeout_s: Seconds = 3600.0
    """Longest time for one phase of a step; then the workers that did not answer count as failed."""
    stuck_s: Seconds | None = None
    """Seconds in one phase of a step after which the run says once what each process is doing, with Python stacks; null: ten times
    the longest that this phase took, at least 60, and half of the timeouts if it is new."""
    recover: Literal["auto", "off"] = "auto"
    """The reaction to worker processes that die or freeze. auto: an engine's replica is replaced; if a process of another role is
    lost, the run goes back to its newest checkpoint and on from there, with the same bits (with save_freq=-1 it keeps one for
    itself, at most once a minute, while it lasts). off: the run ends."""
    heartbeat_s: Seconds = 5.0
    """Time between two signs of life of a worker process; one that misses three of them is ended and started again."""
    max_restarts: CountOrZero = field(5, needs="recover=auto")
    """Restarts of one worker within restart_window_s; then the run stops and names all causes."""
    restart_window_s: Seconds = field(3600.0, needs="recover=auto")
    """The time after which a restart no longer counts for max_restarts."""
    collective_timeout_s: Seconds = 600.0
    """The longest time that ranks wait for each other in a collective operation; then their worker group has failed."""
    grace_s: Seconds = 30.0
    """Seconds that SIGTERM, SIGINT, SIGHUP or SIGUSR1 leave to finish or give up the step and to save; then the process ends."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """The reaction to a loss or a gradient that is not finite: leave that update out on every rank and go on, or
    stop. The rollouts are kept in <run>/nonfinite_step_N.jsonl."""
    max_nonfinite_steps: CountOrZero = field(3, needs="on_nonfinite=skip")
    """skip: so many training steps in a row may leave an update out, then the run stops."""
    stop_on: list[Illness] = field(list, needs="val_only=false")
    """Alarms of the doctor that end the run when they begin, saved, with exit code 76: [kl_runaway,entropy_collapse]; docs/doctor.md."""


@dataclass(frozen=True, slots=True)
class GlobalProfilerConfig:
    tool: Literal["torch"] | None = field(None, needs=["steps", _IS_PROFILED], harmless=True)
    """torch: a trace of every call that runs a model, for chrome://tracing or Perfetto (docs/performance.md)."""
    steps: list[Count] | None = field(None, needs="tool")
    """The training steps that are profiled, e.g. [2,3], by the roles whose profiler.enable is true; null: none."""
    save_path: str = field("profile", needs="tool", harmless=True)
    """The folder of traces; a relative one lies in the run's folder."""


@dataclass(frozen=True, slots=True)
class RayInitConfig:
    address: str | None = None
    """Address of a running cluster (`auto`, or ray://...); null: a local one, or the job's own under `ray job submit`."""
    num_cpus: Cores | None = field(None, harmless=True)
    """CPUs of a local cluster; null: all."""
    object_store_memory: StoreBytes | None = field(None, harmless=True)
    """Bytes of a local cluster's object store, through which a step's tokens, and weights on CPUs, go; what does not
    fit goes to disk. null: 30 % of the memory that is free, at most 80 % of /dev/shm and at least 2 GiB."""
    wait_for_nodes_s: Seconds = 5.0
    """The time that too small a cluster has to grow, by late nodes or an autoscaler; then the run ends."""
    allow_insecure: bool = False
    """Use a cluster though it asks for no token (Ray before 2.52 knows none): any process that reaches its ports can run code."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    ray_init: RayInitConfig = field(RayInitConfig)
