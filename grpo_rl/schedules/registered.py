"""All schedules by name, the values of `trainer.schedule`: functions that loop over the steps of a session."""

from __future__ import annotations

import dataclasses
import inspect

from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry, needs, needs_of
from grpo_rl.schedules import asynchronous, iterate, offline, one_step_off, reward_model, sync
from grpo_rl.trainer.parts import Roles
from grpo_rl.trainer.session import Schedule, Session

SCHEDULES: Registry[Schedule] = Registry("schedule", "train(session: grpo_rl.trainer.session.Session)")
SCHEDULES.register("sync")(sync.train)
SCHEDULES.register("one_step_off")(one_step_off.train)
SCHEDULES.register("async")(asynchronous.train)
SCHEDULES.register("iterate")(iterate.train)
SCHEDULES.register("offline")(offline.train)
SCHEDULES.register("reward_model")(reward_model.train)

SAMPLED = frozenset({"actor", "rollout", "rewarder", "reference", "teacher", "critic"})
"""The roles of a schedule that names none by `@needs`."""


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of a run. Raises ConfigError for an unknown name and for what is no loop."""
    name = config.trainer.schedule
    schedule = SCHEDULES.get(name)
    if inspect.isclass(inspect.unwrap(schedule)):
        raise ConfigError(f"schedule {name!r} is a class, and a schedule is a function of a session: see docs/schedules.md")
    SCHEDULES.check_call(name, "session")
    known = {field.name for field in dataclasses.fields(Roles)} - {"recoveries", "replays", "instruments", "audit"}
    if unknown := sorted(roles_of(schedule) - known):
        raise ConfigError(f"schedule {name!r} names the roles {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return validate if config.trainer.val_only else schedule


def roles_of(schedule: Schedule) -> frozenset[str]:
    """Return the roles that a schedule can drive, as `@needs` on its function says: they are started if the configuration needs them."""
    return needs_of(schedule) or SAMPLED


@needs("rollout", "rewarder")
def validate(session: Session) -> None:
    """Validate and do no step (`trainer.val_only=true`)."""
    list(session.steps())
