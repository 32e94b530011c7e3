"""The command `python -m grpo_rl.main recipe=NAME key=value ...`, from its words to the report of the run."""

from __future__ import annotations

import errno
import gc
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING

import grpo_rl
from grpo_rl import faults
from grpo_rl.cluster.session import launcher
from grpo_rl.config.secrets import redact, scrub
from grpo_rl.errors import CheckpointError, ConfigError, GrpoRlError, Preempted, StoppedByAlarm, details, exit_code_of, headline
from grpo_rl.telemetry.terminal.standard_streams import make_lasting

if TYPE_CHECKING:  # what takes time to load is imported where it is used, so that a misspelt key is refused at once
    from grpo_rl.checkpoint.manifest import Checkpoint
    from grpo_rl.cluster.inputs import Inputs
    from grpo_rl.cluster.processes.worker_group import WorkerFailed
    from grpo_rl.cluster.recovery.supervisor import Recoveries
    from grpo_rl.cluster.run_session import RunSession
    from grpo_rl.config.compose import Composed
    from grpo_rl.plan.decisions import Plan
    from grpo_rl.telemetry.page.beside_run import PageBeside
    from grpo_rl.telemetry.terminal.console import Console
    from grpo_rl.trainer.run import RunLoop
    from grpo_rl.types import Metrics

MOST_CHANGES = 20
REFUSAL = "this configuration cannot be run"


error_handlers: list[Callable[[BaseException], object]] = []
"""Called with the error that ends the process: `grpo_rl.train` has one in the process of its run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code (`errors.EXIT_CODES`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        make_lasting()
        launcher.launches = True
    # Imports make a million objects that stay; a run enables collection afterwards (`RunSession.model_folder`).
    gc.disable()
    try:
        return exit_code_after(lambda: _run(words))
    finally:
        gc.enable()
        # What stays frozen makes libraries complain at the interpreter's end (nanobind).
        gc.unfreeze()


def exit_code_after(work: Callable[[], int], refusal: str = REFUSAL) -> int:
    """A failure is printed on stderr, after `refusal` if it is a list of a configuration's problems."""
    try:
        return work()
    except (Exception, KeyboardInterrupt, Preempted) as error:
        # No name of ours is that long, and no file of ours is closed to this user: it was given.
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EACCES) and error.filename:
            name = str(error.filename)
            error = ConfigError(f"{name if len(name) < 256 else name[:60] + '...'}: {error.strerror}")
        _explain(error, refusal)
        for handle in error_handlers:
            handle(error)
        return exit_code_of(error)


def _run(words: list[str]) -> int:
    if "--version" in words:
        print(f"grpo_rl {grpo_rl.__version__}")
        return 0
    with ExitStack() as loading:
        loading.enter_context(_ended_by_an_interrupt())
        from grpo_rl.config.compose import launch, print_asked, read

        command = read(words)
        if command.options.multirun:
            if command.shown:
                raise ConfigError(
                    f"{command.shown[0]}: a sweep has several configurations; leave out --multirun, and give one value for each key"
                )
            from grpo_rl.sweep.points import run_sweep

            faults.arm()
            loading.close()
            return run_sweep(words)
        if command.shown:
            return print_asked(command)
        return launch(command, partial(_start, loading))


def _start(loading: ExitStack, composed: Composed) -> int:
    """`loading` ends before the training begins."""
    from grpo_rl.telemetry.rundir import refuse_taken

    faults.arm()
    trainer = composed.config.trainer
    if not trainer.dry_run:
        refuse_taken(trainer.default_local_dir, trainer.experiment_name)
        if (message := done_already(composed, trainer.total_training_steps)) is not None:
            print(message)
            return 0

    def work() -> int:
        from grpo_rl.plan.make import make_plan

        plan = make_plan(composed)
        loading.close()
        if trainer.dry_run:
            print(redact(plan.render()))
            look_at_inputs(plan)
            return 0
        if (message := done_already(composed, plan.sizes.total_steps)) is not None:
            print(message)
            return 0
        return run(composed, plan)

    if trainer.dry_run:
        return work()
    return launcher.launched(lambda: exit_code_after(work))


