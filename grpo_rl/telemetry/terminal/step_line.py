"""One training step as one line of a table, and the header above it: the metrics that a person sees."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from grpo_rl.telemetry.metrics.validation import shown_keys, validation_keys, validation_score
from grpo_rl.telemetry.terminal.text import number, safe_text

PHASES = {
    "gen": "timing_s/gen",
    "reward": "timing_s/reward",
    "ref": "timing_s/ref",
    "update": "timing_s/update_actor",
    "sync": "timing_s/sync_weights",
}
"""Phases that have a column of their own; what is left of the step is `other`."""
MOST_COMPONENTS = 4
"""Components of the reward that a line has room for."""
OVERALL = ("mean", "max", "min", "std", "greedy_baseline_mean")
"""The keys `reward/<key>` that are about the whole reward."""
FAILURES = {
    "timeouts": "past the deadline",
    "errors": "raised an error",
    "invalid": "gave no number",
    "dropped": "dropped from the step",
    "failed_baselines": "without a greedy response to compare with",
    "broken_groups": "groups that compare nothing any more",
}
"""The keys `reward/<key>` that count scores which could not be had, by what happened."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a line and how much a reader should notice it."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its name, its width, and the metric or function that has its values."""

    name: str
    width: int
    value: str | Callable[[Metrics], float | None]
    digits: int = 3
    style: str = ""

    def cell(self, metrics: Metrics) -> Cell:
        """Return the value of a step; "-" for what it did not measure."""
        value = metrics.get(self.value) if isinstance(self.value, str) else self.value(metrics)
        return Cell(number(value, self.width, self.digits), self.style)


def _seconds(metrics: Metrics) -> float | None:
    # Rounded first: half a millisecond is 0.00 s to a reader, not 5e-04.
    seconds = metrics.get("timing_s/step")
    return None if seconds is None else round(seconds, 2)


def _gradient(metrics: Metrics) -> float | None:
    return metrics.get("actor/grad_norm", metrics.get("reward_model/grad_norm"))


_VALID = "bold green"
_SPEED = (Column("tok/s", 8, "perf/tokens_per_s", 0), Column("seconds", 8, _seconds, 2))
_SAMPLED = (
    Column("reward", 8, "reward/mean", style="bold"),
    Column("valid", 8, validation_score, style=_VALID),
    Column("kl", 9, "actor/kl_loss", 5),
    Column("clip", 8, "actor/pg_clipfrac", 4),
    Column("length", 8, "response_length/mean", 1),
    *_SPEED,
)
_LOSSES = (Column("loss", 9, "train/loss", 4, "bold"), Column("val loss", 9, "val/loss", 4, _VALID))
_ANSWERS = Column("answers", 9, validation_score, style=_VALID)
_SUPERVISED = (
    *_LOSSES,
    Column("val ppl", 10, "val/perplexity"),
    _ANSWERS,
    Column("lr", 10, "actor/lr", 7),
    Column("grad", 9, _gradient),
    Column("trained", 9, "train/num_tokens", 0),
    *_SPEED,
)
_PAIRS = (
    *_LOSSES,
    Column("accuracy", 10, "train/accuracy"),
    Column("val acc", 9, "val/accuracy", style=_VALID),
    Column("margin", 9, "train/margin"),
    Column("val marg", 9, "val/margin", style=_VALID),
    _ANSWERS,
    Column("grad", 9, _gradient),
    *_SPEED,
)
"""Of a run that learns from pairs: losses per pair, how many are in the right order and by how much. Of a reward model that learns
rated steps they are losses per step, and the share that it judges right."""


def header(metrics: Metrics = MappingProxyType({})) -> list[Cell]:
    """Return the names of the columns of the table that `line` writes for such metrics, each as wide as its values.

    Nothing for metrics of validations of prompts alone, which every kind of run has, and whose line names them itself.
    """
    if metrics and _is_validation(metrics):
        return []
    columns = _columns(metrics)
    names = f"{'step':>9}" + "".join(column.name.rjust(column.width) for column in columns) + f"{'left':>8}"
    phases = "  |" + "".join(name.rjust(7) for name in (*PHASES, "other"))
    return [Cell(names + (phases if columns is _SAMPLED else ""), "bold")]


def line(step: int, total: int, metrics: Metrics, left_s: float | None = None) -> list[Cell]:
    """Return the values under `header()`: of a run that samples 119 columns, and after them the reward's components and failures."""
    place = Cell(f"{step}/{total}".rjust(9))
    if _is_validation(metrics):
        return [place, _validation(metrics)]
    columns = _columns(metrics)
    cells = [place, *(column.cell(metrics) for column in columns)]
    cells.append(Cell(("-" if left_s is None else _short_duration(left_s)).rjust(8)))
    if columns is not _SAMPLED:
        return cells
    has_reward = len(shown_keys([metrics])) > len(validation_keys(metrics))
    return [*cells, _phases(metrics), *_rewards(metrics), *([_validation(metrics)] if has_reward else [])]


