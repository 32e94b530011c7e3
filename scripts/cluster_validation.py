"""The cluster model against runs of this program: rates from a part of their steps, and step times of the others predicted."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from cluster_model import ClusterRates, EngineRates, TrainerRates, Work, replayed, simulate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo_rl.telemetry.metrics.timeline import Interval, busy_seconds, read_timeline  # noqa: E402
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts, step_files  # noqa: E402

WARM_UP_STEPS = 2
"""The first steps of a run, in which caches and pipelines are cold."""
LAST_STEPS = 2
"""The last steps of a run in which roles overlap: nothing more is to be sampled in them."""
OVERLAPPING = ("one_step_off", "async")
"""The schedules in which engines and trainer work at the same time."""
TRAINING = ("actor", "reference", "critic")
BAR = 0.10
PREDICTED_STEPS = 200
"""Steps of a prediction, whose mean is compared; the measured lengths are used again and again."""


@dataclass(frozen=True)
class Step:
    """One measured step, in seconds."""

    number: int
    whole_s: float
    rollout_s: float
    """Seconds in which requests were under way; `trainer_s` and `transfer_s` are those of the other roles."""
    trainer_s: float
    transfer_s: float
    rest_s: float
    """Seconds between the other parts: rewards that are waited for, collating, logs. Of a schedule that overlaps, those in
    which the trainer neither works, nor gets rid of its weights, nor waits for responses."""
    lengths: np.ndarray
    """The response lengths of what the step logged."""
    prompts: int
    """Tokens of all its prompts, each counted once per response."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum()) + self.prompts


@dataclass(frozen=True)
class MeasuredRun:
    """A run's steps after the warm-up, and the settings that the model reads."""

    folder: Path
    schedule: str
    num_groups: int
    group_size: int
    replicas: int
    slots: int
    max_staleness: int
    steps: list[Step]

    @property
    def step_s(self) -> float:
        return statistics.fmean(step.whole_s for step in self.steps)


