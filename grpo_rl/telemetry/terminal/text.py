"""Text for people: numbers in few columns, model output that cannot drive a terminal, progress."""

from __future__ import annotations

import math
import sys
import threading
import time
import unicodedata
from typing import TextIO

from grpo_rl.config.secrets import redact

# All that can move a cursor, reorder a line or break an encoder.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def safe_text(text: str, limit: int | None = None, keep_newlines: bool = False) -> str:
    """Escape every character that a terminal would obey instead of show, and hide secrets: model output may
    contain ANSI sequences, carriage returns or right-to-left overrides. `limit` cuts the middle out, between
    words if they are short."""
    text = redact(text)
    if limit is not None and len(text) > limit:
        head = (limit - 5) * 2 // 3
        begin, end = text[:head], text[len(text) - (limit - 5 - head) :]
        if (space := begin.rfind(" ")) > head // 2 and text[head] != " ":
            begin = begin[:space]
        if 0 < (space := end.find(" ") + 1) < len(end) // 2 and text[-len(end) - 1] != " ":
            end = end[space:]
        text = f"{begin} ... {end}"
    newlines = "\n" if keep_newlines else ""
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in _UNSAFE_CATEGORIES and char not in newlines
        else char
        for char in text
    )


def encodable(text: str, encoding: str) -> str:
    """Escape what `encoding` lacks, so that printing never fails."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print as far as the stream's encoding goes."""
    stream = sys.stdout if stream is None else stream
    print(encodable(text, stream.encoding or "utf-8"), file=stream, flush=True)


def number(value: float | None, width: int, digits: int = 3) -> str:
    """Right-align in `width` columns (at least 7), with up to `digits` decimals; "-" for None."""
    if value is None:
        return "-".rjust(width)
    if not math.isfinite(value):
        return str(value).rjust(width)
    if value != 0 and abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}".rjust(width)
    for decimals in range(digits, -1, -1):
        text = f"{value:.{decimals}f}"
        if len(text) <= width and (decimals > 0 or abs(value) < 1e5):
            return text.rjust(width)
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        text = f"{value / factor:.0f}{unit}"
        if len(text) <= min(width, 5):
            return text.rjust(width)
    return f"{value:.0e}".rjust(width)


def duration(seconds: float) -> str:
    """`0.31 s`, `12.4 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Bar:
    """Progress of a piece of work, from any thread, also after the work."""

    def __init__(self, title: str = "", total: float | None = None) -> None:
        self._began = time.monotonic()
        self._ends_at: float | None = None
        self._is_even = True
        # A signal's exception may come out of any line of the main thread, which must not wait for itself.
        self._lock = threading.RLock()
        self.title, self.total, self.note = title, total, ""
        self.done = 0.0

    def advance(self, k: float = 1, note: str | None = None) -> None:
        """Move on by `k`; `note` is shown beside the bar, and the last one on the closing line."""
        with self._lock:
            self.done += k
            if note is not None:
                self.note = safe_text(note, limit=120)

    def left(self, seconds: float | None) -> None:
        """Set how long the rest of the work takes, for a bar whose own speed is no estimate of that."""
        self._is_even, self._ends_at = False, None if seconds is None else time.monotonic() + seconds

    def text(self, width: int = 0) -> str:
        """Return where the work is, as one line of plain text, in which the bar has so many columns."""
        took, share = time.monotonic() - self._began, self.done / self.total if self.total else 0.0
        bar = f" [{'=' * round(width * min(1.0, share)):-<{width}}]" if width and self.total else ""
        count = f" {self.done:g} of {self.total:g}" if self.total is not None else ""
        remaining = took * (1 / share - 1) if share and self._is_even else None
        remaining = remaining if self._ends_at is None else self._ends_at - time.monotonic()
        rest = f", about {duration(max(0.0, remaining))} left" if remaining is not None else ""
        return f"{self.title}{bar}{count}{self.note and f': {self.note}'}, {duration(took)} so far{rest}"
