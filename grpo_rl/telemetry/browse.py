"""`grpo-rl browse RUN [--where "reward<0.5"] [--sort reward]`: a run's rollouts, chosen and shown."""

from __future__ import annotations

import argparse
import io
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_rl.arguments import Arguments
from grpo_rl.errors import DataError, GrpoRlError
from grpo_rl.telemetry.rollouts.filters import FIELDS, Condition, Record, check_names, field, parse_condition
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts, step_files
from grpo_rl.telemetry.rollouts.rollout_pages import as_text
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.text import encodable


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rollouts that the command line asks for. Return exit code 0; 2 for wrong options and what is no run, 3 where there are no rollouts or they cannot be read."""
    try:
        print(encodable(browse(_parser().read(sys.argv[1:] if argv is None else argv)), sys.stdout.encoding or "utf-8"))
    except GrpoRlError as error:
        print(f"error: {encodable(str(error), sys.stderr.encoding or 'utf-8')}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader, such as `head`, has read enough and closed the pipe.
        sys.stdout = io.StringIO()
    return 0


def browse(arguments: argparse.Namespace) -> str:
    """Return the rollouts that are shown."""
    conditions = [parse_condition(text) for text in arguments.where]
    step, path = choose_file(find_run(arguments.run), "val" if arguments.val else "rollouts", arguments.step)
    records = read_rollouts(path)
    wanted = [condition.name for condition in conditions] + ([arguments.sort.lstrip("-")] if arguments.sort else [])
    check_names(wanted, records)
    chosen = select(records, conditions, arguments.sort)
    shown = chosen[: arguments.limit]
    title = f"{path}: {len(chosen)} of {len(records)} rollouts of step {step}"
    if conditions:
        title += " with " + " and ".join(arguments.where)
    if len(shown) < len(chosen):
        title += f", the first {len(shown)} shown"
    return as_text(title, shown, full=arguments.full)


def choose_file(run: Path, kind: str, step: int | None) -> tuple[int, Path]:
    """Return step and file of the run folder's rollouts, the last step where none is named. Raises DataError with the steps there are."""
    files = step_files(run / kind)
    if not files:
        raise DataError(f"{run / kind}: there are no files step_N.jsonl or step_N.jsonl.zst; give the folder of a run")
    if step is None:
        return files[-1]
    for there, path in files:
        if there == step:
            return there, path
    steps = [str(there) for there, _ in files]
    shown = ", ".join(steps if len(steps) <= 12 else [*steps[:6], "...", *steps[-6:]])
    raise DataError(f"{run / kind}: there is no step {step}; there are {shown}")


def select(records: Sequence[Record], conditions: Sequence[Condition], sort: str | None) -> list[Record]:
    """Return the rollouts that meet all conditions, sorted by the field or component `sort`; `-sort` is from large to small.

    Rollouts without the field, or with NaN, come last either way.
    """
    chosen = [record for record in records if all(condition.holds(record) for condition in conditions)]
    if sort is None:
        return chosen
    descending, name = sort.startswith("-"), sort.lstrip("-")

    def has_value(record: Record) -> bool:
        value = field(record, name)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    with_value = [record for record in chosen if has_value(record)]
    numbers = all(isinstance(field(record, name), int | float) for record in with_value)

    def key(record: Record) -> Any:
        value = field(record, name)
        return value if numbers else str(value)

    return sorted(with_value, key=key, reverse=descending) + [record for record in chosen if not has_value(record)]


def _parser() -> Arguments:
    parser = Arguments(
        "browse",
        "Show rollouts of a run, one step at a time. Names in --where and --sort are the components of the reward, and\n"
        + textwrap.fill(", ".join(FIELDS), 110),
        "grpo-rl browse my_run --where 'reward<0.5' --sort=-response_length",
    )
    parser.add_argument("run", metavar="RUN", help="the folder or the name of a run")
    parser.add_argument("--step", type=int, help="the step; the last one if not given")
    parser.add_argument("--val", action="store_true", help="validation instead of training")
    parser.add_argument(
        "--where", action="append", default=[], metavar="CONDITION", help="such as reward<0.5; all that are given must hold"
    )
    parser.add_argument("--sort", metavar="NAME", help="from small to large; --sort=-NAME from large to small")
    parser.add_argument("--limit", type=int, default=10, help="rollouts at most (10)")
    parser.add_argument("--full", action="store_true", help="long prompts and responses whole")
    return parser


if __name__ == "__main__":
    sys.exit(main())
