"""Does every algorithm learn? Each estimator with its natural loss, and each loss, in a short seeded run on the embedded task.

    .venv/bin/python scripts/learning_table.py                       # all of them, most of a minute each
    .venv/bin/python scripts/learning_table.py --only remax gspo     # these
    .venv/bin/python scripts/learning_table.py --steps 40 --seed 2

Prints a table and ends with 1 if some run failed or did not raise its reward. `reward` is the mean over the rollouts of the
first and of the last fifth of the steps, `accuracy` that of greedy answers to held-out problems before and after.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_rl.rewards.rules.arithmetic_rule import arithmetic_process
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ACCURACY = "val/arithmetic/mean@1"
BASE = (
    "recipe=arithmetic/grpo",
    "data.val_files=task:arithmetic?carrying=0.7&split=val&num_rows=128",
    "data.train_batch_size=32",
    f"{A}.ppo_mini_batch_size=32",
    f"{A}.use_kl_loss=false",
    f"{R}.n=8",
    "trainer.logger=[console]",
    "trainer.test_freq=-1",
    "trainer.export_at_end=false",
    "trainer.save_rollouts=false",
)
TWO_UPDATES = (f"{A}.ppo_mini_batch_size=16",)
"""Two updates per batch: with one the ratio is 1 and most losses are the same."""
ONE_RESPONSE = ("data.train_batch_size=256", f"{A}.ppo_mini_batch_size=256", f"{R}.n=1")


@dataclass(frozen=True)
class Pair:
    """One line of the table."""

    name: str
    estimator: str
    loss: str
    words: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        return [*BASE, f"algorithm.adv_estimator={self.estimator}", f"{A}.policy_loss.loss_mode={self.loss}", *self.words]


def digits(**row: Any) -> float:
    """A second reward beside the right answer, for estimators that read several: the share of right digits."""
    return float(arithmetic_process(**row)["digits"])


def clip(low: float, high: float) -> tuple[str, str]:
    return f"{A}.clip_ratio_low={low}", f"{A}.clip_ratio_high={high}"


PAIRS = (
    Pair("grpo", "grpo", "vanilla", TWO_UPDATES),
    Pair("dr_grpo", "dr_grpo", "vanilla", (*TWO_UPDATES, f"{A}.loss_agg_mode=seq-mean-token-sum-norm")),
    Pair("rloo", "rloo", "reinforce"),
    Pair("opo", "opo", "reinforce"),
    Pair("rft", "rft", "reinforce"),
    Pair("gpg", "gpg", "gpg"),
    Pair("grpo_passk", "grpo_passk", "vanilla", TWO_UPDATES),
    Pair("gdpo", "gdpo", "vanilla", (*TWO_UPDATES, f"reward.functions=[arithmetic,0.5*{Path(__file__).resolve()}:digits]")),
    Pair("reinforce_plus_plus", "reinforce_plus_plus", "vanilla", TWO_UPDATES),
    Pair("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", "vanilla", TWO_UPDATES),
    Pair("remax", "remax", "reinforce", ONE_RESPONSE),
    Pair("grpo_process", "grpo_process", "vanilla", (*TWO_UPDATES, "reward.functions=[arithmetic_process]")),
    Pair("gae", "gae", "vanilla", ("critic.optim.lr=1e-3", "critic.ppo_epochs=2", "trainer.critic_warmup=3")),
    Pair("gspo", "grpo", "gspo", (*TWO_UPDATES, *clip(3e-4, 4e-4), f"{A}.loss_agg_mode=seq-mean-token-mean")),
    Pair("gspo_token", "grpo", "gspo_token", (*TWO_UPDATES, *clip(3e-4, 4e-4), f"{A}.loss_agg_mode=seq-mean-token-mean")),
    Pair("cispo", "grpo", "cispo", TWO_UPDATES),
    Pair("sapo", "grpo", "sapo", (*TWO_UPDATES, f"{A}.loss_agg_mode=seq-mean-token-mean")),
    Pair("geo_mean", "grpo", "geo_mean", (*TWO_UPDATES, *clip(0.4, 0.4), f"{A}.loss_agg_mode=seq-mean-token-mean")),
    Pair("clip_cov", "grpo", "clip_cov", TWO_UPDATES),
    Pair("kl_cov", "grpo", "kl_cov", TWO_UPDATES),
    Pair("dppo_tv", "grpo", "dppo_tv", TWO_UPDATES),
    Pair("dppo_kl", "grpo", "dppo_kl", TWO_UPDATES),
    Pair("dro", "grpo", "dro", TWO_UPDATES),
)


@dataclass(frozen=True)
class Result:
    """The figures of one run."""

    rewards: tuple[float, float]
    accuracies: tuple[float, float]
    seconds: float

    @property
    def learnt(self) -> bool:
        return self.rewards[1] > self.rewards[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[pair.name for pair in PAIRS], help="lines of the table")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: at least 2, a first and a last one")
    line = "{:<30} {:<11} {:>13} {:>7} {:>15} {:>7} {:>8}  {}"
    print(line.format("name", "loss", "reward before", "after", "accuracy before", "after", "seconds", "learnt"), flush=True)
    failed = []
    for pair in PAIRS:
        if arguments.only and pair.name not in arguments.only:
            continue
        result = run(pair, arguments.steps, arguments.seed)
        if result is None or not result.learnt:
            failed.append(pair.name)
        if result is not None:
            rewards, accuracies = [f"{x:.3f}" for x in result.rewards], [f"{x:.1%}" for x in result.accuracies]
            seconds, verdict = f"{result.seconds:.0f}", "yes" if result.learnt else "NO"
            print(line.format(pair.name, pair.loss, *rewards, *accuracies, seconds, verdict), flush=True)
    if failed:
        print(f"did not raise the reward: {', '.join(failed)}")
    return int(bool(failed))


def run(pair: Pair, num_steps: int, seed: int) -> Result | None:
    """The outcome of one training run in a process of its own; None, and its last lines shown, where it failed."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as base:
        command = [sys.executable, "-m", "grpo_rl.main", *pair.overrides()]
        command += [f"{key}={seed}" for key in ("trainer.seed", "data.seed", f"{R}.seed")]
        command += [f"trainer.total_training_steps={num_steps}"]
        command += [f"trainer.default_local_dir={base}", "trainer.experiment_name=run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            print(f"{pair.name}: exit code {done.returncode}\n{' '.join(command)}\n{done.stdout[-3000:]}", flush=True)
            return None
        records = read_metrics(Path(base) / "run" / "metrics.jsonl")
    return summary(records, time.perf_counter() - started)


def summary(records: list[dict[str, float]], seconds: float) -> Result:
    """Reward of the first and last fifth of the steps, accuracy of the first and last validation."""
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    fifth = max(1, len(rewards) // 5)
    return Result((fmean(rewards[:fifth]), fmean(rewards[-fifth:])), (accuracies[0], accuracies[-1]), seconds)


if __name__ == "__main__":
    sys.exit(main())
