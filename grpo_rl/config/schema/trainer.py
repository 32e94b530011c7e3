"""Options `trainer.*`, `global_profiler.*` and `ray_kwargs.*`."""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import Literal

from grpo_rl.config.schema.kinds import *

_IS_PROFILED = (
    "actor_rollout_ref.actor.profiler.enable or actor_rollout_ref.ref.profiler.enable or critic.profiler.enable | "
    "no role is profiled: actor_rollout_ref.actor.profiler.enable=true"
)
_VALIDATES = "data.val_files or data.val_prompt_files | there is nothing to validate on, such as data.val_files"


@frozen
class IterateConfig:
    steps_per_iteration: Count = 100
    """Policy steps per iteration, rewarded by the reward model's score alone."""
    reward_model_steps: CountOrZero = 20
    """Reward model steps at the beginning of each iteration, on data.train_batch_size new groups each,
    labelled by reward.functions; 0: only the reference is refreshed."""
    replay_share: MinorShare = field(0.1, needs="reward_model_steps above 0")
    """Share of pairs from earlier iterations in the reward model's batches."""
    replay_pairs: Pairs = field(4096, needs=["reward_model_steps above 0", "replay_share above 0"])
    """Most pairs kept for that; of more, an even sample of all iterations."""


@frozen
class AsynchronousConfig:
    max_staleness: Staleness = 1
    """Bound on the versions (steps) by which a trained token's sampling weights may be older than those that
    it trains: max_staleness + 1 batches of prompts are in flight; 0: as schedule=sync."""
    sync_every: Updates = 1
    """Steps between transfers of weights to engines; at most max_staleness + 1."""
    partial_rollout: bool = field(True, needs="max_staleness above 0")
    """Unfinished responses go on with new weights; false: they end first."""
    keep_cache: bool = field(False, needs=["max_staleness above 0", "partial_rollout=true"])
    """Unfinished responses keep keys and values of the old weights; false: recompute them, so that log-probs
    are exactly the new weights'."""


