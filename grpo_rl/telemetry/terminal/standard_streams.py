"""Standard output and error that outlive their reader: a closed pipe or terminal never ends or changes a run."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO

FULL_PIPE_S = 5.0


class LastingFile(io.FileIO):
    """A file descriptor which, once it cannot be written any more, leads to /dev/null.

    It is the descriptor that is turned, and not only this object: C code and child processes that have inherited it meet
    the dead pipe as well. Python's own answer would be BrokenPipeError in whatever function happens to print, and exit
    code 120 at the end; rich's would be SystemExit.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write, or drop what can no longer be read; return the number of bytes taken."""
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
    """Redirect what is written to this descriptor from now on to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def make_lasting() -> None:
    """Make `sys.stdout` and `sys.stderr` outlive their readers, also if the process was started without them."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # closed before the program began, as with `>&-`
        return open(os.devnull, "w", encoding="utf-8")
    with contextlib.suppress(OSError):
        stream.flush()
    # The same buffering as Python's own: lines on a terminal and for errors, blocks on a pipe.
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(descriptor)),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=descriptor == 2 or stream.isatty() or getattr(stream, "write_through", False),
    )


def write_now(text: str) -> None:
    """Write to standard error past all buffers and locks, for signal handlers and last words."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
