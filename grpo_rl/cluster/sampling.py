"""Sampling without a training: Ray, and the engines and rewards of one model after another, for the commands.

The parts are those of a run that only validates (`trainer.val_only=true`): the plan's engine, its reward, the prompts of
`data.val_files`. What is asked of them is the caller's: responses to all prompts, or to one that a person has just typed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_rl.cluster.inputs import read_inputs
from grpo_rl.cluster.launch import await_ray, connecting_for, ends_the_run, phase_of, reported
from grpo_rl.cluster.processes.placement import raylets
from grpo_rl.cluster.recovery.supervisor import Recoveries
from grpo_rl.cluster.session.ray_session import Connection, clean_earlier
from grpo_rl.cluster.start_roles import Cluster, start_roles
from grpo_rl.cluster.warm_start import ready_folder
from grpo_rl.config.schema.tree import MultiTurnConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.plan.decisions import Plan, RewardPlan
from grpo_rl.protocols import Rewarder, RolloutPool
from grpo_rl.rewards.combined import by_rule
from grpo_rl.rollout.requests import rollout_id
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.sampled.reward_failures import scored
from grpo_rl.trainer.stopping import Stop
from grpo_rl.types import Prompt, Rollout, Sampling


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engines of one model, and its reward."""

    plan: Plan
    tokenizer: Any
    prompts: PromptDataset | None
    """The prompts of `data.val_files`; None for a plan without data."""
    rollout: RolloutPool
    rewarder: Rewarder | None
    """None where nothing is scored."""
    warn: Callable[[str], None]

    def parts_of(self, rows: Sequence[int], n: int) -> list[Sequence[int]]:
        """Return the rows in parts, each of which keeps all engines busy: what is lost when the process is killed is two."""
        engine = self.plan.engine
        assert engine is not None, "a plan that samples has an engine"
        size = max(1, -(-engine.max_num_seqs * self.plan.num_replicas // n))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def answers(
        self, parts: Sequence[Sequence[Prompt]], n: int, sampling: Sampling, on_answer: Callable[[], None] = lambda: None
    ) -> Iterator[list[Rollout]]:
        """Yield the scored responses to the prompts of each part, by prompt and sample; `on_answer` is called as each ends.

        The next part is asked for before one is waited for, so that no engine runs empty at a part's end.
        """
        asked: list[list[str]] = []

        def ask(number: int) -> None:
            if number < len(parts):
                asked.append(self.rollout.submit(parts[number], n, sampling))

        ask(0)
        try:
            for number in range(len(parts)):
                ask(number + 1)
                found: dict[str, Rollout] = {}
                for rollout in self.rollout.completed(only=asked[number]):
                    found[rollout_id(rollout.prompt, rollout.sample_index)] = rollout
                    if self.rewarder is not None:
                        self.rewarder.submit(rollout)
                    on_answer()
                rollouts = [found[one] for one in asked[number]]
                yield rollouts if self.rewarder is None else by_rule(scored(self.rewarder, rollouts, self.warn))
        finally:
            self.rollout.forget([one for ids in asked for one in ids])


class SamplingSession:
    """A Ray session in which models are sampled from, one after another."""

    def __init__(self, connection: Connection, run_dir: RunDir, console: Console, status: Status, stop: Stop) -> None:
        self._connection, self._run_dir, self._console = connection, run_dir, console
        self._status, self.stop = status, stop
        self.phase = phase_of(status, stop)
        """A function to call as a phase begins: `gen` may be left by a signal, `save` may not."""

    @contextmanager
    def sampler(self, plan: Plan) -> Iterator[Sampler]:
        """Start the engines and the reward of a plan, and end them after the block."""
        with ExitStack() as stack:
            inputs = read_inputs(plan, self._run_dir, self._console, stack, part="prompts")
            await_ray(self._connection, self._console)
            logs, model = self._run_dir.logs, plan.config.actor_rollout_ref.model.path
            folder = ready_folder(model, plan.machine, logs, self._console)
            scorer = ready_folder(plan.config.reward.reward_model.model_path or "", plan.machine, logs, self._console)
            recoveries = Recoveries(plan.config.trainer, self._console.warn, self._status.count_restart)
            cluster = Cluster(inputs.plan, folder, scorer, logs, self._console, recoveries)
            stack.callback(cluster.shutdown)
            roles, scorers = start_roles(cluster, inputs.plan, inputs.tokenizer, inputs.episodes)
            self._status.update(workers=cluster.pids())
            self._connection.watch_nodes(raylets(cluster.places()))
            assert roles.rollout is not None, "a plan that samples has engines"
            rewarder = None
            if plan.reward.scores:
                rewarder = inputs.models.beside(inputs.rules, scorers)
                stack.callback(rewarder.close)
            yield Sampler(inputs.plan, inputs.tokenizer, inputs.val_data, roles.rollout, rewarder, self._console.warn)


@contextmanager
def sampling_session(plan: Plan, run_dir: RunDir, console: Console) -> Iterator[SamplingSession]:
    """Start Ray for plans like this one, with the status, the signals and the logs of a run in `run_dir`; end all after it."""
    from transformers.utils.logging import disable_progress_bar

    with ExitStack() as stack:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        clean_earlier(run_dir.session_file)
        status, stop = stack.enter_context(reported(plan, run_dir, stack, console))
        lost = ends_the_run(plan, status, run_dir, console)
        connection = stack.enter_context(connecting_for(plan, run_dir, console.warn, lost))
        # Model and tokenizer files are small beside what follows; the screen has bars of its own.
        disable_progress_bar()
        yield SamplingSession(connection, run_dir, console, status, stop)


def unscored(plan: Plan) -> Plan:
    """Return the plan without any reward, environment or data: prompts that are not in verl's row format, or are typed."""
    data = dataclasses.replace(plan.config.data, val_files=[])
    parts = plan.config.actor_rollout_ref
    rollout = dataclasses.replace(parts.rollout, multi_turn=MultiTurnConfig())
    single = dataclasses.replace(parts, rollout=rollout)
    return dataclasses.replace(
        plan,
        config=dataclasses.replace(plan.config, data=data, actor_rollout_ref=single),
        roles=tuple(role for role in plan.roles if role.name == "rollout"),
        pools=tuple(pool for pool in plan.pools if pool.name in {role.pool for role in plan.roles if role.name == "rollout"}),
        reward=RewardPlan(scores=False, rules=False, judge=False, steps_from="none"),
    )
