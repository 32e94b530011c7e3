"""Secrets, which are hidden in every file and line of a run."""

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
_SHORTEST, _SHORTEST_NUMBER = 4, 6  # letters of a secret, digits of a numeric one
_SHORT = 8  # below, a secret is hidden as a whole word only: it may be part of ordinary words
_WORD = re.compile("[A-Z]?[a-z]*|[A-Z]*")  # a short value of this form is a word (`RAY_AUTH_MODE=token`), no secret
_EXPRESSION = re.compile(r"\$\{[\w.:,]+\}")

# A whole part of a name: HF_TOKEN and apiKey are secrets, max_tokens and TOKENIZERS_PARALLELISM are not.
_NAME = re.compile(
    r"(^|[_\-.])(token|secret|secrets|password|passwd|passphrase|credential|credentials|apikey|key|auth)($|[_\-.])"
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Credentials in addresses and queries, and tokens with a known beginning. Before each pattern: words of which
# a match contains one, as searching for a word takes a hundredth of the time. Bounded lengths avoid quadratic
# time on long words.
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
_LONGEST_LINE = 2**16  # bytes that are held back until the line ends


def is_secret_name(name: str) -> bool:
    return bool(_NAME.search(_CAMEL.sub("_", name).lower()))


def remember(values: Iterable[object]) -> None:
    """Hide these values, and all inside of them, from now on, also as JSON and YAML escape them."""
    for value in values:
        if isinstance(value, Mapping):
            remember(value.values())
        elif isinstance(value, list | tuple):
            remember(value)
        elif isinstance(value, str | int) and not isinstance(value, bool) and _is_secret(text := str(value)):
            quoted = (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text))
            _known.update({text, text.replace("'", "''"), *(form[1:-1] for form in quoted)})


def may_be_secret(value: object) -> bool:
    """Return whether a value with a secret's name is hidden: text, a list, a mapping, a long whole number."""
    return isinstance(value, str | list | Mapping) or (isinstance(value, int) and _is_secret(str(value)))


def _is_secret(text: str) -> bool:
    """Return whether a value may be a secret: no path, expression or word."""
    if len(text) < (_SHORTEST_NUMBER if text.isdigit() else _SHORTEST) or text == HIDDEN or _EXPRESSION.fullmatch(text):
        return False
    return not (len(text) < _SHORT and _WORD.fullmatch(text)) and not (text.startswith("/") and os.path.exists(text))


def _without(text: str, value: str) -> str:
    if len(value) >= _SHORT and not value.isdigit():
        return text.replace(value, HIDDEN)
    return re.sub(rf"(?<![\w.]){re.escape(value)}(?![\w.])", HIDDEN, text) if value in text else text


def remember_environment() -> None:
    remember(value for name, value in os.environ.items() if is_secret_name(name))


def known() -> list[str]:
    """Return the remembered values, the longest first: one may be part of another."""
    return sorted(_known, key=len, reverse=True)


def hide_known(line: str) -> str:
    for value in known():
        line = _without(line, value)
    return line


def redact(text: str) -> str:
    text = hide_known(text)
    for needles, pattern, replacement in _IN_TEXT:
        if any(needle in text for needle in needles):
            text = pattern.sub(replacement, text)
    return text


# ---- what other programs write: the output of processes, and log files that are already there -------------------


class HidingStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` redacted, and return its length before."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HiddenLines:
    """Redacts bytes that arrive in pieces, in whole lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        lines, newline, rest = (self._pending + data).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE:
            # A secret may begin in the last bytes.
            done = _redacted(lines + newline + rest)
            cut = len(done) - _overlap()
            self._pending = done[cut:]
            return done[:cut]
        self._pending = rest
        return _redacted(lines + newline)

    def rest(self) -> bytes:
        rest, self._pending = self._pending, b""
        return _redacted(rest)


def scrub(files: Iterable[Path]) -> list[Path]:
    """Rewrite files that hold secrets, to which no process writes any more, and return them. Only this finds
    what libraries and children of workers print past Python's streams."""
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
    """Return the bytes that may begin a remembered secret."""
    return max((len(value.encode(errors="surrogateescape")) for value in known()), default=1) - 1
