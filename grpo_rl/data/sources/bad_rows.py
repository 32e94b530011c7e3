"""What happens to bad rows: the run stops at them, or goes on without, with a list of those left out."""

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
        if self.action == "skip":
            self._write(str(error))
            if not collect and self.warn is not None and self.num_rows <= SHOWN:
                self.warn(f"bad row left out: {error}")

    def raise_collected(self, num_checked: int) -> None:
        """Raise one DataError for all that was collected under `error`."""
        if self.action == "error" and self._seen:
            raise DataError(self._list(self._counted(num_checked)))

    def report_collected(self, num_checked: int) -> None:
        """Tell which rows were left out so far."""
        if self.action == "skip" and self._seen and self.warn is not None:
            place = f", listed in {self.file}" if self.file is not None else ""
            self.warn(self._list(f"left out {self._counted(num_checked)}{place}"))

    def _counted(self, num_checked: int) -> str:
        return f"{self.num_rows} bad row{'s' if self.num_rows > 1 else ''} of the {num_checked} checked"

    def _list(self, title: str) -> str:
        if self.num_rows == 1 and self.action == "error":
            return self._messages[0]
        more = [f"... and {self.num_rows - LISTED} more"] if self.num_rows > LISTED else []
        return "\n  ".join([f"{title}:", *self._messages, *more])

    def _write(self, message: str) -> None:
        if self.file is None:
            return
        with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps({"bad_row": message}) + "\n")
