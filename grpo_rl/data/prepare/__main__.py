"""`python -m grpo_rl.data.prepare gsm8k|math|countdown --from FILE --to FOLDER`: original files to verl's row format."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments, counted
from grpo_rl.data.prepare.formats import FORMATS, Row
from grpo_rl.data.prepare.original import read_original
from grpo_rl.errors import ConfigError, DataError, GrpoRlError

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl"}


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
    target = Path(arguments.to).expanduser() / f"{arguments.split}{SUFFIXES[arguments.type]}"
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
        help="files (.jsonl, .json, .parquet), or folders of them; math: also one JSON file per problem, as in the original archive",
    )
    parser.add_argument("--to", required=True, metavar="FOLDER", help="where SPLIT.parquet or SPLIT.jsonl is written")
    parser.add_argument("--split", default="train", help="name of the file, and of the split in extra_info (train)")
    parser.add_argument("--type", choices=sorted(SUFFIXES), default="parquet", help="kind of file (parquet)")
    parser.add_argument("--limit", type=counted, metavar="N", help="the first N rows only")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """The file `path` with these rows, its folder made where it is missing; raises ConfigError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(temporary, path.suffix, rows)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--to: {path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=True) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    sys.exit(main())
