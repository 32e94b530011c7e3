"""Standard output and error that outlive their reader."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO

FULL_PIPE_S = 5.0


class LastingFile(io.FileIO):
    """A file descriptor that leads to /dev/null once it cannot be written any more. The descriptor itself is
    redirected: C code and child processes inherit it. Otherwise printing would raise BrokenPipeError, or in
    rich SystemExit, and Python exit with 120."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        try:
            written = super().write(data)
            # None: the other end made the pipe non-blocking, and it is full.
            if written is None and select.select([], [self.fileno()], [], FULL_PIPE_S)[1]:
                written = super().write(data)
        except OSError:
            discard(self.fileno())
            return len(data)
        return len(data) if written is None else written


def discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def make_lasting() -> None:
    """Also if the process was started without them."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # closed by `>&-`
        return open(os.devnull, "w", encoding="utf-8")
    with contextlib.suppress(OSError):
        stream.flush()
    # Python's buffering: lines on a terminal and for errors, blocks on a pipe.
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(descriptor)),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=descriptor == 2 or stream.isatty() or getattr(stream, "write_through", False),
    )


def write_now(text: str) -> None:
    """Write to standard error past buffers and locks, for signal handlers."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