def _columns(metrics: Metrics) -> tuple[Column, ...]:
    if "train/accuracy" in metrics or "val/accuracy" in metrics:
        return _PAIRS
    return _SUPERVISED if _is_supervised(metrics) else _SAMPLED


def _is_supervised(metrics: Metrics) -> bool:
    return any(name in metrics for name in ("train/loss", "val/loss", "collect/kept"))


def _is_validation(metrics: Metrics) -> bool:
    """Return whether these are validations of prompts before the training, from which no kind of run can be told."""
    return bool(validation_keys(metrics)) and "reward/mean" not in metrics and not _is_supervised(metrics)


def _phases(metrics: Metrics) -> Cell:
    """Return the seconds of each phase, and those of the step that no phase has."""
    seconds = metrics.get("timing_s/step")
    phases = {name: metrics.get(key) for name, key in PHASES.items()}
    # Where responses are sampled beside the training, what is waited for them.
    phases["gen"] = metrics.get("timing_s/wait_for_rollouts", phases["gen"])
    other = None if seconds is None else max(0.0, seconds - sum(value or 0.0 for value in phases.values()))
    shown = (number(None if value is None else round(value, 2), 7, 2) for value in (*phases.values(), other))
    return Cell("  |" + "".join(shown), "dim")


def _rewards(metrics: Metrics) -> list[Cell]:
    """Return the components of a reward that has several, and how many scores failed, where some did."""
    parts = {key.removeprefix("reward/"): value for key, value in metrics.items() if key.startswith("reward/")}
    # `acc` and `answer` stand there twice: by themselves, for validation, and under the component that gave them.
    names = [
        name
        for name in parts
        if name not in (*OVERALL, *FAILURES) and "/" not in name and not any(other.endswith(f"/{name}") for other in parts)
    ]
    cells = []
    if len(names) > 1:
        shown = "".join(f"  {safe_text(name, limit=16)}{number(parts[name], 7)}" for name in names[:MOST_COMPONENTS])
        more = f"  and {len(names) - MOST_COMPONENTS} more" if len(names) > MOST_COMPONENTS else ""
        cells.append(Cell(f"  |{shown}{more}", "dim"))
    failures = {"timed out": "timeouts", "in error": "errors", "invalid": "invalid"}
    counts = {text: parts[name] for text, name in failures.items() if parts.get(name)}
    if counts:
        kinds = ", ".join(f"{count:g} {text}" for text, count in counts.items())
        cells.append(Cell(f"  {sum(counts.values()):g} scores failed ({kinds})", "bold red"))
    return cells


def _validation(metrics: Metrics) -> Cell:
    """Return the validation by name: what has the column `valid`, and the reward where that is another number."""
    keys = validation_keys(metrics)
    text = f"{keys[0].rpartition('/')[2]}{number(validation_score(metrics), 7)}"
    if len(shown_keys([metrics])) > len(keys):
        rewards = [metrics[key.rpartition("/")[0] + "/reward"] for key in keys]
        text += f", reward{number(statistics.fmean(rewards), 7)}"
    return Cell(f"  |  valid: {text}", "dim")


def _short_duration(seconds: float) -> str:
    """Return `45s`, `12m05s`, `7h03m` or `3d07h`: at most 7 columns below a thousand days."""
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"
