"""Treatment of bad rows: the run stops at them, or goes on without them; either way the first ones are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from grpo_rl.errors import DataError

LISTED = 10
"""Bad rows named in one message."""
SHOWN = 5
"""Bad rows met later that are each shown as a line; the file has them all."""


class BadRows:
    """The bad rows of one data set: all counted, each once, the first ones shown, and all written to `file` where one is given."""

    def __init__(
        self, action: Literal["error", "skip"], file: Path | None = None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.action = action
        self.file = file
        self.warn = warn
        self._messages: list[str] = []
        self._seen: set[int] = set()

    @property
    def num_rows(self) -> int:
        """Bad rows so far."""
        return len(self._seen)

    def found(self, index: int, error: DataError, *, collect: bool = False) -> None:
        """Take note of bad row `index`, once. Raises `error` under `error`, unless the caller collects several for one message."""
        if self.action == "error" and not collect:
            raise error
        if index in self._seen:
            return
        self._seen.add(index)
        if len(self._messages) < LISTED:
            self._messages.append(str(error))
        if self.action == "skip" or self.num_rows > 1:
            # One bad row that ends the run is in its message, and needs no file.
            self._write(*(self._messages if self.action == "error" and self.num_rows == 2 else [str(error)]))
        if self.action == "skip" and not collect and self.warn is not None and self.num_rows <= SHOWN:
            self.warn(f"bad row left out: {error}")

    def raise_collected(self, num_checked: int) -> None:
        """Raise one DataError for all that was collected under `error`."""
        if self.action == "error" and self._seen:
            raise DataError(self._list(self._counted(num_checked)) if self.num_rows > 1 else self._messages[0])

    def report_collected(self, num_checked: int) -> None:
        """Warn, under `skip`, with the rows that were left out so far."""
        if self.action == "skip" and self._seen and self.warn is not None:
            self.warn(self._list(f"left out {self._counted(num_checked)}"))

    def _counted(self, num_checked: int) -> str:
        return f"{self.num_rows} bad row{'s' if self.num_rows > 1 else ''} of the {num_checked} checked"

    def _list(self, title: str) -> str:
        """Return the first rows, one a line. The first line has one of them, for it may be all that is shown."""
        first, *others = self._messages
        place = f"see {self.file}" if self.file is not None else ""
        if self.num_rows > LISTED:
            others.append(f"and {self.num_rows - LISTED} more{', ' if place else ''}{place}")
        elif place:
            others.append(place)
        return "\n  ".join([f"{title}: {first}", *others])

    def _write(self, *messages: str) -> None:
        if self.file is None:
            return
        with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps({"bad_row": message}) + "\n" for message in messages)
