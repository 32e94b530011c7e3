"""Rows that are trained as they stand: their order, validation, the reference's log-probs."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
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
        """Compute the reference's log-probs if the objective needs them. Raises DivergedError if they are not finite.

        The reference is the initial policy, which the actor is before the first step, also in a run that is about
        to load a checkpoint.
        """
        self.config, self.roles, self.objective = config, roles, objective
        self.sets = {part: data for part, data in (("train", rows.train), ("val", rows.val)) if data is not None}
        self.order = make_row_order(config, rows.train)
        self._batch_size = config.data.train_batch_size
        self._reference: dict[str, tuple[Tensor, Tensor]] = {}
        """The reference's log-probs of each part's rows back to back, and where each row's begin."""
        if roles.actor is not None and objective.needs_ref:
            total = sum(map(len, self.sets.values()))
            with console.progress("computing the reference's log-probs of all rows, once", total=total) as bar:
                for part, data in self.sets.items():
                    self._reference[part] = _reference_of(part, data, roles.actor, self._batch_size, bar.advance)

    def batch(self, part: str, rows: Sequence[int]) -> Batch:
        """Return rows of `train` or `val`, with `ref_logprobs_T` if the objective needs it."""
        batch = self.sets[part].batch(rows)
        if part not in self._reference:
            return batch
        logprobs_T, starts_R = self._reference[part]
        pieces = [logprobs_T[int(starts_R[row]) : int(starts_R[row + 1])] for row in rows]
        return batch.replace(ref_logprobs_T=torch.cat(pieces))

    def draw(self) -> Batch:
        """Return the next batch of rows. Raises DataError for one that cannot be used; the next draw begins with it again."""
        with self.order.rewinding():
            return self.batch("train", [row for row, _ in self.order.next_batch()])

    def measure(self) -> Metrics:
        """Return metrics of the present weights on the validation rows."""
        if self.roles.actor is not None:
            return named_measures("val", self._losses(self.roles.actor), self.objective)
        assert self.roles.reward_model is not None
        scored = scored_rows(self.roles.reward_model, self.sets["val"], self._batch_size)
        center_coef = self.config.reward.reward_model.train.center_coef
        measured = step_quality(**scored) if "labels_K" in scored else pair_quality(**scored, center_coef=center_coef)
        return {f"val/{name}": value for name, value in measured.items()}

    def _losses(self, actor: Actor) -> Metrics:
        """Return the policy loss `pg_loss` of the validation rows, and its statistics, as one batch of all of them has them."""
        # The other terms of the objective are no part of how well the rows are learnt.
        objective = dataclasses.replace(
            self.objective, entropy_coeff=0.0, adaptive_entropy=False, kl_loss_type=None, kl_options=(), distillation=None
        )
        data, parts = self.sets["val"], _row_ranges(len(self.sets["val"]), self._batch_size)
        batches = (answers_of(data.batch(rows)) if objective.needs_kl else data.batch(rows) for rows in parts)
        counts = Counts(*map(sum, zip(*(dataclasses.astuple(batch.counts()) for batch in batches), strict=True)))
        totals: dict[str, float] = defaultdict(float)
        for rows in parts:
            batch = with_kl(self.batch("val", rows), actor) if objective.needs_kl else self.batch("val", rows)
            batch = batch.replace(group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N))
            advantages_T = torch.ones(batch.num_trained_tokens) if batch.advantages_T is None else batch.advantages_T
            segments, columns = Segments(batch.trained_lengths_N), batch.loss_columns()
            inputs = LossInput(actor.logprobs(batch), advantages_T, segments, batch.group_N, **columns)
            for name, value in objective(inputs, counts)[1].items():
                totals[name] += float(value)
        return {
            name.partition("/")[2]: value / counts.num_tokens if name.startswith("sum/") else value
            for name, value in totals.items()
            if not name.startswith("max/")
        }

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict() | {"data": self.sets["train"].fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError for other training data."""
        resume_order(self.order, self.sets["train"], state, allow_change=self.config.data.allow_change)


def named_measures(part: str, measured: Metrics, objective: Objective) -> Metrics:
    """Return the loss of rows, and a perplexity or how the policy orders pairs, as metrics `part/...`."""
    measures = {f"{part}/loss": measured["pg_loss"]}
    if objective.loss_mode == "sft":
        measures[f"{part}/perplexity"] = math.exp(min(measured["pg_loss"], 700.0))  # near the largest exponent of a float
    for name in ("accuracy", "margin") if objective.needs_pairs else ():
        if f"reward_{name}" in measured:
            measures[f"{part}/{name}"] = measured[f"reward_{name}"]
    return measures


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


def scored_rows(model: TrainedRewardModel, data: TrainingSet[Any], batch_size: int) -> dict[str, Tensor]:
    parts: list[dict[str, Tensor]] = []
    for rows in _row_ranges(len(data), batch_size):
        batch = data.batch(rows)
        scores = model.scores(batch)
        if batch.labels_T is not None:
            parts.append({"scores_K": scores, "labels_K": batch.labels_T})
            continue
        assert batch.chosen_N is not None
        pairs = Pairs.of(batch.group_N, values(batch.chosen_N))
        margin_P = torch.zeros(len(pairs.chosen_P)) if batch.margins_N is None else batch.margins_N[pairs.chosen_P]
        parts.append({"chosen_P": scores[pairs.chosen_P], "rejected_P": scores[pairs.rejected_P], "margin_P": margin_P})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _reference_of(
    part: str, data: TrainingSet[Any], actor: Actor, batch_size: int, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of one part's rows back to back, and where each row's begin; the last is their number."""
    pieces, lengths_R = [torch.empty(0)], torch.zeros(len(data), dtype=torch.long)
    for rows in _row_ranges(len(data), batch_size):
        if usable := [row for row in rows if data.usable(row)]:
            batch = data.batch(usable)
            pieces.append(actor.logprobs(batch).float())
            check_finite(batch.replace(ref_logprobs_T=pieces[-1]))
            lengths_R[usable] = lengths_R[usable].index_add(0, batch.group_N, batch.trained_lengths_N)
        fault_point("driver.reference", part=part, row=rows[-1])
        advance(len(rows))
    return torch.cat(pieces), torch.cat([lengths_R.new_zeros(1), lengths_R.cumsum(0)])


def _row_ranges(num_rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
