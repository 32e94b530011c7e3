"""`grpo-rl prepare gsm8k|math|countdown --from FILE --to FOLDER`: original files in verl's row format.

Prompts are worded as verl's and TinyZero's own preparation words them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments, counted, writing
from grpo_rl.data.sources.locate import data_files, open_source
from grpo_rl.errors import ConfigError, DataError, GrpoRlError
from grpo_rl.rewards.rules.answers import last_boxed

ORIGINALS = (".jsonl", ".json", ".parquet")
Record = dict[str, Any]
Row = dict[str, Any]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
COUNTDOWN_PROMPT = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations (+, -, *, /) "
    "and each number can only be used once. Show your work in <think> </think> tags. And return the final answer in "
    "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)

VERL_KEYS = {"data_source", "prompt", "reward_model"}


def gsm8k(record: Record, split: str, index: int) -> Row:
    """A row of GSM8K from {question, answer}; the ground truth is what follows `####`, without commas.

    Raises ValueError for a record without these, or an answer without its number.
    """
    question, answer = _text(record, "question"), _text(record, "answer")
    _, marker, final = answer.rpartition("#### ")
    truth = final.strip().replace(",", "")
    if not marker or not truth.removeprefix("-").replace(".", "", 1).isdigit():
        raise ValueError(f"the answer does not end with '#### NUMBER': {_shown(answer[-40:])}")
    return _row(
        "openai/gsm8k",
        f"{question} {GSM8K_INSTRUCTION}",
        truth,
        {"split": split, "index": index, "answer": answer, "question": question},
    )


def math(record: Record, split: str, index: int) -> Row:
    r"""A row of MATH from {problem, solution, level, type}, or of MATH-500; the ground truth is in the solution's last \boxed.

    Raises ValueError for a record without problem or solution, or a solution without a complete box.
    """
    problem, solution = _text(record, "problem"), _text(record, "solution")
    truth = last_boxed(solution, bare_end="$")
    if truth is None:
        raise ValueError(f"the solution has no complete \\boxed{{...}}: {_shown(solution[-60:])}")
    row = _row("DigitalLearningGmbH/MATH-lighteval", f"{problem} {MATH_INSTRUCTION}", truth, {"split": split, "index": index})
    # MATH-500 has the level as a number, and calls the type a subject.
    level = record.get("level")
    more = {"level": f"Level {level}"} if isinstance(level, int) else {}
    return row | {key: _text(record, key) for key in ("level", "type", "subject") if key in record and key not in more} | more


def countdown(record: Record, split: str, index: int) -> Row:
    """A row of countdown from {target, nums}, TinyZero's columns; the ground truth is {target, numbers}.

    Raises ValueError for a record without them, or where they are no whole numbers.
    """
    numbers = record.get("nums", record.get("numbers"))
    target = record.get("target")
    if not isinstance(numbers, list) or len(numbers) < 2 or not all(type(number) is int for number in numbers):
        raise ValueError(f"nums must be a list of whole numbers, two at least; found {_shown(numbers)}")
    if type(target) is not int:
        raise ValueError(f"target must be a whole number; found {_shown(target)}")
    content = COUNTDOWN_PROMPT.format(numbers=numbers, target=target)
    return _row("countdown", content, {"target": target, "numbers": numbers}, {"split": split, "index": index})


FORMATS: dict[str, Callable[[Record, str, int], Row]] = {"gsm8k": gsm8k, "math": math, "countdown": countdown}


def _row(data_source: str, content: str, truth: Any, extra_info: dict[str, Any]) -> Row:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def _text(record: Record, key: str) -> str:
    if key not in record:
        ready = (
            "; it is in verl's format already: data.train_files takes the file as it is" if record.keys() >= VERL_KEYS else ""
        )
        raise ValueError(f"there is no {key!r}; the record has {', '.join(sorted(map(str, record))) or 'nothing'}{ready}")
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r} must be text; found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- the command -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0 when the file is written, else 2 for wrong options or 3 for rows that cannot be read."""
    try:
        print(prepare(_parser().read(sys.argv[1:] if argv is None else argv)))
    except GrpoRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare(arguments: argparse.Namespace) -> str:
    """Write the file, and return in words what was written."""
    original = FORMATS[arguments.format]
    target = Path(arguments.to).expanduser() / f"{arguments.split}.{arguments.type}"
    if target.exists() and not arguments.overwrite:
        raise ConfigError(f"--to: {target} is there already; give --overwrite to replace it, or another --split or --to")
    rows: list[Row] = []
    for place, record in read_original([Path(name).expanduser() for name in arguments.source]):
        if arguments.limit is not None and len(rows) >= arguments.limit:
            break
        try:
            rows.append(original(record, arguments.split, len(rows)))
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
    if not rows:
        raise DataError(f"{', '.join(arguments.source)}: there are no rows")
    from grpo_rl.data.sources.tables import write_rows  # which loads pyarrow

    with writing(f"--to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_rows(target, rows)
    longest = max(len(row["prompt"][-1]["content"]) for row in rows)
    return f"{target}: {len(rows)} rows of {arguments.format}, split {arguments.split}, longest prompt {longest} characters"


def read_original(paths: Sequence[Path]) -> Iterator[tuple[str, Record]]:
    """Yield place and content of each record of the files, and of the files below the folders.

    A folder's files come by name, the numbers in it as numbers: 9.json before 10.json. A .json file is one record or a
    list of them. Raises DataError with the place for anything that cannot be read.
    """
    for path in paths:
        if path.is_dir():
            files = sorted((file for file in path.rglob("*") if file.suffix in ORIGINALS and file.is_file()), key=_natural)
            if not files:
                raise DataError(f"{path}: the folder has no {', '.join(ORIGINALS)} files")
        else:
            files = [file for _, file in data_files(str(path))]
        for file in files:
            if file.suffix == ".json":
                yield from _records(file)
                continue
            source = open_source(str(file))
            for index in range(len(source)):
                yield source.where(index), source.row(index)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON: {error}") from error
    for index, record in enumerate(value if isinstance(value, list) else [value]):
        where = f"{path}, record {index}" if isinstance(value, list) else str(path)
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object, found {type(record).__name__}")
        yield where, record


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
        help="files (.jsonl, .json, .parquet), or folders of them; math: also one JSON file per problem, as in the original archive",
    )
    parser.add_argument("--to", required=True, metavar="FOLDER", help="where SPLIT.parquet or SPLIT.jsonl is written")
    parser.add_argument("--split", default="train", help="name of the file, and of the split in extra_info (train)")
    parser.add_argument("--type", choices=("jsonl", "parquet"), default="parquet", help="kind of file (parquet)")
    parser.add_argument("--limit", type=counted, metavar="N", help="the first N rows only")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
