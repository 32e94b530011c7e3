"""`python -m grpo_rl page RUN...`: one HTML file with everything about a run, or the same served live."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.page.page_file import write_page
from grpo_rl.telemetry.page.page_server import HOST, PageServer
from grpo_rl.telemetry.terminal.text import encodable


def main(argv: Sequence[str]) -> int:
    """Write the page of the runs and print its path, or serve it until Ctrl-C. Returns 0.

    Raises DataError for a folder that is no run, ConfigError where the page cannot be written or served.
    """
    arguments = _parser().parse_args(argv)
    runs = [Path(run).expanduser() for run in arguments.run]
    out = Path(arguments.out).expanduser() if arguments.out is not None else None
    if out is not None and out.suffix != ".html":
        raise ConfigError(f"--out {out}: the name of a page ends in .html")
    if arguments.port and not arguments.serve:
        raise ConfigError("--port is for --serve")
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"--port {arguments.port}: a port is a number below 65536")
    if not arguments.serve:
        _print(f"page: {write_page(runs, out)}")
        return 0
    server = PageServer(runs, out, arguments.port, lambda message: print(message, file=sys.stderr))
    _print(f"page: {server.address}\nIt follows the run, for browsers on this machine; Ctrl-C ends it.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0


def _print(text: str) -> None:
    print(encodable(text, sys.stdout.encoding or "utf-8"), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_rl page",
        description="Write one HTML file with everything about a run: state, health, curves, rollouts, time, configuration. "
        "Of several runs the curves lie over each other.",
        epilog="examples: python -m grpo_rl page runs/my_run      "
        "python -m grpo_rl page runs/one runs/two --out both.html      python -m grpo_rl page runs/my_run --serve",
    )
    parser.add_argument("run", nargs="+", help="the folder of a run, finished or running")
    parser.add_argument("--out", metavar="FILE", help="the page; RUN/page.html if not given, runs.html beside several")
    parser.add_argument("--serve", action="store_true", help=f"serve it on {HOST}, and keep it new while the run goes on")
    parser.add_argument("--port", type=int, default=0, help="the port for --serve; a free one if not given")
    return parser
