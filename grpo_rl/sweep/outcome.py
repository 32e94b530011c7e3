"""The runs of a sweep, named after their values, and their result: a table with mean and spread per setting.

`python -m grpo_rl.sweep.outcome FOLDER` makes it from the folder of a sweep, also of one whose runs were submitted to a
cluster one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_rl.config import overrides
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.evaluation.estimates import Estimate
from grpo_rl.run_files import read_json
from grpo_rl.telemetry.metrics.metrics_file import is_count, read_metrics
from grpo_rl.telemetry.metrics.validation import validation_score
from grpo_rl.telemetry.status import read_status
from grpo_rl.telemetry.terminal.text import number, say

SEED_AXES = ("seed", *overrides.SEEDS)
"""Axes whose runs differ by chance alone: results are averaged over them."""
SWEEP_FILE = "sweep.json"
_PLAIN = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 60
LAST_STEPS = 5
"""The number of last training steps whose mean stands for the end of a run."""
LEAST_STEPS = 8
"""Fewer than twice as many steps as the curve has parameters say nothing about its end."""
LEVEL = 0.90
_HALFWAYS = np.geomspace(0.1, 10.0, 30)
"""T, in lengths of what has been seen: beyond, the curve is flat or straight."""
_EXPONENTS = (0.7, 1.0, 1.4, 2.0, 3.0)
_DRAWS = 20_000
LOSSES = {"validation loss": "val/loss", "training loss": "train/loss"}


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    values: Mapping[str, str]
    """The value of each axis, as Hydra writes it."""
    name: str
    """The name of the run's folder, such as `lr=0.001,seed=2`."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The values that are no seeds: runs with the same ones are repetitions of each other."""
        return tuple((key, value) for key, value in self.values.items() if key not in SEED_AXES)


@dataclass(frozen=True, slots=True)
class SweptRun:
    """The end of one run."""

    point: Point
    state: str
    steps: int
    """The number of training steps that were logged."""
    values: Mapping[str, float]
    """The measures at the end, by the names of the table's columns."""
    expected: str = ""
    """What the reward would have come to, where the run ended before its last step."""


def summarize(folder: Path, points: Sequence[Point]) -> str:
    """Return the table, one row per setting, and write it to sweep.txt."""
    results = [_result(folder / point.name, point) for point in points]
    columns = list(dict.fromkeys(name for result in results for name in result.values))
    file = folder / "sweep.txt"
    text = f"{_table(results, columns)}\n\nWritten: {file}"
    begun = [shlex.quote(str(folder / one.point.name)) for one in results if one.values]
    text += f"\nTheir curves over each other: grpo-rl page {' '.join(begun)}\n" if begun else "\n"
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the sweep in a folder, and write it there."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_rl.sweep.outcome",
        description="Make the table of a sweep from the folder in which its runs lie.",
        epilog="example: python -m grpo_rl.sweep.outcome runs/grpo_rl/my_sweep",
    )
    parser.add_argument("folder", type=Path, help="the folder in which the folders of the runs lie")
    folder = parser.parse_args(argv).folder
    points = read_points(folder)
    if not points:
        print(
            f"error: {folder}: there is neither a sweep.json nor the folder of a run named by values, as seed=1",
            file=sys.stderr,
        )
        return DataError.exit_code
    say(redact(summarize(folder, points)))
    return 0


def _result(folder: Path, point: Point) -> SweptRun:
    records = read_metrics(folder / "metrics.jsonl")
    values: dict[str, float] = {}
    scores = [score for record in records if (score := validation_score(record)) is not None]
    if scores:
        values["validation"] = scores[-1]
    for name, key in ({"reward": "reward/mean"} | LOSSES).items():
        points = [record[key] for record in records if key in record]
        if points:
            values[name] = points[-1] if key == "val/loss" else statistics.fmean(points[-LAST_STEPS:])
    seconds = [record["timing_s/step"] for record in records if "timing_s/step" in record]
    if seconds:
        values["s/step"] = statistics.median(seconds)
    status = read_status(folder)
    steps, total = sum(record["step"] > 0 for record in records), int(status["total"]) if is_count(status.get("total")) else 0
    expected = ""
    if status.get("state") != "done" and steps < total:
        end = expected_end([record["reward/mean"] for record in records if "reward/mean" in record], total, LAST_STEPS)
        if end is not None:
            expected = f"; expected reward at step {total}: {end.mean:.3f} ({end.low:.3f} to {end.high:.3f} with 90 %)"
    return SweptRun(point, str(status.get("state", "not started")), steps, values, expected)


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged."""
    return max((int(record["step"]) for record in read_metrics(folder / "metrics.jsonl")), default=0)


def score_until(folder: Path, step: int) -> float:
    """Return what a run had reached by this step: its last validation, else its last rewards, else its loss; more is better."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] <= step]
    scores = [score for record in records if record["step"] > 0 and (score := validation_score(record)) is not None]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    losses = [-record[key] for key in ("train/loss", "val/loss") for record in records if key in record]
    return scores[-1] if scores else statistics.fmean(rewards[-LAST_STEPS:]) if rewards else (losses or [-math.inf])[-1]


