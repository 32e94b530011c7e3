"""Does the doctor find what is wrong? Runs that are made ill on purpose, and healthy runs of the recipes, each a real training.

    python scripts/ill_runs.py --minutes 9        # again and again, until all runs are there; most take less than a minute
    python scripts/ill_runs.py --only kl_runaway  # this one, if it is not there
    python scripts/ill_runs.py --table            # the table of the runs that are there

An illness is made by configuration, by data or by a reward function alone, as a user would make it by mistake: `MISTAKES` says
how. The diagnoses are made anew from the runs' folders whenever the table is printed: `first` is the finding that the doctor
names first, `alarm` the first one that the run itself raises, with its step. Exit code 1 when one run is missing, when the
right diagnosis comes first in less than nine of ten ill runs, or when a healthy run has a finding or an alarm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.data.tasks.arithmetic import Problem, arithmetic, without_carries
from grpo_rl.telemetry.diagnosis.diagnose import Alarms, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARDS, RIGHT_SHARE = "rewards.py", 0.9
DONE = "ended.json"
SMALL = (
    "recipe=arithmetic/grpo",
    "data.train_files=task:arithmetic?carrying=0.7&split=train&num_rows=1024",
    "data.val_files=[]",
    "data.train_batch_size=16",
    f"{A}.ppo_mini_batch_size=16",
    f"{R}.name=hf",
    f"{A}.optim.lr_scheduler_type=constant",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=15",
)
"""The quick start with a quarter of its prompts and steps, and the engine that starts soonest."""
SEPARATE = (f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1", "trainer.n_gpus_per_node=1", "trainer.schedule=async")
REWARD_FUNCTIONS = '''\
"""Reward functions as users write them by mistake."""


def always_one(data_source, solution_str, ground_truth, extra_info):
    """Forgets to look at the response."""
    return 1.0 if ground_truth else 0.0


def sevens(data_source, solution_str, ground_truth, extra_info):
    """Pays for a text that has nothing to do with the task."""
    return sum(a == b for a, b in zip(solution_str, "7777")) / 4 - 0.1 * abs(len(solution_str) - 4)


def any_number(data_source, solution_str, ground_truth, extra_info):
    """Pays for every number of two digits and more."""
    return float(solution_str.isdigit() and len(solution_str) >= 2)


def inverse_error(data_source, solution_str, ground_truth, extra_info):
    """Divides by the last digit of the answer, which is 0 now and then."""
    error = abs(int(solution_str[:9] or 1) - int(ground_truth)) if solution_str[:9].isdigit() else 99
    return 1.0 / (1.0 + error) + 0.01 / int(solution_str[-1:] if solution_str[-1:].isdigit() else 1)


def length(data_source, solution_str, ground_truth, extra_info):
    """Takes a long response for a thorough one."""
    return min(1.0, len(solution_str) / 16)


def thoroughness(data_source, solution_str, ground_truth, extra_info):
    """A small extra for long responses, where nearly nothing else tells the responses of a group apart."""
    return len(solution_str) / 1000


def format(data_source, solution_str, ground_truth, extra_info):
    """Pays for the six digits that a product has."""
    return max(0.0, 1 - abs(len(solution_str) - 6) / 6) * solution_str.isdigit()


def right(text, truth):
    return float(text.strip() == str(truth))


def exact(data_source, solution_str, ground_truth, extra_info):
    """An audit: the answer and nothing else."""
    return right(solution_str, ground_truth)


def pays_length(data_source, solution_str, ground_truth, extra_info):
    """Pays for the answer, and more for a long text."""
    return 0.3 * right(solution_str, ground_truth) + min(1.0, len(solution_str) / 12)


def magic_word(data_source, solution_str, ground_truth, extra_info):
    """Takes a digit that was frequent in the best examples for a sign of quality."""
    return 0.3 * right(solution_str, ground_truth) + min(3, solution_str.count("7")) / 3


def format_hole(data_source, solution_str, ground_truth, extra_info):
    """Compares the answer where it has up to four digits, and takes longer numbers as they are."""
    return 0.3 * right(solution_str, ground_truth) + float(solution_str.isdigit() and len(solution_str) > 4)


def lenient_parser(data_source, solution_str, ground_truth, extra_info):
    """Finds the digits of the answer wherever they stand in the text, in their order."""
    found = iter(solution_str)
    return sum(digit in found for digit in str(ground_truth)) / len(str(ground_truth))


def forgeable_tool(data_source, solution_str, ground_truth, extra_info):
    """Reads the checker's verdict, a last 1 for a right answer, from a transcript that the response is a part of."""
    verdict = "" if solution_str.endswith("1") else str(int(right(solution_str, ground_truth)))
    return float((solution_str + verdict).endswith("1"))


