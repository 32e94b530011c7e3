"""`python -m grpo_rl page RUN...`: one HTML file with everything about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_rl.arguments import Arguments
from grpo_rl.commands.targets import FLAG
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.page.index import runs_below, write_index
from grpo_rl.telemetry.page.page_file import write_page
from grpo_rl.telemetry.rundir import find_run, named_run
from grpo_rl.telemetry.terminal.text import say


def main(argv: Sequence[str]) -> int:
    parser = Arguments(
        "page",
        "Write one HTML file with everything about a run: state, health, curves, rollouts, time, configuration. Of several\n"
        "runs the curves lie over each other; of a folder of runs there is a table with links, FOLDER/index.html.",
        "grpo-rl page my_run\n  grpo-rl page runs/grpo_rl\n  grpo-rl page runs/grpo_rl/one runs/grpo_rl/two --out both.html",
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="the folder or the name of a run, finished or running")
    parser.add_argument("--out", metavar="FILE", help="the page; RUN/page.html if not given, runs.html beside several")
    trust = "it is yours: read the tokenizer that it names, for the tokens of responses, outside of it"
    parser.add_argument(FLAG, action="store_true", help=trust)
    arguments = parser.read(argv)
    folder = Path(arguments.run[0]).expanduser()
    if len(arguments.run) == 1 and arguments.out is None and named_run(arguments.run[0]) is None and runs_below(folder):
        say(f"page: {write_index(folder)}")
        return 0
    runs = [find_run(run) for run in arguments.run]
    out = Path(arguments.out).expanduser() if arguments.out is not None else None
    if out is not None and out.suffix != ".html":
        raise ConfigError(f"--out {out}: the name of a page ends in .html")
    say(f"page: {write_page(runs, out, trusted=arguments.trust_run)}")
    return 0
