"""The cluster model against runs of this program: rates from a part of their steps, and step times of the others predicted."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from cluster_lengths import replayed
from cluster_model import ClusterRates, EngineRates, TrainerRates, Work, simulate

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
PASSES = 3
"""Forward passes that the training of a token costs: 6 FLOPs a parameter against 2 (PaLM, arXiv 2204.02311, appendix B)."""
READING_ROUNDS = 8
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
    overlap_s: float
    """Seconds in which both sides worked at the same time."""
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
    shares_prompts: bool
    """True where a replica reads the prompt of a group once (enable_prefix_caching)."""
    reads_again: bool
    """True where new weights make the engines read again what is unfinished: async without asynchronous.keep_cache."""
    steps: list[Step]

    @property
    def step_s(self) -> float:
        return statistics.fmean(step.whole_s for step in self.steps)

    @property
    def overlaps(self) -> bool:
        """True where engines and trainer work at the same time."""
        return self.schedule in OVERLAPPING

    def prompt_tokens(self, step: Step) -> float:
        """Return how many tokens of prompts one replica read for this step."""
        return step.prompts / self.replicas / (self.group_size if self.shares_prompts else 1)

    def is_reading(self) -> bool:
        """Return whether engines of this run read more tokens of prompts than they sampled: it shows what reading costs."""
        sampled = sum(int(step.lengths.sum()) for step in self.steps) / self.replicas
        return not self.overlaps and sum(self.prompt_tokens(step) for step in self.steps) > sampled


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
    asynchronous = trainer.get("asynchronous") or {}
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
        asynchronous.get("max_staleness", 1),
        rollout.get("enable_prefix_caching", True),
        schedule == "async" and not asynchronous.get("keep_cache", False),
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
    sampling_s, training_s, either_s = busy("rollout"), busy(*TRAINING), busy("rollout", *TRAINING)
    path = (*TRAINING, "weights", "wait" if any(one.role == "wait" for one in intervals) else "rollout")
    return Step(
        mark.step,
        mark.end - mark.start,
        sampling_s,
        training_s,
        busy("weights"),
        sampling_s + training_s - either_s,
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


def sampled_columns(run: MeasuredRun, steps: Sequence[Step]) -> np.ndarray:
    """Return decode steps and sampled tokens of one replica, for each of these steps."""
    rows = [[decode_steps(step.lengths, run.slots * run.replicas), step.lengths.sum() / run.replicas] for step in steps]
    return np.array(rows, dtype=float)


def engine_seconds(rates: EngineRates, run: MeasuredRun, steps: Sequence[Step]) -> np.ndarray:
    """Return the seconds that the engines need by themselves for what these steps sampled."""
    prompts = np.array([run.prompt_tokens(step) for step in steps])
    return sampled_columns(run, steps) @ [rates.overhead_s, rates.sequence_s] + prompts * rates.prefill_token_s


def trainer_seconds(rates: TrainerRates, steps: Sequence[Step]) -> np.ndarray:
    """Return the seconds that the trainer needs by itself for these steps."""
    return np.array([rates.batch_s(step.tokens, 0.0) for step in steps])


def seconds_of(steps: Sequence[Step], name: str) -> np.ndarray:
    """Return one of the measured times of each step."""
    return np.array([getattr(step, name) for step in steps])


def rates_of(run: MeasuredRun, steps: Sequence[Step], reading_s: float = 0.0) -> ClusterRates:
    """Return the rates that these steps show, where reading a token of a prompt takes `reading_s`."""
    sampled, sampling_s = sampled_columns(run, steps), seconds_of(steps, "rollout_s")
    prompts = np.array([run.prompt_tokens(step) for step in steps])
    overhead_s, sequence_s = fitted(sampled, sampling_s - prompts * reading_s)
    training_s = seconds_of(steps, "trainer_s")
    fixed_s, token_s = fitted(np.array([[1.0, step.tokens] for step in steps]), training_s)
    engine = EngineRates(overhead_s, sequence_s, prefill_token_s=reading_s, max_sequences=run.slots)
    trainer = TrainerRates(fixed_s, token_s)
    return ClusterRates(
        engine,
        trainer,
        run.replicas,
        statistics.fmean(step.transfer_s for step in steps),
        controller_step_s=max(0.0, statistics.fmean(step.rest_s for step in steps)),
        engine_factors=tuple((sampling_s / engine_seconds(engine, run, steps)).tolist()),
        trainer_factors=tuple((training_s / trainer_seconds(trainer, steps)).tolist()),
    )


def reading_seconds(run: MeasuredRun, base: MeasuredRun) -> float:
    """Return the seconds of reading a token of a prompt, from a run of long prompts and short responses.

    What is not reading in it takes the time that the rates of `base` give it; as these contain the reading of its own
    prompts, which takes the time that is looked for, both are computed in turns.
    """
    reading_s = 0.0
    for _ in range(READING_ROUNDS):
        sampling_s = engine_seconds(rates_of(base, base.steps, reading_s).engine, run, run.steps)
        prompts = sum(run.prompt_tokens(step) for step in run.steps)
        without_s = float(sampling_s.sum()) - prompts * reading_s
        reading_s = max(0.0, (float(seconds_of(run.steps, "rollout_s").sum()) - without_s) / prompts)
    return reading_s


def slowdown(alone_s: float, busy_s: float, overlap_s: float) -> float:
    """Return how many times as long one side's work takes while the other side works.

    Work that takes `alone_s` by itself took `busy_s`, in `overlap_s` of which the other side worked: alone = busy - overlap +
    overlap / slowdown. Raises ValueError where that has no solution.
    """
    during_s = alone_s - (busy_s - overlap_s)
    if overlap_s <= 0.0 or during_s <= 0.0:
        raise ValueError("the two sides worked at the same time too seldom to tell how they slow each other")
    return overlap_s / during_s


def beside_each_other(alone: ClusterRates, run: MeasuredRun, steps: Sequence[Step]) -> ClusterRates:
    """Return the rates of a run that takes turns, with what these steps of an overlapping one add.

    That is how much the two sides slow each other, how much their steps differ, and the times of weights and controller.
    """
    engine_s, trainer_s = engine_seconds(alone.engine, run, steps), trainer_seconds(alone.trainer, steps)
    sampling_s, training_s = seconds_of(steps, "rollout_s"), seconds_of(steps, "trainer_s")
    overlap_s = float(seconds_of(steps, "overlap_s").sum())
    return replace(
        alone,
        transfer_s=statistics.fmean(step.transfer_s for step in steps),
        controller_step_s=max(0.0, statistics.fmean(step.rest_s for step in steps)),
        engine_slowdown=slowdown(float(engine_s.sum()), float(sampling_s.sum()), overlap_s),
        trainer_slowdown=slowdown(float(trainer_s.sum()), float(training_s.sum()), overlap_s),
        engine_factors=_spread(sampling_s, engine_s),
        trainer_factors=_spread(training_s, trainer_s),
    )


def _spread(measured_s: np.ndarray, expected_s: np.ndarray) -> tuple[float, ...]:
    """Return by which factor each step differs from what was expected, with the mean 1."""
    factors = measured_s / expected_s
    return tuple((factors / factors.mean()).tolist())


def predicted(rates: ClusterRates, run: MeasuredRun, steps: Sequence[Step]) -> float:
    """Return the seconds of a step that the model expects of this run in these steps, with the lengths that they had."""
    lengths = replayed(np.concatenate([step.lengths for step in steps]).tolist())
    prompt = round(sum(step.prompts for step in steps) / sum(len(step.lengths) for step in steps))
    num_steps = PREDICTED_STEPS
    group_size = len(steps[0].lengths) // run.num_groups or run.group_size
    work = Work(run.num_groups, group_size, prompt, lengths, num_steps, run.max_staleness)
    result = simulate(replace(rates, recomputes_cache=run.reads_again), work, run.schedule)
    return result.step_s(skip=run.max_staleness + 2)


@dataclass(frozen=True)
class Bases:
    """The runs that rates are taken from; the others are predicted."""

    alone: MeasuredRun | None
    """The first run in which the roles take turns."""
    beside: MeasuredRun | None
    """The first run in which they work at the same time, and engines read nothing again."""
    reading: MeasuredRun | None
    """The first run that takes turns and reads more tokens than it samples; it is not predicted itself."""

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun]) -> Bases:
        """Choose among these runs, in their order. Raises ValueError where all of them read again what is unfinished."""
        turns = [run for run in runs if not run.overlaps]
        reading = next((run for run in turns if run.is_reading()), None)
        alone = next((run for run in turns if run is not reading), None)
        beside = next((run for run in runs if run.overlaps and not run.reads_again), None)
        if alone is None and beside is None:
            raise ValueError(
                "no run to take rates from: give one of sync, or of one_step_off, whose engines read nothing again after an update"
            )
        return cls(alone, beside, reading)

    def reading_s(self) -> tuple[float, str]:
        """Return the seconds of reading one token, and where they are from."""
        base = self.alone or self.beside
        assert base is not None, "one of the two is there"
        if self.reading is not None:
            return reading_seconds(self.reading, base), f"measured in {self.reading.folder.name}"
        return rates_of(base, base.steps).trainer.token_s / PASSES, "assumed: a third of training, which is three passes"

    def rates(self, run: MeasuredRun, reading_s: float) -> tuple[ClusterRates, str, Sequence[Step]]:
        """Return the rates for a run, where they are from, and the steps that they are to predict.

        Of a run that rates are taken from, every second step gives them and predicts the others: not the first half the second,
        because a machine that gets slower meanwhile is no error of the model.
        """
        base = self.beside if run.overlaps else self.alone
        kept = run.steps[::2] if run is base else base.steps if base is not None else []
        steps = run.steps[1::2] if run is base else run.steps
        if self.alone is None or (base is self.alone and run is base):
            assert base is not None, "one of the two is there"
            source = f"every 2nd step of {base.folder.name}" if run is base else base.folder.name
            return rates_of(base, kept, reading_s), source, steps
        rates, source = rates_of(self.alone, self.alone.steps, reading_s), self.alone.folder.name
        if run.overlaps and base is not None:
            share = "every 2nd step of " if run is base else ""
            return beside_each_other(rates, base, kept), f"{source} and {share}{base.folder.name}", steps
        return rates, source, steps

    def lines(self, reading_s: float) -> list[str]:
        """Return what the runs show, in words: the rates of one side by itself, and how much the two slow each other."""
        base = self.alone or self.beside
        assert base is not None, "one of the two is there"
        found = rates_of(base, base.steps, reading_s)
        lines = [
            f"rates of {base.folder.name}, {len(base.steps)} steps: decode step {1e3 * found.engine.overhead_s:.3f} ms + "
            f"{1e6 * found.engine.sequence_s:.2f} us a request, training {found.trainer.fixed_s:.3f} s + "
            f"{1e6 * found.trainer.token_s:.2f} us a token, weights {found.transfer_s:.3f} s, rest {found.controller_step_s:.3f} s"
        ]
        if self.alone is not None and self.beside is not None:
            both = beside_each_other(found, self.beside, self.beside.steps)
            lines.append(
                f"in {self.beside.folder.name}, {len(self.beside.steps)} steps, engines took {both.engine_slowdown:.2f} times as "
                f"long while the trainer worked, and the trainer {both.trainer_slowdown:.2f} times as long while engines did"
            )
        return lines

    def counts(self, run: MeasuredRun) -> bool:
        """Return whether the rates contain what this run does: of sides that work at the same time, how they slow each other."""
        return (self.beside if run.overlaps else self.alone) is not None


def validate(folders: Sequence[Path]) -> int:
    """Print predicted and measured step times, and return 1 where one that counts is off by more than the bar.

    Rates of sampling, training and reading come from runs in which the roles take turns; how much they slow each other
    while both work, on one machine, from the first overlapping run in which engines read nothing again (see `Bases`).
    All other runs are predicted from these. `async` reads again what is unfinished after an update, which is predicted by the
    rate of reading. Where no overlapping run is given, predictions of overlapping ones do not count.
    """
    try:
        runs = [read_run(folder) for folder in folders]
        bases = Bases.of(runs)
        reading_s, source = bases.reading_s()
        print(f"reading a token: {1e6 * reading_s:.2f} us, {source}")
        predictions = [(run, *bases.rates(run, reading_s)) for run in runs if run is not bases.reading]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(bases.lines(reading_s)))
    print(f"\n| run | schedule | rates of | measured s per step | predicted | error | counts |\n{'|---' * 7}|")
    worst = 0.0
    for run, found, source, steps in predictions:
        measured, expected = statistics.fmean(step.whole_s for step in steps), predicted(found, run, steps)
        error, counts = expected / measured - 1, bases.counts(run)
        worst = max(worst, abs(error)) if counts else worst
        print(
            f"| {run.folder.name} | {run.schedule} | {source} | {measured:.3f} | {expected:.3f} | {error:+.1%} | "
            f"{'yes' if counts else 'no'} |"
        )
    print(f"\nworst error that counts {worst:.1%}, bar {BAR:.0%}: {'met' if worst <= BAR else 'missed'}")
    return 0 if worst <= BAR else 1
