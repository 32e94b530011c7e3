"""A training step as a line of a table, and its header."""

from __future__ import annotations

import statistics
from types import MappingProxyType

from grpo_rl.telemetry.metrics.metrics_file import Metrics
from grpo_rl.telemetry.metrics.validation import shown_keys, validation_keys, validation_score
from grpo_rl.telemetry.terminal.text import number, safe_text

PHASES = {
    "gen": "timing_s/gen",
    "reward": "timing_s/reward",
    "ref": "timing_s/ref",
    "update": "timing_s/update_actor",
    "sync": "timing_s/sync_weights",
}
MOST_COMPONENTS = 4  # of the reward on a line
OVERALL = ("mean", "max", "min", "std", "greedy_baseline_mean")  # `reward/<key>` of the whole reward
FAILURES = {
    "timeouts": "past the deadline",
    "errors": "raised an error",
    "invalid": "gave no number",
    "dropped": "dropped from the step",
    "failed_baselines": "without a greedy response to compare with",
    "broken_groups": "groups that compare nothing any more",
}  # `reward/<key>` that count failed scores


Piece = tuple[str, str]  # a part of a line, and its style
Column = tuple[str, int, int, str, tuple[str, ...]]
"""Name, width, digits, style, and metrics, of which the first that is there is shown."""

_VALID = "bold green"
_SPEED: tuple[Column, ...] = (
    ("tok/s", 8, 0, "", ("perf/tokens_per_s",)),
    ("seconds", 8, 2, "", ("timing_s/step",)),
)
_SAMPLED: tuple[Column, ...] = (
    ("reward", 8, 3, "bold", ("reward/mean",)),
    ("valid", 8, 3, _VALID, ("valid",)),
    ("kl", 9, 5, "", ("actor/kl_loss",)),
    ("clip", 8, 4, "", ("actor/pg_clipfrac",)),
    ("length", 8, 1, "", ("response_length/mean",)),
    *_SPEED,
)
_LOSSES: tuple[Column, ...] = (("loss", 9, 4, "bold", ("train/loss",)), ("val loss", 9, 4, _VALID, ("val/loss",)))
_ANSWERS: Column = ("answers", 9, 3, _VALID, ("valid",))
_GRADIENT: Column = ("grad", 9, 3, "", ("actor/grad_norm", "reward_model/grad_norm"))
_SUPERVISED: tuple[Column, ...] = (
    *_LOSSES,
    ("val ppl", 10, 3, "", ("val/perplexity",)),
    _ANSWERS,
    ("lr", 10, 7, "", ("actor/lr",)),
    _GRADIENT,
    ("trained", 9, 0, "", ("train/num_tokens",)),
    *_SPEED,
)
_PAIRS: tuple[Column, ...] = (
    *_LOSSES,
    ("accuracy", 10, 3, "", ("train/accuracy",)),
    ("val acc", 9, 3, _VALID, ("val/accuracy",)),
    ("margin", 9, 3, "", ("train/margin",)),
    ("val marg", 9, 3, _VALID, ("val/margin",)),
    _ANSWERS,
    _GRADIENT,
    *_SPEED,
)
"""Losses and margins of rows. Accuracy: the share of pairs in the right order, of labelled answers on the side of their label,
of rated steps judged right."""


def header(metrics: Metrics = MappingProxyType({})) -> list[Piece]:
    if metrics and _is_validation(metrics):
        return []
    columns = _columns(metrics)
    names = f"{'step':>9}" + "".join(name.rjust(width) for name, width, *_ in columns) + f"{'left':>8}"
    phases = "  |" + "".join(name.rjust(7) for name in (*PHASES, "other"))
    return [(names + (phases if columns is _SAMPLED else ""), "bold")]


