"""From a configuration to its plan: all that can be refused is refused before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.config import effects
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed
from grpo_rl.config.derived import Machine, settled
from grpo_rl.config.schema.fields import replaced
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.sources.locate import HUB_PREFIX, check_data_files, data_files, open_source
from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIX
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.data.training_rows.conversations import conversation
from grpo_rl.data.training_rows.pairs import labelled_texts, pair_texts
from grpo_rl.data.training_rows.rated_steps import rated_row
from grpo_rl.envs.setup import EpisodeSetup
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.models.builtin import PREFIX, get_builtin
from grpo_rl.plan import algorithm, model_folder
from grpo_rl.plan import machine as machines
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.memory import memory_by_role
from grpo_rl.plan.proposal import chosen_by_memory
from grpo_rl.plan.text import describe
from grpo_rl.registry import load_function
from grpo_rl.rewards.combined import factors_of
from grpo_rl.rewards.compose import RewardFunction, audit_of
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.schedules.registered import schedule_of
from grpo_rl.telemetry.rundir import RunDir

READ_WHOLE = 16 * 2**20  # bytes up to which a data file is opened whole
INDEXED_WHOLE = 256 * 2**20  # bytes up to which a .jsonl file's lines are counted


def make_plan(composed: Composed, machine: Machine | None = None) -> Plan:
    """Return the plan of a run, with its page. Raises as `plan_without_page`."""
    plan = plan_without_page(composed.config, machine)
    return replace(plan, text=describe(composed, plan))


def plan_without_page(config: Config, machine: Machine | None = None, *, looks_at_data: bool = True) -> Plan:
    """Return the plan of a run on `machine`, by default this one; the page of a run on GPUs, which proposes
    other divisions of them, would take ten times as long. Without `looks_at_data` nothing reads the data
    files. Raises ConfigError with all that is wrong between keys and with functions that they name, and
    DataError for data files of which the first rows are unusable."""
    machine = machine or machines.probe_machine(config)
    if problems := refusals(config, machine):
        raise ConfigError(problems)
    plan_config, config = config, settled(config)
    rows = _look_at_data(config) if looks_at_data else None
    plan_config = effects.as_read(model_folder.with_shared_prompts(plan_config, model_folder.policy_settings(config)), machine)
    plan = decide(plan_config, machine, num_train_rows=rows, resumes=_finds_checkpoint(config))
    if plan.passes.replays_routing and not plan.recomputes_old_logprobs:
        raise ConfigError(
            "actor_rollout_ref.actor.router_replay.mode=R2: there is no pass for old log-probs whose experts could be taken "
            "again: a step has one update, whose experts are the old ones, or old log-probs are the engine's; leave it out"
        )
    if changes := chosen_by_memory(plan):
        changed_config = replaced(plan_config, changes)
        plan = decide(changed_config, machine, num_train_rows=rows, resumes=plan.resumes, model=plan.model)
    return replace(plan, memory=memory_by_role(plan))


def _finds_checkpoint(config: Config) -> bool:
    trainer = config.trainer
    if trainer.resume_mode != "auto" or trainer.experiment_name is None:
        return trainer.resume_mode == "resume_path"
    folder = RunDir(Path(trainer.default_local_dir).expanduser() / trainer.experiment_name).checkpoints
    return bool(CheckpointStore(folder).steps())


Checks = Iterator[tuple[str, Callable[[], Any]]]
"""How a check's messages begin, and the check, which raises ConfigError."""


def refusals(config: Config, machine: Machine) -> list[str]:
    """Return all that is wrong between the keys, and with the functions and models that they name."""
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