def _table(results: Sequence[SweptRun], columns: Sequence[str]) -> str:
    """Return one row per setting: its runs that are done, and mean and spread of each column over them."""
    groups: dict[str, list[SweptRun]] = {}
    for result in results:
        label = name_of(dict(result.point.setting)).replace(",", ", ") or "all runs"
        groups.setdefault(label, []).append(result)
    width = max([len("setting"), *map(len, groups)]) + 2
    lines = [f"{'setting':<{width}}{'done':>7}" + "".join(f"{name:>22}" for name in columns)]
    for label, group in groups.items():
        done = [result for result in group if result.state == "done"]
        cells = "".join(f"{_mean_and_spread([r.values[name] for r in done if name in r.values]):>22}" for name in columns)
        lines.append(f"{label:<{width}}{f'{len(done)}/{len(group)}':>7}{cells}")
    lines.append(
        f"mean and standard deviation (n - 1) over the runs that are done; reward: of the last {LAST_STEPS} steps of each"
    )
    lines += [f"  {r.point.name}: {r.state}, {r.steps} steps{r.expected}" for r in results if r.state != "done"]
    return "\n".join(lines)


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {number(statistics.stdev(values), 9).strip()}" if len(values) > 1 else ""
    return f"{number(statistics.fmean(values), 9).strip()}{spread}"


def expected_end(rewards: Sequence[float], end: int, last: int) -> Estimate | None:
    """Return the mean reward of steps `end - last + 1` to `end`, foretold from that of the first steps, with its 90 % interval.

    The curve is ScaleRL's (arXiv 2510.13786, equation 1): R(t) = R0 + (A - R0) / (1 + (T / t)^B), with a start R0, an asymptote A, the
    step T at which half of the way is made, and an exponent B. None for fewer than eight steps. The noise of a step is unknown. For each T and B of a grid the rest is a linear model in R0 and
    A - R0, whose posterior is a Student's t (Gelman et al., "Bayesian Data Analysis", section 14.2); the prior of A - R0 has three
    times the range of the rewards that were seen as its standard deviation, for a curve that has hardly begun to rise says nothing of A. The
    interval is taken from draws of the mixture over the grid, with the noise of the last steps added.
    """
    seen_T = np.asarray(rewards, dtype=np.float64)
    count = len(seen_T)
    if count < LEAST_STEPS:
        return None
    noise = max(np.std(np.diff(seen_T)) / np.sqrt(2), 1e-6)
    precision = np.diag([1e-9, (noise / max(3 * np.ptp(seen_T), 1e-6)) ** 2])
    fits = [
        _posterior(
            seen_T, _curve(1, count, halfway, exponent), _curve(end - last + 1, end, halfway, exponent).mean(0), precision
        )
        for halfway in _HALFWAYS * count
        for exponent in _EXPONENTS
    ]
    log_weight_G, mean_G, spread_G, noise_G = np.array(fits).T
    weight_G = np.exp(log_weight_G - log_weight_G.max())
    generator = np.random.default_rng(0)
    drawn_D = generator.choice(len(fits), _DRAWS, p=weight_G / weight_G.sum())
    spread_D = np.sqrt(spread_G[drawn_D] + noise_G[drawn_D] / last)
    end_D = mean_G[drawn_D] + generator.standard_t(count - 2, _DRAWS) * spread_D
    tail = (1 - LEVEL) / 2
    low, middle, high = np.quantile(end_D, [tail, 0.5, 1 - tail])
    return Estimate(float(middle), float(low), float(high))


def _curve(first: int, last: int, halfway: float, exponent: float) -> np.ndarray:
    """Return [steps, 2]: what R0 and A - R0 are multiplied by in each step."""
    steps_T = np.arange(first, last + 1, dtype=np.float64)
    return np.stack([np.ones_like(steps_T), 1.0 / (1.0 + (halfway / steps_T) ** exponent)], axis=-1)


def _posterior(seen_T: np.ndarray, curve_TP: np.ndarray, end_P: np.ndarray, precision_PP: np.ndarray) -> tuple[float, ...]:
    """Return the logarithm of the evidence, the expected end, its variance, and the variance of one step's noise."""
    moments_PP = curve_TP.T @ curve_TP + precision_PP
    fitted_P = np.linalg.solve(moments_PP, curve_TP.T @ seen_T)
    residual_T = seen_T - curve_TP @ fitted_P
    loss = max(float(residual_T @ residual_T + fitted_P @ precision_PP @ fitted_P), 1e-12)
    freedom = len(seen_T) - 2
    log_evidence = -freedom / 2 * np.log(loss) - np.linalg.slogdet(moments_PP)[1] / 2
    variance = loss / freedom
    return log_evidence, float(end_P @ fitted_P), float(variance * end_P @ np.linalg.solve(moments_PP, end_P)), variance


def read_points(folder: Path) -> list[Point]:
    """Return the runs of the sweep in `folder`; those of runs that were submitted one by one go by the names of their folders."""
    try:
        if (folder / SWEEP_FILE).exists():
            return [Point(dict(entry["values"]), str(entry["name"])) for entry in read_json(folder / SWEEP_FILE)]
        names = sorted(path.parent.name for path in folder.glob("*=*/config.yaml"))
        return [Point(dict(part.partition("=")[::2] for part in name.split(",")), name) for name in names]
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} cannot be read: {error}") from None


def name_of(values: Mapping[str, str]) -> str:
    """Return `lr=0.001,seed=2`: the last parts of the keys, as many as tell them apart, and the values in plain letters."""
    return ",".join(f"{_shortest(key, list(values))}={_plain(value)}" for key, value in values.items())


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        ending = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{ending}") for other in keys) == 1:
            return ending
    return key


def _plain(value: str) -> str:
    text = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    plain = _PLAIN.sub("-", text)[:_LONGEST]
    # Two values that look alike without their special characters must not share a folder.
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


if __name__ == "__main__":
    sys.exit(main())
