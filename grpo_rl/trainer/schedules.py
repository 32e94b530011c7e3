"""All schedules by name, the values of `trainer.schedule`. Another one is a file, and a line here."""

from __future__ import annotations

import dataclasses

from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry
from grpo_rl.trainer.offline import OfflineSchedule
from grpo_rl.trainer.schedule import Roles, Schedule
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.trainer.validation import ValidationOnly

SCHEDULES: Registry[type[Schedule]] = Registry("schedule")
SCHEDULES.register("sync")(SyncSchedule)
SCHEDULES.register("offline")(OfflineSchedule)


def schedule_of(config: Config) -> type[Schedule]:
    """Return the schedule of a run. Raises ConfigError for an unknown name, with the nearest ones, and for no schedule."""
    name = config.trainer.schedule
    schedule = SCHEDULES.get(name)
    asked = [
        member
        for member in ("roles", "step", "evaluate", "ended", "state_dict", "load_state_dict")
        if not hasattr(schedule, member)
    ]
    if asked:
        raise ConfigError(f"schedule {name!r} has no {', '.join(asked)}: see grpo_rl/trainer/schedule.py, class Schedule")
    known = {field.name for field in dataclasses.fields(Roles)} - {"recoveries"}
    if unknown := sorted(set(schedule.roles) - known):
        raise ConfigError(f"schedule {name!r} names the roles {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return ValidationOnly if config.trainer.val_only else schedule
