"""The course of a run from its folder to its report: what earlier ones left, Ray, workers, training, end."""

from __future__ import annotations

import gc
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.checkpoint.manifest import Checkpoint, verify
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster.processes.forks import modules_for
from grpo_rl.cluster.session.ray_session import Connection, clean_earlier, connecting
from grpo_rl.config.compose import Composed
from grpo_rl.config.relative_paths import function_files
from grpo_rl.config.schema.tree import Config
from grpo_rl.config.secrets import redact, scrub
from grpo_rl.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    FunctionError,
    GrpoRlError,
    Preempted,
    RewardError,
    StoppedByAlarm,
    headline,
)
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.first_look import lack_of_memory, of_memory
from grpo_rl.source_code import digest, sources
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.telemetry.page.beside_run import FAILED_S, LAST_S, PageBeside
from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.standard_streams import write_now
from grpo_rl.trainer.stopping import Stop

if TYPE_CHECKING:  # these import torch, which loads beside Ray
    from grpo_rl.cluster.inputs import Inputs
    from grpo_rl.cluster.processes.worker_group import WorkerFailed
    from grpo_rl.cluster.recovery.supervisor import Recoveries
    from grpo_rl.plan.first_look import RewardTrial
    from grpo_rl.trainer.schedule import Roles
    from grpo_rl.types import Metrics

TAKEN_DOWN_S = 20.0
"""Seconds that a run which has ended may take to leave a cluster that is gone."""
MOST_CHANGES = 20
"""Changed keys that a resumed run shows; its folder has both configurations."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run that has its folder, and is about to start."""

    composed: Composed
    plan: Plan
    run_dir: RunDir
    console: Console
    checkpoint: Checkpoint | None
    """The state from which the run goes on; None for a run from the start."""
    status: Status
    stop: Stop
    page: PageBeside


