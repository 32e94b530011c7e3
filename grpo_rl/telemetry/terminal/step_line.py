"""One training step as one line of a table, and the header above it: the metrics that a person sees."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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


def component_keys(records: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the keys `reward/<part>` of the records that are means of a component, those of a component's own dict after it."""
    known = {f"reward/{key}" for key in (*OVERALL, *FAILURES)}
    keys = dict.fromkeys(key for record in records for key in record if key.startswith("reward/") and key not in known)
    # `acc` and `answer` stand there twice: by themselves, for validation, and under the component that gave them.
    doubled = {key for key in keys if any(other != key and other.endswith(f"/{key.removeprefix('reward/')}") for other in keys)}
    spreads = {key for key in keys if key.endswith("/std") and key.removesuffix("/std") in keys}
    return [key for key in keys if key not in doubled | spreads]


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a line and how much a reader should notice it."""

    text: str
    style: str = ""


def header(metrics: Mapping[str, float] = MappingProxyType({})) -> list[Cell]:
    """Return the names of the columns of the table that `line` writes for such metrics, each as wide as its values.

    Nothing for metrics of validations of prompts alone, which every kind of run has, and whose line names them itself.
    """
    if metrics and _is_validation(metrics):
        return []
    if is_supervised(metrics):
        columns = _PAIR_COLUMNS if compares_pairs(metrics) else _SUPERVISED_COLUMNS
        return [Cell(f"{'step':>9}" + "".join(name.rjust(width) for name, width in columns), "bold")]
    names = "".join(name.rjust(width) for name, width in _COLUMNS)
    return [Cell(f"{'step':>9}{names}  |" + "".join(name.rjust(7) for name in (*PHASES, "other")), "bold")]


def is_supervised(metrics: Mapping[str, float]) -> bool:
    """Return whether these are metrics of a run on fixed responses, whose table has other columns."""
    return any(name in metrics for name in ("train/loss", "val/loss", "collect/kept"))


def compares_pairs(metrics: Mapping[str, float]) -> bool:
    """Return whether these are metrics of a run that learns from given pairs of answers."""
    return "train/accuracy" in metrics or "val/accuracy" in metrics


def _is_validation(metrics: Mapping[str, float]) -> bool:
    """Return whether these are validations of prompts before the training, from which no kind of run can be told."""
    return bool(validation_keys(metrics)) and "reward/mean" not in metrics and not is_supervised(metrics)


def _pair_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None) -> list[Cell]:
    """Return losses per pair, how many pairs are in the right order and by how much, and how well prompts were answered.

    Of a reward model that learns rated steps they are losses per step, and the share that it judges right.
    """
    return [
        Cell(f"{step}/{total}".rjust(9)),
        Cell(number(metrics.get("train/loss"), 9, digits=4), "bold"),
        Cell(number(metrics.get("val/loss"), 9, digits=4), "bold green"),
        Cell(number(metrics.get("train/accuracy"), 10)),
        Cell(number(metrics.get("val/accuracy"), 9), "bold green"),
        Cell(number(metrics.get("train/margin"), 9)),
        Cell(number(metrics.get("val/margin"), 9), "bold green"),
        Cell(number(validation_score(metrics), 9), "bold green"),
        Cell(number(metrics.get("actor/grad_norm", metrics.get("reward_model/grad_norm")), 9)),
        Cell(number(metrics.get("perf/tokens_per_s"), 8, digits=0)),
        Cell(_seconds(metrics.get("timing_s/step"), 8)),
        Cell(("-" if left_s is None else _short_duration(left_s)).rjust(8)),
    ]


def _supervised_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None) -> list[Cell]:
    """Return losses per token, how well the prompts were answered, and the optimizer's state."""
    if compares_pairs(metrics):
        return _pair_line(step, total, metrics, left_s)
    return [
        Cell(f"{step}/{total}".rjust(9)),
        Cell(number(metrics.get("train/loss"), 9, digits=4), "bold"),
        Cell(number(metrics.get("val/loss"), 9, digits=4), "bold green"),
        Cell(number(metrics.get("val/perplexity"), 10)),
        Cell(number(validation_score(metrics), 9), "bold green"),
        Cell(number(metrics.get("actor/lr"), 10, digits=7)),
        Cell(number(metrics.get("actor/grad_norm"), 9)),
        Cell(number(metrics.get("train/num_tokens"), 9, digits=0)),
        Cell(number(metrics.get("perf/tokens_per_s"), 8, digits=0)),
        Cell(_seconds(metrics.get("timing_s/step"), 8)),
        Cell(("-" if left_s is None else _short_duration(left_s)).rjust(8)),
    ]


