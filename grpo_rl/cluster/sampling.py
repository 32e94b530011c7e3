"""Sampling without a training, for the commands: engine, reward and prompts of a run that only validates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_rl.cluster.run_session import RunSession, run_session
from grpo_rl.cluster.session.ray_session import clean_earlier
from grpo_rl.config.schema.fields import replaced
from grpo_rl.config.schema.tree import MultiTurnConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.frozen import frozen
from grpo_rl.plan.decisions import Plan, RewardPlan
from grpo_rl.protocols import Rewarder, RolloutPool
from grpo_rl.rewards.combined import by_rule
from grpo_rl.rollout.requests import rollout_id
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.sampled.trained import scored
from grpo_rl.types import Prompt, Rollout, Sampling


@frozen
class Sampler:
    plan: Plan
    tokenizer: Any
    prompts: PromptDataset | None
    """The prompts of `data.val_files`; None for a plan without data."""
    rollout: RolloutPool
    rewarder: Rewarder | None
    warn: Callable[[str], None]

    def parts_of(self, rows: Sequence[int], n: int) -> list[Sequence[int]]:
        """Return the rows in parts, each of which keeps all engines busy: a kill loses two at most."""
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
        submitted_ids: list[list[str]] = []

        def ask(number: int) -> None:
            if number < len(parts):
                submitted_ids.append(self.rollout.submit(parts[number], n, sampling))

        ask(0)
        try:
            for number in range(len(parts)):
                ask(number + 1)
                rollouts_by_id: dict[str, Rollout] = {}
                for rollout in self.rollout.completed(only=submitted_ids[number]):
                    rollouts_by_id[rollout_id(rollout.prompt, rollout.sample_index)] = rollout
                    if self.rewarder is not None:
                        self.rewarder.submit(rollout)
                    on_answer()
                rollouts = [rollouts_by_id[request_id] for request_id in submitted_ids[number]]
                yield rollouts if self.rewarder is None else by_rule(scored(self.rewarder, rollouts, self.warn))
        finally:
            self.rollout.forget([request_id for ids in submitted_ids for request_id in ids])


@contextmanager
def sampling_session(plan: Plan, run_dir: RunDir, console: Console) -> Iterator[RunSession]:
    """Start Ray for plans like this one, with the status, the signals and the logs of a run in `run_dir`; end all after it."""
    from transformers.utils.logging import disable_progress_bar

    run_dir.logs.mkdir(parents=True, exist_ok=True)
    clean_earlier(run_dir.session_file)
    with run_session(plan, run_dir, console) as session:
        # Model and tokenizer files are small beside what follows; the screen has bars of its own.
        disable_progress_bar()
        yield session


@contextmanager
def sampler(session: RunSession, plan: Plan) -> Iterator[Sampler]:
    """Start the engines and the reward of a plan, and end them after the block."""
    # It imports Ray, for which the session's start sets the environment.
    from grpo_rl.cluster.inputs import read_inputs

    with ExitStack() as stack:
        inputs = read_inputs(plan, session.run_dir, session.console, part="prompts")
        _, roles, _ = session.start(inputs.plan, inputs, stack)
        assert roles.rollout is not None, "a plan that samples has engines"
        yield Sampler(inputs.plan, inputs.tokenizer, inputs.val_data, roles.rollout, roles.rewarder, session.console.warn)


def unscored(plan: Plan) -> Plan:
    """Return the plan without any reward, environment or data: prompts that are not in verl's row format, or are typed."""
    roles = tuple(role for role in plan.roles if role.name == "rollout")
    return dataclasses.replace(
        plan,
        config=replaced(plan.config, {"data.val_files": [], "actor_rollout_ref.rollout.multi_turn": MultiTurnConfig()}),
        roles=roles,
        pools=tuple(pool for pool in plan.pools if pool.name in {role.pool for role in roles}),
        reward=RewardPlan(),
    )