def line(step: int, total: int, metrics: Metrics, left_s: float | None = None) -> list[Piece]:
    """For a run that samples 119 columns, then the reward's components and failures."""
    pieces = [(f"{step}/{total}".rjust(9), "")]
    if _is_validation(metrics):
        return [*pieces, _validation(metrics)]
    columns, values = _columns(metrics), {**metrics, "valid": validation_score(metrics)}
    for _, width, digits, style, names in columns:
        pieces.append((_number(next((values[name] for name in names if name in values), None), width, digits), style))
    pieces.append((("-" if left_s is None else _short_duration(left_s)).rjust(8), ""))
    if columns is not _SAMPLED:
        return pieces
    has_reward = len(shown_keys([metrics])) > len(validation_keys(metrics))
    return [*pieces, _phases(metrics), *_rewards(metrics), *([_validation(metrics)] if has_reward else [])]


def _number(value: float | None, width: int, digits: int) -> str:
    # Seconds are rounded first: half a millisecond shows as 0.00, not 5e-04.
    return number(value if value is None or digits != 2 else round(value, 2), width, digits)


def _columns(metrics: Metrics) -> tuple[Column, ...]:
    if "train/accuracy" in metrics or "val/accuracy" in metrics:
        return _PAIRS
    return _SUPERVISED if _is_supervised(metrics) else _SAMPLED


def _is_supervised(metrics: Metrics) -> bool:
    return any(name in metrics for name in ("train/loss", "val/loss", "collect/kept"))


def _is_validation(metrics: Metrics) -> bool:
    """Return whether these are validations before training, which do not tell the kind of run."""
    return bool(validation_keys(metrics)) and "reward/mean" not in metrics and not _is_supervised(metrics)


def _phases(metrics: Metrics) -> Piece:
    seconds = metrics.get("timing_s/step")
    phases = {name: metrics.get(key) for name, key in PHASES.items()}
    # Beside the training, the wait for responses.
    phases["gen"] = metrics.get("timing_s/wait_for_rollouts", phases["gen"])
    other = None if seconds is None else max(0.0, seconds - sum(value or 0.0 for value in phases.values()))
    return "  |" + "".join(_number(value, 7, 2) for value in (*phases.values(), other)), "dim"


def _rewards(metrics: Metrics) -> list[Piece]:
    parts = {key.removeprefix("reward/"): value for key, value in metrics.items() if key.startswith("reward/")}
    # `acc` and `answer` are also there under the component that gave them.
    names = [
        name
        for name in parts
        if name not in (*OVERALL, *FAILURES) and "/" not in name and not any(other.endswith(f"/{name}") for other in parts)
    ]
    pieces = []
    if len(names) > 1:
        components = "".join(f"  {safe_text(name, limit=16)}{number(parts[name], 7)}" for name in names[:MOST_COMPONENTS])
        rest = f"  and {len(names) - MOST_COMPONENTS} more" if len(names) > MOST_COMPONENTS else ""
        pieces.append((f"  |{components}{rest}", "dim"))
    failures = {"timed out": "timeouts", "in error": "errors", "invalid": "invalid"}
    counts = {text: parts[name] for text, name in failures.items() if parts.get(name)}
    if counts:
        kinds = ", ".join(f"{count:g} {text}" for text, count in counts.items())
        pieces.append((f"  {sum(counts.values()):g} scores failed ({kinds})", "bold red"))
    return pieces


def _validation(metrics: Metrics) -> Piece:
    keys = validation_keys(metrics)
    text = f"{keys[0].rpartition('/')[2]}{number(validation_score(metrics), 7)}"
    if len(shown_keys([metrics])) > len(keys):
        rewards = [metrics[key.rpartition("/")[0] + "/reward"] for key in keys]
        text += f", reward{number(statistics.fmean(rewards), 7)}"
    return f"  |  valid: {text}", "dim"


def _short_duration(seconds: float) -> str:
    """At most 7 columns below a thousand days: `45s`, `12m05s`, `7h03m`, `3d07h`."""
    rounded = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if rounded >= size:
            return f"{rounded // size}{unit}{rounded % size // smaller_size:02d}{smaller}"
    return f"{rounded}s"