def done_already(composed: Composed, total: int | None) -> str | None:
    """Return the message if the run of this name has trained all of its `total` steps."""
    from grpo_rl.telemetry.finished import nothing_left

    trainer = composed.config.trainer
    if total is None or trainer.experiment_name is None or trainer.val_only or trainer.resume_mode != "auto":
        return None
    run = Path(trainer.default_local_dir).expanduser() / trainer.experiment_name
    return nothing_left(run, total, composed.resolved, exports=trainer.export_at_end)


@contextmanager
def _ended_by_an_interrupt() -> Iterator[None]:
    """End at once on Ctrl-C: importing a library in C turns KeyboardInterrupt into another error."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(exit_code_of(KeyboardInterrupt()))

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _explain(error: BaseException, refusal: str) -> None:
    """Print the error on stderr; an unexpected one's traceback goes to a file."""
    if isinstance(error, ConfigError):
        count = "1 problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
        lines = [f"{refusal}, {count}:", *(f"  • {problem}" for problem in error.problems)]
    elif isinstance(error, KeyboardInterrupt):
        lines = ["\ninterrupted"]
    elif isinstance(error, GrpoRlError | Preempted):
        kind = "stopped" if isinstance(error, Preempted | StoppedByAlarm) else "error"
        detail_lines = [*details(error), *getattr(error, "__notes__", [])]
        lines = [f"{kind}: {headline(error)}", *(f"  {line}" for line in detail_lines)]
    elif isinstance(error, ModuleNotFoundError):
        lines = [f"error: {headline(error)}"]
    else:
        notes = (note for note in getattr(error, "__notes__", []) if note.startswith("log: "))
        if (place := next(notes, "").removeprefix("log: ")) == "":  # there was no run yet with logs that have it
            descriptor, place = tempfile.mkstemp(prefix="grpo_rl-", suffix=".traceback.txt")
            with os.fdopen(descriptor, "w") as file:
                file.write(redact(traceback.format_exc()))
        error.add_note(f"the traceback is in {place}")
        lines = [f"unexpected {headline(error)}", f"  the traceback is in {place}"]
    print(redact("\n".join(lines)), file=sys.stderr)


@dataclass(slots=True)
class Course:
    composed: Composed
    plan: Plan
    session: RunSession
    page: PageBeside
    checkpoint: Checkpoint | None
    code: str = ""
    rows: Path | None = None
    """The collected rows that are trained on, if there are any."""
    collected: Metrics = field(default_factory=dict)
    recoveries: Recoveries = None  # type: ignore[assignment]
    lost: tuple[str, float] | None = None
    """The role that was lost last and the time of that, until the training goes on."""


def run(composed: Composed, plan: Plan) -> int:
    with opened(composed, plan) as course:
        train(course)
    return 0


