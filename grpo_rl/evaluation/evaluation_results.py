from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from grpo_rl.evaluation import estimates
from grpo_rl.evaluation.estimates import Difference, Estimate
from grpo_rl.evaluation.response_file import Record
from grpo_rl.frozen import frozen
from grpo_rl.rewards.validation_metrics import majority
from grpo_rl.telemetry.metrics.validation import logged_value

ALL = "all sources"
Groups = Mapping[int, Sequence[Record]]
"""The n responses to each prompt, by its row."""
Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


@frozen
class SourceResult:
    source: str
    num_prompts: int
    metrics: dict[str, list[Estimate]]
    """Estimates of each metric, one for each model."""
    differences: dict[str, list[Difference]]
    """Of each further model to the first."""
    lengths: list[float]
    truncated: list[float]
    failures: list[int]
    binary: bool
    """Whether every value is 0 or 1."""


def results_of(models: Sequence[Groups], *, pass_at: float = 1.0) -> list[SourceResult]:
    """By data source; with several also of all together.

    A response passes whose value is at least `pass_at`. Raises ValueError if the models answered different prompts.
    """
    if len({tuple(sorted(groups)) for groups in models}) != 1:
        raise ValueError("the models answered different prompts")
    rows: dict[str, list[int]] = {}
    for row, group in sorted(models[0].items()):
        rows.setdefault(str(group[0]["data_source"]), []).append(row)
    chosen = dict(sorted(rows.items()))
    if len(chosen) > 1:
        chosen[ALL] = sorted(models[0])
    return [
        _of_source(source, [[groups[row] for row in rows] for groups in models], pass_at) for source, rows in chosen.items()
    ]


def _of_source(source: str, models: Sequence[Sequence[Sequence[Record]]], pass_at: float) -> SourceResult:
    flat = [[record for group in groups for record in group] for groups in models]
    values = [np.array([[logged_value(record) for record in group] for group in groups]) for groups in models]
    per_prompt = [_metrics(values_PN, groups, pass_at) for values_PN, groups in zip(values, models, strict=True)]
    first = per_prompt[0]
    return SourceResult(
        source=source,
        num_prompts=len(models[0]),
        metrics={name: [estimates.interval(model_metrics[name]) for model_metrics in per_prompt] for name in first},
        differences={
            name: [estimates.paired_difference(first[name], model_metrics[name]) for model_metrics in per_prompt[1:]]
            for name in first
        },
        lengths=[fmean(record.get("response_length") or 0 for record in records) for records in flat],
        truncated=[fmean(record.get("finish_reason") == "length" for record in records) for records in flat],
        failures=[sum(record.get("failure") is not None for record in records) for records in flat],
        binary=all(bool(np.isin(values_PN, (0.0, 1.0)).all()) for values_PN in values),
    )


def _metrics(values_PN: np.ndarray, groups: Sequence[Sequence[Record]], pass_at: float) -> dict[str, np.ndarray]:
    n = values_PN.shape[1]
    passed_P = (values_PN >= pass_at - 1e-9).sum(axis=1)
    metrics = {f"mean@{n}": values_PN.mean(axis=1)}
    metrics |= {f"pass@{k}": estimates.pass_at_k(passed_P, n, k) for k in estimates.ks_of(n)}
    if n > 1:
        answers = [[(record.get("reward_parts") or {}).get("answer") for record in group] for group in groups]
        metrics[f"maj@{n}"] = np.array([majority(votes) for votes in map(zip, values_PN.tolist(), answers)])
    return metrics


def as_json(results: Sequence[SourceResult], labels: Sequence[str]) -> list[dict[str, Any]]:
    def by_label(values: list[Any]) -> dict[str, Any]:
        return dict(zip(labels[len(labels) - len(values) :], values, strict=True))

    return [
        {
            "data_source": result["source"],
            "num_prompts": result["num_prompts"],
            "metrics": {name: by_label(values) for name, values in result["metrics"].items()},
            f"differences to {labels[0]}": {name: by_label(values) for name, values in result["differences"].items()},
            "response_length": by_label(result["lengths"]),
            "truncated": by_label(result["truncated"]),
            "reward_failures": by_label(result["failures"]),
        }
        for result in map(dataclasses.asdict, results)
    ]


def shown_metrics(result: SourceResult) -> list[str]:
    """The mean, pass at the smallest, a middle and the largest k, the majority."""
    names = list(result.metrics)
    passes = [name for name in names if name.startswith("pass@")]
    # With values of 0 and 1 pass@1 is the mean.
    shown_passes = passes[1:] if result.binary else passes
    some = shown_passes if len(shown_passes) <= 3 else [shown_passes[0], shown_passes[len(shown_passes) // 2], shown_passes[-1]]
    return [name for name in names if not name.startswith("pass@") or name in some]


def table(result: SourceResult, labels: Sequence[str]) -> Table:
    rows = [[name, *map(_text, result.metrics[name])] for name in shown_metrics(result)]
    rows.append(["tokens per response", *(f"{length:.1f}" for length in result.lengths)])
    rows.append(["cut at the limit", *(f"{share:.1%}" for share in result.truncated)])
    rows.append(["failed rewards", *map(str, result.failures)])
    return ["", *labels], rows


def differences_table(result: SourceResult, labels: Sequence[str]) -> Table:
    rows = [
        [name, *(f"{_text(difference, '+')} {p_text(difference.p)}" for difference in result.differences[name])]
        for name in shown_metrics(result)
    ]
    return [f"minus {labels[0]}", *labels[1:]], rows


def _text(estimate: Estimate, sign: str = "") -> str:
    """`0.312 [0.281, 0.344]`; without the interval if there is none."""
    ends = "" if math.isnan(estimate.low) else f" [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
    return f"{estimate.mean:{sign}.3f}{ends}"


def p_text(p: float) -> str:
    return "p<0.0001" if p < 1e-4 else f"p={p:.4f}" if p < 0.01 else f"p={p:.3f}"
