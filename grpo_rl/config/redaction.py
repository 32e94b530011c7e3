"""Keeps secrets out of what other programs write: the output of processes, and log files that are already there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from grpo_rl.config import secrets

_PIECE = 2**20
_LONGEST_LINE = 2**16
"""The most bytes of one line that are held back until it ends."""


class HidingStream:
    """A text stream in front of another one that hides secrets in what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, redacted, and return the number of characters that were given."""
        self._stream.write(secrets.redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the lines, redacted."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HiddenLines:
    """A buffer that makes whole lines without secrets of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        lines, newline, rest = (self._pending + data).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE:
            # A secret may have begun in the last bytes.
            done = _redacted(lines + newline + rest)
            cut = len(done) - _overlap()
            self._pending = done[cut:]
            return done[:cut]
        self._pending = rest
        return _redacted(lines + newline)

    def rest(self) -> bytes:
        """Return what came after the last line's end."""
        rest, self._pending = self._pending, b""
        return _redacted(rest)


def scrub(files: Iterable[Path]) -> list[Path]:
    """Return the files in which a remembered secret stood; they are written anew without it. For files that no process writes to any more.

    What a library prints past Python's streams, and a child of a worker, is found only here.
    """
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            if _holds_secret(file):
                _rewrite(file)
                found.append(file)
    return found


def _redacted(data: bytes) -> bytes:
    return secrets.redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _holds_secret(file: Path) -> bool:
    values = [value.encode(errors="surrogateescape") for value in secrets.known()]
    before = b""
    with file.open("rb") as source:
        while piece := source.read(_PIECE):
            data = before + piece
            if any(value in data for value in values):
                return True
            before = data[max(0, len(data) - _overlap()) :]
    return False


def _overlap() -> int:
    """Return the bytes that may be the beginning of a remembered secret."""
    return max((len(value.encode(errors="surrogateescape")) for value in secrets.known()), default=1) - 1


def _rewrite(file: Path) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    lines = HiddenLines()
    with file.open("rb") as source, temporary.open("wb") as target:
        while piece := source.read(_PIECE):
            target.write(lines.feed(piece))
        target.write(lines.rest())
    os.replace(temporary, file)
