"""Embedded models: built here, given their first ability by supervised training, kept for the next run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import replaced
from grpo_rl.config.schema.tree import Config, OptimConfig
from grpo_rl.data.training_rows.conversations import Demonstration, supervised_batch, task_demonstrations
from grpo_rl.errors import DivergedError
from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer
from grpo_rl.plan.decisions import decide
from grpo_rl.protocols import Actor
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.types import Metrics

COMPLETE = "warm_start.json"


def unstarted_folder(name: str, warm: Path | None = None) -> str:
    """Return a folder with the embedded model as it was initialised, beside `warm`; of any other model, its
    own.

    Its tokenizer and config are those of the warm one.
    """
    if not name.startswith(builtin.PREFIX):
        return name
    warm = warm or builtin.cache_folder(name)
    if _is_complete(warm):
        return str(warm)
    return str(builtin.build(name, warm.with_name(warm.name + ".random")))


def ready_folder(path: str, machine: Machine, log_dir: Path, console: Console) -> str:
    """Return the folder of an embedded model, warm-started, or the path of any other as it is.

    On a cluster that is `models/` in the run's folder: other machines may have another home.
    """
    if not path.startswith(builtin.PREFIX):
        return path
    # It imports Ray, for which a session's start sets the environment.
    from grpo_rl.cluster.processes.placement import runs_here

    cached = builtin.cache_folder(path)
    warm = cached if runs_here() else log_dir.parent / "models" / cached.name
    if not _is_complete(warm) and _is_complete(cached):
        _copy(cached, warm)
    if not _is_complete(warm):
        _train(path, warm, machine, log_dir, console)
    if not _is_complete(cached):
        _copy(warm, cached)
    return str(warm)


def _train(name: str, warm: Path, machine: Machine, log_dir: Path, console: Console) -> None:
    from grpo_rl.cluster.role_specs import actor_spec, make_actor
    from grpo_rl.cluster.start_roles import Cluster

    unstarted = unstarted_folder(name, warm)
    tokenizer = load_tokenizer(unstarted)
    spec = builtin.get_builtin(name).warm_start
    plan = decide(_config(spec, unstarted), machine)
    cluster = Cluster(plan, unstarted, "", log_dir / "warm_start", console)
    try:
        worker_group = cluster.start("actor")
        cluster.build([cluster.start_ranks(worker_group, "actor.ActorWorker", actor_spec(plan, cluster.model_path))])
        actor = make_actor(plan, worker_group, tokenizer)
        learnt = task_demonstrations(spec.task, tokenizer)
        with console.progress("warm start (supervised, once; kept for later runs)", spec.num_steps) as bar:
            for metrics in _fit(actor, learnt, spec):
                bar.advance(note=f"loss {metrics['actor/pg_loss']:.3f}")
        fresh = _beside(warm)
        actor.export(fresh)
        (fresh / COMPLETE).write_text("{}")
    finally:
        cluster.shutdown()
    _publish(fresh, warm)


def _fit(actor: Actor, demonstrations: Sequence[Demonstration], spec: builtin.WarmStart) -> Iterator[Metrics]:
    """Yield the metrics of each step on batches that are drawn in a new seeded order every epoch.

    Rows left over at the end of an epoch open the next batch, which may be larger than the data.
    """
    rng = np.random.default_rng(spec.seed)
    order: list[int] = []
    for step in range(spec.num_steps):
        while len(order) < spec.batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        rows, order = order[: spec.batch_size], order[spec.batch_size :]
        metrics = actor.update(supervised_batch([demonstrations[row] for row in rows]))
        if metrics.get("actor/nonfinite"):
            raise DivergedError(f"supervised step {step + 1}: loss or gradient not finite; no weight was changed by it")
        yield metrics


def _config(spec: builtin.WarmStart, folder: str) -> Config:
    policy = "actor_rollout_ref"
    values = {
        "data.responses": "rows",
        "data.train_batch_size": spec.batch_size,
        f"{policy}.model.path": folder,
        f"{policy}.model.enable_gradient_checkpointing": False,
        f"{policy}.actor.policy_loss.loss_mode": "sft",
        f"{policy}.actor.optim": OptimConfig(lr=spec.lr, lr_warmup_steps=spec.lr_warmup_steps, weight_decay=0.0),
        "trainer.n_gpus_per_node": 1,
        "trainer.seed": spec.seed,
        "trainer.total_training_steps": spec.num_steps,
    }
    return replaced(Config(), values)


def _is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).is_file()


def _beside(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))


def _copy(folder: Path, to: Path) -> None:
    fresh = _beside(to)
    shutil.copytree(folder, fresh, dirs_exist_ok=True)
    _publish(fresh, to)


def _publish(fresh: Path, warm: Path) -> None:
    """Give the finished folder its name; another run may have been quicker, and then its folder stays."""
    try:
        os.rename(fresh, warm)
    except OSError:
        shutil.rmtree(fresh)
        if not _is_complete(warm):
            raise
