"""`python -m grpo_rl doctor`: what is wrong with a run, or with one that is about to start, why, and what to change."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.arguments import Arguments
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.diagnosis.diagnose import as_text, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.text import say

if TYPE_CHECKING:
    from grpo_rl.plan.first_look import Sight

WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis of a finished or a running run, or of the start that the words describe.

    Returns 0, or with --strict 1 where something is wrong. Raises ConfigError where there is no run, DataError where it has no step, and either
    where the words describe a run that would be refused.
    """
    arguments = _parser().read(argv)
    if len(arguments.run) > 1 or _is_word(arguments.run[0]):
        return _before_start(arguments)
    diagnosis = diagnose(RunRecord.of_folder(find_run(arguments.run[0])))
    findings = [one.as_json() for one in diagnosis.findings]
    return _show(arguments, findings, as_text(diagnosis), ill=not diagnosis.is_healthy)


def _before_start(arguments: argparse.Namespace) -> int:
    """Look at a run that is about to start."""
    unread = [word for word in arguments.run if not _is_word(word)]
    if unread:
        raise ConfigError(f"{unread[0]!r} is neither key=value nor alone: give one run, or recipe=NAME key=value ...")
    sights = looked_at(arguments.run)
    troubles = [sight for sight in sights if sight.advice]
    lines = [line for sight in sights for line in _wrapped(f"{'WATCH' if sight.advice else 'ok   '}  {sight.as_line()}")]
    number = f"{len(troubles)} thing{'s' if len(troubles) > 1 else ''} to look at" if troubles else "nothing is in the way"
    text = "\n".join([f"Before a start: {number}.", *lines])
    found: list[dict[str, Any]] = [
        {"name": sight.name, "text": sight.text, "advice": sight.advice, "weight": "watch" if sight.advice else "ok"}
        for sight in sights
    ]
    return _show(arguments, found, text, ill=bool(troubles))


def looked_at(words: Sequence[str]) -> list[Sight]:
    """Return all that can be seen of the run that the words describe, without starting any of its workers.

    Its data are read, its prompts rendered, and its reward is tried on some rows in processes as a run has them. Raises
    what a run would raise.
    """
    from grpo_rl.config.compose import compose
    from grpo_rl.plan.make import make_plan

    plan = make_plan(compose(list(words)))
    from grpo_rl.cluster.inputs import read_inputs
    from grpo_rl.plan.first_look import RewardTrial, of_memory, of_plan, of_prompts, some_prompts
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.telemetry.terminal.console import Console

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo_rl-doctor-"))
        run_dir, console = RunDir.create(folder, "look"), Console(sys.stderr)
        stack.callback(run_dir.release)
        stack.callback(console.close)
        inputs = read_inputs(plan.collection or plan, run_dir, console, stack)
        prompts = some_prompts(inputs.train_data or inputs.val_data)
        runs = Path(plan.config.trainer.default_local_dir).expanduser().absolute()
        sights = [*of_plan(inputs.plan, runs), *of_memory(inputs.plan), *of_prompts(inputs.plan, prompts, inputs.tokenizer)]
        if inputs.rules is not None:
            sights += RewardTrial(prompts, inputs.rules, inputs.tokenizer).sights()
    return sights


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 16, break_long_words=False, break_on_hyphens=False)


def _is_word(word: str) -> bool:
    """Return whether this is part of a configuration, and no folder."""
    return "=" in word or word.startswith("~")


def _show(arguments: argparse.Namespace, found: list[dict[str, Any]], text: str, *, ill: bool) -> int:
    shown = json.dumps(jsonable(found), indent=2) if arguments.json else text
    say(shown)
    return 1 if arguments.strict and ill else 0


def _parser() -> Arguments:
    parser = Arguments(
        "doctor",
        "Say what is wrong with a run, from its metrics and its rollouts: evidence, meaning, what to change. With words of a\n"
        "configuration: what can be seen before the start, the reward tried on rows included.",
        "grpo-rl doctor my_run\n  grpo-rl doctor recipe=arithmetic/grpo data.train_batch_size=32",
    )
    parser.add_argument(
        "run", nargs="+", metavar="RUN", help="the folder or the name of a run, or recipe=NAME key=value ... of one to start"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 where something is wrong")
    return parser
