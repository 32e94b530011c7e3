"""The results of an evaluation: estimates for each data source and model, differences between models, and their tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_rl.evaluation import estimates
from grpo_rl.evaluation.estimates import Difference, Estimate
from grpo_rl.evaluation.response_file import Record
from grpo_rl.rewards.validation_metrics import majority, value_of

ALL = "all sources"
Groups = Mapping[int, Sequence[Record]]
"""The n responses to each prompt, by its row."""
Table = tuple[list[str], list[list[str]]]
"""Header and rows of texts."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a log of responses, as the metrics of validation read a rollout."""

    reward: float | None
    reward_parts: dict[str, float]
    failure: str | None


@dataclass(frozen=True, slots=True)
class Values:
    """The numbers of one model's responses to the prompts of one data source."""

    rows: tuple[int, ...]
    values_PN: np.ndarray
    """The value of each response: its accuracy where the reward gives one, else the reward; 0 where the reward failed."""
    majority_P: np.ndarray
    """The value of the answer with the most votes; the mean over answers that tie."""
    lengths_PN: np.ndarray
    truncated_PN: np.ndarray
    failures: int

    @property
    def n(self) -> int:
        """The number of responses to a prompt."""
        return int(self.values_PN.shape[1])

    def metrics(self, pass_at: float) -> dict[str, np.ndarray]:
        """Return each metric's value for every prompt, by name. A response passes whose value is at least `pass_at`."""
        n = self.n
        passed_P = (self.values_PN >= pass_at - 1e-9).sum(axis=1)
        found = {f"mean@{n}": self.values_PN.mean(axis=1)}
        found |= {f"pass@{k}": estimates.pass_at_k(passed_P, n, k) for k in estimates.ks_of(n)}
        if n > 1:
            found[f"maj@{n}"] = self.majority_P
        return found


@dataclass(frozen=True, slots=True)
class SourceResult:
    """The results of all models on one data source."""

    source: str
    num_prompts: int
    metrics: dict[str, list[Estimate]]
    """One estimate for each model, by metric."""
    differences: dict[str, list[Difference]]
    """The difference of each further model to the first, by metric."""
    lengths: list[float]
    truncated: list[float]
    failures: list[int]
    binary: bool
    """True where every value is 0 or 1."""


def values_of(groups: Groups, source: str | None = None) -> Values:
    """Return the numbers of the responses to the prompts of one data source, or of all."""
    chosen = {row: group for row, group in sorted(groups.items()) if source is None or group[0]["data_source"] == source}
    lines = [[_line(record) for record in group] for group in chosen.values()]
    return Values(
        rows=tuple(chosen),
        values_PN=np.array([[value_of(line) for line in group] for group in lines], dtype=np.float64),
        majority_P=np.array([majority(group) for group in lines], dtype=np.float64),
        lengths_PN=np.array([[record.get("response_length") or 0 for record in group] for group in chosen.values()]),
        truncated_PN=np.array([[record.get("finish_reason") == "length" for record in group] for group in chosen.values()]),
        failures=sum(line.failure is not None for group in lines for line in group),
    )


def results_of(models: Sequence[Groups], *, pass_at: float = 1.0, seed: int = 0) -> list[SourceResult]:
    """Return the results by data source, of all models on the same prompts; with several sources also those of all together.

    Raises ValueError where the models answered different prompts.
    """
    if len({tuple(sorted(groups)) for groups in models}) != 1:
        raise ValueError("the models answered different prompts")
    sources = sorted({str(group[0]["data_source"]) for group in models[0].values()})
    named: list[tuple[str, str | None]] = [(source, source) for source in sources]
    if len(sources) > 1:
        named.append((ALL, None))
    return [_of_source(name, [values_of(groups, source) for groups in models], pass_at, seed) for name, source in named]


def as_json(results: Sequence[SourceResult], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results as plain values, each model by its label."""

    def by_label(values: list[Any]) -> dict[str, Any]:
        return dict(zip(labels[len(labels) - len(values) :], values, strict=True))

    return [
        {
            "data_source": one["source"],
            "num_prompts": one["num_prompts"],
            "metrics": {name: by_label(values) for name, values in one["metrics"].items()},
            f"differences to {labels[0]}": {name: by_label(values) for name, values in one["differences"].items()},
            "response_length": by_label(one["lengths"]),
            "truncated": by_label(one["truncated"]),
            "reward_failures": by_label(one["failures"]),
        }
        for one in map(dataclasses.asdict, results)
    ]


def shown_metrics(result: SourceResult) -> list[str]:
    """Return the metrics that a table has room for: the mean, pass at the smallest, a middle and the largest k, the majority."""
    names = list(result.metrics)
    passes = [name for name in names if name.startswith("pass@")]
    # With values of 0 and 1 pass@1 is the mean.
    kept = passes[1:] if result.binary else passes
    some = kept if len(kept) <= 3 else [kept[0], kept[len(kept) // 2], kept[-1]]
    return [name for name in names if not name.startswith("pass@") or name in some]


def table(result: SourceResult, labels: Sequence[str]) -> Table:
    """Return header and rows of one data source: a column for each model, a row for each number."""
    rows = [[name, *map(_text, result.metrics[name])] for name in shown_metrics(result)]
    rows.append(["tokens per response", *(f"{length:.1f}" for length in result.lengths)])
    rows.append(["cut at the limit", *(f"{share:.1%}" for share in result.truncated)])
    rows.append(["failed rewards", *map(str, result.failures)])
    return ["", *labels], rows


def differences_table(result: SourceResult, labels: Sequence[str]) -> Table:
    """Return header and rows of the differences to the first model: a column for each of the others."""
    rows = [
        [name, *(f"{_text(found, '+')} {p_text(found.p)}" for found in result.differences[name])]
        for name in shown_metrics(result)
    ]
    return [f"minus {labels[0]}", *labels[1:]], rows


def _text(found: Estimate | Difference, sign: str = "") -> str:
    """Return `0.312 [0.281, 0.344]`; without the interval where there is none."""
    ends = "" if math.isnan(found.low) else f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
    return f"{found.mean:{sign}.3f}{ends}"


def p_text(p: float) -> str:
    """Return `p=0.027`, and for very small ones `p<0.0001`."""
    return "p<0.0001" if p < 1e-4 else f"p={p:.4f}" if p < 0.01 else f"p={p:.3f}"


def _of_source(source: str, models: Sequence[Values], pass_at: float, seed: int) -> SourceResult:
    per_prompt = [values.metrics(pass_at) for values in models]
    names = list(per_prompt[0])
    first = per_prompt[0]
    return SourceResult(
        source=source,
        num_prompts=len(models[0].rows),
        metrics={name: [estimates.interval(one[name], seed=seed) for one in per_prompt] for name in names},
        differences={
            name: [estimates.paired_difference(first[name], one[name], seed=seed) for one in per_prompt[1:]] for name in names
        },
        lengths=[float(values.lengths_PN.mean()) for values in models],
        truncated=[float(values.truncated_PN.mean()) for values in models],
        failures=[values.failures for values in models],
        binary=all(bool(np.isin(values.values_PN, (0.0, 1.0)).all()) for values in models),
    )


def _line(record: Record) -> _Line:
    parts = {
        str(key): float(value) for key, value in (record.get("reward_parts") or {}).items() if isinstance(value, int | float)
    }
    reward = record.get("reward")
    return _Line(float(reward) if isinstance(reward, int | float) else 0.0, parts, record.get("failure"))
