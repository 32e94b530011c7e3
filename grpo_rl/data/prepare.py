"""`grpo-rl prepare`: original files in verl's row format, with prompts worded as verl words them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_rl.arguments import Arguments, whole_number, writing
from grpo_rl.config.convert import show
from grpo_rl.data.rows import Row
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import Joined
from grpo_rl.data.tasks.made_rows import row_of
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.rewards.rules.answers import last_boxed

Record = Row  # as published

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

VERL_KEYS = {"data_source", "prompt", "reward_model"}


def gsm8k(record: Record, split: str, index: int) -> Row:
    """The ground truth is what follows `####`, without commas."""
    question, answer = _text(record, "question"), _text(record, "answer")
    _, marker, final = answer.rpartition("#### ")
    truth = final.strip().replace(",", "")
    if not marker or not truth.removeprefix("-").replace(".", "", 1).isdigit():
        raise ValueError(f"the answer does not end with '#### NUMBER': {answer[-40:]!r}")
    return row_of(
        "openai/gsm8k",
        f"{question} {GSM8K_INSTRUCTION}",
        truth,
        {"split": split, "index": index, "answer": answer, "question": question},
    )


def math(record: Record, split: str, index: int) -> Row:
    r"""Also of MATH-500; the ground truth is in the solution's last \boxed."""
    problem, solution = _text(record, "problem"), _text(record, "solution")
    truth = last_boxed(solution, bare_end="$")
    if truth is None:
        raise ValueError(f"the solution has no complete \\boxed{{...}}: {solution[-60:]!r}")
    row = row_of("DigitalLearningGmbH/MATH-lighteval", f"{problem} {MATH_INSTRUCTION}", truth, {"split": split, "index": index})
    # MATH-500 has the level as a number, and calls the type a subject.
    level = record.get("level")
    extra = {"level": f"Level {level}"} if isinstance(level, int) else {}
    return row | {key: _text(record, key) for key in ("level", "type", "subject") if key in record and key not in extra} | extra


FORMATS: dict[str, Callable[[Record, str, int], Row]] = {"gsm8k": gsm8k, "math": math}


def _text(record: Record, key: str) -> str:
    if key not in record:
        ready = (
            "; it is in verl's format already: data.train_files takes the file as it is" if record.keys() >= VERL_KEYS else ""
        )
        raise ValueError(f"there is no {key!r}; the record has {', '.join(sorted(map(str, record))) or 'nothing'}{ready}")
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r} must be text; found {show(value)}")
    return value


def main(argv: Sequence[str]) -> int:
    print(prepare(_parser().read(argv)))
    return 0


def prepare(arguments: argparse.Namespace) -> str:
    """Returns in words what was written."""
    original = FORMATS[arguments.format]
    target = Path(arguments.to).expanduser() / f"{arguments.split}.{arguments.type}"
    if target.exists() and not arguments.overwrite:
        raise ConfigError(f"--to: {target} is there already; give --overwrite to replace it, or another --split or --to")
    rows: list[Row] = []
    source = Joined("all sources", [open_source(name) for name in arguments.source])
    for index in range(min(len(source), arguments.limit or len(source))):
        try:
            rows.append(original(source.row(index), arguments.split, index))
        except ValueError as error:
            raise DataError(f"{source.where(index)}: {error}") from error
    from grpo_rl.data.sources.tables import write_rows  # which loads pyarrow

    with writing(f"--to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_rows(target, rows)
    longest = max(len(row["prompt"][-1]["content"]) for row in rows)
    return f"{target}: {len(rows)} rows of {arguments.format}, split {arguments.split}, longest prompt {longest} characters"


def _parser() -> Arguments:
    parser = Arguments(
        "prepare",
        "Write a data set's original files in verl's row format.",
        "grpo-rl prepare gsm8k --from train.jsonl --to data",
    )
    parser.add_argument("format", choices=sorted(FORMATS), help="what the original files hold")
    parser.add_argument(
        "--from",
        dest="source",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files or folders (.jsonl, .json, .parquet), or data sets of the hub such as hf:openai/gsm8k?split=train&config=main",
    )
    parser.add_argument("--to", required=True, metavar="FOLDER", help="where SPLIT.parquet or SPLIT.jsonl is written")
    parser.add_argument("--split", default="train", help="name of the file, and of the split in extra_info (train)")
    parser.add_argument("--type", choices=("jsonl", "parquet"), default="parquet", help="kind of file (parquet)")
    parser.add_argument("--limit", type=whole_number, metavar="N", help="the first N rows only")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser
