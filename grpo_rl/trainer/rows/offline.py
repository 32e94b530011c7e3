"""Training on rows as they stand: the policy learns answers, or to prefer some to others, and nothing is sampled to train on."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.columns import values
from grpo_rl.data.draw_order import make_row_order
from grpo_rl.data.row_set import TrainingRows, TrainingSet
from grpo_rl.data.training_rows.conversations import Demonstration, supervised_batch
from grpo_rl.errors import DivergedError
from grpo_rl.protocols import Actor
from grpo_rl.trainer.rows.reference_rows import ReferenceRows
from grpo_rl.trainer.sampled.selection import resume_order
from grpo_rl.trainer.schedule import Context, required
from grpo_rl.trainer.validation import Validation
from grpo_rl.types import Batch, Counts, Metrics, Rollout


class RowSchedule:
    """The part of a schedule that trains on rows as they stand which is alike for all models: which rows come next, and the end."""

    reference: ReferenceRows | None = None
    """The reference's log-probs of the rows, where the objective compares with them."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.config
        rows = required(context.rows, "rows")
        self.train_data, self.val_data = rows.train, rows.val
        self.sampler = make_row_order(self.config, self.train_data)
        self.trained: Sequence[Rollout] = ()

    def draw(self) -> Batch:
        """Return the next batch of rows. Raises DataError for one that cannot be used; the next draw begins with it again."""
        with self.sampler.rewinding():
            rows = [row for row, _ in self.sampler.next_batch()]
            batch = self.train_data.batch(rows)
            return batch if self.reference is None else self.reference.fill("train", rows, batch)

    def ended(self) -> str | None:
        """Return None: there are always further rows."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        order = self.sampler.state_dict() | {"data": self.train_data.fingerprint}
        return {"sampler": order, "num_rows": len(self.train_data)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError for other training data."""
        resume_order(self.sampler, self.train_data, state["sampler"], allow_change=self.config.data.allow_change)


