"""One training under random faults, compared with the same training undisturbed.

    python scripts/soak.py --minutes 30 --rate 20

A tiny random model, two rollout replicas, a reference, checkpoints every second step. Every `rate` seconds a fault: a
process killed or stopped, the driver signalled or killed and its newest checkpoint damaged, a fault point passed (see
soak_faults.py). The driver is started again by the same command whenever it ends, and stopped, by SIGTERM, when the minutes
are over. It takes about twice as long: the undisturbed training of the same steps comes after. Exit code 1 when a bar is missed: committed steps lost 0, the same
SHA-256 of weights and optimizer and the same metrics, nothing left behind, no end of the driver that was not asked for,
effective time >= 70 % of the wall clock.

    python scripts/soak.py --minutes 15 --schedule async

If responses are sampled while others are trained, what is sampled after a failure is sampled by other weights. Then there is
no undisturbed training to compare with; instead every prompt has to be trained exactly once, by weights within the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests"), str(ROOT)]

import oracles  # noqa: E402
import soak_faults  # noqa: E402
from oracles import Training  # noqa: E402

from grpo_rl.models import builtin  # noqa: E402
from grpo_rl.telemetry.metrics.metrics_file import read_metrics  # noqa: E402

BATCH_SIZE, SAMPLES, SAVE_FREQ = 8, 4, 2
CALIBRATION_STEPS = 8
STALENESS = {"sync": 0, "one_step_off": 1, "async": 2}
"""The schedules that can be tried, and the most versions by which a token may be older than the weights that it trains."""
EFFECTIVE_BAR = 0.70
LOOK_S = 0.2
FUTILE_STARTS = 5
THE_END = "SIGTERM driver, the time is over"
ASIDE = re.compile(r"resumed from \S+ at step (\d+)")
BACK = re.compile(r"recovery: (\w+?)\d* is back after ([\d.]+) s")


def words(model: Path, steps: int, ranks: int, schedule: str = "sync", last: int | None = None) -> list[str]:
    """The command's words: for a training of so many steps, or one of them that ends at step `last`."""
    policy = "actor_rollout_ref"
    return [
        f"{policy}.model.path={model}",
        f"data.train_files=task:arithmetic?split=train&num_rows={steps * BATCH_SIZE}",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        "reward.functions=[format]",
        f"{policy}.actor.ppo_mini_batch_size={BATCH_SIZE}",
        f"{policy}.actor.kl_loss_coef=0.1",
        f"{policy}.actor.entropy_coeff=0.01",
        f"{policy}.actor.optim.lr=1e-3",
        f"{policy}.rollout.n={SAMPLES}",
        f"{policy}.rollout.name=hf",
        f"{policy}.rollout.hf.batched=false",
        f"{policy}.rollout.nnodes=1",
        f"{policy}.rollout.n_gpus_per_node=2",
        f"{policy}.rollout.ignore_eos=true",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={last or steps}",
        f"trainer.save_freq={SAVE_FREQ}",
        "trainer.max_actor_ckpt_to_keep=5",
        "trainer.on_save_error=continue",
        "trainer.heartbeat_s=1",
        "trainer.max_restarts=100000",
        "trainer.grace_s=60",
        "trainer.export_at_end=false",
        f"trainer.schedule={schedule}",
        *([f"trainer.asynchronous.max_staleness={STALENESS[schedule]}"] if schedule == "async" else []),
    ]


