"""Training on rows as they stand: the policy learns answers, or to prefer some to others, and nothing is sampled to train on."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.columns import values
from grpo_rl.data.draw_order import make_row_order
from grpo_rl.data.row_set import TrainingRows, TrainingSet
from grpo_rl.data.training_rows.conversations import Demonstration, supervised_batch
from grpo_rl.errors import DivergedError
from grpo_rl.faults import fault_point
from grpo_rl.protocols import Actor
from grpo_rl.trainer.metrics import throughput
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.advantage import check_finite
from grpo_rl.trainer.sampled.selection import resume_order
from grpo_rl.trainer.schedule import Context, required
from grpo_rl.trainer.validation import Validation
from grpo_rl.types import Batch, Counts, Metrics, Rollout

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws.
    from grpo_rl.telemetry.terminal.console import Console


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

    def step_metrics(self, batch: Batch, timer: Timer) -> Metrics:
        """Return what is measured of each step, whatever the model is."""
        return {"trainer/epoch": float(self.sampler.epoch)} | throughput(batch, timer) | timer.metrics()

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
        self.objective, self.answers = context.objective, Validation(context)
        if self.objective.needs_ref:
            rows, batch_size = required(context.rows, "rows"), self.config.data.train_batch_size
            self.reference = ReferenceRows(rows, self.actor, batch_size, context.output.console)

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
        measured = named_measures(
            "train", {name.removeprefix("actor/"): value for name, value in metrics.items()}, self.objective
        )
        return measured | {"train/num_tokens": float(batch.num_trained_tokens)} | metrics | self.step_metrics(batch, timer)

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


def named_measures(part: str, measured: Metrics, objective: Objective) -> Metrics:
    """Return the loss of rows, and what it means: a perplexity, or how the policy orders pairs, as metrics `part/...`."""
    found = {f"{part}/loss": measured["pg_loss"]}
    if objective.loss_mode == "sft":
        found[f"{part}/perplexity"] = math.exp(min(measured["pg_loss"], 700.0))  # near the largest exponent of a float
    for name in ("accuracy", "margin") if objective.needs_pairs else ():
        if f"reward_{name}" in measured:
            found[f"{part}/{name}"] = measured[f"reward_{name}"]
    return found


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


def loss_input(batch: Batch, policy_logprobs_T: Tensor) -> LossInput:
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


# ---- the reference's log-probs -------------------------------------------------------------------------------------


class ReferenceRows:
    """The reference's log-prob of every trained token of the rows, by part (`train`, `val`) and row: computed once.

    The reference of a run on rows is the initial policy. Before the first step the actor is just that, also in a run that is
    about to load a checkpoint, so no other process has to hold those weights.
    """

    def __init__(self, rows: TrainingRows, actor: Actor, batch_size: int, console: Console) -> None:
        """Compute them with the actor, which must not have been trained yet. Raises DivergedError for log-probs that are not finite."""
        sets = {part: found for part, found in (("train", rows.train), ("val", rows.val)) if found is not None}
        total = sum(map(len, sets.values()))
        with console.progress("computing the reference's log-probs of all rows, once", total=total) as bar:
            self._columns = {part: _computed(part, data, actor, batch_size, bar.advance) for part, data in sets.items()}

    def fill(self, part: str, rows: list[int], batch: Batch) -> Batch:
        """Return the batch of these rows of a part with `ref_logprobs_T`."""
        logprobs_T, starts_R = self._columns[part]
        pieces = [logprobs_T[int(starts_R[row]) : int(starts_R[row + 1])] for row in rows]
        return batch.replace(ref_logprobs_T=torch.cat(pieces))


def _computed(part: str, data: TrainingSet[Any], actor: Actor, batch_size: int, done: Any) -> tuple[Tensor, Tensor]:
    """Return the log-probs of one part back to back, and where each row's begin."""
    pieces: list[Tensor] = []
    lengths: list[int] = []
    for start in range(0, len(data), batch_size):
        rows = list(range(start, min(start + batch_size, len(data))))
        usable = [row for row in rows if data.usable(row)]
        sizes = dict.fromkeys(rows, 0)
        if usable:
            batch = data.batch(usable)
            logprobs_T = actor.logprobs(batch).float()
            check_finite(batch.replace(ref_logprobs_T=logprobs_T))
            pieces.append(logprobs_T)
            per_row = torch.zeros(len(usable), dtype=torch.long).index_add(0, batch.group_N, batch.trained_lengths_N)
            sizes |= dict(zip(usable, per_row.tolist(), strict=True))
        lengths += sizes.values()
        fault_point("driver.reference", part=part, row=rows[-1])
        done(len(rows))
    return torch.cat(pieces) if pieces else torch.empty(0), torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