def run(composed: Composed, plan: Plan) -> int:
    """Train as the plan says, and return 0 when the last step is done.

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
        stack.callback(shutil.rmtree, run_dir.recovery, ignore_errors=True)
        shutil.rmtree(run_dir.recovery, ignore_errors=True)
        checkpoint = resume_folder(config, run_dir, console)
        # What was sampled or computed before a checkpoint was there is not done again where it is of the same data and weights.
        kept = () if config.trainer.resume_mode == "disable" else (run_dir.collected, run_dir.reference_logprobs)
        earlier = run_dir.start_fresh(keep=kept) if checkpoint is None else None
        console.log_to(run_dir.logs / "console.log")
        stack.callback(console.close)
        changes = [] if checkpoint is None else run_dir.changes(composed.yaml(), checkpoint.folder.parents[1])
        run_dir.write_config(composed.yaml(), composed.overrides)
        run_dir.plan_file.write_text(redact(plan.render()) + "\n", encoding="utf-8", errors="backslashreplace")
        console.info(plan.render())
        console.info(f"run folder: {run_dir.path}")
        if earlier is not None:
            console.info(f"what an earlier run of this name left is in {earlier}")
        if left:
            console.info(f"ended {len(left)} processes that an earlier run of this name had left")
        if changes:
            console.warn(_changed(changes))
        for sight in of_memory(plan):
            if sight.advice:
                console.warn(sight.as_line())
        page = PageBeside(run_dir.path, config.trainer.page_freq, console.warn)
        with reported(plan, run_dir, stack, console, page) as (status, stop):
            train(Launch(composed, plan, run_dir, console, checkpoint, status, stop, page), stack)
            console.info(final_report(run_dir, seconds=time.perf_counter() - started))
    return 0


def connecting_for(
    plan: Plan, run_dir: RunDir, warn: Callable[[str], None], lost: Callable[[str], None]
) -> AbstractContextManager[Connection]:
    """Return the connection to Ray, whose workers are copies of one process where they can be; `lost` is called with a cause."""
    # A GPU's driver does not survive a fork.
    copied = modules_for(plan.config.actor_rollout_ref.model.path) if plan.machine.device == "cpu" else ()
    ray_init, num_cpus, log = plan.config.ray_kwargs.ray_init, os.cpu_count() or 1, run_dir.logs / "ray.log"
    return connecting(ray_init, num_cpus, run_dir.session_file, lost, warn, copied, log, alone=plan.computes_alone)


def train(launch: Launch, stack: ExitStack) -> None:
    """Start Ray and the workers, and train from the checkpoint on, or from the start. `stack` ends what starts here.

    When a rank is lost, all workers are ended, and the training goes on in new ones from the newest checkpoint.
    """
    plan, run_dir, console = launch.plan, launch.run_dir, launch.console
    lost = ends_the_run(plan, launch.status, run_dir, console)
    connection = stack.enter_context(connecting_for(plan, run_dir, console.warn, lost))
    code = digest(sources(function_files(launch.composed.resolved)))
    launch.status.update(code=code)

    # Ray takes seconds to start, in processes of its own; these imports take seconds as well, beside it.
    with console.progress("starting Ray, and loading libraries"):
        from transformers.utils.logging import disable_progress_bar

        from grpo_rl.cluster.collection import collect
        from grpo_rl.cluster.processes.worker_group import WorkerFailed
        from grpo_rl.cluster.recovery.supervisor import Recoveries
        from grpo_rl.cluster.start_roles import Cluster, start_roles  # noqa: F401 loaded beside Ray, for `_train_from`
    # Model and tokenizer files are small beside what follows; the screen has bars of its own.
    disable_progress_bar()

    collected: Metrics = {}
    rows = None
    if plan.collection is not None:
        folders = partial(model_folders, launch, connection)
        rows, collected = collect(plan, run_dir, console, launch.status, phase_of(launch.status, launch.stop), folders)
    session = Session(
        connection, code, rows, collected, Recoveries(plan.config.trainer, console.warn, launch.status.count_restart)
    )
    while True:
        try:
            with ExitStack() as attempt:
                _train_from(launch, session, attempt)
            return
        except WorkerFailed as error:
            launch = _gone_back(launch, session, error)
        gc.collect()  # what is left of the roles refers to objects in Ray's store


@dataclass(slots=True)
class Session:
    """What stays when the workers of a run are started again."""

    connection: Connection
    code: str
    """The digest of the sources."""
    rows: Path | None
    """The collected rows that are trained on, where there are any."""
    collected: Metrics
    recoveries: Recoveries
    lost: tuple[str, float] | None = None
    """The role that was lost last and the time of that, until the training goes on."""


def _gone_back(launch: Launch, session: Session, error: WorkerFailed) -> Launch:
    """Return the launch that goes on from the newest checkpoint. Raises `error` where it is to end the run, ClusterError at
    the end of the budget for restarts."""
    if not session.recoveries.restarts or not (launch.status.has_begun or session.lost):
        raise error  # workers that fail at their first start will fail again
    role = error.workers[0].name.rstrip("0123456789") if error.workers else "a worker"
    checkpoint = newest_checkpoint(launch)
    place = "the first step" if checkpoint is None else f"step {checkpoint.step}, the newest checkpoint"
    session.recoveries.failed(role, str(error), f"all workers are started again, and the run goes back to {place}")
    session.lost = session.lost or (role, time.monotonic())
    for worker in error.workers:
        session.recoveries.on_restart(worker.name, None)
    return replace(launch, checkpoint=checkpoint)


def newest_checkpoint(launch: Launch) -> Checkpoint | None:
    """Return the newest state of this run: where it began, one of its checkpoints, or the one that it keeps for itself."""
    found = [launch.checkpoint]
    for folder in (launch.run_dir.checkpoints, launch.run_dir.recovery):
        with suppress(CheckpointError):  # none of several is good, each of which was warned of
            found.append(_newest_in(folder, launch.console))
    return max((one for one in found if one is not None), key=lambda one: one.step, default=None)


def _train_from(launch: Launch, session: Session, stack: ExitStack) -> None:
    """Start the workers, and train from the checkpoint on, or from the start. `stack` ends what starts here."""
    from grpo_rl.cluster.inputs import read_inputs
    from grpo_rl.cluster.processes.placement import raylets
    from grpo_rl.cluster.run_instruments import RunInstruments
    from grpo_rl.cluster.start_roles import Cluster, start_roles
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog
    from grpo_rl.trainer.run import RunLoop
    from grpo_rl.trainer.schedule import Context, Output

    config, run_dir, console, connection = launch.plan.config, launch.run_dir, launch.console, session.connection
    inputs = read_inputs(launch.plan, run_dir, console, stack, collected=session.rows)
    plan = inputs.plan
    trial = first_look(launch, inputs) if launch.checkpoint is None and session.lost is None else None
    folders = model_folders(launch, connection)
    plan = with_teachers(launch, plan)
    cluster = Cluster(plan, *folders, run_dir.logs, console, session.recoveries)
    stack.callback(cluster.shutdown)
    roles, scorers = start_roles(cluster, plan, inputs.tokenizer, inputs.episodes)
    roles.instruments = RunInstruments(plan, cluster.worker_groups, run_dir.path, console.info)
    for sight in trial.sights() if trial is not None else ():
        (console.warn if sight.advice else console.info)(sight.as_line())
    launch.status.update(workers=cluster.pids(), tokenizer=cluster.model_path)
    connection.watch_nodes(raylets(cluster.places()))
    if plan.reward.scores:
        roles.rewarder = inputs.models.beside(inputs.rules, scorers)
        stack.callback(roles.rewarder.close)
    sinks = Sinks(run_dir, config.trainer, launch.composed.resolved, console.warn, console.info)
    stack.callback(sinks.close)
    timeline = stack.enter_context(closing(Timeline(run_dir.timeline_file, console.warn)))
    if inputs.rules is not None:
        inputs.rules.on_busy = partial(timeline.ended, "reward", "scoring")
    rollouts = RolloutLog(
        run_dir,
        config.trainer.rollout_data_format,
        beside=True,
        token_groups=config.trainer.log_token_groups,
        written=sinks.written,
    )
    stack.callback(rollouts.close)  # before the cluster ends, whose store has the tokens

    context = Context(
        config,
        roles,
        inputs.train_data,
        inputs.val_data,
        Output(run_dir, console, sinks, rollouts, launch.status, launch.stop, timeline, launch.page),
        plan.sizes.total_steps or 0,
        objective=plan.objective,
        rows=inputs.rows,
        collected=session.collected,
        code=session.code,
    )
    training = RunLoop(context, plan.schedule)
    if launch.checkpoint is not None:
        training.resume(launch.checkpoint)
    elif session.lost is not None:
        training.start_over()
    if session.lost is not None:
        (role, since), session.lost = session.lost, None
        session.recoveries.recovered(role, role, time.monotonic() - since, f"the run goes on after step {training.step}")
    training.fit()
    leave_results(launch, roles, timeline, training.step)


def first_look(launch: Launch, inputs: Inputs) -> RewardTrial | None:
    """Warn of what would make the run vain, and begin to try the reward, which is scored while the workers start."""
    from grpo_rl.plan.first_look import RewardTrial, of_plan, of_prompts, some_prompts

    runs = launch.run_dir.path.parent
    prompts = some_prompts(inputs.train_data or inputs.val_data)
    for sight in (*of_plan(inputs.plan, runs), *of_prompts(inputs.plan, prompts, inputs.tokenizer)):
        if sight.advice:
            launch.console.warn(sight.as_line())
    return None if inputs.rules is None else RewardTrial(prompts, inputs.rules, inputs.tokenizer)


def newest_best(run_dir: RunDir) -> Path | None:
    """Return the policy with the lowest validation loss, which a run with early stopping keeps; None without one."""
    found = sorted(run_dir.best.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return found[-1] if found else None


def model_folders(launch: Launch, connection: Connection) -> tuple[str, str]:
    """Wait for Ray, and return the folders of the policy and of the reward model: embedded ones may have to be trained first."""
    from grpo_rl.cluster.warm_start import ready_folder

    await_ray(connection, launch.console)
    gc.enable()  # everything is imported
    # A million objects of modules, which live as long as the process: a garbage collection during a step need not visit them.
    if not gc.get_freeze_count():  # later there is more than modules: what workers that were lost have left
        gc.freeze()
    config = launch.plan.config
    policy, scorer = config.actor_rollout_ref.model.path, config.reward.reward_model.model_path or ""
    ready = partial(ready_folder, machine=launch.plan.machine, log_dir=launch.run_dir.logs, console=launch.console)
    return ready(policy), ready(scorer)


def with_teachers(launch: Launch, plan: Plan) -> Plan:
    """Return the plan with the folders of the teachers' models, which are made first where they are embedded ones."""
    from grpo_rl.cluster.warm_start import ready_folder

    ready = partial(ready_folder, machine=plan.machine, log_dir=launch.run_dir.logs, console=launch.console)
    teachers = (
        (name, one if one.model_path is None else replace(one, model_path=ready(one.model_path))) for name, one in plan.teachers
    )
    return replace(plan, teachers=tuple(teachers))


