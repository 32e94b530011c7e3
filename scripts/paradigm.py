"""Compare the methods of the paradigm from one common start: figures 5 and 6 of DeepSeekMath (arXiv 2402.03300), on two cores.

    .venv/bin/python scripts/paradigm.py                        # all methods, seeds 1 2 3
    .venv/bin/python scripts/paradigm.py --only rft grpo_os --seeds 1
    .venv/bin/python scripts/paradigm.py --only written_os written_ps written_ps_model
    .venv/bin/python scripts/paradigm.py --out FOLDER --draw    # the table and the picture of runs that are there
    .venv/bin/python scripts/paradigm.py --credit               # if the first update of each supervision leads

The embedded model learns sums with carries (`TASK`) from demonstrations of which eight in ten forget to carry: that is the start.
Every method then trains from it for the same number of steps, and samples the same number of rollouts: the online ones in
each step, RFT and DPO before the first one, all of what is kept of them about once. Process rewards are exact, one for each digit.
The reward model of the last two methods begins as the start and learns from pairs of the start's own responses, labelled by the
rule; one stays as it is, the other learns on in every iteration. Accuracy is that of greedy answers to held-out problems, judged
by the rule, whatever rewarded the training.

The `written_*` methods do the same on sums that are written column by column (`WRITTEN`), if a response has six steps: outcome
against process supervision, with the rule's scores and with those of a process reward model that learns from rated sums.

`--credit` compares if the first update of each supervision leads: the cosine of its gradient, over batches of a step's size, with the
exact gradient of the probability of the right solutions. On sums it begins with builtin:arithmetic, which any run of its recipes makes.

A run that is complete in the folder is not done again, so a command that was interrupted goes on. `table.md` and `paradigm.png`
(figure 5 on the left, figure 6 in the middle, written sums on the right) are written there.
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
from typing import Any

from grpo_rl.algos.advantages.group_relative import grpo
from grpo_rl.algos.advantages.per_token import Steps, episode_and_turn, grpo_process
from grpo_rl.algos.advantages.registered import AdvantageInput
from grpo_rl.config.derived import policy_steps
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.models.builtin import cache_folder
from grpo_rl.rewards.rules.number_rules import arithmetic_process, written_sum
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.report import STYLE

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TASK = "task:arithmetic?forms=3+1,2+2&carrying=0.7"
WRITTEN = "task:rated_sums?digits=5"
HELD_OUT = {task: f"{task}&split=val&num_rows=512" for task in (TASK, WRITTEN)}
ACCURACY = {TASK: "val/arithmetic/mean@1", WRITTEN: "val/rated_sums/mean@1"}
PROMPTS, RESPONSES, STEPS, TEST_EVERY = {TASK: 32, WRITTEN: 8}, 8, 40, 5
ROLLOUTS = PROMPTS[TASK] * RESPONSES
"""Rollouts that a method samples for each of its steps; on written sums a quarter, for 30 steps."""
KEPT_RESPONSES, KEPT_PAIRS = 64, 24
"""Rows in a batch of RFT and DPO: about as many of `ROLLOUTS` of the start are right, and of `PROMPTS` groups make a pair."""
NUM_PAIRED_PROMPTS, NUM_HELD_OUT_PAIRS = 4096, 256
"""Prompts whose responses the reward model learns from, and the pairs of them that it is measured on."""
MODEL_STEPS, POLICY_STEPS = 25, 10
"""Steps of the reward model and of the policy in one iteration."""

LENGTHS = {
    TASK: ("data.max_prompt_length=32", "data.max_response_length=16"),
    WRITTEN: ("data.max_prompt_length=32", "data.max_response_length=64"),
}


def start_on(task: str, careless: str, steps: int, lr: str = "2e-3") -> tuple[str, ...]:
    """Return the words of the run that all methods on a task begin with."""
    return (
        "recipe=paradigm/sft",
        f"data.train_files={task}&{careless}",
        "data.response_key=extra_info.demonstration",
        "data.val_files=[]",
        f"data.val_prompt_files={HELD_OUT[task]}",
        *LENGTHS[task],
        f"{A}.optim.lr={lr}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
    )


STARTS = {
    TASK: {"start": start_on(TASK, "forgotten_carries=0.8", 150)},
    # The form is learnt from demonstrations that remember some carries: without any, the model would not know how one is written.
    WRITTEN: {
        "written_form": start_on(WRITTEN, "forgotten_carries=0.7&num_rows=65536", 500),
        "written_start": start_on(WRITTEN, "forgotten_carries=0.95&num_rows=8192", 80, lr="5e-4"),
    },
}
"""The runs, each from the one before, that all methods on a task begin with: names and words."""
STEP_MODEL = (
    "recipe=paradigm/process_reward_model",
    f"data.train_files={WRITTEN}&num_rows=16384",
    f"data.val_files={HELD_OUT[WRITTEN]}",
    "trainer.total_training_steps=200",
    "trainer.test_freq=50",
    "trainer.logger=[console]",
)
PAIRS = (
    "recipe=paradigm/dpo",
    f"data.train_files={TASK}&split=train&num_rows={NUM_PAIRED_PROMPTS}",
    "data.val_prompt_files=[]",
    # The collected file is what is wanted of this run.
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.export_at_end=false",
    "trainer.logger=[console]",
)
REWARD_MODEL = (
    "recipe=paradigm/reward_model",
    "data.chosen_key=chosen",
    "data.rejected_key=rejected",
    "trainer.total_training_steps=250",
    "trainer.test_freq=50",
    "trainer.logger=[console]",
)
ALL = (
    f"{A}.optim.lr_scheduler_type=linear",
    "trainer.logger=[console]",
)
FROM_FIXED = (
    f"data.train_files={TASK}&split=train&num_rows={PROMPTS[TASK] * STEPS}",
    f"data.val_prompt_files={HELD_OUT[TASK]}",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={TEST_EVERY}",
)


def sampling(task: str) -> tuple[str, ...]:
    """Return the words of runs on a task that sample in each step."""
    return (
        f"data.train_files={task}&split=train",
        f"data.val_files={HELD_OUT[task]}",
        f"data.train_batch_size={PROMPTS[task]}",
        f"{A}.ppo_mini_batch_size={PROMPTS[task]}",
        "trainer.save_rollouts=false",
    )


EVERY_STEP = (f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={TEST_EVERY}")
ONLINE = (*sampling(TASK), *EVERY_STEP)
WRITTEN_SUMS = (
    *sampling(WRITTEN),
    *("trainer.total_training_steps=30", "trainer.test_freq=10", "reward.functions=[written_sum]"),
)
AGAINST_A_MODEL = (
    "recipe=paradigm/iterate",
    *sampling(TASK),
    f"{A}.kl_loss_coef=0.05",
    # Two wrong answers differ little in score: divided by the spread of their own group they would weigh like a right and a wrong one.
    "algorithm.adv_options={std: batch}",
)


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    label: str
    words: tuple[str, ...]
    lr: str = "5e-4"
    iteration: tuple[int, int] = (0, STEPS)
    """Steps of the reward model and of the policy in one iteration."""
    against_a_model: bool = False
    """Trained on the score of a reward model."""
    task: str = TASK


RFT = (
    *("recipe=paradigm/rft", *FROM_FIXED, f"data.train_batch_size={KEPT_RESPONSES}"),
    # As in the formula: every right response counts, however often it was sampled.
    "algorithm.rejection.deduplicate=false",
)
FIXED = (
    *(*AGAINST_A_MODEL, *EVERY_STEP),
    *("trainer.iterate.reward_model_steps=0", f"trainer.iterate.steps_per_iteration={STEPS}", "~reward.reward_model.train"),
)
CYCLE = MODEL_STEPS + POLICY_STEPS
ITERATED = (
    *(*AGAINST_A_MODEL, f"trainer.total_training_steps={STEPS // POLICY_STEPS * CYCLE}", f"trainer.test_freq={CYCLE}"),
    *(f"trainer.iterate.reward_model_steps={MODEL_STEPS}", f"trainer.iterate.steps_per_iteration={POLICY_STEPS}"),
    "reward.reward_model.train.optim.lr=5e-4",
)
BY_STEP_MODEL = (
    *("recipe=paradigm/grpo_process", *WRITTEN_SUMS),
    *("reward.reward_model.enable=true", 'reward.reward_model.step_separator="\\n"'),
)
METHODS = (
    Method("rft", "RFT", RFT),
    Method("online_rft", "online RFT", ("recipe=paradigm/online_rft", *ONLINE)),
    Method("grpo_os", "GRPO+OS", ("recipe=paradigm/grpo", *ONLINE)),
    Method("fixed", "GRPO, fixed reward model", FIXED, lr="1e-4", against_a_model=True),
    Method("iterate", "iterative GRPO", ITERATED, lr="1e-4", iteration=(MODEL_STEPS, POLICY_STEPS), against_a_model=True),
    Method("grpo_ps", "GRPO+PS", ("recipe=paradigm/grpo_process", *ONLINE)),
    Method("ppo", "PPO", ("recipe=paradigm/ppo", *ONLINE)),
    Method("dpo", "DPO", ("recipe=paradigm/dpo", *FROM_FIXED, f"data.train_batch_size={KEPT_PAIRS}"), lr="2e-4"),
    Method("online_dpo", "online DPO", ("recipe=paradigm/online_dpo", *ONLINE), lr="3e-4"),
    Method("written_os", "written sums, GRPO+OS", ("recipe=paradigm/grpo", *WRITTEN_SUMS), lr="2e-4", task=WRITTEN),
    Method("written_ps", "written sums, GRPO+PS", ("recipe=paradigm/grpo_process", *WRITTEN_SUMS), lr="2e-4", task=WRITTEN),
    Method(
        "written_ps_model", "written sums, GRPO+PS by a model", BY_STEP_MODEL, lr="2e-4", against_a_model=True, task=WRITTEN
    ),
)
ORDERS = (
    *(("online_rft", "rft"), ("grpo_os", "online_rft"), ("grpo_ps", "grpo_os"), ("online_dpo", "dpo"), ("iterate", "fixed")),
    *(("written_ps", "written_os"), ("written_ps_model", "written_os")),
)
"""The orders that the paper finds: the first method of each pair ends above the second."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[method.name for method in METHODS], help="these methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/paradigm"))
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time")
    parser.add_argument("--draw", action="store_true", help="train nothing; draw what is there")
    parser.add_argument(
        "--credit", action="store_true", help="train the start of written sums only, and compare where first updates lead"
    )
    arguments = parser.parse_args()
    if arguments.credit:
        print("\n".join(credit({TASK: cache_folder("arithmetic"), WRITTEN: start_of(arguments.out, WRITTEN)})))
        return 0
    methods = [method for method in METHODS if arguments.only is None or method.name in arguments.only]
    if not arguments.draw:
        train_all(methods, arguments.seeds, arguments.out, arguments.side_by_side)
    found = {
        method: {seed: points for seed in arguments.seeds if (points := curve(arguments.out / f"{method.name}_{seed}", method))}
        for method in METHODS
    }
    found = {method: seeds for method, seeds in found.items() if seeds}
    text = "\n".join([*table_of(found), "", *orders(found), *reward_model_quality(arguments.out)])
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw(found, arguments.out / "paradigm.png")
    return 0