class Soak:
    """The disturbed training, from its first start to `steps`, or to the step at which the time was over."""

    def __init__(self, training: Training, source: soak_faults.Source, steps: int, rate: float, always: str) -> None:
        self.training, self.source, self.steps, self.rate, self.always = training, source, steps, rate, always
        self.faults: Counter[str] = Counter()
        self.lost = 0
        self.unasked: list[str] = []
        self.to_first_step: list[float] = []
        self.left_s: list[float] = []
        self.loads: list[float] = []
        self.wall_s = 0.0
        self._due = self._over = float("inf")
        self._asked: str | None = None
        self._died = time.monotonic()
        self._num_fired = 0
        self._is_training = False
        self._cleaning: list[tuple[float, dict[str, Any]]] = []
        self._commit, self._futile = 0, 0

    def run(self, seconds: float | None, longest_s: float) -> None:
        """Until the training is done or so many seconds are over. Raises AssertionError when it takes too long or gets nowhere."""
        began = self._died = time.monotonic()
        self._over = began + seconds if seconds is not None else float("inf")
        self._start()
        while not self._ended():
            assert time.monotonic() - began < longest_s, f"not done after {longest_s:.0f} s\n{self.training.describe()}"
            self._look()
            time.sleep(LOOK_S)  # polling: the status is a file
        self.wall_s = time.monotonic() - began
        while self._cleaning:
            self._clean()
            time.sleep(LOOK_S)

    # ---- starts and ends -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._commit = max([0, *soak_faults.intact(self.training.path / "checkpoints")])
        armed = self.source.armed(self._commit, self.steps)
        self.training.faults = ";".join([*filter(None, [self.always]), *armed])
        self._is_training, self._asked = False, None
        self._log_end = _size(self.training.path / "logs" / "console.log")
        self.training.start()

    def _ended(self) -> bool:
        """Return whether all is done; a driver that ended before is started again."""
        assert self.training.process is not None
        code = self.training.process.poll()
        if code is None:
            return False
        self._count_fired()
        status = self.training.status
        if self.training.sessions:
            self._cleaning.append((time.monotonic(), self.training.sessions[-1]))
        if code == 0:
            return True
        if code == 75 and self._asked == THE_END:
            committed = soak_faults.intact(self.training.path / "checkpoints")
            assert committed, "no step was committed in this time: more --minutes, a larger --rate, or a quieter machine"
            self.steps = max(committed)
            return True
        self._died = time.monotonic()
        if code != (75 if self._asked == "SIGTERM driver" else -9) or self._asked is None:
            line = next(iter(self.training.error_lines()[-12:]), "")
            self.unasked.append(f"exit code {code} after {self._asked or 'nothing'}: {line}")
            say(f"!! {self.unasked[-1]}")
        good = soak_faults.intact(self.training.path / "checkpoints")
        if (status.get("last_commit") or 0) > max([0, *good]):
            self.lost += status["last_commit"] - max([0, *good])
        if self._asked is not None and self._asked.endswith("damaged"):
            path = self.source.damage(self.training.path / "checkpoints")
            say(f"   damaged: {path}")
        self._futile = 0 if max([0, *good]) > self._commit else self._futile + 1
        assert self._futile < FUTILE_STARTS, f"{FUTILE_STARTS} starts without a commit\n{self.training.describe()}"
        self._start()
        return False

    # ---- while it runs -------------------------------------------------------------------------------------

    def _look(self) -> None:
        assert self.training.process is not None
        self.training.note_session()
        self._clean()
        self.loads.append(os.getloadavg()[0])
        status = self.training.status
        if status.get("pid") != self.training.process.pid or status.get("phase") == "start" or status["state"] != "running":
            return
        if not self._is_training:
            self._is_training = True
            self.to_first_step.append(time.monotonic() - self._died)
            self._check_resumed()
            self._due = time.monotonic() + self.rate
        if self._count_fired():
            self._due = time.monotonic() + self.rate
        elif time.monotonic() >= self._over and self._asked is None:
            self._asked = THE_END
            soak_faults.send(status["pid"], self._asked)
        elif time.monotonic() >= self._due and self._asked is None:
            self._strike(status)

    def _strike(self, status: dict[str, Any]) -> None:
        kind = self.source.draw()
        if "driver" in kind:
            pid: int | None = status["pid"]
        else:
            pid = self.source.victim(kind, status, self.training.sessions[-1])
        if pid is None or not soak_faults.send(pid, kind):
            return  # its process is being started again: another fault at the next look
        if "driver" in kind:
            self._asked = kind
        self.faults[kind] += 1
        self._due = time.monotonic() + self.rate
        say(f"   step {status['step']}, {status['phase']}: {kind} ({pid})")

    def _count_fired(self) -> bool:
        """Count the armed faults that have come about since the last call."""
        fired = [fault["fault"] for fault in self.training.fired() if fault["fault"] not in self.always.split(";")]
        new = fired[self._num_fired :]
        self._num_fired = len(fired)
        for entry in new:
            kind = entry.partition("@")[0]
            self.faults[f"armed {kind}"] += 1
            if kind.startswith(("ckpt.before_rename:kill9", "ckpt.after_rename:kill9", "driver.")):
                self._asked = kind
            say(f"   {entry}")
        return bool(new)

    def _check_resumed(self) -> None:
        with (self.training.path / "logs" / "console.log").open("rb") as log:
            log.seek(self._log_end)
            found = ASIDE.findall(log.read().decode(errors="replace"))
        at = int(found[-1]) if found else 0
        self.lost += max(0, self._commit - at)
        if self.to_first_step[1:]:
            say(f"   goes on from step {at} after {self.to_first_step[-1]:.1f} s")

    def _clean(self) -> None:
        """Return how long anything of an ended driver's processes was still there."""
        waiting = []
        for died, session in self._cleaning:
            gone = not list(oracles.leftovers(session))
            if gone or time.monotonic() - died > 2 * oracles.ORPHANS_S:
                self.left_s.append(time.monotonic() - died)
            else:
                waiting.append((died, session))
        self._cleaning = waiting