def phase_of(status: Status, stop: Stop) -> Callable[[str], None]:
    """Return what is called as a phase begins that belongs to no training step."""

    def begins(name: str) -> None:
        status.update(phase=name)
        stop.phase(name)

    return begins


def leave_results(launch: Launch, roles: Roles, timeline: Timeline, step: int) -> None:
    """Export the models of a training that is done, write its page, and draw its curves."""
    from grpo_rl.telemetry.report import plot_curves

    run_dir, console = launch.run_dir, launch.console
    exports = launch.composed.config.trainer.export_at_end and launch.plan.trains
    if exports and roles.actor is not None:
        with console.progress("exporting the policy"):
            best = newest_best(run_dir)
            if best is None:
                roles.actor.export(run_dir.model)
            else:
                shutil.rmtree(run_dir.model, ignore_errors=True)
                best.rename(run_dir.model)
                shutil.rmtree(run_dir.best)
        if best is not None:
            console.info(f"the exported policy is that of {best.name.replace('_', ' ')}, whose validation loss is the lowest")
    if exports and roles.reward_model is not None:
        with console.progress("exporting the reward model"):
            roles.reward_model.export(run_dir.reward_model)
    timeline.close()
    # In a process of its own, beside the picture.
    launch.page.last("done")
    if step > 0:
        with console.progress("drawing the curves"):
            plot_curves(run_dir)
    launch.page.wait(LAST_S)