@frozen
class TrainerConfig:
    project_name: str = "grpo_rl"
    """Folder of the runs, and project of W&B or MLflow."""
    experiment_name: str | None = None
    """Name of this run; null: by the date. A named run resumes where it stopped (resume_mode)."""
    default_local_dir: str = "runs/${trainer.project_name}"
    """Folder of run folders."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow"]] = field(lambda: ["console", "tensorboard"])
    """Receivers of metrics beside metrics.jsonl, which is always written: `file` adds nothing."""
    metrics_port: Port | None = None
    """Serve the newest metrics to Prometheus at http://metrics_host:PORT/metrics; null: do not."""
    metrics_host: str = field("127.0.0.1", needs="metrics_port")
    """This machine alone, or 0.0.0.0 for a Prometheus elsewhere; without a password."""
    log_val_generations: TableRows = field(8, needs="logger=wandb or mlflow", harmless=True)
    """Responses in W&B's table of each validation."""
    schedule: str = field("sync", part="policy")
    """Course of a step with data.responses=policy. sync: sample, score, train; one_step_off: sample the next
    batch meanwhile; async: sample all the time, within a bound on staleness (asynchronous.*); iterate: sync
    in iterations that refresh reference and reward model (iterate.*); or your own `path/to/file.py:train`."""
    asynchronous: AsynchronousConfig = field(AsynchronousConfig, needs="schedule=async")
    iterate: IterateConfig = field(IterateConfig, needs="schedule=iterate")
    total_epochs: Count = field(30, needs="total_training_steps=null | {total_training_steps} says when it ends", harmless=True)
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Training steps; null: total_epochs of the data."""
    nnodes: Nodes = 1
    """Nodes of the actor's pool."""
    n_gpus_per_node: Devices | None = None
    """Actor ranks per node: GPUs, or processes on a CPU; null: all GPUs, or 1 process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the models; auto: cuda if there is a GPU."""
    deterministic: bool = False
    """Use slower kernels with the same bits every time: torch.use_deterministic_algorithms in all ranks,
    batch-invariant kernels in vLLM on GPUs; docs/gpus.md says what holds where."""
    device_tflops: Tflops | None = None
    """Dense bfloat16 TFLOP/s of a device, for perf/mfu; null: by the GPU's name, and none on CPUs."""
    seed: Seed = 1
    """Seed of all but data order and sampling: dropout, new weights."""
    critic_warmup: CountOrZero = field(0, part="critic")
    """First steps, in which only the critic learns."""
    val_before_train: bool = field(True, needs=_VALIDATES, harmless=True)
    """Validate before the first step."""
    val_only: bool = field(False, part="policy")
    """Validate and stop."""
    test_freq: CountOrOff = field(-1, needs=_VALIDATES)
    """Validate every so many steps, and at the end; -1: before and at the end only."""
    save_freq: CountOrOff = -1
    """Save a checkpoint every so many steps, and at the end; -1: see save_at_end."""
    save_at_end: bool = field(True, needs="save_freq=-1")
    """With save_freq=-1: save the last state, from which a longer run goes on."""
    on_save_error: Literal["stop", "continue"] = field("stop", needs="save_freq above 0 or keep_best=true")
    """If a checkpoint cannot be written: stop, or try again at the next save. Earlier ones stay."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: a named run goes on from its newest checkpoint; resume_path: from resume_from_path."""
    resume_from_path: str | None = field(None, needs="resume_mode=resume_path")
    """A checkpoint folder (.../checkpoints/step_N)."""
    max_actor_ckpt_to_keep: Count | None = field(None, needs="save_freq above 0 or save_at_end=true or keep_best=true")
    """Newest checkpoints to keep; null: all."""
    keep_best: bool = field(False, needs="test_freq above 0 | only validations while training are compared")
    """Save each best validated step, and keep that checkpoint beside the newest."""
    export_at_end: bool = True
    """Write the policy to <run>/model, a Hugging Face folder."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = field("float32", needs="export_at_end=true")
    """Number type of its weights."""
    save_rollouts: bool = field(True, part="policy")
    """Write every rollout to <run>/rollouts/step_N.jsonl."""
    log_token_groups: CountOrZero = field(2, part="policy")
    """First groups of each step that are logged with id and log-prob of every token, for the run's page."""
    page_freq: CountOrOff = 10
    """Write <run>/page.html every so many steps and at the end, in a process beside the run; -1: never
    (`python -m grpo_rl page` does at any time)."""
    dry_run: bool = False
    """Print the plan and stop."""
    machine: str | None = None
    """Machine that a dry run plans for: 8xH100-80GB, several as 4x8xH100-80GB; `machine=` for short. Sets
    n_gpus_per_node, and several nnodes, if not given (docs/gpus.md)."""
    machine_host_gib: Gib | None = None
    """Host memory of each such machine; null: usual for these GPUs."""
    mean_response_length: Length | None = None
    """Mean tokens of a response, for the time of a step; null: half of data.max_response_length. `grpo-rl
    plan --lengths RUN` takes it, and the spread, from a run's log."""
    response_length_spread: LogSpread | None = None
    """Standard deviation of the logarithm of response lengths; null: 0.8; 0: all equal."""
    start_timeout_s: Seconds = 600.0
    """Longest start of workers (loading model and engine), and of what is slow once: an engine's compilation,
    the first copy into page-locked memory."""
    step_timeout_s: Seconds = 3600.0
    """Longest phase of a step; then workers that did not answer have failed."""
    stuck_s: Seconds | None = None
    """Seconds in a phase after which the run says what each process does, with Python stacks; null: ten times
    the phase's longest, at least 60, for new phases half of the timeouts."""
    recover: Literal["auto", "off"] = "auto"
    """If processes die or freeze. auto: replace an engine's replica; for other roles go back to the newest
    checkpoint and on from it, with the same bits (save_freq=-1 keeps one for this, at most once a minute).
    off: the run ends."""
    heartbeat_s: Seconds = 5.0
    """Time between signs of life of a worker process; missing three ends and restarts it."""
    max_restarts: CountOrZero = field(5, needs="recover=auto")
    """Restarts of one worker within restart_window_s; then the run stops with all causes."""
    restart_window_s: Seconds = field(3600.0, needs="recover=auto")
    """Time after which a restart no longer counts."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of ranks in a collective operation; then their worker group has failed."""
    grace_s: Seconds = 30.0
    """Seconds after SIGTERM, SIGINT, SIGHUP or SIGUSR1 to end the step and save; then the process ends."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """If a loss or gradient is not finite: leave that update out on every rank, or stop.
    <run>/nonfinite_step_N.jsonl has the rollouts."""
    max_nonfinite_steps: CountOrZero = field(3, needs="on_nonfinite=skip")
    """skip: most steps in a row that leave an update out; then the run stops."""
    stop_on: list[Illness] = field(list, needs="val_only=false")
    """The doctor's alarms that end the run, saved, with exit code 76 (docs/doctor.md): [kl_runaway]."""


@frozen
class GlobalProfilerConfig:
    tool: Literal["torch"] | None = field(None, needs=["steps", _IS_PROFILED], harmless=True)
    """torch: traces of calls that run a model, for chrome://tracing or Perfetto (docs/performance.md)."""
    steps: list[Count] | None = field(None, needs="tool")
    """Profiled training steps, e.g. [2,3], of roles with profiler.enable=true; null: none."""
    save_path: str = field("profile", needs="tool", harmless=True)
    """Folder of traces, from the run's folder."""


@frozen
class RayInitConfig:
    address: str | None = None
    """A running cluster (`auto`, ray://...); null: a local one, or the job's own under `ray job submit`."""
    num_cpus: Cores | None = field(None, harmless=True)
    """CPUs of a local cluster; null: all."""
    object_store_memory: StoreBytes | None = field(None, harmless=True)
    """Bytes of a local cluster's object store, for a step's tokens, and weights on CPUs; the rest goes to
    disk. null: 30 % of free memory, at most 80 % of /dev/shm and at least 2 GiB."""
    wait_for_nodes_s: Seconds = 5.0
    """Time for too small a cluster to grow, by late nodes or an autoscaler; then the run ends."""
    allow_insecure: bool = False
    """Use a cluster without tokens (Ray before 2.52 has none): whoever reaches its ports can run code."""


@frozen
class RayConfig:
    ray_init: RayInitConfig = field(RayInitConfig)