def train_all(methods: Sequence[Method], seeds: Sequence[int], out: Path, side_by_side: int) -> None:
    """Train the start, what the methods need, and every method with every seed; what is complete is left as it is."""
    started = time.perf_counter()
    starts = {task: start_of(out, task) for task in STARTS if any(method.task == task for method in methods)}
    scorers = {
        task: reward_model(out, start) if task == TASK else step_model(out, start)
        for task, start in starts.items()
        if any(method.against_a_model and method.task == task for method in methods)
    }
    jobs = [(method, seed) for method in methods for seed in seeds]

    def run(job: tuple[Method, int]) -> None:
        method, seed = job
        train(out, f"{method.name}_{seed}", words_of(method, seed, starts[method.task], scorers.get(method.task)))

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(run, jobs))
    print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)


def start_of(out: Path, task: str) -> Path:
    """Return the folder of the model that all methods on a task begin with."""
    model: list[str] = []
    for name, words in STARTS[task].items():
        folder = train(out, name, [*words, *model]) / "model"
        model = [f"actor_rollout_ref.model.path={folder}"]
    return folder


def reward_model(out: Path, start: Path) -> Path:
    """Return the folder of the reward model, which learns from pairs of the start's own responses."""
    begin_as = f"actor_rollout_ref.model.path={start}"
    lines = (train(out, "pairs", [*PAIRS, begin_as]) / "collected" / "train.jsonl").read_text(encoding="utf-8").splitlines(True)
    files = [out / "pairs" / name for name in ("learnt.jsonl", "held_out.jsonl")]
    for file, part in zip(files, (lines[:-NUM_HELD_OUT_PAIRS], lines[-NUM_HELD_OUT_PAIRS:]), strict=True):
        file.write_text("".join(part), encoding="utf-8")
    data = [f"data.train_files={files[0]}", f"data.val_files={files[1]}", f"reward.reward_model.model_path={start}"]
    return train(out, "reward_model", [*REWARD_MODEL, *data]) / "reward_model"