def await_ray(connection: Connection, console: Console) -> None:
    """Wait for Ray, which has been starting beside everything else. Nothing is printed where it is there already."""
    if connection.has_tried:
        connection.connected()
        return
    with console.progress("waiting for Ray"):
        connection.connected()


@contextmanager
def reported(
    plan: Plan, run_dir: RunDir, stack: ExitStack, console: Console, page: PageBeside | None = None
) -> Iterator[tuple[Status, Stop]]:
    """Write status.json and answer signals. At the end the status says how, and the logs have a failure's traceback."""
    status = Status(run_dir.status_file)
    over = Preempted("the grace period is over; the last commit is untouched")
    stop = Stop(plan.config.trainer.grace_s, lambda: status.end(over), console.notice, console.give_back_terminal)
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
            if isinstance(error, ClusterError):
                error.advice = _with_memory(plan, error.advice)
        log = run_dir.logs / "error.log"
        stopped = isinstance(error, Preempted | StoppedByAlarm)
        if not stopped:
            with suppress(OSError):
                log.write_text(redact(traceback.format_exc()), encoding="utf-8", errors="backslashreplace")
            error.add_note(f"log: {log}")
        # The command prints it as well, where the terminal is still there.
        console.log(f"{'stopped' if stopped else 'error'}: {headline(error)}")
        status.end(error)
        if page is not None:
            page.last(outlives=True)
            # In a container the process ends with the run. A batch system that has asked the run to stop is not kept waiting.
            page.wait(0.0 if isinstance(error, Preempted) else FAILED_S)
        if error is not raised:
            raise error from None
        raise
    status.end()


def ends_the_run(plan: Plan, status: Status, run_dir: RunDir, console: Console) -> Callable[[str], None]:
    """Return what to do, in another thread, when the cluster is lost: the main one may be in Ray and not come back."""

    def end(cause: str) -> None:
        if status.ended_with is not None:
            # The run is over and is being taken down, which the loss may hold up but no longer changes.
            time.sleep(TAKEN_DOWN_S)
            os._exit(status.ended_with)
        error = ClusterError(cause)
        error.where, error.advice = status.where(), _with_memory(plan, status.going_on())
        log = run_dir.logs / "error.log"
        with suppress(OSError):
            log.write_text(f"{headline(error)}\nRay's own logs go with its temporary folder.\n", encoding="utf-8")
        status.end(error)
        console.give_back_terminal()
        write_now(redact(f"\nerror: {headline(error)}\n  log: {log}\n"))
        # What it leaves behind is ended and removed by the process beside it (run_watcher.py).
        os._exit(error.exit_code)

    return end


def _with_memory(plan: Plan, advice: str) -> str:
    """Return the advice on a cluster that failed, with lack of memory as its cause where that is likely."""
    return "; ".join(words for words in (lack_of_memory(plan), advice) if words)


def resume_folder(config: Config, run_dir: RunDir, console: Console) -> Checkpoint | None:
    """Return the checkpoint to go on from, verified; None for a fresh start.

    Raises CheckpointError for a bad one that was asked for by name, and when all of a run's are bad.
    """
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return verify(Path(trainer.resume_from_path or ""))
    if trainer.resume_mode == "disable":
        return None
    return _newest_in(run_dir.checkpoints, console)


def _newest_in(folder: Path, console: Console) -> Checkpoint | None:
    """Return the newest checkpoint in this folder that is good. Raises CheckpointError when none of several is."""
    return CheckpointStore(folder, warn=console.warn).latest(lambda reason: console.warn(f"CHECKPOINT PASSED OVER: {reason}"))


def _changed(changes: list[str]) -> str:
    shown = changes[:MOST_CHANGES]
    more = [f"... and {len(changes) - MOST_CHANGES} more"] if len(changes) > MOST_CHANGES else []
    return "\n  ".join(["this run goes on with another configuration than at its last start:", *shown, *more])
