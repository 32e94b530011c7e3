"""Rows that are trained as they stand: their order, validation, the reference's log-probs."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.scoring_quality import pair_quality, step_quality
from grpo_rl.algos.segments import Segments
from grpo_rl.columns import values
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.draw_order import make_row_order, resume_order
from grpo_rl.data.row_set import TrainingRows, TrainingSet
from grpo_rl.faults import fault_point
from grpo_rl.protocols import Actor, TrainedRewardModel
from grpo_rl.trainer.parts import Roles
from grpo_rl.trainer.sampled.trained import check_finite
from grpo_rl.types import Batch, Counts, Metrics

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws.
    from grpo_rl.telemetry.terminal.console import Console


class Rows:
    def __init__(self, config: Config, rows: TrainingRows, roles: Roles, objective: Objective, console: Console) -> None:
        """Compute the reference's log-probs if the objective needs them: the actor must not have been trained yet."""
        self.config, self.roles, self.objective = config, roles, objective
        self.train_data, self.val_data = rows.train, rows.val
        self.order = make_row_order(config, rows.train)
        self.reference: ReferenceRows | None = None
        if roles.actor is not None and objective.needs_ref:
            self.reference = ReferenceRows(rows, roles.actor, config.data.train_batch_size, console)

    def draw(self) -> Batch:
        """Return the next batch of rows. Raises DataError for one that cannot be used; the next draw begins with it again."""
        with self.order.rewinding():
            rows = [row for row, _ in self.order.next_batch()]
            batch = self.train_data.batch(rows)
            return batch if self.reference is None else self.reference.fill("train", rows, batch)

    def measure(self) -> Metrics:
        """Return metrics of the present weights on the validation rows; empty without any."""
        batch_size = self.config.data.train_batch_size
        if self.val_data is None:
            return {}
        if self.roles.actor is not None:
            measured = measure(self.roles.actor, self.val_data, self.objective, batch_size, self.reference)
            return named_measures("val", measured, self.objective)
        assert self.roles.reward_model is not None
        scored = scored_rows(self.roles.reward_model, self.val_data, batch_size)
        center_coef = self.config.reward.reward_model.train.center_coef
        measured = step_quality(**scored) if "labels_K" in scored else pair_quality(**scored, center_coef=center_coef)
        return {f"val/{name}": value for name, value in measured.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict() | {"data": self.train_data.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError for other training data."""
        resume_order(self.order, self.train_data, state, allow_change=self.config.data.allow_change)


def named_measures(part: str, measured: Metrics, objective: Objective) -> Metrics:
    """Return the loss of rows, and a perplexity or how the policy orders pairs, as metrics `part/...`."""
    measures = {f"{part}/loss": measured["pg_loss"]}
    if objective.loss_mode == "sft":
        measures[f"{part}/perplexity"] = math.exp(min(measured["pg_loss"], 700.0))  # near the largest exponent of a float
    for name in ("accuracy", "margin") if objective.needs_pairs else ():
        if f"reward_{name}" in measured:
            measures[f"{part}/{name}"] = measured[f"reward_{name}"]
    return measures


def measure(
    actor: Actor, data: TrainingSet[Any], objective: Objective, batch_size: int, reference: ReferenceRows | None = None
) -> Metrics:
    """Return the policy loss `pg_loss` and its statistics as one batch of all rows has them."""
    # The other terms of the objective are no part of how well the rows are learnt.
    objective = dataclasses.replace(
        objective, entropy_coeff=0.0, adaptive_entropy=False, kl_loss_type=None, kl_options=(), distillation=None
    )
    parts = [list(range(start, min(start + batch_size, len(data)))) for start in range(0, len(data), batch_size)]
    part_counts = [(answers_of(data.batch(rows)) if objective.needs_kl else data.batch(rows)).counts() for rows in parts]
    counts = Counts(*(sum(column) for column in zip(*(dataclasses.astuple(part) for part in part_counts), strict=True)))
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
    """Return a batch of labelled rows without the mismatched answers."""
    return batch.select(torch.arange(0, batch.num_rollouts, 2))


def with_kl(batch: Batch, actor: Actor) -> Batch:
    """Return labelled rows without the mismatched answers, with these' mean log-ratio under the policy, at least 0, as `kl_N`."""
    mismatched = batch.select(torch.arange(1, batch.num_rollouts, 2))
    assert mismatched.ref_logprobs_T is not None
    ratio_T = actor.logprobs(mismatched).double() - values(mismatched.ref_logprobs_T).double()
    kl = Segments(mismatched.trained_lengths_N).sum(ratio_T).mean().clamp(min=0.0)
    answers = answers_of(batch)
    return answers.replace(kl_N=kl.expand(answers.num_rollouts).clone())


def loss_input(batch: Batch, policy_logprobs_T: Tensor) -> LossInput:
    advantages_T = torch.ones(batch.num_trained_tokens) if batch.advantages_T is None else batch.advantages_T
    batch = batch.replace(group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N))
    columns = batch.loss_columns()
    return LossInput(policy_logprobs_T, advantages_T, Segments(batch.trained_lengths_N), batch.group_N, **columns)


def scored_rows(model: TrainedRewardModel, data: TrainingSet[Any], batch_size: int) -> dict[str, Tensor]:
    parts: list[dict[str, Tensor]] = []
    for start in range(0, len(data), batch_size):
        batch = data.batch(range(start, min(start + batch_size, len(data))))
        scores = model.scores(batch)
        if batch.labels_T is not None:
            parts.append({"scores_K": scores, "labels_K": batch.labels_T})
            continue
        assert batch.chosen_N is not None
        pairs = Pairs.of(batch.group_N, values(batch.chosen_N))
        margin_P = torch.zeros(len(pairs.chosen_P)) if batch.margins_N is None else batch.margins_N[pairs.chosen_P]
        parts.append({"chosen_P": scores[pairs.chosen_P], "rejected_P": scores[pairs.rejected_P], "margin_P": margin_P})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class ReferenceRows:
    """The reference's log-probs of the trained tokens of all rows, by part (`train`, `val`).

    The reference is the initial policy, which the actor is before the first step, also in a run that is about
    to load a checkpoint.
    """

    def __init__(self, rows: TrainingRows, actor: Actor, batch_size: int, console: Console) -> None:
        """Compute them with the untrained actor. Raises DivergedError for log-probs that are not finite."""
        sets = {part: row_set for part, row_set in (("train", rows.train), ("val", rows.val)) if row_set is not None}
        total = sum(map(len, sets.values()))
        with console.progress("computing the reference's log-probs of all rows, once", total=total) as bar:
            self._columns = {part: _computed(part, data, actor, batch_size, bar.advance) for part, data in sets.items()}

    def fill(self, part: str, rows: list[int], batch: Batch) -> Batch:
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
