"""`python -m grpo_rl page RUN...`: one HTML file with everything about a run, or the same served live."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.arguments import Arguments
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.page.page_file import HOST, PageServer, write_page
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.text import say


def main(argv: Sequence[str]) -> int:
    """Write the page of the runs and print its path, or serve it until Ctrl-C. Returns 0.

    Raises ConfigError for what is no run, and where the page cannot be written or served; DataError for a run without a step.
    """
    arguments = _parser().read(argv)
    runs = [find_run(run) for run in arguments.run]
    out = Path(arguments.out).expanduser() if arguments.out is not None else None
    if out is not None and out.suffix != ".html":
        raise ConfigError(f"--out {out}: the name of a page ends in .html")
    if arguments.port and not arguments.serve:
        raise ConfigError("--port is for --serve")
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"--port {arguments.port}: a port is a number below 65536")
    if not arguments.serve:
        say(f"page: {write_page(runs, out)}")
        return 0
    server = PageServer(runs, out, arguments.port, lambda message: print(message, file=sys.stderr))
    say(f"page: {server.address}\nIt follows the run, for browsers on this machine; Ctrl-C ends it.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "page",
        "Write one HTML file with everything about a run: state, health, curves, rollouts, time, configuration. Of several\n"
        "runs the curves lie over each other.",
        "grpo-rl page my_run\n  grpo-rl page runs/grpo_rl/one runs/grpo_rl/two --out both.html\n  grpo-rl page my_run --serve",
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="the folder or the name of a run, finished or running")
    parser.add_argument("--out", metavar="FILE", help="the page; RUN/page.html if not given, runs.html beside several")
    parser.add_argument("--serve", action="store_true", help=f"serve it on {HOST}, and keep it new while the run goes on")
    parser.add_argument("--port", type=int, default=0, help="the port for --serve; a free one if not given")
    return parser
