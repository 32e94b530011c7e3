"""A benchmark of the schedules on the same separate pools: one core samples, the other one trains.

    python scripts/bench_schedules.py --calibrate                     # how many requests at once make sampling last as long
    python scripts/bench_schedules.py --speed                         # rollouts per second, idle shares
    python scripts/bench_schedules.py --speed --response-tokens 64 --out runs/short   # other lengths, in a folder of their own
    python scripts/bench_schedules.py --table                         # of all runs that are there

Every run is the program's own command, in a folder of its own below --out; a run that is there is not done again, so parts
can be measured one after the other and the table covers them all. Speed: responses of 128 tokens (or --response-tokens) of a
random Qwen3 (1.1 M parameters; steps of several seconds), schedules in turns, medians over the rounds of ratios within a round. The
bar: one_step_off and async have at least 1.5 x the rollouts per second of sync.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_step import SIZES, make_data, make_model, make_prompts  # noqa: E402

from grpo_rl.telemetry.metrics.metrics_file import read_metrics  # noqa: E402
from grpo_rl.telemetry.metrics.timeline import Interval, read_timeline  # noqa: E402

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SCHEDULES = ("sync", "one_step_off", "async")
BATCH, SAMPLES = 32, 8
BAR_SPEED = 1.5
WARM_UP, ENDING = 2, 2
"""Steps at both ends of a run that do not count: pipelines fill, and at last nothing more is to be sampled."""
TRIED = (256, 128, 64, 32)
"""The numbers of requests at once that the calibration tries."""

POOLS = (
    "recipe=arithmetic/grpo",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=1",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.export_at_end=false",
    f"{A}.use_kl_loss=false",
    f"data.train_batch_size={BATCH}",
    f"{A}.ppo_mini_batch_size={BATCH}",
    f"{R}.n={SAMPLES}",
)
SPEED = (f"{R}.ignore_eos=true", "trainer.test_freq=-1")
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_PROMPTS = 16, 128, 512


@dataclass(frozen=True)
class Measured:
    """The figures of a run of the speed part, without its first and last steps."""

    seconds: float
    """Seconds per step."""
    rollouts_s: float
    sampling_s: float
    """Seconds per step in which requests were under way; `training_s` those of the trained roles."""
    training_s: float
    staleness: tuple[float, float]
    idle: dict[str, float]


def run(out: Path, name: str, words: Sequence[str]) -> Path:
    """Return the folder of a run of this name, which is made unless it is there. Raises RuntimeError if it fails."""
    folder = out / name
    if (folder / "report.txt").exists():
        return folder
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "grpo_rl.main",
        *words,
        f"trainer.default_local_dir={out}",
        f"trainer.experiment_name={name}",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started = time.perf_counter()
    print(f"{name} ... ", end="", flush=True)
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        environment = os.environ | {"PYTHONPATH": path}
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    if code != 0:
        raise RuntimeError(f"{name} ended with exit code {code}: {out / f'{name}.log'}")
    return folder


@dataclass(frozen=True)
class Content:
    """The model and the lengths of the speed part."""

    model: str = "1m"
    response_tokens: int = RESPONSE_TOKENS
    more: tuple[str, ...] = ()
    """Words of the command that are added to every run."""


def speed_words(out: Path, content: Content) -> list[str]:
    """Return the words of the command that choose the model of the speed part, and its data, which are made unless they are there."""
    folder = out / f"model-{content.model}"
    if not (folder / "reward.py").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_model(folder, content.model)
        make_data(folder, make_prompts(folder, NUM_PROMPTS, PROMPT_TOKENS))
    own = [
        f"actor_rollout_ref.model.path={folder}",
        f"data.train_files={folder / 'prompts.jsonl'}",
        "data.val_files=[]",
        f"data.max_prompt_length={2 * PROMPT_TOKENS}",
        f"data.max_response_length={content.response_tokens}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
    ]
    return [*POOLS, *SPEED, *own, *content.more]


def schedule_words(schedule: str, staleness: int) -> list[str]:
    """Return the words of the command that choose a schedule."""
    more = [f"trainer.asynchronous.max_staleness={staleness}"] if schedule == "async" else []
    return [f"trainer.schedule={schedule}", *more]


def counted(folder: Path) -> list[Interval]:
    """Return the intervals of a run between its warm-up and its ending."""
    intervals = read_timeline(folder / "timeline.jsonl")
    steps = sorted((one for one in intervals if one.role == "step"), key=lambda one: one.step)
    if len(steps) <= WARM_UP + ENDING:
        raise RuntimeError(f"{folder} has {len(steps)} steps, and more than {WARM_UP + ENDING} are needed")
    first, end = steps[WARM_UP].start, steps[-ENDING].start
    marks = [one._replace(end=after.start) for one, after in itertools.pairwise(steps)]
    marks = [one for one in marks if first <= one.start < end]
    parts = [
        one._replace(start=max(one.start, first), end=min(one.end, end))
        for one in intervals
        if one.role != "step" and one.end > first and one.start < end
    ]
    return sorted([*marks, *parts], key=lambda one: one.start)


def measured(folder: Path) -> Measured:
    """Return the figures of a run."""
    intervals = counted(folder)
    marks = [one for one in intervals if one.role == "step"]
    whole = marks[-1].end - marks[0].start
    numbers = {one.step for one in marks}
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] in numbers]
    idle = idle_shares(intervals)
    return Measured(
        whole / len(marks),
        BATCH * SAMPLES * len(marks) / whole,
        (1 - idle["rollout"]) * whole / len(marks),
        (1 - idle["actor"]) * whole / len(marks),
        (
            statistics.fmean(record.get("staleness/mean", 0.0) for record in records),
            max(record.get("staleness/max", 0.0) for record in records),
        ),
        idle,
    )


def idle_shares(intervals: list[Interval]) -> dict[str, float]:
    """Return for each role the share of the time from the first step's begin to the last one's end in which it did nothing."""
    steps = [one for one in intervals if one.role == "step"]
    start, end = steps[0].start, steps[-1].end
    busy: dict[str, float] = {}
    reached: dict[str, float] = {}
    for one in intervals:
        first, last = max(one.start, reached.get(one.role, start)), min(one.end, end)
        busy[one.role] = busy.get(one.role, 0.0) + max(0.0, last - first)
        reached[one.role] = max(last, reached.get(one.role, start))
    return {role: 1.0 - seconds / (end - start) for role, seconds in busy.items() if role not in ("step", "wait")}


# ---- the parts -----------------------------------------------------------------------------------------------


def calibrate(out: Path, content: Content) -> int:
    """Return how many requests at once make sampling last about as long as training; it is kept in calibration.json."""
    kept = out / "calibration.json"
    if kept.exists():
        return int(json.loads(kept.read_text())["max_num_seqs"])
    ratios: dict[int, float] = {}
    print(f"{'at once':>8} {'sampling':>9} {'training':>9} {'ratio':>6}")
    for number in TRIED:
        words = [*speed_words(out, content), f"{R}.max_num_seqs={number}", "trainer.total_training_steps=8"]
        found = measured(run(out, f"calibration-{number}", [*words, "trainer.schedule=sync"]))
        ratios[number] = found.sampling_s / found.training_s
        print(f"{number:>8} {found.sampling_s:>7.2f} s {found.training_s:>7.2f} s {ratios[number]:>6.2f}", flush=True)
        if ratios[number] > 1.0:
            break
    best = min(ratios, key=lambda number: abs(ratios[number] - 1.0))
    kept.write_text(json.dumps({"max_num_seqs": best, "sampling_to_training": ratios}) + "\n")
    print(f"chosen: {best} requests at once")
    return best


def speed(
    out: Path, schedules: Sequence[str], content: Content, steps: int, rounds: int, staleness: int, at_once: int | None
) -> None:
    """Run the schedules in turns, and draw the last steps of the first round below each other."""
    number = at_once or calibrate(out, content)
    total, chosen = steps + WARM_UP + ENDING, speed_words(out, content)
    for place in range(1, rounds + 1):
        for schedule in schedules:
            words = [*chosen, f"{R}.max_num_seqs={number}", f"trainer.total_training_steps={total}"]
            run(out, f"speed-{schedule}-{place}", [*words, *schedule_words(schedule, staleness)])


def finished(out: Path, schedule: str) -> dict[int, Path]:
    """Return the folders of the runs that are there, by round."""
    found = [path.parent for path in out.glob(f"speed-{schedule}-*/report.txt")]
    return {int(path.name.rpartition("-")[2]): path for path in sorted(found)}


def speed_table(out: Path) -> bool:
    """Print the figures of all rounds; return whether the bar is met."""
    rounds = {schedule: {n: measured(path) for n, path in finished(out, schedule).items()} for schedule in SCHEDULES}
    if not any(rounds.values()):
        return True
    print("\n| schedule | rounds | s per step | rollouts/s | to sync | staleness mean / max | idle: rollout | actor | reward |")
    print("|---" * 9 + "|")
    met = True
    for schedule, found in rounds.items():
        if not found:
            continue
        both = [n for n in found if n in rounds["sync"]]
        ratio = statistics.median(found[n].rollouts_s / rounds["sync"][n].rollouts_s for n in both) if both else None
        if schedule != "sync" and ratio is not None:
            met &= ratio >= BAR_SPEED
        median, shown = statistics.median, list(found.values())
        idle = [f"{median([one.idle.get(role, 1.0) for one in shown]):.0%}" for role in ("rollout", "actor", "reward")]
        print(
            f"| {schedule} | {len(shown)} | {median([one.seconds for one in shown]):.2f} | "
            f"{median([one.rollouts_s for one in shown]):.1f} | {'' if ratio is None else f'{ratio:.2f}'} | "
            f"{median([one.staleness[0] for one in shown]):.2f} / {max(one.staleness[1] for one in shown):.0f} | "
            f"{' | '.join(idle)} |"
        )
    for one in list(rounds["sync"].values())[:1]:
        print(
            f"\nsync: sampling {one.sampling_s:.2f} s, training {one.training_s:.2f} s: {one.sampling_s / one.training_s:.2f} x"
        )
    if rounds["sync"] and sum(map(bool, rounds.values())) > 1:
        print(f"bar, {BAR_SPEED} x the rollouts per second of sync: {'met' if met else 'missed'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("calibrate", "speed", "table"):
        parser.add_argument(f"--{part}", action="store_true", help="this part; several can be asked for")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "schedules", help="the folder of all runs")
    parser.add_argument("--model", choices=list(SIZES), default="1m", help="the model, as in bench_step.py")
    parser.add_argument("--response-tokens", type=int, default=RESPONSE_TOKENS, help="of each response")
    parser.add_argument("--more", nargs="+", default=[], metavar="WORD", help="words of the command for every run")
    parser.add_argument("--steps", type=int, default=16, help="steps that count in each run")
    parser.add_argument("--rounds", type=int, default=2, help="how often the schedules take turns")
    parser.add_argument("--max-num-seqs", type=int, help="requests at once, instead of a calibration")
    parser.add_argument("--staleness", type=int, default=1, help="trainer.asynchronous.max_staleness of async")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not (arguments.calibrate or arguments.speed or arguments.table):
        parser.error("give one of --calibrate, --speed, --table")
    content = Content(arguments.model, arguments.response_tokens, tuple(arguments.more))
    try:
        if arguments.calibrate:
            calibrate(out, content)
        if arguments.speed:
            counts = arguments.steps, arguments.rounds, arguments.staleness, arguments.max_num_seqs
            speed(out, arguments.schedules, content, *counts)
        met = speed_table(out)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
