"""Compare the methods of the paradigm from one common start: figures 5 and 6 of DeepSeekMath (arXiv 2402.03300), on two cores.

    .venv/bin/python scripts/paradigm.py                        # all methods, seeds 1 2 3
    .venv/bin/python scripts/paradigm.py --only rft grpo --seeds 1
    .venv/bin/python scripts/paradigm.py --out FOLDER --draw    # the table and the pictures of runs that are there

The embedded model learns sums with carries (`TASK`) from demonstrations of which half forget to carry: that is the start. Every
method then trains from it on the same problems, with the same number of rollouts in each step. Process rewards are exact: one
for each digit. Accuracy is that of greedy answers to held-out problems, judged by the rule, whatever rewarded the training.

A run that is complete in the folder is not done again. `table.md`, `accuracy.png` (like figure 5) and `reward_model.png` (like
figure 6) are written there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.plots.curves import style

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TASK = "task:arithmetic?forms=3+1,2+2&carrying=0.7"
ACCURACY = "val/arithmetic/mean@1"
PROMPTS, RESPONSES, STEPS, TEST_EVERY = 32, 8, 60, 10
ROLLOUTS = PROMPTS * RESPONSES
"""Rollouts in each training step, of every method."""

START = (
    "recipe=paradigm/sft",
    f"data.train_files={TASK}&forgotten_carries=0.5",
    "data.response_key=extra_info.demonstration",
    "data.val_files=[]",
    f"{A}.optim.lr=2e-3",
    "trainer.total_training_steps=150",
)
ALL = (
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    f"{A}.optim.lr_scheduler_type=linear",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={TEST_EVERY}",
    "trainer.logger=[console]",
    "trainer.save_rollouts=false",
    "trainer.export_at_end=false",
)
ONLINE = (
    "recipe=arithmetic/grpo",
    f"data.train_files={TASK}&split=train",
    f"data.val_files={TASK}&split=val&num_rows=256",
    f"data.train_batch_size={PROMPTS}",
    f"{A}.ppo_mini_batch_size={PROMPTS}",
    f"{R}.n={RESPONSES}",
)


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    label: str
    words: tuple[str, ...]
    lr: str = "5e-4"


METHODS = (
    Method("rft", "RFT", ()),
    Method("online_rft", "online RFT", (*ONLINE, "algorithm.adv_estimator=rft", f"{A}.policy_loss.loss_mode=reinforce")),
    Method("ppo", "PPO", (*ONLINE, "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_epochs=2")),
    Method("grpo_os", "GRPO+OS", ONLINE),
    Method("grpo_ps", "GRPO+PS", (*ONLINE, "algorithm.adv_estimator=grpo_process", "reward.functions=[arithmetic_process]")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[method.name for method in METHODS], help="these methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/paradigm"))
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="train nothing; draw what is there")
    arguments = parser.parse_args()
    methods = [method for method in METHODS if arguments.only is None or method.name in arguments.only]
    started = time.perf_counter()
    if not arguments.draw:
        start = train(arguments.out, "start", [*START, "trainer.test_freq=-1"]) / "model"
        jobs = [(method, seed) for seed in arguments.seeds for method in methods]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda job: train(arguments.out, f"{job[0].name}_{job[1]}", words_of(*job, start)), jobs))
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    curves = {method: [curve(arguments.out / f"{method.name}_{seed}") for seed in arguments.seeds] for method in METHODS}
    found = {method: [points for points in seeds if points] for method, seeds in curves.items() if any(seeds)}
    table = "\n".join(table_of(found))
    (arguments.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    draw(found, arguments.out / "accuracy.png")
    return 0