def step_model(out: Path, start: Path) -> Path:
    """Return the folder of the process reward model of written sums, which learns from rated ones."""
    return train(out, "step_model", [*STEP_MODEL, f"reward.reward_model.model_path={start}"]) / "reward_model"


def words_of(method: Method, seed: int, start: Path, scorer: Path | None) -> list[str]:
    """Return the command's words for one run of a method."""
    seeds = [f"{key}={seed}" for key in ("trainer.seed", "data.seed", f"{R}.seed")]
    models = [f"actor_rollout_ref.model.path={start}"]
    models += [f"reward.reward_model.model_path={scorer}"] if method.against_a_model else []
    return [
        *method.words,
        *LENGTHS[method.task],
        *ALL,
        *models,
        f"{A}.optim.lr={method.lr}",
        "trainer.export_at_end=false",
        *seeds,
    ]


def train(out: Path, name: str, words: Sequence[str]) -> Path:
    """Return the folder of this run, which is made now unless it is complete. Exits where the run fails, with its last lines."""
    folder = out / name
    if (folder / "report.txt").is_file():
        return folder
    command = [sys.executable, "-m", "grpo_rl.main", *words]
    command += [f"trainer.default_local_dir={out}", f"trainer.experiment_name={name}"]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: exit code {done.returncode}\n{' '.join(command)}\n{done.stdout[-3000:]}")
    points = next((points for method in (METHODS[0], METHODS[-1]) if (points := curve(folder, method))), [])
    end = f"accuracy {points[0][1]:.3f} -> {points[-1][1]:.3f}" if points else "done"
    print(f"{name:<16} {end}, {time.perf_counter() - began:.0f} s", flush=True)
    return folder


