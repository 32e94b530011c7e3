"""The end of a run, and what it prints and writes then."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_trials import save_with

from grpo_rl import machine_memory
from grpo_rl import main as command
from grpo_rl.checkpoint.manifest import Checkpoint, verify
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster import run_session
from grpo_rl.cluster.processes.worker_group import WorkerDied
from grpo_rl.cluster.recovery.supervisor import Recoveries
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError, Preempted, headline
from grpo_rl.plan.first_look import of_memory
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.text import describe
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.console import Console

PLAN = make_plan(compose(["recipe=arithmetic/grpo", "trainer.device=cpu"]), Machine(0, 2, "cpu"))


def raised_in_c(cause: BaseException) -> SystemError:
    """Return the error that C code makes of an exception which was raised beside it and which it does not handle."""
    error = SystemError("<cyfunction CoreWorker.wait> returned a result with an exception set")
    error.__cause__ = cause
    return error


def end_of(run_dir: RunDir, error: BaseException) -> tuple[BaseException, str]:
    """Return the error that leaves a run in which this one is raised, and the state in the run's status."""
    with ExitStack() as stack, pytest.raises(BaseException) as found:
        stack.callback(run_dir.release)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(run_session, "connecting", lambda *_, **__: nullcontext())
        with run_session.run_session(PLAN, run_dir, Console()):
            raise error
    return found.value, json.loads(run_dir.status_file.read_text())["state"]


def test_a_signal_that_comes_while_ray_waits_ends_the_run_as_any_other_signal_does(tmp_path: Path) -> None:
    plain, state = end_of(RunDir.create(str(tmp_path), "plain"), Preempted("by SIGTERM"))
    assert isinstance(plain, Preempted)
    wrapped, same = end_of(RunDir.create(str(tmp_path), "wrapped"), raised_in_c(Preempted("by SIGTERM")))
    assert (type(wrapped), str(wrapped), same) == (Preempted, str(plain), state)


def test_any_other_error_in_c_stays_what_it_is(tmp_path: Path) -> None:
    error, state = end_of(RunDir.create(str(tmp_path), "other"), raised_in_c(ValueError("bad")))
    assert isinstance(error, SystemError)
    assert state == "failed"


FORK = multiprocessing.get_context("fork")


def lose_the_cluster(folder: Path, when: str) -> None:
    """Be a process that notices the loss of its cluster, before the end of its run or after it."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
    run_session.TAKEN_DOWN_S = 0.2
    run_dir = RunDir.create(str(folder), "lost")
    status = Status(run_dir.status_file)
    if when == "ended":
        status.end(Preempted("by SIGTERM: step 1 of 2 is saved"))
    run_session.ends_the_run(PLAN, status, run_dir, Console())("the Ray cluster is lost")


@pytest.mark.parametrize(("when", "code", "state"), [("going on", 6, "failed"), ("ended", 75, "preempted")])
def test_a_cluster_that_is_lost_ends_a_run_and_changes_nothing_about_one_that_has_ended(
    when: str, code: int, state: str, tmp_path: Path
) -> None:
    process = FORK.Process(target=lose_the_cluster, args=(tmp_path, when))
    process.start()
    process.join(120)
    said = (tmp_path / "stderr").read_text()
    assert process.exitcode == code, said
    assert json.loads((tmp_path / "lost" / "status.json").read_text())["state"] == state
    assert ("the Ray cluster is lost" in said) == (code == 6)


@pytest.mark.parametrize(("gigabytes", "is_named"), [(1.5, True), (2.5, False)])
@pytest.mark.parametrize(
    ("groups", "limit", "used"),
    [
        ("0::/\n", "memory.max", "memory.current"),
        ("1:cpu:/\n0::/job/task\n", "job/memory.max", "job/memory.current"),
        ("4:memory:/docker/1a2b\n0::/\n", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_container_that_is_too_small_is_named_before_a_start_and_as_the_cause_of_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, limit: str, used: str, gigabytes: float, is_named: bool
) -> None:
    meminfo, own, tree = tmp_path / "meminfo", tmp_path / "own", tmp_path / "tree"
    meminfo.write_text("MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n")
    own.write_text(groups)
    for name, text in {limit: gigabytes * 1e9, used: 1e8, str(Path(used).parent / "memory.stat"): "inactive_file 200"}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"{text}\n")
    for name, path in {"MEMINFO": meminfo, "CGROUP": tree, "OWN_GROUPS": own}.items():
        monkeypatch.setattr(machine_memory, name, path)
    warnings = list(of_memory(PLAN))
    assert [f"the container, which has {gigabytes / 1.073741824:.1f} GiB" in one for one in warnings] == [True] * is_named
    assert "this container has" in describe(compose(["recipe=arithmetic/grpo"]), PLAN)
    error, _ = end_of(RunDir.create(str(tmp_path), "short"), ClusterError("the Ray cluster is lost"))
    assert ("the likely cause is memory: the container has 1.4 GiB, and the run needs about" in headline(error)) == is_named


def going_on(run_dir: RunDir, checkpoint: Checkpoint | None = None, step: int = 3, **trainer: Any) -> tuple[Any, list[str]]:
    """Return a run in this step, without Ray, and the lines that it prints."""
    lines: list[str] = []
    status = Status(run_dir.status_file)
    status.update(step=step)
    session: Any = SimpleNamespace(run_dir=run_dir, console=Console(), status=status)
    nothing: Any = None
    recoveries = Recoveries(TrainerConfig(**trainer), lines.append)
    return command.Course(nothing, nothing, session, nothing, checkpoint, recoveries=recoveries), lines


def goes_back_to(run_dir: RunDir, checkpoint: Checkpoint | None = None) -> Checkpoint | None:
    course, _ = going_on(run_dir, checkpoint)
    command._go_back(course, LOST)
    return course.checkpoint


def saved(folder: Path, step: int) -> Checkpoint:
    return verify(save_with(CheckpointStore(folder), step, lambda _: None, {"step": step}))


LOST = WorkerDied("actor.update failed on actor1: the process died", [SimpleNamespace(name="actor1")])  # type: ignore[list-item]


def test_a_run_that_loses_a_rank_goes_back_to_the_newest_state_that_it_has(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path), "lost")
    first, lines = going_on(run_dir)
    command._go_back(first, LOST)
    assert first.checkpoint is None and first.lost[0] == "actor"
    assert lines[-1].endswith("and the run goes back to the first step")
    began = saved(tmp_path / "another run", 2)
    assert goes_back_to(run_dir, began) == began, "where resume_from_path points"
    for folder, step in ((run_dir.recovery, 3), (run_dir.checkpoints, 4), (run_dir.recovery, 5)):
        newest = goes_back_to(run_dir, began)
        saved(folder, step)
        found = goes_back_to(run_dir, began)
        assert found is not None and found.step == step and found != newest
    (run_dir.recovery / "step_5" / "trainer.json").write_text("{}")
    found = goes_back_to(run_dir, began)
    assert found is not None and found.step == 4, "a damaged one is passed over"


def test_a_lost_rank_ends_the_run_where_it_may_not_go_back_or_no_step_has_begun(tmp_path: Path) -> None:
    run_dir = RunDir.create(str(tmp_path), "lost")
    with pytest.raises(WorkerDied):
        command._go_back(going_on(run_dir, recover="off")[0], LOST)
    with pytest.raises(ClusterError, match=r"actor failed and is not started again: restarts so far: 0"):
        command._go_back(going_on(run_dir, max_restarts=0)[0], LOST)
    with pytest.raises(WorkerDied):
        command._go_back(going_on(run_dir, step=0)[0], LOST)
