"""`python -m grpo_rl doctor RUN`: what is wrong with a run, why, and what to change."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.telemetry.diagnosis.diagnose import as_text, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.terminal.text import encodable


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis of a finished or a running run. Returns 0, or with --strict 1 where something is wrong.

    Raises DataError where there is no run.
    """
    arguments = _parser().parse_args(argv)
    diagnosis = diagnose(RunRecord.of_folder(Path(arguments.run).expanduser()))
    if arguments.json:
        text = json.dumps(jsonable([one.as_json() for one in diagnosis.findings]), indent=2)
    else:
        text = as_text(diagnosis)
    print(encodable(text, sys.stdout.encoding or "utf-8"))
    return 1 if arguments.strict and not diagnosis.is_healthy else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_rl doctor",
        description="Say what is wrong with a run, from its metrics and its rollouts: evidence, meaning, what to change.",
        epilog="example: python -m grpo_rl doctor runs/my_run",
    )
    parser.add_argument("run", help="the folder of a run, finished or running")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 where something is wrong")
    return parser
