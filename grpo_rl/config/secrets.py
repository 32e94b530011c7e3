"""Secrets, which are never written down: values that look like one are hidden in every file and line of a run."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

HIDDEN = "<hidden>"
_SHORTEST, _SHORTEST_NUMBER, _SHORT = 4, 6, 8
"""The least letters of a secret, the least of one that has digits alone, and those below which a secret is hidden as a whole word
only: hiding it would eat parts of words out of ordinary text."""
_WORD = re.compile("[A-Z]?[a-z]*|[A-Z]*")
"""A short value of this form is a word (`RAY_AUTH_MODE=token`), which no text could do without."""
_EXPRESSION = re.compile(r"\$\{[\w.:,]+\}")

# A whole part of a name: HF_TOKEN and apiKey are secrets, max_tokens and TOKENIZERS_PARALLELISM are not.
_NAME = re.compile(
    r"(^|[_\-.])(token|secret|secrets|password|passwd|passphrase|credential|credentials|apikey|key|auth)($|[_\-.])"
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Credentials inside an address, parameters of a query, and tokens that are recognised by their beginning. Before each
# pattern are the words of which a text must contain one for a match: hardly any text does, and a search for a word takes
# a hundredth of the pattern's time. Lengths are bounded if a long word would be read again from each of its letters.
_IN_TEXT = (
    (("://",), re.compile(r"(\b\w{1,32}://)[^\s/@:]*:[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (
        ("?", "&"),
        re.compile(r"([?&](?:[\w-]{0,64}(?:token|secret|password|key))=)[^&\s\"',\]]{4,}", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (
        ("hf_", "sk-", "gh", "AKIA"),
        re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"),
        HIDDEN,
    ),
    (("Bearer ",), re.compile(r"(Bearer )[A-Za-z0-9._~+/-]{8,}=*"), rf"\1{HIDDEN}"),
)
_known: set[str] = set()
_PIECE = 2**20
_LONGEST_LINE = 2**16
"""The most bytes of one line that are held back until it ends."""


def is_secret_name(name: str) -> bool:
    return bool(_NAME.search(_CAMEL.sub("_", name).lower()))


def remember(values: Iterable[object]) -> None:
    """Hide these values, and all in lists and mappings among them, from now on, wherever they appear in a text, JSON or YAML."""
    for value in values:
        if isinstance(value, Mapping):
            remember(value.values())
        elif isinstance(value, list | tuple):
            remember(value)
        elif isinstance(value, str | int) and not isinstance(value, bool) and _is_secret(text := str(value)):
            quoted = (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text))
            _known.update({text, text.replace("'", "''"), *(form[1:-1] for form in quoted)})


def may_be_secret(value: object) -> bool:
    """Return whether a value by the name of a secret is to be hidden: any text, list or mapping, and a long whole number."""
    return isinstance(value, str | list | Mapping) or (isinstance(value, int) and _is_secret(str(value)))


def _is_secret(text: str) -> bool:
    """Return whether the value of a secret's name may be one: no path, expression or word."""
    if len(text) < (_SHORTEST_NUMBER if text.isdigit() else _SHORTEST) or text == HIDDEN or _EXPRESSION.fullmatch(text):
        return False
    return not (len(text) < _SHORT and _WORD.fullmatch(text)) and not (text.startswith("/") and os.path.exists(text))


def _without(text: str, value: str) -> str:
    """Return a text without a remembered value."""
    if len(value) >= _SHORT and not value.isdigit():
        return text.replace(value, HIDDEN)
    return re.sub(rf"(?<![\w.]){re.escape(value)}(?![\w.])", HIDDEN, text) if value in text else text


def remember_environment() -> None:
    """Hide the values of all environment variables whose names look like those of secrets."""
    remember(value for name, value in os.environ.items() if is_secret_name(name))


def known() -> list[str]:
    """Return all remembered values, the longest first: one may be part of another."""
    return sorted(_known, key=len, reverse=True)


def hide_known(line: str) -> str:
    """Return a line of JSON without remembered values; quick, for texts in which there are hardly ever any."""
    for value in known():
        line = _without(line, value)
    return line


def redact(text: str) -> str:
    """Return `text` without remembered values, credentials in addresses, and tokens recognised by their look."""
    text = hide_known(text)
    for needles, pattern, replacement in _IN_TEXT:
        if any(needle in text for needle in needles):
            text = pattern.sub(replacement, text)
    return text


# ---- what other programs write: the output of processes, and log files that are already there -------------------


class HidingStream:
    """A text stream in front of another one that hides secrets in what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, redacted, and return the number of characters that were given."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HiddenLines:
    """A buffer that makes whole lines without secrets of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
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
    """Return the files in which a secret stood; they are written anew without it. For files that no process writes to any more.

    What a library prints past Python's streams, and a child of a worker, is found only here.
    """
    scrubbed = []
    for file in files:
        with contextlib.suppress(OSError):
            temporary, lines = file.with_name(f".{file.name}.tmp"), HiddenLines()
            with file.open("rb") as source, temporary.open("wb") as target:
                while piece := source.read(_PIECE):
                    target.write(lines.feed(piece))
                target.write(lines.rest())
            if filecmp.cmp(file, temporary, shallow=False):
                temporary.unlink()
            else:
                os.replace(temporary, file)
                scrubbed.append(file)
    return scrubbed


def _redacted(data: bytes) -> bytes:
    return redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _overlap() -> int:
    """Return the bytes that may be the beginning of a remembered secret."""
    return max((len(value.encode(errors="surrogateescape")) for value in known()), default=1) - 1
