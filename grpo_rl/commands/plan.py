"""`grpo-rl plan recipe=... key=value`: what a run would do, without doing it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import log
from pathlib import Path

from grpo_rl import main as training
from grpo_rl.arguments import Arguments
from grpo_rl.errors import DataError


def main(argv: Sequence[str]) -> int:
    """Returns the code that the run's own refusal would end with."""
    parser = Arguments(
        "plan",
        "Check a configuration whole and print its plan: roles and devices, passes, sizes, objective, memory; for a machine that\n"
        "machine= names also the time of a step and how to divide its GPUs. Nothing starts.\n"
        "The words are those of training: recipe=NAME, key=value, ~key.",
        "grpo-rl plan recipe=gsm8k/qwen2.5-7b machine=8xH100-80GB trainer.mean_response_length=300",
    )
    lengths = "take mean and spread of the responses' lengths from this run's log"
    parser.add_argument("--lengths", type=Path, metavar="RUN", help=lengths)
    for names in (("--config-name", "-cn"), ("--config-path", "-cp"), ("--config-dir", "-cd")):
        parser.add_argument(*names, metavar="NAME", help="Hydra's, as for training")
    options, settings = parser.read_with_settings(argv)
    files = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if value and name != "lengths"]
    measured = [] if options.lengths is None else words_of_lengths(options.lengths)
    return training.main(
        [*files, *(word for word in settings if not word.startswith("trainer.dry_run=")), *measured, "trainer.dry_run=true"]
    )


def words_of_lengths(run: Path) -> list[str]:
    """Return words for the response lengths in a run's log. Raises DataError if it has none."""
    from grpo_rl.telemetry.rollout_log import read_rollouts, step_files

    records = (record for _, path in step_files(run / "rollouts") for record in read_rollouts(path))
    lengths = [length for record in records if isinstance(length := record.get("response_length"), int)]
    if not lengths:
        raise DataError(f"--lengths {run}: has no log of rollouts whose lengths could be taken")
    spread = statistics.pstdev([log(max(1, length)) for length in lengths])
    return [
        f"trainer.mean_response_length={max(1, round(statistics.fmean(lengths)))}",
        f"trainer.response_length_spread={min(spread, 5.0):.4f}",
    ]
