"""A run from its folder to its report: what earlier ones left, how it ends, and Ray beside the training's own start."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from grpo_rl.checkpoint.manifest import Checkpoint, verify
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster.processes.forks import modules_for
from grpo_rl.cluster.session.ray_session import clean_earlier, connecting
from grpo_rl.config.compose import Composed
from grpo_rl.config.redaction import scrub
from grpo_rl.config.schema.tree import Config
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ClusterError, ConfigError, FunctionError, GrpoRlError, Preempted, RewardError, headline
from grpo_rl.plan.decisions import Plan
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.stopping import Stop


def run(composed: Composed, plan: Plan) -> int:
    """Train as the plan says; 0 when the last step is done.

    Raises this package's errors for whatever a user can mend, with step and phase. Data, rewards and the model's
    settings are read while Ray starts, before there is any worker.
    """
    config = composed.config
    started = time.perf_counter()
    console = Console()
    with ExitStack() as stack:
        run_dir = RunDir.create(config.trainer.default_local_dir, config.trainer.experiment_name)
        stack.callback(run_dir.release)
        stack.callback(lambda: scrub(run_dir.logs.glob("*.log")))
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
            lost = ends_the_run(status, run_dir)
            # A GPU's driver does not survive a fork.
            copied = modules_for(config.actor_rollout_ref.model.path) if plan.machine.device == "cpu" else ()
            ray_init, num_cpus = config.ray_kwargs.ray_init, os.cpu_count() or 1
            session = connecting(ray_init, num_cpus, run_dir.session_file, lost, console.warn, copied)
            connection = stack.enter_context(session)
            # Ray takes seconds to start, in processes of its own, and so do these imports.
            from grpo_rl.cluster.wiring import train

            train(composed, plan, run_dir, console, checkpoint, stack, status, stop, connection)
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
    except BaseException as raised:
        # What a signal's handler raises in the middle of Ray's C++ part comes out of it as a SystemError.
        error = raised.__cause__ if isinstance(raised, SystemError) and isinstance(raised.__cause__, Preempted) else raised
        stop.finishing()
        if isinstance(error, GrpoRlError) and not isinstance(error, ConfigError):
            error.where = error.where or status.where()
            if isinstance(error, ClusterError | FunctionError | RewardError) and status.has_begun:
                error.advice = status.going_on()
        log = run_dir.logs / "error.log"
        if not isinstance(error, Preempted):
            log.write_text(redact(traceback.format_exc()), encoding="utf-8", errors="backslashreplace")
            error.add_note(f"log: {log}")
        status.end(error)
        if error is not raised:
            raise error from None
        raise
    status.end()


def ends_the_run(status: Status, run_dir: RunDir) -> Callable[[str], None]:
    """What is done, by another thread, when the cluster is lost: the main one may be anywhere in Ray and not come back."""

    def end(cause: str) -> None:
        error = ClusterError(cause)
        error.where, error.advice = status.where(), status.going_on()
        log = run_dir.logs / "error.log"
        with suppress(OSError):
            log.write_text(f"{headline(error)}\nRay's own logs go with its temporary folder.\n", encoding="utf-8")
        status.end(error)
        os.write(2, redact(f"\nerror: {headline(error)}\n  log: {log}\n").encode())
        # What it leaves behind is ended and removed by the process beside it (watch.py).
        os._exit(error.exit_code)

    return end


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
