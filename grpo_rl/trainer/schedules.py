"""All schedules by name, the values of `trainer.schedule`. Another one is a file, and a line here."""

from __future__ import annotations

import dataclasses
import types

from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry, guarded
from grpo_rl.trainer.iterate import IterateSchedule
from grpo_rl.trainer.offline import OfflineSchedule
from grpo_rl.trainer.overlap import AsyncSchedule, OneStepOffSchedule
from grpo_rl.trainer.reward_training import RewardModelSchedule
from grpo_rl.trainer.schedule import Roles, Schedule
from grpo_rl.trainer.session import Session
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.trainer.validation import ValidationOnly

SCHEDULES: Registry[type[Schedule]] = Registry("schedule")
SCHEDULES.register("sync")(SyncSchedule)
SCHEDULES.register("one_step_off")(OneStepOffSchedule)
SCHEDULES.register("async")(AsyncSchedule)
SCHEDULES.register("iterate")(IterateSchedule)
SCHEDULES.register("offline")(OfflineSchedule)
SCHEDULES.register("reward_model")(RewardModelSchedule)
METHODS = {
    "__init__": "Schedule(context: Context)",
    "step": "step() -> Metrics",
    "evaluate": "evaluate() -> Metrics",
    "ended": "ended() -> str | None",
    "state_dict": "state_dict() -> dict[str, Any], which JSON can hold",
    "load_state_dict": "load_state_dict(state: dict[str, Any]) -> None",
}
"""The methods of a schedule as a run calls them; `Schedule` in grpo_rl/trainer/schedule.py describes each."""


def schedule_of(config: Config) -> type[Schedule]:
    """Return the schedule of a run. Raises ConfigError for an unknown name, with the nearest ones, and for no schedule."""
    name = config.trainer.schedule
    schedule = SCHEDULES.get(name)
    if isinstance(schedule, types.FunctionType):
        schedule = _of_loop(schedule, name)
    if not isinstance(schedule, type):
        raise ConfigError(f"schedule {name!r} is neither a function of a session nor a class: see docs/schedules.md")
    if asked := [member for member in ("roles", *METHODS) if not hasattr(schedule, member)]:
        raise ConfigError(f"schedule {name!r} has no {', '.join(asked)}: see grpo_rl/trainer/schedule.py, class Schedule")
    known = {field.name for field in dataclasses.fields(Roles)} - {"recoveries", "kept"}
    if unknown := sorted(set(schedule.roles) - known):
        raise ConfigError(f"schedule {name!r} names the roles {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if config.trainer.val_only:
        return ValidationOnly
    return schedule if ":" not in name or issubclass(schedule, Session) else _guarded(schedule, name)


def _of_loop(function: types.FunctionType, name: str) -> type[Schedule]:
    """Return the schedule of a user's loop over `Session.steps()`, with its failures as FunctionErrors."""
    loop = guarded(function, f"loop {name}", "train(session: grpo_rl.trainer.session.Session)")
    return types.new_class(function.__name__, (Session,), exec_body=lambda body: body.update(loop=loop))


def _guarded(schedule: type[Schedule], name: str) -> type[Schedule]:
    """Return a user's schedule with the failures of its methods as FunctionErrors, which name its file and line."""
    methods = {
        method: guarded(getattr(schedule, method), f"schedule {name}, {method}", interface)
        for method, interface in METHODS.items()
    }
    return types.new_class(schedule.__name__, (schedule,), exec_body=lambda body: body.update(methods))
