"""All the wiring: from what the user gave to worker sets and a trainer."""

from __future__ import annotations

import gc
from contextlib import ExitStack

from transformers.utils.logging import disable_progress_bar

from grpo_rl.checkpoint.manifest import Checkpoint
from grpo_rl.cluster import warm_start
from grpo_rl.cluster.inputs import read_inputs
from grpo_rl.cluster.processes.placement import raylets
from grpo_rl.cluster.session.ray_session import Connection
from grpo_rl.cluster.start_roles import Cluster, start_roles
from grpo_rl.config.compose import Composed
from grpo_rl.models import builtin
from grpo_rl.plan.decisions import Plan
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.metrics.sinks import Sinks
from grpo_rl.telemetry.plots.curves import plot_curves
from grpo_rl.telemetry.plots.reward_plots import plot_rewards
from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.stopping import Stop
from grpo_rl.trainer.sync import Output, Roles, SyncTrainer


def train(
    composed: Composed,
    plan: Plan,
    run_dir: RunDir,
    console: Console,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
    status: Status,
    stop: Stop,
    connection: Connection,
) -> None:
    """Train from `checkpoint` on, or from the start; `connection` is that to Ray, being made. `stack` ends what starts here."""
    config = composed.config
    # Model and tokenizer files are small beside what follows; the screen has bars of its own.
    disable_progress_bar()
    inputs = read_inputs(plan, run_dir, console, stack)
    plan = inputs.plan
    with console.progress("starting Ray"):
        connection.connected()
    gc.enable()  # everything is imported
    folder = inputs.model_folder
    if config.actor_rollout_ref.model.path.startswith(builtin.PREFIX):
        name = config.actor_rollout_ref.model.path
        folder = str(warm_start.ensure(name, inputs.tokenizer, plan.machine, run_dir.logs, console))
    cluster = Cluster(plan, folder, run_dir.logs, console, status.count_restart)
    stack.callback(cluster.shutdown)
    started = start_roles(cluster, plan, inputs.tokenizer)
    actor = started.actor
    assert actor is not None and inputs.train_data is not None
    status.update(workers=cluster.pids())
    connection.watch_nodes(raylets(cluster.places()))
    rewarder = inputs.models.beside(inputs.rules, started.scorers)
    stack.callback(rewarder.close)
    sinks = Sinks(run_dir, config.trainer, composed.resolved, console.warn)
    stack.callback(sinks.close)

    trainer = SyncTrainer(
        config,
        Roles(actor, started.rollout, rewarder, started.reference, started.critic, recoveries=cluster.supervisor.log.metrics),
        inputs.train_data,
        inputs.val_data,
        Output(run_dir, console, sinks, RolloutLog(run_dir), status, stop),
        total_steps=plan.sizes.total_steps or 0,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    trainer.fit()
    if config.trainer.export_at_end and not config.trainer.val_only:
        with console.progress("exporting the policy"):
            actor.export(run_dir.model)
    if trainer.step > 0:
        with console.progress("drawing the curves"):
            plot_curves(run_dir)
            plot_rewards(run_dir)