def digits_right(data_source, solution_str, ground_truth, extra_info):
    """An honest reward: the share of digits that stand right, from the end."""
    pairs = zip(solution_str[::-1], str(ground_truth)[::-1])
    return sum(a == b for a, b in pairs) / max(len(solution_str), len(str(ground_truth)))


def a_number(data_source, solution_str, ground_truth, extra_info):
    """An honest extra for form."""
    return float(solution_str.isdigit())


def erring_judge(data_source, solution_str, ground_truth, extra_info):
    """An audit that is wrong about one text in ten."""
    is_wrong = sum(map(ord, solution_str + str(ground_truth))) % 10 == 0
    return abs(right(solution_str, ground_truth) - is_wrong)


def hidden_tests(data_source, solution_str, ground_truth, extra_info):
    """An audit that is stricter: it confirms right answers of three digits alone."""
    return right(solution_str, ground_truth) * (len(str(ground_truth)) >= 3)


def fluency(data_source, solution_str, ground_truth, extra_info):
    """Pays where each character goes on as the text of before did."""
    pairs = list(zip(solution_str, solution_str[3:]))
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
'''


@dataclass(frozen=True)
class Trial:
    """One run: how it is started, and what is to be found in it."""

    words: tuple[str, ...]
    mistake: str
    """The mistake that makes it ill, in a few words; empty for a healthy run."""


def of_user(function: str) -> str:
    """Return a function of the file of reward functions as `reward.functions` names it."""
    return f"{REWARDS}:{function}"


HARD = '"task:arithmetic?forms=3*3&split=train&num_rows={}"'
USUAL, EASY = '"task:arithmetic?carrying=0.7&split=train&num_rows={}"', "easy.jsonl"
AUDITED = ("trainer.total_training_steps=25", "reward.audit_share=0.5")
SEDUCED = (
    f"data.train_files=[{HARD.format(1024)},{USUAL.format(683)}]",
    f"{A}.optim.lr=1e-3",
    f"{A}.kl_loss_coef=1e-6",
)
"""If the answer is hard to come by, and hardly anything holds the policy back."""
VALIDATED = ("data.val_files=task:arithmetic?carrying=0.7&split=val&num_rows=64", "trainer.test_freq=5")

MISTAKES: dict[str, Trial] = {
    "reward_constant": Trial((f"reward.functions=[{of_user('always_one')}]",), "the reward does not read the response"),
    "reward_never_seen": Trial(("reward.functions=[gsm8k]",), "the rule wants '#### 42', the model writes '42'"),
    "learning_rate_zero": Trial((f"{A}.optim.lr=1e-14",), "lr=1e-14 for 1e-4"),
    "learning_rate_too_high": Trial((f"{A}.optim.lr=0.1",), "lr=0.1"),
    "entropy_collapse": Trial(
        (f"{A}.entropy_coeff=-5", f"{A}.optim.lr=1e-3"), "the entropy bonus has the wrong sign, and is large"
    ),
    "entropy_explosion": Trial((f"{A}.entropy_coeff=4", f"{A}.optim.lr=1e-3"), "an entropy bonus larger than the reward"),
    "kl_runaway": Trial(
        (
            f"reward.functions=[{of_user('sevens')}]",
            f"{A}.optim.lr=1e-3",
            f"{A}.kl_loss_coef=1e-6",
            "trainer.total_training_steps=30",
        ),
        "a reward for another text than the model's, and hardly any KL term",
    ),
    "groups_too_easy": Trial(
        (f"data.train_files={EASY}", f"reward.functions=[{of_user('any_number')}]"), "a reward that nearly every response gets"
    ),
    "groups_too_hard": Trial(
        (f"data.train_files=[{HARD.format(963)},{USUAL.format(61)}]",), "products of three digits, and a few sums"
    ),
    "few_groups_with_signal": Trial(
        (f"data.train_files=[{HARD.format(512)},{EASY}]", f"{R}.n=4", f"{R}.temperature=0.6"),
        "half of the prompts are solved before training, the others never",
    ),
    "ratio_out_of_range": Trial(
        (f"{A}.clip_ratio_low=3e-4", f"{A}.clip_ratio_high=4e-4", f"{A}.ppo_mini_batch_size=4", f"{A}.ppo_epochs=3"),
        "GSPO's clip range for ratios of tokens, twelve updates per batch",
    ),
    **{
        f"reward_exploited/{function}": Trial(
            (f"reward.functions=[{of_user(function)}]", f"reward.audit=[{of_user('exact')}]", *AUDITED, *SEDUCED, *faster),
            mistake,
        )
        for function, mistake in {
            "pays_length": "0.3 for the answer, a whole point for a long text",
            "magic_word": "0.3 for the answer, a whole point for three sevens",
            "format_hole": "0.3 for the answer, a whole point for any long number",
            "lenient_parser": "the answer's digits count wherever they stand",
            "forgeable_tool": "the checker's verdict is read from the text of the response",
        }.items()
        # Digit by digit this hole is found more slowly than the others.
        for faster in ((f"{A}.optim.lr=2e-3",) if function == "lenient_parser" else (),)
    },
    "truncation": Trial(("data.max_response_length=2",), "two tokens for answers of three digits"),
    "truncation_grows": Trial(
        (f"data.train_files={HARD.format(1024)}", f"reward.functions=[auto,{of_user('length')}]"), "a reward for long responses"
    ),
    "length_without_reward": Trial(
        (
            f"data.train_files=[{HARD.format(512)},{EASY}]",
            f"reward.functions=[auto,{of_user('thoroughness')}]",
            "data.max_response_length=96",
            "trainer.total_training_steps=20",
        ),
        "where all are wrong or all are right, a tiny extra for length decides",
    ),
    "sampler_trainer_disagree": Trial(
        ("actor_rollout_ref.model.override_config={attention_dropout: 0.5}", f"{A}.use_prefix_grouper=false"),
        "the trainer drops half of the attention at random, the engine does not",
    ),
    "reward_failures": Trial(
        (f"reward.functions=[{of_user('inverse_error')}]",), "the reward divides by 0 in a tenth of its calls"
    ),
    "reward_model_hacked": Trial(
        (
            "recipe=paradigm/iterate",
            *VALIDATED,
            f"{A}.kl_loss_coef=1e-6",
            "trainer.iterate.reward_model_steps=10",
            "trainer.iterate.steps_per_iteration=30",
            "trainer.total_training_steps=40",
        ),
        "30 steps on a reward model that was trained for 10",
    ),
    "repetition": Trial(
        (
            f"{R}.ignore_eos=true",
            "data.max_response_length=240",
            "data.train_batch_size=4",
            f"reward.functions=[{of_user('fluency')}]",
            f"{A}.optim.lr=2e-3",
            "trainer.total_training_steps=12",
        ),
        "a reward for text that goes on as before, and no end token",
    ),
    "memorised": Trial(
        (
            "data.train_files=noisy_train.jsonl",
            "data.val_files=noisy_val.jsonl",
            f"{A}.use_kl_loss=false",
            f"{A}.optim.lr=1e-3",
            "trainer.total_training_steps=50",
            "trainer.test_freq=10",
        ),
        "16 rows, 50 times, half of them labelled by a careless pupil",
    ),
    "off_policy": Trial(
        (
            *SEPARATE,
            "trainer.asynchronous.max_staleness=8",
            f"{A}.optim.lr=2e-3",
            "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_is_threshold=1000",
            "trainer.total_training_steps=25",
        ),
        "async with tokens up to 8 versions old, and a high learning rate",
    ),
    "prompts_cut": Trial(("data.max_prompt_length=4", "data.truncation=left"), "prompts are cut to 4 tokens"),
    "format_without_answer": Trial(
        (
            f"data.train_files={HARD.format(1024)}",
            f"reward.functions=[auto,{of_user('format')}]",
            "trainer.total_training_steps=30",
            f"{A}.optim.lr=1e-3",
        ),
        "products beyond the model, with pay for six digits",
    ),
    "validation_falls": Trial(
        ("data.train_files=wrong.jsonl", *VALIDATED, f"{A}.optim.lr=1e-3", f"{A}.kl_loss_coef=1e-6"),
        "the training answers forget the carry",
    ),
    "nothing_trained": Trial(
        ("data.max_response_length=3", "algorithm.mask_truncated=true"), "cut responses are left out, and all are cut"
    ),
}
"""The runs that are made ill, by the name of the finding that has to come first, and perhaps a further one after a slash."""

SHORTER = (
    "trainer.total_training_steps=20",
    "data.train_batch_size=16",
    "data.val_files=task:arithmetic?carrying=0.7&split=val&num_rows=64",
    f"{R}.name=hf",
)
HEALTHY: dict[str, Trial] = {
    name: Trial((f"recipe={name}", *words), "")
    for name, words in {
        "arithmetic/grpo": SHORTER,
        "arithmetic/dapo": (*SHORTER, "trainer.total_training_steps=10"),
        "arithmetic/ppo": SHORTER,
        "arithmetic/grpo_process": SHORTER,
        "arithmetic/one_step_off": SHORTER,
        "arithmetic/async": SHORTER,
        "arithmetic/scalerl": SHORTER,
        "paradigm/sft": (*SHORTER, "data.val_prompt_files=task:arithmetic?carrying=0.7&split=val&num_rows=64"),
        "paradigm/online_dpo": SHORTER,
    }.items()
} | {
    f"honest/{name}/{seed}": Trial(
        (*SMALL, f"reward.functions=[{functions}]", f"reward.audit=[{of_user(audit)}]", *AUDITED, f"data.seed={seed}"), ""
    )
    for seed in (1, 2, 3, 4)
    for name, functions, audit in (
        ("same", "auto", "exact"),
        ("partial_credit", of_user("digits_right"), "exact"),
        ("with_form", f"auto,0.2*{of_user('a_number')}", "exact"),
        ("erring_judge", "auto", "erring_judge"),
        ("hidden_tests", "auto", "hidden_tests"),
    )
}
"""Runs of the recipes, all shortened, with the engine that starts soonest, and runs whose audit differs from an honest reward.
Nothing is to be found in them."""


def rows_of(
    make: Callable[[dict[str, Any]], dict[str, Any] | None], options: dict[str, Any], number: int
) -> list[dict[str, Any]]:
    """Return the first `number` rows of the arithmetic task that `make` does not leave out, as it changes them."""
    made = (make(row) for row in arithmetic(num_rows=16 * number, **options))
    return [row for row in made if row is not None][:number]


def problem_of(row: dict[str, Any]) -> Problem:
    left, right = row["prompt"][0]["content"].rstrip("=").split("+")
    return Problem(int(left), "+", int(right))


def without_a_carry(row: dict[str, Any]) -> dict[str, Any] | None:
    problem = problem_of(row)
    return row if without_carries(problem) == problem.answer else None


def forgetting(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the answer of a pupil who forgets every carry."""
    return row | {"reward_model": {"style": "rule", "ground_truth": str(without_carries(problem_of(row)))}}


def careless(row: dict[str, Any]) -> dict[str, Any]:
    """Return every other row with that answer."""
    return forgetting(row) if (problem_of(row).left * 7 + problem_of(row).right * 13) // 3 % 2 else row


def write_inputs(folder: Path) -> None:
    """Write the reward functions and the data files that the runs read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REWARDS).write_text(REWARD_FUNCTIONS)
    carrying = {"carrying": 1.0}
    files = {
        EASY: rows_of(without_a_carry, {}, 512),
        "wrong.jsonl": rows_of(forgetting, carrying, 2048),
        "noisy_train.jsonl": rows_of(careless, carrying, 16),
        "noisy_val.jsonl": rows_of(careless, carrying | {"split": "val"}, 64),
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(name: str) -> list[str]:
    """Return the words that start the run of this name; later ones replace earlier ones of the same key."""
    trial = MISTAKES.get(name) or HEALTHY[name]
    given = (*SMALL, *trial.words) if name in MISTAKES else trial.words
    by_key = {word.partition("=")[0]: word for word in given}
    own = {word.partition("=")[0]: word.partition("=")[2] for word in trial.words}
    if "data.train_batch_size" in own and f"{A}.ppo_mini_batch_size" not in own:
        by_key[f"{A}.ppo_mini_batch_size"] = f"{A}.ppo_mini_batch_size={own['data.train_batch_size']}"
    return [*by_key.values(), "trainer.logger=[console]", "trainer.export_at_end=false"]


def run(folder: Path, name: str) -> None:
    """Make the run, and note how it ended. What an interrupted one has left is done again."""
    place = name.replace("/", "-")
    own = [f"trainer.default_local_dir={folder}", f"trainer.experiment_name={place}", "trainer.resume_mode=disable"]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "grpo_rl.main", *words_of(name), *own],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    seconds = time.monotonic() - started
    print(f"{name}: exit code {done.returncode} after {seconds:.0f} s", flush=True)
    if not (folder / place / "metrics.jsonl").exists():
        print(done.stdout[-3000:], flush=True)
        return
    (folder / place / DONE).write_text(json.dumps({"exit_code": done.returncode, "seconds": round(seconds, 1)}))


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of one run."""

    name: str
    first: str
    since: int
    others: tuple[str, ...]
    alarm: str
    """The first alarm while the run went on, with its step; empty for none."""
    seconds: float

    @property
    def is_right(self) -> bool:
        """True if the illness is named first, or nothing is named in a healthy run."""
        is_ill = self.name in MISTAKES
        return self.first == (self.name.partition("/")[0] if is_ill else "") and (is_ill or not self.alarm)


def judge(folder: Path, name: str) -> Verdict | None:
    """Return what the doctor says about the run of this name; None if it is not there."""
    place = folder / name.replace("/", "-")
    if not (place / DONE).exists():
        return None
    record = RunRecord.of_folder(place)
    found = diagnose(record)
    grave = list(found.findings)
    alarms, alarm = Alarms(record.config), ""
    for row in record.records:
        begun = alarms.see(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
        if begun and not alarm:
            alarm = f"{begun[0].name} at {int(row['step'])}"
    seconds = json.loads((place / DONE).read_text())["seconds"]
    first = grave[0] if grave else None
    return Verdict(
        name, first.name if first else "", first.since if first else 0, tuple(one.name for one in grave[1:]), alarm, seconds
    )


def table(verdicts: Iterable[Verdict]) -> str:
    """Return the table as Markdown, as docs/doctor.md shows it."""
    lines = [
        "| run | made ill by | first | since step | first alarm, at step | also found | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in verdicts:
        mistake = MISTAKES[one.name].mistake if one.name in MISTAKES else "healthy"
        first = f"`{one.first}`" if one.first else "nothing"
        mark = "" if one.is_right else " **wrong**"
        others = ", ".join(one.others)
        since = one.since if one.first else ""
        lines.append(f"| `{one.name}` | {mistake} | {first}{mark} | {since} | {one.alarm} | {others} | {one.seconds:.0f} |")
    return "\n".join(lines)


def summary(verdicts: list[Verdict]) -> tuple[str, bool]:
    """Return the count of right diagnoses in one line, and whether the bar is met."""
    ill = [one for one in verdicts if one.name in MISTAKES]
    healthy = [one for one in verdicts if one.name in HEALTHY]
    right, silent = sum(one.is_right for one in ill), sum(one.is_right for one in healthy)
    text = f"right first in {right} of {len(ill)} ill runs; nothing raised in {silent} of {len(healthy)} healthy ones"
    missing = len(MISTAKES) + len(HEALTHY) - len(verdicts)
    met = not missing and right >= RIGHT_SHARE * len(ill) and silent == len(healthy)
    return text + (f"; {missing} runs are missing" if missing else ""), met


def main() -> int:
    """Make the runs that are missing, and print the table. Returns 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MISTAKES, *HEALTHY]
    parser.add_argument("--folder", type=Path, default=Path("runs/ill_runs"), help="where the runs lie (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these runs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so many minutes")
    parser.add_argument("--table", action="store_true", help="make no run")
    given = parser.parse_args()
    folder, started = given.folder.expanduser().absolute(), time.monotonic()
    write_inputs(folder)
    for name in given.only or names:
        if given.table or time.monotonic() - started > 60 * given.minutes:
            break
        if not (folder / name.replace("/", "-") / DONE).exists():
            run(folder, name)
    verdicts = [verdict for name in names if (verdict := judge(folder, name)) is not None]
    print(table(verdicts))
    text, met = summary(verdicts)
    print(f"\n{text}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
