"""`grpo-rl plan recipe=... key=value`: what a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_rl import main as training
from grpo_rl.arguments import Arguments

DRY = "trainer.dry_run=true"


def main(argv: Sequence[str]) -> int:
    """Print the plan of the run that the words describe, and return the code that the run's own refusal would end with."""
    options, settings = _parser().read_with_settings(argv)
    del options
    return training.main([*(word for word in settings if not word.startswith("trainer.dry_run=")), DRY])


def _parser() -> Arguments:
    return Arguments(
        "plan",
        "Check a configuration whole and print its plan: roles and devices, passes, sizes, objective, memory. Nothing starts.\n"
        "The words are those of training: recipe=NAME, key=value, ~key.",
        "grpo-rl plan recipe=arithmetic/grpo trainer.total_training_steps=20",
    )
