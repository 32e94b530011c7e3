"""Training of a reward model alone: pairs or rated steps from files, and how well it tells good from bad on others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.algos.losses.reward_scores import bradley_terry, step_classification
from grpo_rl.algos.scoring_quality import auc, calibration, pair_accuracy, pair_calibration
from grpo_rl.config.schema.tree import RewardModelTrainConfig
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.protocols import TrainedRewardModel
from grpo_rl.trainer.offline import RowSchedule
from grpo_rl.trainer.schedule import Context, required
from grpo_rl.types import Metrics


class RewardModelSchedule(RowSchedule):
    """One optimizer step of the reward model on each batch of pairs or of rated steps; no policy, and no engine."""

    roles: ClassVar[frozenset[str]] = frozenset({"reward_model"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model = required(context.roles.reward_model, "reward_model")
        self.settings = self.config.reward.reward_model.train

    def step(self) -> Metrics:
        """Train on the next batch of rows."""
        timer = self.context.progress.timer()
        with timer("data"):
            batch = self.draw()
        with timer("update_reward_model"):
            metrics = self.model.update(batch)
        measured = {f"train/{name}": metrics[f"reward_model/{name}"] for name in ("loss", "accuracy")}
        if self.settings.loss == "bradley_terry":
            measured["train/margin"] = metrics["reward_model/margin"]
        return measured | metrics | self.step_metrics(batch, timer)

    def evaluate(self) -> Metrics:
        """Measure loss, accuracy, ranking and calibration on the validation rows."""
        if self.val_data is None:
            return {}
        timer = self.context.progress.timer()
        with timer("testing"):
            scored = scored_rows(self.model, self.val_data, self.config.data.train_batch_size)
        return quality(scored, self.settings) | timer.metrics()


def scored_rows(model: TrainedRewardModel, data: TrainingSet[Any], batch_size: int) -> dict[str, Tensor]:
    """Return the present scores of all rows, read `batch_size` at a time: those of pairs, or those of rated steps with their labels."""
    parts: list[dict[str, Tensor]] = []
    for start in range(0, len(data), batch_size):
        batch = data.batch(range(start, min(start + batch_size, len(data))))
        scores = model.scores(batch)
        if batch.labels_T is not None:
            parts.append({"scores_K": scores, "labels_K": batch.labels_T})
            continue
        assert batch.chosen_N is not None
        pairs = Pairs.of(batch.group_N, batch.chosen_N)
        margin_P = torch.zeros(len(pairs.chosen_P)) if batch.margins_N is None else batch.margins_N[pairs.chosen_P]
        parts.append({"chosen_P": scores[pairs.chosen_P], "rejected_P": scores[pairs.rejected_P], "margin_P": margin_P})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def quality(scored: Mapping[str, Tensor], settings: RewardModelTrainConfig) -> Metrics:
    """Return the metrics `val/...` of these scores.

    A pair is right where the chosen response has the larger score, `auc` compares every chosen response with every rejected
    one, and the probability whose calibration is measured is sigmoid(|r_w - r_l|). A step is good where its label is above one half, its
    probability is sigmoid(s), and neutral steps (label 0.5) count in the loss only.
    """
    if "scores_K" in scored:
        scores_K, labels_K = scored["scores_K"], scored["labels_K"]
        loss = step_classification(scores_K, labels_K)[0].mean()
        decided_K = labels_K != 0.5
        scores_K, good_K = scores_K[decided_K], labels_K[decided_K] > 0.5
        accuracy = float(((scores_K > 0) == good_K).double().mean())
        ranking, reliability = auc(scores_K, good_K), calibration(scores_K.double().sigmoid(), good_K)
        more = {"val/good": float(good_K.double().mean())}
    else:
        chosen_P, rejected_P = scored["chosen_P"], scored["rejected_P"]
        loss = bradley_terry(chosen_P, rejected_P, margin_P=scored["margin_P"], center_coef=settings.center_coef)[0].mean()
        accuracy, reliability = pair_accuracy(chosen_P, rejected_P), pair_calibration(chosen_P, rejected_P)
        sides = torch.arange(2).repeat_interleave(len(chosen_P)) == 0
        ranking = auc(torch.cat([chosen_P, rejected_P]), sides)
        more = {
            "val/margin": float((chosen_P - rejected_P).double().mean()),
            "val/score_mean": float(torch.cat([chosen_P, rejected_P]).double().mean()),
        }
    measured = {"val/loss": float(loss), "val/accuracy": accuracy, "val/auc": ranking}
    measured |= {"val/calibration_error": reliability.error, "val/brier": reliability.brier} | more
    # Before the first update of a new head all scores are equal, and no pair has a preferred side.
    return {name: value for name, value in measured.items() if value == value}