def line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None = None) -> list[Cell]:
    """Return the values under `header()`: 119 columns, "-" for what the step did not measure. After them, the reward's components and failures.

    A run that learns given answers has other columns, under the header for them.
    """
    if _is_validation(metrics):
        return [Cell(f"{step}/{total}".rjust(9)), _validation(metrics)]
    if is_supervised(metrics):
        return _supervised_line(step, total, metrics, left_s)
    seconds = metrics.get("timing_s/step")
    phases = {name: metrics.get(key) for name, key in PHASES.items()}
    # Where responses are sampled beside the training, what is waited for them.
    phases["gen"] = metrics.get("timing_s/wait_for_rollouts", phases["gen"])
    other = None if seconds is None else max(0.0, seconds - sum(value or 0.0 for value in phases.values()))
    return [
        Cell(f"{step}/{total}".rjust(9)),
        Cell(number(metrics.get("reward/mean"), 8), "bold"),
        Cell(number(validation_score(metrics), 8), "bold green"),
        Cell(number(metrics.get("actor/kl_loss"), 9, digits=5)),
        Cell(number(metrics.get("actor/pg_clipfrac"), 8, digits=4)),
        Cell(number(metrics.get("response_length/mean"), 8, digits=1)),
        Cell(number(metrics.get("perf/tokens_per_s"), 8, digits=0)),
        Cell(_seconds(seconds, 8)),
        Cell(("-" if left_s is None else _short_duration(left_s)).rjust(8)),
        Cell("  |" + "".join(_seconds(value, 7) for value in (*phases.values(), other)), "dim"),
        *_rewards(metrics),
        *([_validation(metrics)] if len(shown_keys([metrics])) > len(validation_keys(metrics)) else []),
    ]


def _rewards(metrics: Mapping[str, float]) -> list[Cell]:
    """Return the components of a reward that has several, and how many scores failed, where some did."""
    names = [key for key in component_keys([metrics]) if "/" not in key.removeprefix("reward/")]
    cells = []
    if len(names) > 1:
        shown = "".join(
            f"  {safe_text(key.removeprefix('reward/'), limit=16)}{number(metrics[key], 7)}" for key in names[:MOST_COMPONENTS]
        )
        more = f"  and {len(names) - MOST_COMPONENTS} more" if len(names) > MOST_COMPONENTS else ""
        cells.append(Cell(f"  |{shown}{more}", "dim"))
    kinds_of = {"timed out": "timeouts", "in error": "errors", "invalid": "invalid"}
    failures = {text: metrics.get(f"reward/{kind}", 0.0) for text, kind in kinds_of.items()}
    if failed := sum(failures.values()):
        kinds = ", ".join(f"{count:g} {text}" for text, count in failures.items() if count)
        cells.append(Cell(f"  {failed:g} scores failed ({kinds})", "bold red"))
    return cells


def _validation(metrics: Mapping[str, float]) -> Cell:
    """Return the validation by name: what has the column `valid`, and the reward where that is another number."""
    keys = validation_keys(metrics)
    text = f"{keys[0].rpartition('/')[2]}{number(validation_score(metrics), 7)}"
    if len(shown_keys([metrics])) > len(keys):
        rewards = [metrics[key.rpartition("/")[0] + "/reward"] for key in keys]
        text += f", reward{number(statistics.fmean(rewards), 7)}"
    return Cell(f"  |  valid: {text}", "dim")


def _seconds(value: float | None, width: int) -> str:
    # Rounded first: half a millisecond is 0.00 s to a reader, not 5e-04.
    return number(None if value is None else round(value, 2), width, digits=2)


def _short_duration(seconds: float) -> str:
    """Return `45s`, `12m05s`, `7h03m` or `3d07h`: at most 7 columns below a thousand days."""
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"


_COLUMNS = [("reward", 8), ("valid", 8), ("kl", 9), ("clip", 8), ("length", 8), ("tok/s", 8), ("seconds", 8), ("left", 8)]


_SUPERVISED_COLUMNS = [
    ("loss", 9),
    ("val loss", 9),
    ("val ppl", 10),
    ("answers", 9),
    ("lr", 10),
    ("grad", 9),
    ("trained", 9),
    ("tok/s", 8),
    ("seconds", 8),
    ("left", 8),
]


_PAIR_COLUMNS = [
    ("loss", 9),
    ("val loss", 9),
    ("accuracy", 10),
    ("val acc", 9),
    ("margin", 9),
    ("val marg", 9),
    ("answers", 9),
    ("grad", 9),
    ("tok/s", 8),
    ("seconds", 8),
    ("left", 8),
]
