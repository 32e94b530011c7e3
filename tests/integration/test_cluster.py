"""Worker groups on a real Ray: answers in order, and a clear cause for every kind of failure."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny_workers import make_worker

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_group import WorkerGroup, wait_all
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.errors import CheckpointError, ClusterError, ConfigError

# Far longer than any of these tests may take: a failure that is noticed only at this deadline times the test out.
NEVER_S = 3000.0
START_S = 120.0


@pytest.fixture(scope="module")
def ray_pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # Ray's processes have to find tiny_workers, too.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        stack.enter_context(ray_session(RayInitConfig(allow_insecure=True), 2))
        pool = Pool(1, 3, use_gpu=False, timeout_s=START_S)
        yield pool
        pool.release()


@pytest.fixture(scope="module")
def start(ray_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., WorkerGroup]]:
    """Starts a set of tiny workers. Processes cost seconds: tests share one if none of them ends it."""
    started: list[WorkerGroup] = []

    def make(num_ranks: int, role: str = "tiny", **environment: str) -> WorkerGroup:
        worker_group = WorkerGroup(
            role,
            [ray_pool.slots()[rank % 3] for rank in range(num_ranks)],
            log_dir=tmp_path_factory.mktemp("logs"),
            environment={"OMP_NUM_THREADS": "1"} | environment,
            call_timeout_s=NEVER_S,
        )
        started.append(worker_group)
        worker_group.where(START_S)
        build(worker_group, [(rank,) for rank in range(num_ranks)])
        return worker_group

    yield make
    for worker_group in started:
        worker_group.shutdown()


def build(worker_group: WorkerGroup, arguments: list[tuple[Any, ...]]) -> None:
    wait_all(worker_group.workers, worker_group.start_build(make_worker, arguments), START_S, f"start {worker_group.role}")


@pytest.fixture(scope="module")
def tiny(start: Callable[..., WorkerGroup]) -> WorkerGroup:
    return start(3, TINY_SETTING="seen")


# ---- answers ----------------------------------------------------------------------------------------


def test_every_rank_gets_its_own_arguments_and_answers_come_by_rank(tiny):
    # The last to be asked is the first to answer.
    assert tiny.call_each("add", [(1, 10, 0.4), (2, 20, 0.2), (3, 30, 0.0)]) == [(0, 11), (1, 22), (2, 33)]
    assert tiny.call("add", 5, 6) == [(0, 11), (1, 11), (2, 11)]
    with pytest.raises(ValueError, match="argument"):
        tiny.call_each("add", [(1, 2)])


def test_a_process_knows_its_environment_and_writes_all_it_prints_to_its_log(tiny):
    assert tiny.call("environment", "TINY_SETTING") == ["seen"] * 3
    tiny.call_each("write_below_python", [(f"from c {rank}\n",) for rank in range(3)])
    for rank, worker in enumerate(tiny.workers):
        text = worker.log_file.read_text()
        assert f"from c {rank}\n" in text and f"FROM C {rank}\n" in text


# ---- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ValueError", "Unpicklable"])
def test_an_error_names_worker_call_and_cause_and_its_traceback_is_in_the_log(tiny, kind):
    with pytest.raises(ClusterError) as caught:
        tiny.call("fail", kind, "the number is odd")
    message = str(caught.value)
    assert re.match(rf"tiny\.fail failed on tiny\d: {kind}: the number is odd\n  log: .*tiny\d\.log$", message)
    log = Path(message.rpartition("log: ")[2]).read_text()
    assert "Traceback" in log and "the number is odd" in log
    assert tiny.call("add", 1, 1) == [(0, 2), (1, 2), (2, 2)], "an error does not end the worker"


@pytest.mark.parametrize("error", [ConfigError, CheckpointError])
def test_a_users_mistake_found_in_a_worker_stays_what_it_is(tiny, error):
    with pytest.raises(error, match=r"^model\.path: there is no such folder$") as caught:
        tiny.call("fail", error.__name__, "model.path: there is no such folder")
    assert type(caught.value) is error


def test_a_worker_that_cannot_be_made_says_why(tiny):
    with pytest.raises(ClusterError, match="start tiny failed on tiny1: MemoryError: no room for rank 1"):
        build(tiny, [(0, False), (1, True), (2, False)])


def test_a_process_that_is_frozen_is_named_at_the_deadline(tiny):
    pid = tiny.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        calls = [worker.call("add", 1, 1) for worker in tiny.workers]
        wait_all(tiny.workers[1:], calls[1:], START_S, "tiny.add")
        with pytest.raises(ClusterError) as caught:
            wait_all(tiny.workers, calls, 1.0, "tiny.add")
    finally:
        os.kill(pid, signal.SIGCONT)
    message = str(caught.value)
    assert "tiny.add: no answer from tiny0 within 1 s" in message
    assert "tiny0.log" in message and "tiny1" not in message


@pytest.fixture(scope="module")
def doomed(start: Callable[..., WorkerGroup]) -> WorkerGroup:
    """One that lives and one for each way to die."""
    return start(1 + len(DEATHS), role="doomed")


DEATHS = ["exit", "sys.exit", "killed from outside"]


@pytest.mark.parametrize("how", DEATHS)
def test_a_process_that_ends_is_named_with_its_last_words_while_the_others_still_work(doomed, how):
    alive, dying = doomed.workers[0], doomed.workers[1 + DEATHS.index(how)]
    if how == "killed from outside":
        assert dying.pid is not None
        ref = dying.call("say_and_sleep", "what I said last", NEVER_S)
        deadline = time.monotonic() + START_S
        while "what I said last" not in dying.log_file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(dying.pid, signal.SIGKILL)
    else:
        ref = dying.call("die", how, "what I said last")
    with pytest.raises(ClusterError) as caught:
        wait_all([alive, dying], [alive.call("say_and_sleep", "", NEVER_S), ref], NEVER_S, "doomed.work")
    message = str(caught.value)
    assert f"doomed.work failed on {dying.name}: the process died" in message
    assert str(dying.log_file) in message and "| what I said last" in message
    assert alive.name not in message
    with pytest.raises(ClusterError, match=f"failed on {dying.name}: the process died"):
        wait_all([dying], [dying.call("add", 1, 1)], NEVER_S, "a later call")


def test_the_process_that_died_is_blamed_and_not_those_that_noticed(start, monkeypatch):
    monkeypatch.setattr("grpo_rl.cluster.processes.worker_group.BLAME_S", START_S)
    with pytest.raises(ClusterError, match="failed on tiny1: the process died"):
        start(2).call("die_or_notice")


def test_devices_that_the_cluster_does_not_have_are_refused_and_those_that_others_have_are_waited_for(ray_pool):
    with pytest.raises(
        ClusterError, match=r"the cluster is too small: it has 2 CPUs, 0 GPUs on 1 nodes, and .* 1 x 1000 processes"
    ):
        Pool(1, 1000, use_gpu=False, timeout_s=NEVER_S)
    with pytest.raises(ClusterError, match=r"the cluster is too small: .* and the run needs 2 x 1 GPUs; take a larger one"):
        Pool(2, 1, use_gpu=True, timeout_s=NEVER_S)
    # All but 0.03 of a core of two: it would fit if nobody else were there.
    with pytest.raises(ClusterError, match=r"the cluster did not give 1 x 199 processes within 1 s; it has .*CPU"):
        Pool(1, 199, use_gpu=False, timeout_s=1.0)


def test_slots_of_several_devices_are_neighbours_and_a_rest_is_left_over(ray_pool):
    assert [slot.bundles for slot in ray_pool.slots()] == [(0,), (1,), (2,)]
    assert [slot.bundles for slot in ray_pool.slots(2)] == [(0, 1)]
    assert [slot.bundles for slot in ray_pool.slots(1, processes_per_slot=2)] == [(0,), (1,), (2,), (0,), (1,), (2,)]
