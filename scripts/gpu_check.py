"""Try on this machine's device everything that needs neither Ray nor vLLM, and print a table of what passed.

    python scripts/gpu_check.py                    # on the GPU; a few minutes
    python scripts/gpu_check.py --device cpu       # what can run without one, in small sizes
    python scripts/gpu_check.py --only head actor --json figures.json

Each check is a process of its own: one that crashes or fills the memory leaves the others alone. A row says what was found
and the bound that it was judged by; `not possible` is a check that this machine cannot make. The exit code is 1 if a row failed.
Needed are torch, transformers and numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gpu_checks import CHECKS, TINY, Row, Sizes

# On a new machine the package need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEADLINE_S = 300.0
"""Seconds that one check may take."""


def rows_of(name: str, device: str) -> list[Row]:
    """Return the rows of one check, made in this process. An error becomes a row."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        try:
            # Inside: where it is broken, each check says so in its row.
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
            for row in CHECKS[name](device, Sizes() if device == "cuda" else TINY, Path(folder)):
                rows.append(row)
        except Exception as error:
            traceback.print_exc()
            rows.append(
                Row(name, "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100])
            )
    return rows


def _serve(pipe: Any, name: str, device: str) -> None:
    pipe.send([dataclasses.asdict(row) for row in rows_of(name, device)])


def in_process(name: str, device: str) -> list[Row]:
    """Return the rows of one check, made in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(other, name, device))
    process.start()
    other.close()
    try:
        if not pipe.poll(DEADLINE_S):
            return [Row(name, "failed", f"no answer within {DEADLINE_S:.0f} s")]
        rows = [Row(**row) for row in pipe.recv()]
        process.join(30)
        return rows
    except EOFError:
        process.join(10)
        return [Row(name, "failed", f"the process ended with exit code {process.exitcode}")]
    finally:
        process.kill()


def table(rows: Iterable[Row]) -> str:
    """Return the rows as lines of aligned columns."""
    cells = [("check", "state", "figure", "bound"), *(dataclasses.astuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        # cuBLAS reads it when it starts; deterministic kernels need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    else:
        print(f"CPU, torch {torch.__version__}: small sizes; what needs a GPU is not possible here", flush=True)
    rows = [row for name in arguments.only for row in in_process(name, arguments.device)]
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.state == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
