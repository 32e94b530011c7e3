"""Try on this machine's device everything that needs neither Ray nor vLLM, and print what passed.

    python scripts/gpu_check.py                    # on the GPU; a few minutes
    python scripts/gpu_check.py --device cpu       # what can run without one, in small sizes
    python scripts/gpu_check.py --only head actor --json figures.jsonl

Each check is a process of its own: one that crashes or fills the memory leaves the others alone. A row is printed, and appended
to the file, as soon as it is there: its state, what was found, and the bound that it was judged by. `not possible` is a check
that this machine cannot make. The exit code is 1 if a row failed. Needed are torch, transformers, numpy, psutil and pyarrow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_checks import CHECKS, TINY, Row, Sizes

# On a new machine the package need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEADLINE_S = 300.0
"""Seconds that one check may take."""


def rows_of(name: str, device: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of one check, made in this process, with its model in `folder`. An error becomes a row."""
    try:
        # Inside: if it is broken, each check says so in its row.
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        yield from CHECKS[name](device, Sizes() if device == "cuda" else TINY, folder)
    except Exception as error:
        traceback.print_exc()
        yield Row(name, "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100])


def _serve(pipe: Any, name: str, device: str, folder: Path) -> None:
    for row in rows_of(name, device, folder):
        pipe.send(dataclasses.asdict(row))
    pipe.send(None)


def in_process(name: str, device: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of one check as they come, made in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(other, name, device, folder))
    process.start()
    other.close()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            row = pipe.recv()
            if row is None:
                process.join(30)
                return
            yield Row(**row)
        yield Row(name, "failed", f"no answer within {DEADLINE_S:.0f} s")
    except EOFError:
        process.join(10)
        yield Row(name, "failed", f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()


def line(row: Row) -> str:
    """Return a row as a line."""
    return f"{row.state:<12}  {row.name:<66}  {row.figure}" + (f"  [{row.bound}]" if row.bound else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--json", type=Path, help="also append each row to this file, as a line of JSON")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        # cuBLAS reads it when it starts; deterministic kernels need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    else:
        print(f"CPU, torch {torch.__version__}: small sizes; what needs a GPU is not possible here", flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        for name in arguments.only:
            for row in in_process(name, arguments.device, Path(folder)):
                print(line(row), flush=True)
                failed |= row.state == "failed"
                if arguments.json is not None:
                    with arguments.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