@contextmanager
def opened(composed: Composed, plan: Plan) -> Iterator[Course]:
    """Lock the run's folder, start Ray, and yield the run; print its report at the end."""
    from grpo_rl.checkpoint.manifest import verify
    from grpo_rl.cluster.run_session import run_session
    from grpo_rl.cluster.session.ray_session import clean_earlier
    from grpo_rl.plan import cost
    from grpo_rl.plan.first_look import of_memory
    from grpo_rl.telemetry.finished import refuse_rewind, set_aside_after
    from grpo_rl.telemetry.metrics.metrics_file import read_metrics
    from grpo_rl.telemetry.page.beside_run import PageBeside
    from grpo_rl.telemetry.report import final_report
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.telemetry.terminal.console import Console

    if plan.lacks:
        raise ConfigError(plan.lacks)
    trainer = composed.config.trainer
    started = time.perf_counter()
    console = Console()
    with ExitStack() as stack:
        run_dir = RunDir.create(trainer.default_local_dir, trainer.experiment_name)
        stack.callback(run_dir.release)
        stack.callback(lambda: scrub(run_dir.logs.glob("*.log")))
        leftovers = clean_earlier(run_dir.session_file)
        stack.callback(shutil.rmtree, run_dir.recovery, ignore_errors=True)
        shutil.rmtree(run_dir.recovery, ignore_errors=True)
        checkpoint = None
        if trainer.resume_mode == "resume_path":
            checkpoint = verify(Path(trainer.resume_from_path or ""))
        elif trainer.resume_mode == "auto":
            checkpoint = _newest_in(run_dir.checkpoints, console)
        # What was sampled before a checkpoint was there is not sampled again if it is of the same data and weights.
        collected = () if trainer.resume_mode == "disable" else (run_dir.collected,)
        if checkpoint is not None and trainer.resume_mode == "auto":
            refuse_rewind(run_dir.path, checkpoint.step)
        if checkpoint is not None and checkpoint.folder.resolve().parent == run_dir.checkpoints.resolve():
            earlier = set_aside_after(run_dir, checkpoint.step) if trainer.resume_mode == "resume_path" else None
        else:
            earlier = run_dir.start_fresh(keep=collected)
        console.log_to(run_dir.logs / "console.log")
        stack.callback(console.close)
        changes = [] if checkpoint is None else run_dir.changes(composed.yaml(), checkpoint.folder.parents[1])
        run_dir.write_config(composed.yaml(), composed.overrides)
        run_dir.plan_file.write_text(redact(plan.render()) + "\n", encoding="utf-8", errors="backslashreplace")
        console.info(plan.render())
        console.info(f"run folder: {run_dir.path}")
        if earlier is not None:
            console.info(f"what an earlier run of this name left, and this one does not go on from, is in {earlier}")
        if leftovers:
            console.info(f"ended {len(leftovers)} processes that an earlier run of this name had left")
        if changes:
            rest = [f"... and {len(changes) - MOST_CHANGES} more"] if len(changes) > MOST_CHANGES else []
            lines = ["this run goes on with another configuration than at its last start:", *changes[:MOST_CHANGES], *rest]
            console.warn("\n  ".join(lines))
        for warning in of_memory(plan):
            console.warn(warning)
        page = PageBeside(run_dir.path, trainer.page_freq, console.warn)
        with run_session(plan, run_dir, console, page) as session:
            yield Course(composed, plan, session, page, checkpoint)
            with suppress(OSError, ArithmeticError, ValueError):  # the run is done, whatever room there is for this
                cost.learn(plan, Path(trainer.default_local_dir).expanduser(), read_metrics(run_dir.metrics_file))
            console.info(final_report(run_dir, seconds=time.perf_counter() - started))


def train(course: Course) -> None:
    """Train; if a rank is lost, end all workers, and go on in new ones from the newest checkpoint."""
    prepare(course)
    from grpo_rl.cluster.processes.worker_group import WorkerFailed

    while True:
        try:
            with ExitStack() as attempt:
                training = begin(course, attempt)
                with leaving_results(course, training):
                    training.fit()
            return
        except WorkerFailed as error:
            _go_back(course, error)
        gc.collect()  # what is left of the roles refers to objects in Ray's store


def prepare(course: Course) -> None:
    from grpo_rl.config.relative_paths import function_files
    from grpo_rl.run_files import model_digests
    from grpo_rl.source_code import digest, sources
    from grpo_rl.telemetry.finished import contents_of

    plan, session, settings = course.plan, course.session, course.composed.resolved
    course.code = digest(sources(function_files(settings)) | model_digests(settings))
    session.status.update(code=course.code, **contents_of(settings))

    with session.console.progress("starting Ray, and loading libraries"):
        from transformers.utils.logging import disable_progress_bar

        from grpo_rl.cluster.collection import collect
        from grpo_rl.cluster.recovery.supervisor import Recoveries
        from grpo_rl.cluster.start_roles import start_roles  # noqa: F401 loaded beside Ray, for `RunSession.start`
    disable_progress_bar()

    if plan.collection is not None:
        course.rows, course.collected = collect(plan, session)
    course.recoveries = Recoveries(plan.config.trainer, session.console.warn, session.status.count_restart)


