"""The log of what reward processes print."""

from __future__ import annotations

from pathlib import Path

from grpo_rl.config.redaction import HiddenLines
from grpo_rl.config.secrets import redact

LOG_LIMIT = 4 * 2**20
"""Bytes of what a process prints that are kept."""
LAST_LINES = 500
"""Characters of its log that an error quotes."""


class OutputLog:
    """The output of the processes in one place, up to `LOG_LIMIT` bytes, in a file; without one, its end is kept for
    errors.

    Secrets are hidden in both.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab")
        self._room = LOG_LIMIT
        self._lines = HiddenLines()
        self._last = b""

    def write(self, data: bytes) -> None:
        """Keep the data as far as there is room; the rest is dropped, which is noted once."""
        self._last = (self._last + data)[-4 * LAST_LINES :]
        if self._file is None or self._room <= 0:
            return
        self._file.write(self._lines.feed(data[: self._room]))
        self._room -= len(data)
        if self._room <= 0:
            self._file.write(self._lines.rest() + b"\n[all further output is dropped]\n")
        self._file.flush()

    @property
    def last(self) -> str:
        """The last `LAST_LINES` characters."""
        return redact(self._last.decode(errors="replace"))[-LAST_LINES:].strip()

    def close(self) -> None:
        if self._file is not None:
            self._file.write(self._lines.rest())
            self._file.close()