def read_run(folder: Path) -> MeasuredRun:
    """Return what a run left. Raises ValueError where it has no timeline, too few steps, or no log of rollouts."""
    intervals = read_timeline(folder / "timeline.jsonl")
    files = dict(step_files(folder / "rollouts"))
    marks = {one.step: one for one in intervals if one.role == "step"}
    numbers = [number for number in sorted(marks) if number in files][WARM_UP_STEPS:]
    _enough(folder, numbers)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    rollout, trainer = config["actor_rollout_ref"]["rollout"], config["trainer"]
    shared = not rollout["nnodes"]
    devices = (
        (trainer["nnodes"] * (trainer["n_gpus_per_node"] or 1))
        if shared
        else rollout["nnodes"] * (rollout["n_gpus_per_node"] or 1)
    )
    schedule = "colocated" if shared and trainer["schedule"] == "sync" else trainer["schedule"]
    numbers = [number for number in sorted(marks) if number in files][WARM_UP_STEPS:]
    numbers = numbers[:-LAST_STEPS] if schedule in OVERLAPPING else numbers
    if len(numbers) < 4:
        raise ValueError(
            f"{folder}: {len(numbers)} steps with a timeline and rollouts, without the first and last ones; 4 are needed"
        )
    return MeasuredRun(
        folder,
        schedule,
        config["data"]["train_batch_size"],
        rollout["n"],
        max(1, devices // rollout["tensor_model_parallel_size"]),
        rollout["max_num_seqs"],
        (trainer.get("asynchronous") or {}).get("max_staleness", 1),
        [_step(marks[number], intervals, files[number]) for number in numbers],
    )


def _enough(folder: Path, numbers: Sequence[int]) -> None:
    if len(numbers) < 4:
        raise ValueError(
            f"{folder}: {len(numbers)} steps with a timeline and rollouts, without the first and last ones; 4 are needed"
        )


def _step(mark: Interval, intervals: Sequence[Interval], log: Path) -> Step:
    """Return the step of this mark; other roles' work counts where it lies between the mark's ends."""

    def busy(*roles: str) -> float:
        return busy_seconds([one for one in intervals if one.role in roles], mark.start, mark.end)

    records = read_rollouts(log)
    path = (*TRAINING, "weights", "wait" if any(one.role == "wait" for one in intervals) else "rollout")
    return Step(
        mark.step,
        mark.end - mark.start,
        busy("rollout"),
        busy(*TRAINING),
        busy("weights"),
        mark.end - mark.start - busy(*path),
        np.asarray([record["response_length"] for record in records], dtype=np.int64),
        sum(record["prompt_length"] for record in records),
    )


def lengths_of(folder: Path) -> tuple[int, list[int]]:
    """Return the mean prompt length and all response lengths of a run's log of rollouts."""
    records: list[dict[str, Any]] = [record for _, path in step_files(folder / "rollouts") for record in read_rollouts(path)]
    if not records:
        raise ValueError(f"{folder} has no log of rollouts")
    prompt = round(statistics.fmean(record["prompt_length"] for record in records))
    return prompt, [record["response_length"] for record in records]


def decode_steps(lengths: np.ndarray, slots: int) -> int:
    """Return how many decode steps one replica needs for these responses, each slot taking the next one when it is free."""
    ends = np.zeros(min(slots, len(lengths)), dtype=np.int64)
    for length in lengths:
        ends[ends.argmin()] += length
    return int(ends.max())


def fitted(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the factors, none below 0, with the least squares of `columns @ factors - seconds`; of two columns at most.

    Columns that differ by a factor only, as with equal lengths, leave the division between them open: then the last one
    counts alone.
    """
    scaled = columns / columns.mean(axis=0)
    if columns.shape[1] > 1 and np.linalg.matrix_rank(scaled, tol=1e-3 * len(seconds) ** 0.5) > 1:
        factors = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        if (factors >= 0).all():
            return factors
    alone = []
    for place in range(columns.shape[1]):
        column = columns[:, place]
        factor = float(column @ seconds / (column @ column))
        error = float(((column * factor - seconds) ** 2).sum())
        alone.append((error, -place, factor))
    _, place, factor = min(alone)
    factors = np.zeros(columns.shape[1])
    factors[-place] = factor
    return factors


def rates_of(run: MeasuredRun, steps: Sequence[Step]) -> ClusterRates:
    """Return the rates that these steps show."""
    sampled = np.array(
        [[decode_steps(step.lengths, run.slots * run.replicas), step.lengths.sum() / run.replicas] for step in steps]
    )
    sampling_s, training_s = (np.array([getattr(step, name) for step in steps]) for name in ("rollout_s", "trainer_s"))
    overhead_s, sequence_s = fitted(sampled.astype(float), sampling_s)
    trained = np.array([[1.0, step.tokens] for step in steps])
    fixed_s, token_s = fitted(trained, training_s)
    return ClusterRates(
        EngineRates(overhead_s, sequence_s, max_sequences=run.slots),
        TrainerRates(fixed_s, token_s),
        run.replicas,
        statistics.fmean(step.transfer_s for step in steps),
        controller_step_s=max(0.0, statistics.fmean(step.rest_s for step in steps)),
        engine_factors=tuple((sampling_s / (sampled @ [overhead_s, sequence_s])).tolist()),
        trainer_factors=tuple((training_s / (trained @ [fixed_s, token_s])).tolist()),
    )


def predicted(rates: ClusterRates, run: MeasuredRun, steps: Sequence[Step]) -> float:
    """Return the seconds of a step that the model expects of this run in these steps, with the lengths that they had."""
    lengths = replayed(np.concatenate([step.lengths for step in steps]).tolist())
    prompt = round(sum(step.prompts for step in steps) / sum(len(step.lengths) for step in steps))
    num_steps = PREDICTED_STEPS
    group_size = len(steps[0].lengths) // run.num_groups or run.group_size
    work = Work(run.num_groups, group_size, prompt, lengths, num_steps, run.max_staleness)
    result = simulate(rates, work, run.schedule)
    return result.step_s(skip=run.max_staleness + 2)


def validate(folders: Sequence[Path]) -> int:
    """Print predicted and measured step times, and return 1 where one that counts is off by more than the bar.

    Rates are taken from two runs: the first one in which the roles take turns, and the first one in which they work at the same
    time. All of its steps predict every other run; every second one predicts its own others, and not the first half the second,
    because a machine that gets slower meanwhile is no error of the model. What counts are predictions from rates of
    the same kind: on one machine two busy roles slow each other through caches and memory, which the model has no
    term for, and which pools on devices of their own do not do. Predictions from the other kind are printed beside them.
    """
    try:
        runs = [read_run(folder) for folder in folders]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bases = {}
    for run in runs:
        bases.setdefault(run.schedule in OVERLAPPING, run)
    rates = {kind: rates_of(base, base.steps) for kind, base in sorted(bases.items())}
    for kind, found in rates.items():
        print(
            f"rates of {bases[kind].folder.name}, {len(bases[kind].steps)} steps: decode step "
            f"{1e3 * found.engine.overhead_s:.3f} ms + {1e6 * found.engine.sequence_s:.2f} us a request, training "
            f"{found.trainer.fixed_s:.3f} s + {1e6 * found.trainer.token_s:.2f} us a token, weights {found.transfer_s:.3f} s, "
            f"rest {found.controller_step_s:.3f} s"
        )
    print(f"\n| run | schedule | rates of | measured s per step | predicted | error | counts |\n{'|---' * 7}|")
    worst = 0.0
    for run in runs:
        for kind, base in bases.items():
            steps, counts = run.steps[1::2] if run is base else run.steps, kind == (run.schedule in OVERLAPPING)
            used = rates_of(run, run.steps[::2]) if run is base else rates[kind]
            measured, expected = statistics.fmean(step.whole_s for step in steps), predicted(used, run, steps)
            error = expected / measured - 1
            worst = max(worst, abs(error)) if counts else worst
            source = f"every 2nd step of {base.folder.name}" if run is base else base.folder.name
            print(
                f"| {run.folder.name} | {run.schedule} | {source} | {measured:.3f} | {expected:.3f} | {error:+.1%} | "
                f"{'yes' if counts else 'no'} |"
            )
    print(f"\nworst error that counts {worst:.1%}, bar {BAR:.0%}: {'met' if worst <= BAR else 'missed'}")
    return 0 if worst <= BAR else 1
