"""What a run has while it lasts, and a command that samples: Ray, the files that say how it goes, answers to signals."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from grpo_rl.cluster.session.ray_session import Connection, connecting
from grpo_rl.config.secrets import redact
from grpo_rl.errors import (
    ClusterError,
    ConfigError,
    FunctionError,
    GrpoRlError,
    Preempted,
    RewardError,
    StoppedByAlarm,
    headline,
)
from grpo_rl.frozen import frozen
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.first_look import lack_of_memory
from grpo_rl.telemetry.page.beside_run import FAILED_S, PageBeside
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.standard_streams import write_now
from grpo_rl.trainer.stopping import Stop

if TYPE_CHECKING:  # these import torch, which loads beside Ray
    from grpo_rl.cluster.inputs import Inputs
    from grpo_rl.cluster.recovery.supervisor import Recoveries
    from grpo_rl.cluster.start_roles import Cluster
    from grpo_rl.rewards.runtime.runner import RewardRunner
    from grpo_rl.trainer.parts import Roles

RAY_JOB, STOP_WAIT = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's variables: one that every job has, and the seconds (3 if absent) from `ray job stop` to SIGKILL."""
TAKEN_DOWN_S = 20.0
"""A run that has ended may take so long to leave a cluster that is gone."""

_first: RunSession | None = None
"""The session that this process opened first and has not left. Those beside it share its connection, as Ray knows one
cluster for a process, and its answer to signals, as what must not be left half-way may belong to any of them.
"""


@frozen
class RunSession:
    plan: Plan
    run_dir: RunDir
    console: Console
    status: Status
    stop: Stop
    connection: Connection

    def phase(self, name: str) -> None:
        """Note that a phase begins that belongs to no training step; `gen` may be left by a signal, `save` may not."""
        self.status.update(phase=name)
        self.stop.phase(name)

    def model_folder(self, path: str) -> str:
        """Wait for Ray, and return the folder of a model: an embedded one may have to be trained first."""
        from grpo_rl.cluster.warm_start import ready_folder

        with nullcontext() if self.connection.attempt.done() else self.console.progress("waiting for Ray"):
            self.connection.connected()
        if not gc.isenabled():  # by the command that trains, whose imports are done now
            gc.enable()
            # A million objects of modules, which live as long as the process: a garbage collection need not visit them.
            gc.freeze()
        return ready_folder(path, self.plan.machine, self.run_dir.logs, self.console)

    def start(
        self, plan: Plan, inputs: Inputs, stack: ExitStack, recoveries: Recoveries | None = None
    ) -> tuple[Cluster, Roles, RewardRunner | None]:
        from grpo_rl.cluster.processes.placement import raylets
        from grpo_rl.cluster.recovery.supervisor import StuckReport
        from grpo_rl.cluster.start_roles import Cluster, start_roles

        policy = self.model_folder(plan.config.model.path)
        scorer = self.model_folder(plan.config.reward.reward_model.model_path or "")
        cluster = Cluster(plan, policy, scorer, self.run_dir.logs, self.console, recoveries)
        stack.callback(cluster.shutdown)
        cluster.on_engines = self.status.update
        functions = inputs.functions(plan, self.run_dir.logs)
        roles, scorers = start_roles(cluster, plan, inputs.tokenizer, inputs.episodes, functions)
        self.status.update(workers=cluster.pids(), tokenizer=cluster.model_path)
        self.connection.watch_nodes(raylets(cluster.fixed_places()))
        stuck = StuckReport(plan.config.trainer, self.status, cluster.all_groups, self.console.warn)
        stack.callback(stuck.close)
        cluster.supervisor.before_kill = stuck.report
        pool, rules = cluster.functions, None
        if plan.reward.scores:
            roles.rewarder, rules = inputs.start_rewards(
                scorers, lambda name: None if pool is None else partial(pool.scorer, name)
            )
            stack.callback(roles.rewarder.close)
        return cluster, roles, rules


@contextmanager
def run_session(plan: Plan, run_dir: RunDir, console: Console, page: PageBeside | None = None) -> Iterator[RunSession]:
    """Start Ray for a plan, or use that of a session which is open in this process, write status.json and answer signals.

    At the end the status says how it ended, before anything is taken down, and the logs have a failure's traceback.
    Raises ConfigError for a session beside one with other settings of Ray.
    """
    global _first
    first, ray_init = _first, plan.config.ray_kwargs.ray_init
    if first is not None and first.plan.config.ray_kwargs.ray_init != ray_init:
        raise ConfigError(
            "ray_kwargs.ray_init: another session is open in this process with other values, and both use one Ray"
        )
    status = Status(run_dir.status_file)
    over = Preempted("the grace period is over; the last commit is untouched")
    wait_s, grace_s = os.environ.get(STOP_WAIT, "3"), plan.config.trainer.grace_s
    if first is None:
        stop = Stop(grace_s, lambda: None, console.notice, console.give_back_terminal)
        stop.listen()
    else:
        stop = first.stop
    if RAY_JOB in os.environ and float(wait_s) < grace_s:
        console.warn(
            f"`ray job stop` kills this run after {wait_s} s, and trainer.grace_s={grace_s:g} are to save it: submit it with "
            f"""--runtime-env-json '{{"env_vars": {{"{STOP_WAIT}": "90"}}}}'"""
        )
    with ExitStack() as stack:
        if first is None:
            stack.callback(stop.close)
        stack.enter_context(stop.calling_at_deadline(lambda: status.end(over)))
        try:
            if first is None:
                lost, log = ends_the_run(plan, status, run_dir, console), run_dir.logs / "ray.log"
                cores = os.cpu_count() or 1
                starting = connecting(ray_init, cores, run_dir.session_file, lost, log, alone=plan.computes_alone)
                _first = RunSession(plan, run_dir, console, status, stop, stack.enter_context(starting))
                yield _first
            else:
                yield RunSession(plan, run_dir, console, status, stop, first.connection)
        except BaseException as raised:
            error = behind_ray(raised)
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
            # The command prints it as well, if the terminal is still there.
            console.log(f"{'stopped' if stopped else 'error'}: {headline(error)}")
            status.end(error)
            if page is not None:
                page.last(outlives=True)
                # In a container the process ends with the run. A batch system that has asked the run to stop is not kept waiting.
                page.wait(0.0 if isinstance(error, Preempted) else FAILED_S)
            if error is not raised:
                raise error from None
            raise
        finally:
            if first is None:
                _first = None
        status.end()


def ends_the_run(plan: Plan, status: Status, run_dir: RunDir, console: Console) -> Callable[[str], None]:
    """Return what ends a run whose cluster is lost from another thread: the main one may be stuck in Ray."""

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
        # What it leaves behind is ended and removed by the launcher.
        os._exit(error.exit_code)

    return end


def behind_ray(raised: BaseException) -> BaseException:
    """Return the Preempted that a signal's handler raised in the middle of Ray's C++ part; any other error as
    it is.

    It comes out as the cause of a SystemError, once more so if another signal follows.
    """
    error: BaseException | None = raised
    while isinstance(error, SystemError):
        error = error.__cause__
    return error if isinstance(error, Preempted) else raised


def _with_memory(plan: Plan, advice: str) -> str:
    return "; ".join(words for words in (lack_of_memory(plan), advice) if words)
