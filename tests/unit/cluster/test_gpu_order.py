"""The order of calls if engines and ranks share GPUs or meet by NCCL, with worker groups that only note what they are asked.

No GPU is needed: the order is all that is looked at. What it does to memory was not measured here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compositions import compose

from grpo_rl.cluster import start_roles
from grpo_rl.cluster.processes.worker_group import WorkerDied, WorkerFailed
from grpo_rl.cluster.recovery import replicas as replicas_module
from grpo_rl.cluster.recovery.replicas import Replicas
from grpo_rl.cluster.roles import rollout_pool
from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool, Transfer
from grpo_rl.config.derived import Machine
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.rollout.weights import WeightBucket

ONE_GPU = Machine(num_gpus=1, num_cpus=8, device="cuda")
TWO_GPUS = Machine(num_gpus=2, num_cpus=8, device="cuda")
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = ["data.train_files=task:arithmetic?num_rows=1000", "actor_rollout_ref.model.path=builtin:arithmetic"]
BASE += ["data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", f"{R}.n=8", "trainer.total_epochs=1"]
BUCKET = WeightBucket(("w",), ("float32",), ((1,),))


class Log(list[str]):
    """The events, in their order."""

    def since(self, event: str) -> list[str]:
        """The events from the last of this name on."""
        return self[len(self) - 1 - self[::-1].index(event) :]


class FakeWorker:
    """A process that notes its calls. A call in `fails` raises instead of answering; one in `hangs` never answers."""

    def __init__(self, name: str, log: Log, answers: dict[str, Callable[..., Any]] | None = None) -> None:
        self.name, self.log, self.pid, self.verdict, self.slot = name, log, 1, None, None
        self.answers = answers or {}
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        build = SimpleNamespace(remote=lambda *arguments: self.call("build"))
        self.actor = SimpleNamespace(build=build)

    def call(self, method: str, *arguments: Any) -> Ref:
        self.log.append(f"{self.name} {method}")
        if method in self.hangs:
            return Ref(None, None, hangs=True)
        if method in self.fails:
            return Ref(None, self.fails.pop(method))
        return Ref(self.answers.get(method, lambda *_: None)(*arguments), None)

    def call_for_two(self, method: str) -> tuple[Ref, Ref]:
        ref = self.call(method)
        return Ref(ref.value is not None, ref.error, ref.hangs), ref

    def another(self, name: str, slot: Any) -> FakeWorker:
        return FakeWorker(name, self.log, self.answers)

    def kill(self, verdict: str | None = None) -> None:
        self.log.append(f"{self.name} killed")


class Ref:
    """What a call returns."""

    def __init__(self, value: Any, error: Exception | None, hangs: bool = False) -> None:
        self.value, self.error, self.hangs = value, error, hangs

    def get(self) -> Any:
        assert not self.hangs, "this call never ends: nothing may wait for it alone"
        if self.error is not None:
            raise self.error
        return self.value


class FakeSet:
    """A worker group over such processes."""

    call_timeout_s = 1.0

    def __init__(self, role: str, size: int, log: Log, answers: Callable[[int], dict[str, Any]] = lambda rank: {}) -> None:
        self.role, self.log, self.make = role, log, answers
        self.workers = [FakeWorker(f"{role}{rank}", log, answers(rank)) for rank in range(size)]

    def __len__(self) -> int:
        return len(self.workers)

    def where(self, timeout_s: float, workers: Sequence[Any] | None = None) -> list[tuple[str, int, int]]:
        if workers is not None:
            self.log.append(f"{self.role} located")
        return [("127.0.0.1", 1, 1000 + len(self.log))] * len(self)

    def start_build(self, factory: Any, arguments: Sequence[Any]) -> list[Ref]:
        return [worker.call("build") for worker in self.workers]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [ref.get() for ref in [worker.call(method, *arguments) for worker in self.workers]]


def settle(calls: Any, timeout_s: float, what: str, on_loss: Callable[[Any, WorkerFailed], None]) -> Any:
    answers = {}
    for worker, ref in calls.items():
        try:
            answers[worker] = ref.get()
        except WorkerFailed as error:
            on_loss(worker, error)
    return answers


def wait_all(workers: Any, refs: Any, timeout_s: float, what: str) -> list[Any]:
    found = [ref.get() for ref in refs if not ref.hangs]
    assert len(found) == len(refs), "a call that never ends, and none that failed"
    return found


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (start_roles, rollout_pool, replicas_module):
        for name, function in (("settle", settle), ("wait_all", wait_all), ("fetch", lambda worker, ref, what: ref.get())):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)


# ---- the start ------------------------------------------------------------------------------------------


class FakeCluster(start_roles.Cluster):
    """A cluster whose worker groups only note what is built in them; the waiting for it is noted, too."""

    def __init__(self, plan: Plan, log: Log) -> None:
        supervisor = SimpleNamespace(
            recoveries=SimpleNamespace(restarts=True, metrics=dict), watch=lambda *_: None, closed=False
        )
        console: Any = SimpleNamespace(progress=lambda *_, **__: contextlib.nullcontext(), warn=log.append)
        super().__init__(plan, "model", "", Path(), console)
        self.log, self.supervisor = log, supervisor  # type: ignore[assignment]

    def pool(self, name: str) -> Any:
        return None

    def start(self, name: Any, environment: Any = None) -> Any:
        role = self.plan.role(name)
        return None if role is None else FakeSet(name, role.num_workers, self.log)

    def ranks(self, worker_group: Any) -> list[Any]:
        return [None] * len(worker_group)

    def build(self, starts: Any, began: float | None = None) -> None:
        self.log.append(f"waited for {', '.join(worker_group.role for worker_group, _ in starts)}")


def start_events(machine: Machine, *words: str) -> Log:
    log = Log()
    plan = make_plan(compose([*BASE, *words]), machine)
    start_roles.start_roles(FakeCluster(plan, log), plan, None)
    return log


def test_on_one_gpu_the_engine_is_built_alone_and_sleeps_before_any_rank_touches_the_device() -> None:
    assert start_events(ONE_GPU) == [
        "rollout0 build",
        "waited for rollout",
        "rollout0 sleep",
        "actor0 build",
        "reference0 build",
        "waited for actor, reference",
    ]


@pytest.mark.parametrize(
    ("machine", "words"),
    [(CPU, ()), (TWO_GPUS, (f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1", "trainer.n_gpus_per_node=1"))],
    ids=["on a CPU", "apart"],
)
def test_engines_on_devices_of_their_own_come_up_beside_the_ranks(machine, words) -> None:
    events = [event for event in start_events(machine, *words) if "connect" not in event]
    waits = [event for event in events if event.startswith("waited")]
    assert waits == ["waited for rollout, actor, reference"] and not any("sleep" in event for event in events)


# ---- a step ---------------------------------------------------------------------------------------------


def supervisor() -> Any:
    """One that watches nothing and reports nothing."""
    done: Any = lambda *_: None  # noqa: E731
    notes = SimpleNamespace(**dict.fromkeys(("failed", "on_restart", "recovered", "count"), done))
    return SimpleNamespace(recoveries=notes, closed=False, start_timeout_s=1.0, watch=done, forget=done)


class Shared:
    """A pool of engines on the GPUs of ranks, which send two buckets of weights."""

    def __init__(self, size: int = 2, *, sleeps: bool = True, backend: Any = "object_store", shares: bool = True) -> None:
        self.log = Log()
        versions: list[int] = []
        buckets: list[WeightBucket | None] = []
        engine = {"start_weight_update": versions.append, "finish_weight_update": lambda keep: versions[-1]}
        rank = {"begin_weight_sync": lambda: buckets.extend([BUCKET, BUCKET, None]) or 4, "next_bucket": lambda: buckets.pop(0)}
        self.engines = FakeSet("rollout", size, self.log, lambda _: engine)
        self.ranks = FakeSet("actor", 1, self.log, lambda _: rank)
        self.actor: Any = SimpleNamespace(worker_group=self.ranks, version=0)
        self.replicas = Replicas(
            self.engines,  # type: ignore[arg-type]
            supervisor(),
            lambda worker: worker.call("build"),
            self.vacated if shares else None,
        )
        transfer = Transfer(backend, self.ranks, self.engines, 1, 1.0)  # type: ignore[arg-type]
        options = PoolOptions(4, sleeps=sleeps, step_timeout_s=1.0, starts_asleep=sleeps)
        self.pool = ReplicaPool(self.replicas, transfer, options)

    @contextlib.contextmanager
    def vacated(self) -> Iterator[None]:
        self.log.append("ranks leave")
        yield
        self.log.append("ranks come back")

    def lose(self, number: int) -> None:
        """End a replica, and wait until the thread that replaces it has done what it can."""
        before = set(threading.enumerate())
        self.replicas.lose(self.engines.workers[number], "killed")  # type: ignore[arg-type]
        for thread in set(threading.enumerate()) - before:
            thread.join(120)


def test_engines_that_started_asleep_get_the_first_weights_and_their_cache_last() -> None:
    shared = Shared(1)
    shared.pool.sync_weights(shared.actor)
    assert shared.log == [
        "rollout0 wake_up",
        "rollout0 start_weight_update",
        "actor0 begin_weight_sync",
        "actor0 next_bucket",
        "rollout0 load_bucket",
        "actor0 next_bucket",
        "rollout0 load_bucket",
        "actor0 next_bucket",
        "actor0 end_weight_sync",
        "rollout0 finish_weight_update",
        "rollout0 wake_up",
    ]
    shared.log.clear()
    shared.pool.sync_weights(shared.actor)
    assert shared.log == [], "it is awake and has these weights"


def test_a_lost_engine_is_built_at_the_next_transfer_on_a_device_without_ranks() -> None:
    shared = Shared(2)
    shared.pool.sync_weights(shared.actor)
    shared.log.clear()
    shared.lose(1)
    shared.pool._admit()
    assert shared.log == ["rollout1 killed", "rollout located"], "the others sample meanwhile, and ranks may work"
    shared.log.clear()
    shared.actor.version = 1
    shared.pool.sync_weights(shared.actor)
    assert shared.log[:4] == ["ranks leave", "rollout1 build", "rollout1 sleep", "ranks come back"]
    assert shared.log.count("rollout1 wake_up") == 2 and shared.log.count("rollout0 wake_up") == 0
    assert [worker.name for worker in shared.replicas.serving] == ["rollout0", "rollout1"]


def test_the_only_engine_is_built_again_at_once_unless_the_ranks_are_at_work() -> None:
    shared = Shared(1)
    shared.pool.sync_weights(shared.actor)
    shared.lose(0)
    shared.log.clear()
    with shared.pool.keep_weights():
        shared.pool._admit()
        assert shared.log == []
    shared.pool._admit()
    assert shared.log[:4] == ["ranks leave", "rollout0 build", "rollout0 sleep", "ranks come back"]
    assert [worker.name for worker in shared.replicas.serving] == ["rollout0"]


# ---- NCCL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_every_process_of_an_engine_has_a_rank_of_its_own_in_the_group(devices) -> None:
    log, places = Log(), []
    engines = FakeSet("rollout", 3, log, lambda rank: {"connect": places.append})
    actors = FakeSet("actor", 2, log, lambda rank: {"connect": places.append})
    transfer = Transfer("nccl", actors, engines, devices, 1.0)
    places.clear()
    transfer._connect(engines.workers)
    offsets = [place.rank_offset for place in places]
    assert offsets == [0, 1, 1 + devices, 1 + 2 * devices] and {place.world_size for place in places} == {1 + 3 * devices}


def test_a_group_is_made_anew_when_its_members_are_other_processes() -> None:
    apart = Shared(2, sleeps=False, backend="nccl", shares=False)
    assert apart.log == ["actor0 connect", "rollout0 connect", "rollout1 connect"]
    apart.actor.version = 1
    apart.pool.sync_weights(apart.actor)
    assert apart.log.count("actor0 connect") == 1, "nothing has changed"
    apart.lose(1)
    apart.log.clear()
    apart.actor.version = 2
    apart.pool.sync_weights(apart.actor)
    assert apart.log.count("actor0 connect") == 1 and len(apart.replicas.serving) == 2


@pytest.mark.parametrize("dies", ["an engine", "the sender"])
def test_a_broadcast_that_loses_a_member_ends_the_transfer_although_the_others_wait_in_it(dies) -> None:
    apart = Shared(2, sleeps=False, backend="nccl", shares=False)
    engine, sender = apart.engines.workers[1], apart.ranks.workers[0]
    # The others never answer: a collective without one of its members does not end.
    apart.engines.workers[0].hangs.add("load_bucket")
    if dies == "an engine":
        engine.fails["load_bucket"] = WorkerDied("killed", [])
    else:
        engine.hangs.add("load_bucket")

        def dying() -> Any:
            sender.fails["next_bucket"] = WorkerDied("killed", [])
            return BUCKET

        sender.answers["next_bucket"] = dying
    apart.actor.version = 1
    with pytest.raises(WorkerDied, match="killed"):
        apart.pool.sync_weights(apart.actor)
