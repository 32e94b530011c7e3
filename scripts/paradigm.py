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

from grpo_rl.config.derived import policy_steps
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.plots.curves import style

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TASK = "task:arithmetic?forms=3+1,2+2&carrying=0.7"
ACCURACY = "val/arithmetic/mean@1"
PROMPTS, RESPONSES, STEPS, TEST_EVERY = 32, 8, 40, 5
ROLLOUTS = PROMPTS * RESPONSES
"""Rollouts in each training step, of every method."""
ITERATION, REWARD_MODEL_STEPS = 5, 10
"""Steps of the policy and of the reward model in one iteration."""

START = (
    "recipe=paradigm/sft",
    f"data.train_files={TASK}&forgotten_carries=0.5",
    "data.response_key=extra_info.demonstration",
    "data.val_files=[]",
    f"data.val_prompt_files={TASK}&split=val&num_rows=256",
    f"{A}.optim.lr=2e-3",
    "trainer.total_training_steps=150",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
)
ALL = (
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    f"{A}.optim.lr_scheduler_type=linear",
    "trainer.logger=[console]",
)
FROM_FIXED = (
    f"data.train_files={TASK}&split=train&num_rows=2048",
    f"data.val_prompt_files={TASK}&split=val&num_rows=256",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={TEST_EVERY}",
)
SAMPLING = (
    f"data.train_files={TASK}&split=train",
    f"data.val_files={TASK}&split=val&num_rows=256",
    f"data.train_batch_size={PROMPTS}",
    f"{A}.ppo_mini_batch_size={PROMPTS}",
    "trainer.save_rollouts=false",
)
ONLINE = (*SAMPLING, f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={TEST_EVERY}")


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    label: str
    words: tuple[str, ...]
    lr: str = "5e-4"
    iteration: tuple[int, int] = (0, STEPS)
    """Steps of the reward model and of the policy in one iteration."""


def iterated(name: str, label: str, reward_model_steps: int, policy_steps: int) -> Method:
    """Return a method that trains against a reward model, which learns from the policy's samples as each iteration begins."""
    cycle = reward_model_steps + policy_steps
    total = STEPS // policy_steps * cycle
    words = (
        *("recipe=paradigm/iterate", *SAMPLING, f"trainer.total_training_steps={total}"),
        f"trainer.test_freq={cycle if policy_steps < STEPS else TEST_EVERY}",
        f"trainer.iterate.reward_model_steps={reward_model_steps}",
        f"trainer.iterate.steps_per_iteration={policy_steps}",
    )
    return Method(name, label, words, iteration=(reward_model_steps, policy_steps))


METHODS = (
    Method("rft", "RFT", ("recipe=paradigm/rft", *FROM_FIXED, f"data.train_batch_size={ROLLOUTS}")),
    Method("online_rft", "online RFT", ("recipe=paradigm/online_rft", *ONLINE)),
    Method("dpo", "DPO", ("recipe=paradigm/dpo", *FROM_FIXED, f"data.train_batch_size={ROLLOUTS // 2}"), lr="2e-4"),
    Method("online_dpo", "online DPO", ("recipe=paradigm/online_dpo", *ONLINE), lr="3e-4"),
    Method("ppo", "PPO", ("recipe=paradigm/ppo", *ONLINE)),
    Method("grpo_os", "GRPO+OS", ("recipe=paradigm/grpo", *ONLINE)),
    Method("grpo_ps", "GRPO+PS", ("recipe=paradigm/grpo_process", *ONLINE)),
    iterated("fixed", "GRPO, fixed reward model", REWARD_MODEL_STEPS * STEPS // ITERATION, STEPS),
    iterated("iterate", "iterative GRPO", REWARD_MODEL_STEPS, ITERATION),
)
AGAINST_A_MODEL = ("fixed", "iterate")


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
        start = train(arguments.out, "start", list(START)) / "model"
        jobs = [(method, seed) for seed in arguments.seeds for method in methods]
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(lambda job: train(arguments.out, f"{job[0].name}_{job[1]}", words_of(*job, start)), jobs))
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    curves = {
        method: [curve(arguments.out / f"{method.name}_{seed}", method) for seed in arguments.seeds] for method in METHODS
    }
    found = {method: [points for points in seeds if points] for method, seeds in curves.items() if any(seeds)}
    table = "\n".join(table_of(found))
    (arguments.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    draw({method: found[method] for method in found if method.name not in AGAINST_A_MODEL}, arguments.out / "accuracy.png")
    against = {method: found[method] for method in found if method.name in (*AGAINST_A_MODEL, "grpo_os")}
    draw(against, arguments.out / "reward_model.png")
    return 0


def words_of(method: Method, seed: int, start: Path) -> list[str]:
    """Return the command's words for one run of a method."""
    seeds = [f"{key}={seed}" for key in ("trainer.seed", "data.seed", f"{R}.seed")]
    scorer = [f"reward.reward_model.model_path={start}"] if method.name in AGAINST_A_MODEL else []
    models = [f"actor_rollout_ref.model.path={start}", *scorer]
    return [*method.words, *ALL, *models, f"{A}.optim.lr={method.lr}", "trainer.export_at_end=false", *seeds]


def train(out: Path, name: str, words: Sequence[str]) -> Path:
    """Return the folder of this run, which is made now unless it is complete. Exits where the run fails, with its last lines."""
    folder = out / name
    if (folder / "report.txt").is_file():
        return folder
    command = [sys.executable, "-m", "grpo_rl.main", *words]
    command += [f"trainer.default_local_dir={out}", f"trainer.experiment_name={name}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: exit code {done.returncode}\n{' '.join(command)}\n{done.stdout[-3000:]}")
    points = curve(folder, METHODS[0])
    print(f"{name:<16} accuracy {points[0][1]:.3f} -> {points[-1][1]:.3f}" if points else f"{name:<16} done", flush=True)
    return folder


Points = list[tuple[int, float]]


def curve(folder: Path, method: Method) -> Points:
    """Return the policy's steps and the accuracy at each validation of a run; nothing where the run is not there.

    Of several validations after the same number of the policy's steps, the last one counts.
    """
    file = folder / "metrics.jsonl"
    records = read_metrics(file) if file.is_file() else []
    found = {policy_steps(int(record["step"]), *method.iteration): record[ACCURACY] for record in records if ACCURACY in record}
    return sorted(found.items())


def table_of(curves: dict[Method, list[Points]]) -> list[str]:
    """Return the table: mean and standard deviation over the seeds before, half-way and at the end."""
    lines = ["| method | seeds | before | half-way | end | gain | spread of the gain |", "|---|---|---|---|---|---|---|"]
    for method, seeds in curves.items():
        before, half, end = ([points[index(points)][1] for points in seeds] for index in (first, middle, last))
        gains = [after - earlier for earlier, after in zip(before, end, strict=True)]
        spread = f"{stdev(gains):.3f}" if len(gains) > 1 else "-"
        figures = " | ".join(f"{fmean(values):.3f}" for values in (before, half, end, gains))
        lines.append(f"| {method.label} | {len(seeds)} | {figures} | {spread} |")
    return lines


def first(points: Points) -> int:
    return 0


def middle(points: Points) -> int:
    return len(points) // 2


def last(points: Points) -> int:
    return -1


COLOURS = ("#7b8794", "#0b7285", "#c2255c", "#2b8a3e", "#862e9c", "#d97706", "#2563eb")


def draw(curves: dict[Method, list[Points]], path: Path) -> None:
    """Draw accuracy against rollouts: the mean over the seeds as a line, the lowest and highest as a band."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(style()):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for (method, seeds), colour in zip(curves.items(), COLOURS, strict=False):
            steps = [step for step, _ in seeds[0]]
            values = [[dict(points)[step] for points in seeds if step in dict(points)] for step in steps]
            axes.plot(steps, [fmean(column) for column in values], color=colour, label=method.label)
            axes.fill_between(steps, [min(c) for c in values], [max(c) for c in values], color=colour, alpha=0.12, linewidth=0)
        axes.set_xlabel(f"training step of the policy, {ROLLOUTS} rollouts each")
        axes.set_ylabel("greedy accuracy on held-out problems")
        axes.legend(frameon=False)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
