"""The way from a configuration to its plan: all that can be refused is refused here, before any process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.config import effects
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed
from grpo_rl.config.derived import Machine, plays_episodes, settled
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.plan import machine as machines
from grpo_rl.registry import load_function

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan


def make_plan(composed: Composed, machine: Machine | None = None) -> Plan:
    """Return the plan of a run on `machine`: by default this one, or any other by its description.

    Raises ConfigError with everything that is wrong between the keys and with the functions that they name, and DataError
    for data files that cannot be used, as far as their first rows show it.
    """
    config = composed.config
    machine = machine or machines.probe_machine(config)
    if problems := refusals(config, machine):
        raise ConfigError(problems)
    given, config = config, settled(config)
    rows = _look_at_data(config)

    from grpo_rl.plan.decisions import decide
    from grpo_rl.plan.memory import memory_by_role
    from grpo_rl.plan.model_folder import model_size, policy_settings, with_shared_prompts
    from grpo_rl.plan.text import describe

    given = effects.as_read(with_shared_prompts(given, policy_settings(config)), machine)
    plan = decide(given, machine, num_train_rows=rows, resumes=_finds_checkpoint(config))
    if plan.passes.replays_routing and not plan.recomputes_old_logprobs:
        raise ConfigError(
            "actor_rollout_ref.actor.router_replay.mode=R2: there is no pass for old log-probs whose experts could be taken "
            "again: a step has one update, whose experts are the old ones, or old log-probs are the engine's; leave it out"
        )
    size = model_size(config.actor_rollout_ref.model.path)
    plan = dataclasses.replace(plan, model=size, memory=() if size is None else memory_by_role(plan, size))
    return dataclasses.replace(plan, text=describe(composed, plan))


def _finds_checkpoint(config: Config) -> bool:
    """Return whether the run goes on from a checkpoint: one that is named, or one in its folder."""
    from grpo_rl.checkpoint.store import CheckpointStore
    from grpo_rl.telemetry.rundir import RunDir

    trainer = config.trainer
    if trainer.resume_mode != "auto" or trainer.experiment_name is None:
        return trainer.resume_mode == "resume_path"
    folder = RunDir(Path(trainer.default_local_dir).expanduser() / trainer.experiment_name).checkpoints
    return bool(CheckpointStore(folder).steps())


Checks = Iterator[tuple[str, Callable[[], Any]]]
"""What the messages of a check begin with, and the check, which raises ConfigError."""


def refusals(config: Config, machine: Machine) -> list[str]:
    """Return everything that is wrong between the keys, and with the functions and the model that they name."""
    problems = [*check(config, machine), *machines.problems(config, machine)]
    run = settled(config)
    fitting = [] if problems else _failures(_fitting(run, machine))
    return list(dict.fromkeys([*problems, *_failures(_functions(run)), *fitting]))


def _failures(checks: Checks) -> Iterator[str]:
    for key, action in checks:
        try:
            action()
        except ConfigError as error:
            yield from (f"{key}{problem}" for problem in error.problems)


def _look_at_data(config: Config) -> int | None:
    """Return the number of training rows, where that is quickly found. Raises ConfigError and DataError for data that cannot be used."""
    from grpo_rl.plan import data_files

    # Data may be missing where only a plan is made, for another machine; what is there is looked at.
    away = config.trainer.machine is not None and data_files.missing(config)
    unusable = [] if away else data_files.unusable(config)
    rows = data_files.count_rows(config, with_files=not (unusable or away))
    if problems := data_files.too_few_rows(config, rows):
        raise ConfigError(problems)
    if unusable:
        raise DataError("\n  ".join(unusable))
    return rows


def _functions(config: Config) -> Checks:
    """Yield each look-up of a function with its options, of a task, and of what the judge and episodes need, by their names."""
    from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIX
    from grpo_rl.data.tasks.registry import task_rows
    from grpo_rl.envs.setup import EpisodeSetup
    from grpo_rl.models.builtin import PREFIX, get_builtin
    from grpo_rl.plan import algorithm
    from grpo_rl.rewards.combined import factors_of
    from grpo_rl.rewards.compose import RewardFunction, audit_of
    from grpo_rl.rollout.engines import ENGINES
    from grpo_rl.trainer.schedules import schedule_of

    yield from algorithm.checks(config)
    yield "actor_rollout_ref.rollout.name: ", lambda: ENGINES.get(config.actor_rollout_ref.rollout.name)
    yield "trainer.schedule: ", lambda: schedule_of(config)
    yield "", lambda: factors_of(config)
    if set(config.reward.audit) - {"judge"}:
        yield "", lambda: RewardFunction.from_config(audit_of(config.reward), key="audit")
    if config.reward.judge.base_url is not None:
        from grpo_rl.rewards.models.judge import Judge  # the HTTP client, only where an endpoint is asked

        yield "", lambda: Judge(config.reward.judge)
    if plays_episodes(config):
        yield "", lambda: EpisodeSetup.of(config)
    custom = config.data.custom_cls
    if custom.path is not None and custom.name is not None:
        yield "data.custom_cls.path: ", lambda: load_function(f"{custom.path}:{custom.name}", "data set class")
    for key in ("train_files", "val_files", "val_prompt_files") if custom.path is None else ():
        for name in getattr(config.data, key):
            if name.startswith(TASK_PREFIX):
                yield f"data.{key}={name}: ", partial(task_rows, name)
    path = config.actor_rollout_ref.model.path
    scorer = config.reward.reward_model.model_path or ""
    if path.startswith(PREFIX) and path != scorer:
        yield "actor_rollout_ref.model.path: ", lambda: get_builtin(path)
    if scorer.startswith(PREFIX):
        yield "reward.reward_model.model_path: ", lambda: get_builtin(scorer)


def _fitting(config: Config, machine: Machine) -> Checks:
    """Yield the checks of what the engine and the model's folder rule out, for keys that are sound by themselves."""
    from grpo_rl.plan import model_folder

    yield "actor_rollout_ref.rollout.tensor_model_parallel_size", lambda: _check_engine(config)
    yield "", lambda: model_folder.check_policy(config, machine)
    if config.actor_rollout_ref.model.lora_rank:
        yield "", lambda: model_folder.check_adapters(config)


def _check_engine(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        raise ConfigError(f"={rollout.tensor_model_parallel_size}: rollout.name=hf runs on one device; 1, or rollout.name=vllm")
