"""All the wiring: from a checked configuration to worker groups, a trainer, and the report at the end."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from grpo_rl.algos.advantages import ADVANTAGES, needs_of
from grpo_rl.checkpoint.manifest import Checkpoint, verify
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster import warm_start
from grpo_rl.cluster.session import clean_earlier, ray_session
from grpo_rl.cluster.start import Cluster, decoder, start_roles
from grpo_rl.config.compose import Composed
from grpo_rl.config.schema import Config
from grpo_rl.data.dataset import PromptDataset, load_dataset
from grpo_rl.errors import ClusterError, ConfigError, GrpoRlError, Preempted, RewardError
from grpo_rl.models import builtin
from grpo_rl.models.load import load_config, load_tokenizer
from grpo_rl.plan import Plan
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runner import RewardRunner
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.plots import plot_curves
from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rollouts import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.sinks import Sinks
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.stopping import Stop
from grpo_rl.trainer.sync import Output, Roles, SyncTrainer


def run(composed: Composed, plan: Plan) -> int:
    """Train as the plan says; 0 when the last step is done.

    Raises this package's errors for whatever a user can mend, with step and phase. Data, rewards and the model's
    settings are read before any process starts.
    """
    config = composed.config
    # Model and tokenizer files are small beside what follows; the screen has bars of its own.
    disable_progress_bar()
    started = time.perf_counter()
    console = Console()
    with ExitStack() as stack:
        run_dir = RunDir.create(config.trainer.default_local_dir, config.trainer.experiment_name)
        stack.callback(run_dir.release)
        left = clean_earlier(run_dir.session_file)
        checkpoint = resume_folder(config, run_dir, console)
        earlier = run_dir.start_fresh() if checkpoint is None else None
        console.log_to(run_dir.logs / "console.log")
        stack.callback(console.close)
        run_dir.write_config(composed.yaml(), composed.overrides)
        console.info(plan.render())
        console.info(f"run folder: {run_dir.path}")
        if earlier is not None:
            console.info(f"what an earlier run of this name left is in {earlier}")
        if left:
            console.info(f"ended {len(left)} processes that an earlier run of this name had left")
        with reported(config, run_dir, stack) as (status, stop):
            _train(composed, plan, run_dir, console, checkpoint, stack, status, stop)
            console.info(final_report(run_dir, seconds=time.perf_counter() - started))
    return 0


@contextmanager
def reported(config: Config, run_dir: RunDir, stack: ExitStack) -> Iterator[tuple[Status, Stop]]:
    """status.json and the answer to signals. How it ends is in the status, and a failure's traceback in the logs."""
    status = Status(run_dir.status_file)
    stop = Stop(config.trainer.grace_s, lambda: status.end(Preempted("the grace period is over; the last commit is untouched")))
    stop.listen()
    stack.callback(stop.close)
    try:
        yield status, stop
    except BaseException as error:
        stop.finishing()
        if isinstance(error, GrpoRlError) and not isinstance(error, ConfigError):
            error.where = error.where or status.where()
            if isinstance(error, ClusterError | RewardError) and status.has_begun:
                error.advice = status.going_on()
        log = run_dir.logs / "error.log"
        if not isinstance(error, Preempted):
            log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            error.add_note(f"log: {log}")
        status.end(error)
        raise
    status.end()


def _train(
    composed: Composed,
    plan: Plan,
    run_dir: RunDir,
    console: Console,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
    status: Status,
    stop: Stop,
) -> None:
    config = composed.config
    model_path = config.actor_rollout_ref.model.path
    is_builtin = model_path.startswith(builtin.PREFIX)
    folder = warm_start.unstarted_folder(model_path) if is_builtin else model_path
    tokenizer = _tokenizer(config, folder)
    train_data, val_data = _data(config, tokenizer, console)
    reads_steps = needs_of(ADVANTAGES.get(config.algorithm.adv_estimator)).steps
    reward = RewardFunction.from_config(config.reward, decode=decoder(tokenizer) if reads_steps else None)
    reward.check_data_sources({*train_data.data_sources, *(val_data.data_sources if val_data else [])})
    total_steps = num_training_steps(config, len(train_data))

    with console.progress("starting Ray"):
        stack.enter_context(ray_session(config.ray_kwargs.ray_init, os.cpu_count() or 1, run_dir.session_file))
    stop.listen()  # Ray has taken SIGTERM for itself
    if is_builtin:
        folder = str(warm_start.ensure(model_path, tokenizer, plan.machine, run_dir.logs, console))
    cluster = Cluster(config, plan.machine, folder, run_dir.logs, console)
    stack.callback(cluster.shutdown)
    actor, reference, critic, rollout = start_roles(cluster, tokenizer, total_steps)
    status.update(workers=cluster.pids())
    rewarder = RewardRunner(reward, config.reward.num_workers, config.reward.timeout_s)
    stack.callback(rewarder.close)
    sinks = Sinks(run_dir, config.trainer, composed.resolved, console.warn)
    stack.callback(sinks.close)

    trainer = SyncTrainer(
        config,
        Roles(actor=actor, rollout=rollout, rewarder=rewarder, reference=reference, critic=critic),
        train_data,
        val_data,
        Output(run_dir, console, sinks, RolloutLog(run_dir), status, stop),
        total_steps=total_steps,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    trainer.fit()
    if config.trainer.export_at_end and not config.trainer.val_only:
        with console.progress("exporting the policy"):
            actor.export(run_dir.model)
    if trainer.step > 0:
        with console.progress("drawing the curves"):
            plot_curves(run_dir)


def resume_folder(config: Config, run_dir: RunDir, console: Console) -> Checkpoint | None:
    """The checkpoint to go on from, verified; None for a fresh start.

    Raises CheckpointError for a bad one that was asked for by name, and when all of a run's are bad.
    """
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return verify(Path(trainer.resume_from_path or ""))
    if trainer.resume_mode == "disable":
        return None
    return CheckpointStore(run_dir.checkpoints, warn=console.warn).latest(
        lambda reason: console.warn(f"CHECKPOINT PASSED OVER: {reason}")
    )


def num_training_steps(config: Config, num_rows: int) -> int:
    """`total_training_steps`, or what `total_epochs` of the data make."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * (num_rows // config.data.train_batch_size)


def _tokenizer(config: Config, folder: str) -> Any:
    model = config.actor_rollout_ref.model
    # The model's config first: a folder that cannot be used is refused before anything is read or started.
    load_config(folder, trust_remote_code=model.trust_remote_code, override=model.override_config)
    return load_tokenizer(model.tokenizer_path or folder, trust_remote_code=model.trust_remote_code)


def _data(config: Config, tokenizer: Any, console: Console) -> tuple[PromptDataset, PromptDataset | None]:
    data = config.data
    with console.progress("reading the data") as bar:
        train = load_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples)
        bar.advance(note=f"train: {train.report}")
        val = load_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples) if data.val_files else None
        if val is not None:
            bar.advance(note=f"train: {train.report}; validation: {val.report}")
    return train, val
