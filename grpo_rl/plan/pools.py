"""How many of a named machine's GPUs sample and how many train, under each schedule: the best division of each, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_rl.config import derived
from grpo_rl.plan.cost import StepTime, step_time
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.memory import fit_of
from grpo_rl.plan.model_folder import ModelSize
from grpo_rl.plan.proposal import changed, refuses

R = "actor_rollout_ref.rollout"
MOST_DIVISIONS = 16
STALENESS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Division:
    """One schedule on the GPUs of a machine, divided in the way that makes its step shortest."""

    schedule: str
    changes: dict[str, Any]
    """The keys that make a run of it."""
    sampling: int
    training: int
    shared: bool
    time: StepTime

    def line(self) -> str:
        """Return it as a row of `HEAD`'s table."""
        total, split = self.time.total, "shared" if self.shared else f"{self.sampling}:{self.training}"
        busy = [min(1.0, seconds / total) for seconds in (self.time.phases["sampling"], self.time.training)]
        shares = "".join(f"{share:>10.0%}" for share in (busy[0], self.time.filled, busy[1]))
        return f"{self.schedule:<18}{split:>13}{total:>10,.1f}{shares}  {self.time.limit}"


HEAD = f"{'schedule':<18}{'sample:train':>13}{'s a step':>10}{'sampling':>10}{'slots':>10}{'training':>10}  limit"


def divisions(plan: Plan, size: ModelSize) -> list[Division]:
    """Return each schedule with its best division of the machine's GPUs that fits; empty where nothing is to be divided."""
    gpus = plan.machine.num_gpus * plan.machine.nodes
    if not plan.machine.name or gpus < 2 or step_time(plan, size) is None:
        return []
    found = [_best(plan, size, "sync", "sync", {}, [_shared(plan)])]
    splits = list(_splits(plan))
    found.append(_best(plan, size, "sync, apart", "sync", {}, splits))
    found.append(_best(plan, size, "one_step_off", derived.ONE_STEP_OFF, {}, splits))
    for staleness in sorted({*STALENESS, plan.config.trainer.asynchronous.max_staleness} - {0}):
        key = {"trainer.asynchronous.max_staleness": staleness}
        found.append(_best(plan, size, f"async, {staleness} old", derived.ASYNC, key, splits))
    return [division for division in found if division is not None]


def _shared(plan: Plan) -> dict[str, Any]:
    machine = plan.machine
    return {"trainer.nnodes": machine.nodes, "trainer.n_gpus_per_node": machine.num_gpus, f"{R}.nnodes": 0}


def _splits(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield keys that give a part of the machines, or of one machine's GPUs, to the engines: at most so many divisions."""
    machine = plan.machine
    parts = machine.nodes if machine.nodes > 1 else machine.num_gpus
    for share in sorted({round(parts * place / MOST_DIVISIONS) for place in range(1, MOST_DIVISIONS)} - {0, parts}):
        if machine.nodes > 1:
            own = {"trainer.nnodes": parts - share, f"{R}.nnodes": share, "trainer.n_gpus_per_node": machine.num_gpus}
            yield own | {f"{R}.n_gpus_per_node": machine.num_gpus}
        else:
            yield {"trainer.n_gpus_per_node": parts - share, f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": share}


def _best(
    plan: Plan, size: ModelSize, name: str, schedule: str, keys: dict[str, Any], splits: list[dict[str, Any]]
) -> Division | None:
    """Return the division with the shortest step among those that the rules allow and that fit; None where there is none."""
    best = None
    for split in splits:
        changes = {"trainer.schedule": schedule, **keys, **split}
        config = changed(plan.config, changes)
        if refuses(plan, config, plan.machine):
            continue
        tried = decide(config, plan.machine)
        fit = fit_of(tried, size)
        time = step_time(tried, size) if fit is not None and fit.fits else None
        if time is None or (best is not None and best.time.total <= time.total):
            continue
        engines = tried.num_replicas * (tried.engine.tensor_parallel_size if tried.engine is not None else 1)
        best = Division(name, changes, engines, tried.world_size, tried.colocated, time)
    return best
