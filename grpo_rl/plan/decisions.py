"""What a run will do, decided before anything starts: names bound, sizes, places, memory, the objective."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.config import derived
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.registry import load_function

__all__ = ["Machine", "Plan", "make_plan", "probe_machine"]

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions, as numbers for the program and as text for people."""

    machine: Machine
    world_size: int
    """Actor ranks."""
    num_replicas: int
    colocated: bool
    """Engines share the actor's devices."""
    weight_backend: str
    uses_reference: bool
    uses_critic: bool
    recomputes_old_logprobs: bool
    updates_per_step: int
    """Optimizer steps in one training step."""
    num_train_rows: int | None
    """None where they are known only once the data is read."""
    total_steps: int | None
    """Training steps; None where they depend on data that is not read yet."""
    text: str

    def render(self) -> str:
        """The plan for a terminal, plain text, at most 100 columns."""
        return self.text


def probe_machine(config: Config) -> Machine:
    """What this machine has. torch is imported only where there may be a GPU."""
    wanted = config.trainer.device
    num_gpus = 0
    if wanted != "cpu" and _may_have_gpu():
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = wanted if wanted != "auto" else ("cuda" if num_gpus else "cpu")
    return Machine(
        num_gpus=num_gpus,
        num_cpus=config.ray_kwargs.ray_init.num_cpus or len(os.sched_getaffinity(0)),
        device=device,
        cluster=bool(config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")),
    )


def _may_have_gpu() -> bool:
    """Whether a driver is there: a device file of the common ones, or the library that torch would load."""
    if any(Path(driver).exists() for driver in _GPU_DRIVERS):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def make_plan(composed: Composed, machine: Machine | None = None) -> Plan:
    """The plan of a run on `machine` (this one, if none is given).

    Raises ConfigError: first with everything that is wrong between the keys, which needs no heavy import,
    then with every name that no registry knows.
    """
    config = composed.config
    machine = machine or probe_machine(config)
    problems = check(config, machine)
    if problems:
        raise ConfigError(problems)
    rows = _bind_names(config, machine)

    from grpo_rl.plan.algorithm import needs_critic, needs_reference, recomputes_old_logprobs
    from grpo_rl.plan.text import describe
    from grpo_rl.rollout.engine import weight_backend

    total_steps = config.trainer.total_training_steps
    if total_steps is None and rows is not None and not _may_drop_rows(config):
        total_steps = config.trainer.total_epochs * (rows // config.data.train_batch_size)
    numbers: dict[str, Any] = {
        "machine": machine,
        "world_size": machine.world_size(config),
        "num_replicas": derived.num_replicas(config, machine),
        "colocated": derived.is_colocated(config),
        "weight_backend": weight_backend(config, machine.device),
        "uses_reference": needs_reference(config),
        "uses_critic": needs_critic(config),
        "recomputes_old_logprobs": recomputes_old_logprobs(config),
        "updates_per_step": derived.updates_per_step(config),
        "num_train_rows": rows,
        "total_steps": total_steps,
    }
    return Plan(**numbers, text=describe(composed, Plan(**numbers, text="")))


def _bind_names(config: Config, machine: Machine) -> int | None:
    """Find everything that the configuration names in the registries; the number of training rows, where that is cheap.

    Raises ConfigError with all names that are unknown and all options that their functions do not take.
    """
    problems: list[str] = []

    def bind(key: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ConfigError as error:
            problems.extend(f"{key}{problem}" for problem in error.problems)
            return None

    for key, action in _names(config, machine):
        bind(key, action)
    rows = _count_rows(config, bind)
    for key in ("train_batch_size", "gen_batch_size"):
        size = getattr(config.data, key)
        if rows is not None and size is not None and rows < size and not config.trainer.val_only:
            problems.append(
                f"data.{key}={size}: larger than the training data, which has {rows} rows; a batch of at most {rows}, or more data"
            )
    if problems:
        raise ConfigError(problems)
    return rows


def _names(config: Config, machine: Machine) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each name with its key and the look-up that raises ConfigError for an unknown one."""
    from grpo_rl.models.builtin import PREFIX, get_builtin
    from grpo_rl.plan import algorithm
    from grpo_rl.rewards.combined import factors_of
    from grpo_rl.rollout.engine import ENGINES, weight_backend

    rollout = config.actor_rollout_ref.rollout
    path = config.actor_rollout_ref.model.path
    yield from algorithm.checks(config)
    yield "actor_rollout_ref.rollout.name: ", lambda: ENGINES.get(rollout.name)
    yield "actor_rollout_ref.rollout.tensor_model_parallel_size", lambda: _check_engine(config)
    yield "", lambda: weight_backend(config, machine.device)
    yield "", lambda: factors_of(config)
    custom = config.data.custom_cls
    if custom.path is not None:
        yield "data.custom_cls: ", lambda: load_function(f"{custom.path}:{custom.name}", "data set class")
    if path.startswith(PREFIX):
        yield "actor_rollout_ref.model.path: ", lambda: get_builtin(path)


def _check_engine(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        raise ConfigError(f"={rollout.tensor_model_parallel_size}: rollout.name=hf runs on one device; 1, or rollout.name=vllm")


def _may_drop_rows(config: Config) -> bool:
    return config.data.filter_overlong_prompts or config.data.on_bad_row == "skip"


def _count_rows(config: Config, bind: Callable[[str, Callable[[], Any]], Any]) -> int | None:
    """Training rows, after train_max_samples; None where only reading the data tells. Tasks are checked on the way."""
    from grpo_rl.data.tasks.registry import PREFIX, task_rows

    if config.data.custom_cls.path is not None:
        return None
    counts: dict[str, list[int | None]] = {"train_files": [], "val_files": []}
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        for file in files:
            if file.startswith(PREFIX):
                rows = bind(f"data.{key}={file}: ", partial(task_rows, file))
                counts[key].append(None if rows is None else len(rows))
            else:
                counts[key].append(_parquet_rows(file) if file.endswith(".parquet") else None)
    known = [count for count in counts["train_files"] if count is not None]
    if not known or len(known) < len(counts["train_files"]):
        return None
    limit = config.data.train_max_samples
    return sum(known) if limit < 0 else min(sum(known), limit)


def _parquet_rows(file: str) -> int | None:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(Path(file).expanduser()).num_rows)
    except (OSError, pyarrow.ArrowException):
        return None