class OfflineSchedule(RowSchedule):
    """One optimizer step on each batch of rows, epoch after epoch, with whatever loss: the rows say what a batch is.

    Validation measures the loss on other rows; where there are prompts to answer, engines and rewards run for these too.
    """

    roles: ClassVar[frozenset[str]] = frozenset({"actor", "rollout", "rewarder", "teacher"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.actor = required(context.roles.actor, "actor")
        self.objective = context.objective
        self.reference = self._reference(required(context.rows, "rows"))
        self.answers = Validation(context)

    def _reference(self, rows: TrainingRows) -> ReferenceRows | None:
        """Return the reference's log-probs of the rows; None where the objective compares with none."""
        if not self.objective.needs_ref:
            return None
        return ReferenceRows(rows, self.actor, self.config.data.train_batch_size, self.context.output.console)

    def step(self) -> Metrics:
        """Train on the next batch of rows."""
        timer = self.context.progress.timer()
        with timer("data"):
            batch = self.draw()
        if self.objective.needs_kl:
            with timer("kl"):
                batch = with_kl(batch, self.actor)
        taught: Metrics = {}
        if self.context.roles.teacher is not None:
            with timer("teacher"):
                batch, taught = self.context.roles.teacher.logprobs(batch)
        with timer("update_actor"):
            metrics = self.actor.update(batch) | taught
        num_tokens = float(len(batch.token_ids_S))
        measured = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        return (
            named_measures("train", measured, self.objective)
            | {"train/num_tokens": float(batch.num_trained_tokens)}
            | metrics
            | {"trainer/epoch": float(self.sampler.epoch)}
            | {"perf/total_num_tokens": num_tokens, "perf/tokens_per_s": num_tokens / max(1e-9, timer.total())}
            | timer.metrics()
        )

    def evaluate(self) -> Metrics:
        """Measure the loss on the validation rows, and answer the validation prompts."""
        metrics: Metrics = {}
        if self.val_data is not None:
            timer = self.context.progress.timer()
            with timer("testing"):
                measured = measure(self.actor, self.val_data, self.objective, self.config.data.train_batch_size, self.reference)
            metrics = named_measures("val", measured, self.objective) | timer.metrics()
        answered = self.answers()
        seconds = metrics.get("timing_s/testing", 0.0) + answered.get("timing_s/testing", 0.0)
        return metrics | answered | ({"timing_s/testing": seconds} if metrics or answered else {})


def fit(
    actor: Actor,
    demonstrations: Sequence[Demonstration],
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[int, Metrics], None],
) -> None:
    """Train for `num_steps` steps on batches drawn in a new seeded order every epoch, without a run around them.

    So embedded models get their first ability. Rows left over at the end of an epoch open the next batch, which may be
    larger than the data.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for step in range(num_steps):
        while len(order) < batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        metrics = actor.update(supervised_batch([demonstrations[i] for i in chosen]))
        if metrics.get("actor/nonfinite"):
            raise DivergedError(f"supervised step {step + 1}: loss or gradient not finite; no weight was changed by it")
        on_step(step, metrics)


LARGEST_EXPONENT = 700.0
"""e to this is near the largest float."""


MEASURES = {"reward_accuracy": "accuracy", "reward_margin": "margin"}
"""Statistics of losses over pairs that are logged beside the loss, with their names there."""


def named_measures(part: str, measured: Metrics, objective: Objective) -> Metrics:
    """Return the loss of rows, and what it means: a perplexity, or how the policy orders pairs, as metrics `part/...`."""
    found = {f"{part}/loss": measured["pg_loss"]}
    if objective.loss_mode == "sft":
        found[f"{part}/perplexity"] = perplexity(measured["pg_loss"])
    if objective.needs_pairs:
        found |= {f"{part}/{name}": measured[stat] for stat, name in MEASURES.items() if stat in measured}
    return found


def perplexity(loss: float) -> float:
    """Return e to the mean loss of a token."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def measure(
    actor: Actor, data: TrainingSet[Any], objective: Objective, batch_size: int, reference: ReferenceRows | None = None
) -> Metrics:
    """Return the policy loss `pg_loss` of all validation rows, and its averaged statistics, as one batch of them all has them."""
    # The other terms of the objective are no part of how well the rows are learnt.
    objective = dataclasses.replace(
        objective, entropy_coeff=0.0, adaptive_entropy=False, kl_loss_type=None, kl_options=(), distillation=None
    )
    parts = [list(range(start, min(start + batch_size, len(data)))) for start in range(0, len(data), batch_size)]
    each = [(answers_of(data.batch(rows)) if objective.needs_kl else data.batch(rows)).counts() for rows in parts]
    counts = Counts(*(sum(column) for column in zip(*(dataclasses.astuple(part) for part in each), strict=True)))
    totals: dict[str, float] = defaultdict(float)
    for rows in parts:
        batch = data.batch(rows)
        batch = batch if reference is None else reference.fill("val", rows, batch)
        batch = with_kl(batch, actor) if objective.needs_kl else batch
        _, stats = objective(loss_input(batch, actor.logprobs(batch)), counts)
        for name, value in stats.items():
            totals[name] += float(value)
    return {
        name.partition("/")[2]: value / counts.num_tokens if name.startswith("sum/") else value
        for name, value in totals.items()
        if not name.startswith("max/")
    }


def answers_of(batch: Batch) -> Batch:
    """Return the answers of a batch of labelled rows without the mismatched ones."""
    return batch.select(torch.arange(0, batch.num_rollouts, 2))


def with_kl(batch: Batch, actor: Actor) -> Batch:
    """Return the answers of labelled rows with `kl_N`: the mean log-ratio of the mismatched ones under the present policy, at least 0."""
    mismatched = batch.select(torch.arange(1, batch.num_rollouts, 2))
    assert mismatched.ref_logprobs_T is not None
    ratio_T = actor.logprobs(mismatched).double() - values(mismatched.ref_logprobs_T).double()
    kl = Segments(mismatched.trained_lengths_N).sum(ratio_T).mean().clamp(min=0.0)
    answers = answers_of(batch)
    return answers.replace(kl_N=kl.expand(answers.num_rollouts).clone())


def loss_input(batch: Batch, policy_logprobs_T: torch.Tensor) -> LossInput:
    """Return a whole batch as its loss reads it."""
    advantages_T = torch.ones(batch.num_trained_tokens) if batch.advantages_T is None else batch.advantages_T
    return LossInput(
        policy_logprobs_T,
        advantages_T,
        Segments(batch.trained_lengths_N),
        ref_logprobs_T=None if batch.ref_logprobs_T is None else values(batch.ref_logprobs_T),
        group_N=batch.group_N,
        chosen_N=batch.chosen_N,
        kl_N=batch.kl_N,
        group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N),
    )