def effective_s(run: Path) -> float:
    """Seconds of steps that counted: each one's own, or the median if a recovery made it longer."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "timing_s/step" in row]
    usual = statistics.median(float(row["timing_s/step"]) for row in rows)
    disturbed = [any(key.startswith("recovery/") for key in row) for row in rows]
    seconds = [float(row["timing_s/step"]) for row in rows]
    return sum(min(usual, each) if hit else each for each, hit in zip(seconds, disturbed, strict=True))


def recoveries(run: Path) -> dict[str, list[float]]:
    """Seconds from each failure that was noticed to the worker's return, by role."""
    found: dict[str, list[float]] = {}
    for log in run.rglob("console.log"):
        for role, seconds in BACK.findall(log.read_text(errors="replace")):
            found.setdefault(role, []).append(float(seconds))
    return found


def ledger(run: Path, steps: int, schedule: str) -> str:
    """Return what is wrong with the prompts that were trained: one is missing, comes twice, or was sampled too long ago."""
    try:
        oracles.assert_each_sample_once(run, steps, BATCH_SIZE, SAMPLES, STALENESS[schedule])
    except (AssertionError, OSError) as error:
        return str(error) or "a prompt comes twice"
    return ""


def learnt(run: Path) -> list[str]:
    """The metrics that both trainings must have; reports of failed saves are in one of them alone."""
    rows = [json.loads(line) for line in oracles.learnt(run)]
    return [json.dumps({k: v for k, v in row.items() if k != "trainer/failed_saves"}, sort_keys=True) for row in rows]


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return f"p50 {at[0]:.1f} s, p99 {at[1]:.1f} s ({len(ordered)})"


def compared(soak: Soak, undisturbed: Training, undisturbed_s: float) -> list[tuple[str, str, bool | None]]:
    """Return the rows that compare the training with the undisturbed one."""
    run, steps = soak.training.path, soak.steps
    hashes = [oracles.state_hash(one, steps) for one in (run, undisturbed.path)]
    same_metrics = learnt(run) == learnt(undisturbed.path)
    share = effective_s(undisturbed.path) / soak.wall_s
    return [
        ("final hash", f"{hashes[0][:16]}, undisturbed {hashes[1][:16]}", hashes[0] == hashes[1]),
        ("metrics.jsonl", "equal" if same_metrics else "DIFFERENT", same_metrics),
        ("the same steps undisturbed", f"{undisturbed_s:.0f} s, {share:.0%} of the wall clock", None),
    ]