def _go_back(course: Course, error: WorkerFailed) -> None:
    """Go on from the newest checkpoint. Raises `error` if it ends the run, ClusterError after too many."""
    recoveries = course.recoveries
    if not recoveries.restarts or not (course.session.status.has_begun or course.lost):
        raise error  # workers that fail at their first start will fail again
    role = error.workers[0].name.rstrip("0123456789") if error.workers else "a worker"
    course.checkpoint = newest_checkpoint(course)
    place = "the first step" if course.checkpoint is None else f"step {course.checkpoint.step}, the newest checkpoint"
    recoveries.failed(role, str(error), f"all workers are started again, and the run goes back to {place}")
    course.lost = course.lost or (role, time.monotonic())
    for worker in error.workers:
        recoveries.on_restart(worker.name, None)


def newest_checkpoint(course: Course) -> Checkpoint | None:
    """Return the newest of the states where this run began, its checkpoints, and that kept for recovery."""
    run_dir, candidates = course.session.run_dir, [course.checkpoint]
    for folder in (run_dir.checkpoints, run_dir.recovery):
        with suppress(CheckpointError):  # none of several is good, each of which was warned of
            candidates.append(_newest_in(folder, course.session.console))
    return max(
        (checkpoint for checkpoint in candidates if checkpoint is not None),
        key=lambda checkpoint: checkpoint.step,
        default=None,
    )


def _newest_in(folder: Path, console: Console) -> Checkpoint | None:
    """Raises CheckpointError if there are checkpoints and none is good."""
    from grpo_rl.checkpoint.store import CheckpointStore

    return CheckpointStore(folder, warn=console.warn).latest(lambda reason: console.warn(f"CHECKPOINT PASSED OVER: {reason}"))


def begin(course: Course, stack: ExitStack) -> RunLoop:
    from grpo_rl.checkpoint.exporting import try_export
    from grpo_rl.cluster.inputs import read_inputs
    from grpo_rl.cluster.run_instruments import RunInstruments
    from grpo_rl.cluster.warm_start import unstarted_folder
    from grpo_rl.plan.cost import expected
    from grpo_rl.plan.first_look import RewardTrial, some_rows
    from grpo_rl.rewards.audit import Audit
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.metrics.timeline import Timeline
    from grpo_rl.telemetry.rollout_log import RolloutLog
    from grpo_rl.trainer.parts import Output
    from grpo_rl.trainer.run import RunLoop
    from grpo_rl.trainer.session import Session

    session, config = course.session, course.plan.config
    run_dir, console = session.run_dir, session.console
    inputs = read_inputs(course.plan, run_dir, console, collected=course.rows)
    if config.trainer.export_at_end and course.plan.trains:
        try_export(unstarted_folder(config.model.path), config.model, inputs.tokenizer)
    is_new = course.checkpoint is None and course.lost is None
    if is_new:
        for warning in _warnings(inputs, run_dir.path.parent):
            console.warn(warning)
    teachers = (
        (name, teacher if teacher.model_path is None else replace(teacher, model_path=session.model_folder(teacher.model_path)))
        for name, teacher in inputs.plan.teachers
    )
    plan = replace(inputs.plan, teachers=tuple(teachers))
    cluster, roles, rules = session.start(plan, inputs, stack, course.recoveries)
    if config.reward.audit and inputs.train_data is not None:
        roles.audit = Audit(config.reward, inputs.audit, stack, None if cluster.functions is None else cluster.functions.scorer)
    roles.instruments = RunInstruments(plan, cluster.worker_groups, run_dir.path, console.info, expected(plan))
    if is_new and rules is not None:
        text, is_trouble = RewardTrial(some_rows(inputs.train_data or inputs.val_data), rules, inputs.tokenizer).verdict()
        if text:
            (console.warn if is_trouble else console.info)(text)
    sinks = Sinks(run_dir, config.trainer, course.composed.resolved, console.warn, console.info)
    stack.callback(sinks.close)
    timeline = Timeline(run_dir.timeline_file, console.warn)
    stack.callback(timeline.write)
    course.recoveries.timeline = timeline
    if rules is not None:
        rules.on_busy = partial(timeline.ended, "reward", "scoring")
    rollouts = RolloutLog(
        run_dir,
        token_groups=config.trainer.log_token_groups,
        written=sinks.written,
        warn=console.warn,
    )
    stack.callback(rollouts.close)  # before the cluster ends, whose store has the tokens

    verbs = Session(
        config,
        roles,
        Output(run_dir, console, sinks, rollouts, session.status, session.stop, timeline, course.page),
        train_data=inputs.train_data,
        val_data=inputs.val_data,
        rows=inputs.rows,
        total_steps=plan.sizes.total_steps or 0,
        objective=plan.objective,
        collected=course.collected,
        code=course.code,
    )
    training = RunLoop(verbs, plan.schedule)
    if course.checkpoint is not None:
        training.resume(course.checkpoint)
    elif course.lost is not None:
        training.start_over()
    if course.lost is not None:
        (role, since), course.lost = course.lost, None
        course.recoveries.recovered(role, role, time.monotonic() - since, f"the run goes on after step {training.step}")
    return training