Points = list[tuple[int, float]]
Curves = dict[Method, dict[int, Points]]
"""The curve of each method and seed."""


def curve(folder: Path, method: Method) -> Points:
    """Return the policy's steps and the accuracy at each validation of a run; nothing where the run is not complete.

    Of several validations after the same number of the policy's steps, the last one counts.
    """
    if not (folder / "report.txt").is_file():
        return []
    records, name = read_metrics(folder / "metrics.jsonl"), ACCURACY[method.task]
    found = {policy_steps(int(record["step"]), *method.iteration): record[name] for record in records if name in record}
    return sorted(found.items())


def table_of(curves: Curves) -> list[str]:
    """Return the table: means over the seeds before, half-way and at the end, and the spread (standard deviation) at the end."""
    lines = [
        "| method | seeds | before | half-way | end | spread of the end | gain / spread |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, seeds in sorted(curves.items(), key=lambda item: -fmean(points[-1][1] for points in item[1].values())):
        columns = [[points[place][1] for points in seeds.values()] for place in (0, len(next(iter(seeds.values()))) // 2, -1)]
        figures = " | ".join(f"{fmean(values):.3f}" for values in columns)
        spread = stdev(columns[-1]) if len(seeds) > 1 else None
        gain = fmean(columns[-1]) - fmean(columns[0])
        compared = "- | -" if not spread else f"{spread:.3f} | {gain / spread:.1f}"
        lines.append(f"| {method.label} | {len(seeds)} | {figures} | {compared} |")
    return lines


def orders(curves: Curves) -> list[str]:
    """Return an item for each order that the paper finds: how far apart the two methods end, and whether every seed has it."""
    named = {method.name: (method.label, seeds) for method, seeds in curves.items()}
    lines = []
    for above, below in ORDERS:
        if above not in named or below not in named:
            continue
        (label, first), (other, second) = named[above], named[below]
        gaps = [first[seed][-1][1] - second[seed][-1][1] for seed in first if seed in second]
        if gaps:
            found = "not in one" if max(gaps) <= 0 else "in every one" if min(gaps) > 0 else "not in every one"
            each = ", ".join(f"{gap:+.3f}" for gap in gaps)
            lines.append(f"- {label} above {other}: {fmean(gaps):+.3f} on average, {found} of the seeds ({each}).")
    return lines


def reward_model_quality(out: Path) -> list[str]:
    """Return an item with the accuracy of the common reward model on held-out pairs; nothing if there is none."""
    file = out / "reward_model" / "metrics.jsonl"
    values = [record["val/accuracy"] for record in read_metrics(file) if "val/accuracy" in record] if file.is_file() else []
    return [f"- The reward model puts {value:.3f} of {NUM_HELD_OUT_PAIRS} held-out pairs in order." for value in values[-1:]]


# ---- if an update leads, by what rewards it ---------------------------------------------------------------

NUM_BATCHES = 12
RULES = {TASK: arithmetic_process, WRITTEN: written_sum}


def credit(starts: dict[str, Path]) -> list[str]:
    """Return the table of how well the first update of each supervision raises the probability of right solutions."""
    columns = {task: directions(task, start) for task, start in starts.items()}
    lines = ["| advantage of a step | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in next(iter(columns.values())):
        figures = (f"{fmean(column[name]):.3f} ± {stdev(column[name]):.3f}" for column in columns.values())
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def directions(task: str, start: Path) -> dict[str, list[float]]:
    """Return, for each kind of advantage, the cosine of each batch's gradient with that of the probability of right solutions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    tokenizer, model = AutoTokenizer.from_pretrained(start, padding_side="left"), AutoModelForCausalLM.from_pretrained(start)
    weights = list(model.parameters())

    def logprobs(prompt_ids: list[int], answers: list[list[int]]) -> list[Any]:
        """Return those of the answers' tokens."""
        longest = max(map(len, answers))
        padded = [prompt_ids + answer + [tokenizer.pad_token_id] * (longest - len(answer)) for answer in answers]
        scores = model(torch.tensor(padded)).logits[:, len(prompt_ids) - 1 : -1].log_softmax(-1)
        return [score[range(len(answer)), answer] for score, answer in zip(scores, answers, strict=True)]

    def gradient(x: Any) -> Any:
        return torch.cat([one.flatten() for one in torch.autograd.grad(x, weights, retain_graph=True)])

    size = PROMPTS[task]
    rows = list(task_rows(f"{task}&split=train&num_rows={NUM_BATCHES * size}"))
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False))
        for row in rows
    ]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    true = sum(
        gradient(logprobs(prompt, [tokenizer.encode(truth + tokenizer.eos_token)])[0].sum().exp())
        for prompt, truth in zip(prompts, truths, strict=True)
    )
    found: dict[str, list[float]] = {}
    means: dict[int, list[float]] = {}
    for first in range(0, len(rows), size):
        answers, scores, results = [], [], []
        for prompt, truth in zip(prompts[first : first + size], truths[first : first + size], strict=True):
            sampled = model.generate(  # type: ignore[misc]
                torch.tensor([prompt] * RESPONSES),
                do_sample=True,
                top_k=0,
                max_new_tokens=64,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts = tokenizer.batch_decode(sampled[:, len(prompt) :], skip_special_tokens=True)
            answers += [tokenizer.encode(text + tokenizer.eos_token) for text in texts]
            scores += logprobs(prompt, answers[-RESPONSES:])
            results += [RULES[task]("", text, truth) for text in texts]
        lengths_N = torch.tensor([len(answer) for answer in answers])
        begins = (lengths_N.cumsum(0) - lengths_N).tolist()
        inp = AdvantageInput(
            None,
            lengths_N=lengths_N,
            group_N=torch.arange(size).repeat_interleave(RESPONSES),
            rewards_N=torch.tensor([result["score"] for result in results]),
            # A character is a token.
            step_ends_K=torch.tensor(
                [begin + end - 1 for begin, one in zip(begins, results, strict=True) for end, _ in one["steps"]]
            ),
            step_rewards_K=torch.tensor([reward for one in results for _, reward in one["steps"]]),
            step_states_K=torch.tensor([place for one in results for place in range(len(one["steps"]))]),
        )
        steps = Steps(inp, 1.0)
        by_place_K = episode_and_turn(inp, steps, "mean_std_norm", 1e-6)[1]
        said = {
            "outcome supervision": grpo(inp),
            "process supervision": grpo_process(inp),
            "the same, of each step its own reward alone": grpo_process(inp, gamma=0.0),
            "the same, sums normalised for each place by itself": steps.on_tokens(by_place_K, torch.zeros(len(answers))),
        }
        score_T = torch.cat(scores)
        for name, out in said.items():
            cosine = torch.nn.functional.cosine_similarity(gradient((score_T * out.advantages_T).mean()), true, dim=0)
            found.setdefault(name, []).append(float(cosine))
        of_steps = said["process supervision"].advantages_T[inp.step_ends_K].tolist()
        for place, advantage in zip(inp.column("step_states_K").tolist(), of_steps, strict=True):
            means.setdefault(place, []).append(advantage)
    print(f"{task}: mean advantage by place {[round(fmean(means[place]), 2) for place in sorted(means)]}", flush=True)
    return found


COLOURS = {
    "rft": "#7b8794",
    "online_rft": "#0b7285",
    "grpo_os": "#2563eb",
    "grpo_ps": "#862e9c",
    "ppo": "#d97706",
    "dpo": "#c9a227",
    "online_dpo": "#c2255c",
    "fixed": "#7b8794",
    "iterate": "#2b8a3e",
    "written_os": "#2563eb",
    "written_ps": "#862e9c",
    "written_ps_model": "#2b8a3e",
}


def draw(curves: Curves, path: Path) -> None:
    """Draw accuracy against steps: rewards of the rule on the left, of a reward model on the right."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(16, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 3, sharey=True)
        for axes, title in zip(panels, ("rewarded by the rule", "rewarded by a reward model", WRITTEN_PANEL), strict=True):
            draw_panel(axes, {method: seeds for method, seeds in curves.items() if panel_of(method) == title})
            axes.set_title(title)
            num = ROLLOUTS if title != WRITTEN_PANEL else PROMPTS[WRITTEN] * RESPONSES
            axes.set_xlabel(f"training step of the policy, {num} rollouts each")
        panels[0].set_ylabel("greedy accuracy on held-out problems")
        figure.savefig(path, dpi=100)


WRITTEN_PANEL = "written sums"


def panel_of(method: Method) -> str:
    """Return the title of the panel with a method's curve."""
    if method.task == WRITTEN:
        return WRITTEN_PANEL
    return "rewarded by a reward model" if method.against_a_model else "rewarded by the rule"


def draw_panel(axes: Any, curves: Curves) -> None:
    """Draw the mean over the seeds as a line, the lowest and the highest as a band."""
    for method, seeds in curves.items():
        colour = COLOURS[method.name]
        columns: dict[int, list[float]] = {}
        for points in seeds.values():
            for step, value in points:
                columns.setdefault(step, []).append(value)
        steps = sorted(columns)
        axes.plot(steps, [fmean(columns[step]) for step in steps], color=colour, label=method.label)
        lowest, highest = ([choose(columns[step]) for step in steps] for choose in (min, max))
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    if curves:
        axes.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main())