def report(soak: Soak, trained: list[tuple[str, str, bool | None]]) -> bool:
    """Print what happened, with the rows about what was `trained`; whether every bar was met."""
    run, steps = soak.training.path, soak.steps
    effective = effective_s(run) / soak.wall_s
    left = max(soak.left_s, default=0.0)
    total = sum(soak.faults.values())
    rows: list[tuple[str, str, bool | None]] = [("wall clock", f"{soak.wall_s:.0f} s for {steps} steps", None)]
    rows += [("first start", f"{soak.to_first_step[0]:.1f} s", None)]
    rows += [("faults", f"{total}, one every {soak.wall_s / max(1, total):.1f} s", None)]
    rows += [(f"  {kind}", str(number), None) for kind, number in sorted(soak.faults.items())]
    rows += [(f"{role} back after", spread(seconds), None) for role, seconds in sorted(recoveries(run).items())]
    rows += [
        ("driver's end to next step", spread(soak.to_first_step[1:]), None),
        ("processes gone after", f"{left:.1f} s at most", left <= oracles.ORPHANS_S),
        ("committed steps lost", str(soak.lost), soak.lost == 0),
        ("ends not asked for", "; ".join(soak.unasked) or "none", not soak.unasked),
        *trained,
        ("effective time", f"{effective:.0%} (bar {EFFECTIVE_BAR:.0%})", effective >= EFFECTIVE_BAR),
        ("load of the machine", f"{statistics.mean(soak.loads):.1f} on {os.cpu_count()} cores", None),
    ]
    print()
    for name, text, is_met in rows:
        print(f"{name:42s} {text}{'' if is_met is None else '  ok' if is_met else '  MISSED'}")
    return all(is_met for _, _, is_met in rows if is_met is not None)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def seconds_per_step(folder: Path, model: Path, ranks: int, schedule: str) -> float:
    """Return the seconds per step of a short undisturbed training."""
    short = Training(folder, "calibration", words(model, CALIBRATION_STEPS, ranks, schedule)).start()
    assert short.wait(600) == 0, short.describe()
    times = [float(row["timing_s/step"]) for row in read_metrics(short.path / "metrics.jsonl")]
    return statistics.median(times[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="so long with faults (default 30)")
    parser.add_argument("--rate", type=float, default=20, help="seconds between two faults (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--ranks", type=int, default=1, help="actor ranks (default 1)")
    parser.add_argument("--steps", type=int, help="so many steps, instead of minutes")
    parser.add_argument("--nan-step", type=int, help="a gradient of this step is not finite, in both trainings")
    parser.add_argument("--schedule", choices=STALENESS, default="sync", help="trainer.schedule (default sync)")
    parser.add_argument("--folder", type=Path, help="where both runs are kept (default: a temporary folder)")
    given = parser.parse_args()
    # A SIGTERM to this script ends the training with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # starts are measured, and a usual run has bytecode
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    model = builtin.build("builtin:arithmetic", folder / "random")
    say(f"everything is kept in {folder}")
    seconds = seconds_per_step(folder, model, given.ranks, given.schedule)
    # More than there is time for: the learning rate is constant, so a training that is stopped earlier is the same until there.
    steps = given.steps or max(CALIBRATION_STEPS, int(2 * given.minutes * 60 / seconds))
    say(f"a step takes {seconds:.2f} s")
    always = f"actor.update.loss:nan@step={given.nan_step}" if given.nan_step else ""
    disturbed = Training(folder, "disturbed", words(model, steps, given.ranks, given.schedule))
    soak = Soak(
        disturbed, soak_faults.Source(given.seed, given.ranks, SAVE_FREQ, given.rate / seconds), steps, given.rate, always
    )
    undisturbed = Training(folder, "undisturbed", [], always)
    try:
        soak.run(None if given.steps else given.minutes * 60, longest_s=max(600.0, given.minutes * 60 * 4))
        if given.schedule != "sync":
            wrong = ledger(disturbed.path, soak.steps, given.schedule)
            return 0 if report(soak, [("prompts trained once, in time", wrong or "all", not wrong)]) else 1
        undisturbed.words = words(model, steps, given.ranks, last=soak.steps)
        say(f"the undisturbed training of {soak.steps} steps")
        began = time.monotonic()
        assert undisturbed.start().wait(max(600.0, given.minutes * 60 * 4)) == 0, undisturbed.describe()
        return 0 if report(soak, compared(soak, undisturbed, time.monotonic() - began)) else 1
    finally:
        for training in (disturbed, undisturbed):
            if training.process is not None and training.process.poll() is None:
                training.kill()


if __name__ == "__main__":
    sys.exit(main())