@contextmanager
def leaving_results(course: Course, training: RunLoop) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        # A model takes a third of a checkpoint's room, and a policy that is trained is not given up for that.
        if training.is_trained:
            export(course, training)
        raise
    leave_results(course, training)


def look_at_inputs(plan: Plan) -> None:
    """Read inputs as a start would, unless it would fetch something, or happen on another machine."""
    path = Path(plan.config.model.path)
    if plan.machine.name or plan.collection is not None or not path.is_dir():
        return
    from grpo_rl.cluster.inputs import read_inputs
    from grpo_rl.plan.first_look import of_memory
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.telemetry.terminal.console import Console

    with tempfile.TemporaryDirectory() as folder:
        inputs = read_inputs(plan, RunDir(Path(folder)), Console(io.StringIO()))
    for warning in (*of_memory(plan), *_warnings(inputs, Path(plan.config.trainer.default_local_dir).expanduser().absolute())):
        print(redact(warning))


def _warnings(inputs: Inputs, runs: Path) -> Iterator[str]:
    from grpo_rl.plan.first_look import of_plan, of_prompts, some_rows

    prompts = [prompt for prompt, _ in some_rows(inputs.train_data or inputs.val_data)]
    yield from of_plan(inputs.plan, runs)
    yield from of_prompts(inputs.plan, prompts, inputs.tokenizer)


def export(course: Course, training: RunLoop) -> None:
    """Raises CheckpointError, which names the checkpoint of what was trained if the disk has room for it."""
    run_dir, console, roles = course.session.run_dir, course.session.console, training.roles
    trainer = course.composed.config.trainer
    if not (trainer.export_at_end and course.plan.trains):
        return
    try:
        if roles.actor is not None:
            with console.progress("exporting the policy"):
                roles.actor.export(run_dir.model, trainer.export_dtype)
        if roles.reward_model is not None:
            with console.progress("exporting the reward model"):
                roles.reward_model.export(run_dir.reward_model, trainer.export_dtype)
    except CheckpointError as error:
        try:
            training.keep()
        except CheckpointError as refused:
            error.add_note(str(refused))
        else:
            error.advice = (
                f"what was trained is in {run_dir.checkpoints}/step_{training.step}: "
                f"grpo-rl export {run_dir.path}@{training.step} --output FOLDER writes it elsewhere"
            )
        raise


def leave_results(course: Course, training: RunLoop) -> None:
    from grpo_rl.telemetry.page.beside_run import LAST_S
    from grpo_rl.telemetry.report import plot_curves

    run_dir, console = course.session.run_dir, course.session.console
    export(course, training)
    training.timeline.write()
    # In a process of its own, beside the picture.
    course.page.last("done")
    if training.step > 0:
        with console.progress("drawing the curves"):
            plot_curves(run_dir)
    course.page.wait(LAST_S)


if __name__ == "__main__":
    sys.exit(main())