def _functions(config: Config) -> Checks:
    """Yield look-ups of functions with options, tasks, and what judge and episodes need."""
    yield from algorithm.checks(config)
    yield "actor_rollout_ref.rollout.name: ", lambda: ENGINES.get(config.rollout.name)
    yield "trainer.schedule: ", lambda: schedule_of(config)
    yield "", lambda: factors_of(config)
    if set(config.reward.audit) - {"judge"}:
        yield "", lambda: RewardFunction.from_config(audit_of(config.reward), key="audit")
    if config.reward.judge.base_url is not None:
        yield "", lambda: JudgeSpec.of(config.reward)
    if config.plays_episodes:
        yield "", lambda: EpisodeSetup.of(config)
    custom = config.data.custom_cls
    if custom.path is not None and custom.name is not None:
        yield "data.custom_cls.path: ", lambda: load_function(f"{custom.path}:{custom.name}", "data set class")
    for key in ("train_files", "val_files", "val_prompt_files") if custom.path is None else ():
        for name in getattr(config.data, key):
            if name.startswith(TASK_PREFIX):
                yield f"data.{key}={name}: ", partial(task_rows, name)
    models = {config.model.path: "actor_rollout_ref.model.path"}
    models[config.reward.reward_model.model_path or ""] = "reward.reward_model.model_path"
    for path, key in models.items():
        if path.startswith(PREFIX):
            yield f"{key}: ", partial(get_builtin, path)


def _fitting(config: Config, machine: Machine) -> Checks:
    """Yield checks of what the model's folder rules out, for keys that are sound by themselves."""
    yield "", lambda: model_folder.check_policy(config, machine)
    if config.trainer.machine is None:
        yield "", lambda: model_folder.check_others(config)
    if config.model.lora_rank:
        yield "", lambda: model_folder.check_adapters(config)


# ---- the data ---------------------------------------------------------------------------------------------------------
# Reading all data happens while Ray starts. Empty, cut or broken files and wrong columns show in a few rows.


def _look_at_data(config: Config) -> int | None:
    """Return the number of training rows after train_max_samples; None if only reading all data would show
    it, or they are sampled first. Raises ConfigError and DataError for unusable data."""
    data, trainer = config.data, config.trainer
    names = [*data.train_files, *data.val_files, *data.val_prompt_files]
    files = [name for name in names if not name.startswith((TASK_PREFIX, HUB_PREFIX))]
    # For a plan for another machine data may be missing.
    away = trainer.machine is not None and any(not os.path.exists(os.path.expanduser(name)) for name in files)
    unusable = [] if away else _unusable(config)
    rows = None
    if data.custom_cls.path is None and not trainer.val_only and not config.collects:
        counts = [count for name in data.train_files for count in _count(name, with_files=not (unusable or away))]
        rows = None if not counts or None in counts else sum(count or 0 for count in counts)
        if rows is not None and data.train_max_samples >= 0:
            rows = min(rows, data.train_max_samples)
    sizes = {key: getattr(data, key) for key in ("train_batch_size", "gen_batch_size")}
    problems = [
        f"data.{key}={size}: larger than the training data, which has {rows} rows; a batch of at most {rows}, or more data"
        for key, size in sizes.items()
        if size is not None and rows is not None and rows < size
    ]
    if problems:
        raise ConfigError(problems)
    if unusable:
        raise DataError("\n  ".join(unusable))
    return rows


def _unusable(config: Config) -> list[str]:
    data = config.data
    if config.trains_only_reward_model:
        rates_steps = config.reward.reward_model.train.loss == "steps"
        return check_data_files(data, rated_row if rates_steps else partial(pair_texts, with_margin=True))
    if not config.is_offline:
        return check_data_files(replace(data, train_files=[]) if config.trainer.val_only else data)
    objective = algorithm.objective_of(config)
    read: Callable[..., Any] = pair_texts if objective.needs_pairs else conversation
    sampled = data.train_files if config.collects else []
    rows = check_data_files(replace(data, train_files=[]) if sampled else data, labelled_texts if objective.needs_kl else read)
    prompts = check_data_files(replace(data, train_files=[*sampled, *data.val_prompt_files], val_files=[]))
    return [*rows, *(problem for problem in prompts if problem not in rows)]


def _count(name: str, *, with_files: bool) -> Iterator[int | None]:
    """Yield the rows of each file of an entry of `data.train_files`; None if counting would take long."""
    if name.startswith(TASK_PREFIX):
        yield len(task_rows(name))
    elif name.startswith(HUB_PREFIX) or not with_files:
        yield None
    else:
        for _, path in data_files(name):
            if path.name.endswith(".parquet"):
                import pyarrow.parquet

                yield int(pyarrow.parquet.read_metadata(path).num_rows)
            else:
                is_small = path.stat().st_size <= (INDEXED_WHOLE if path.name.endswith(".jsonl") else READ_WHOLE)
                yield len(open_source(str(path))) if is_small else None
