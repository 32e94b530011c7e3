"""`python -m grpo_rl doctor`: what is wrong with a run, why, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from grpo_rl.arguments import Arguments
from grpo_rl.telemetry.diagnosis.diagnose import as_text, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.text import say


def main(argv: Sequence[str]) -> int:
    parser = Arguments(
        "doctor",
        "Say what is wrong with a run, from its metrics and its rollouts: evidence, meaning, what to change.",
        "grpo-rl doctor my_run",
    )
    parser.add_argument("run", metavar="RUN", help="the folder or the name of a run")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 where something is wrong")
    arguments = parser.read(argv)
    diagnosis = diagnose(RunRecord.of_folder(find_run(arguments.run)))
    say(json.dumps(jsonable([asdict(item) for item in diagnosis.findings]), indent=2) if arguments.json else as_text(diagnosis))
    return 1 if arguments.strict and diagnosis.findings else 0
