"""The screen of a run: messages, progress bars, a line per step."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from grpo_rl.telemetry.metrics.metrics_file import Metrics
from grpo_rl.telemetry.terminal import step_line
from grpo_rl.telemetry.terminal.text import Bar, duration, encodable, safe_text

HEADER_EVERY = 25
QUIET_S = 30.0  # after which a line tells where the work is, without live bars
CLOSE_S = 1.0  # of waiting for the drawing thread, which a held terminal (Ctrl-S) holds up
DRAW_S = 0.1
BAR_WIDTH = 30


class Console:
    """Live bars on a terminal, plain lines on a pipe, and a copy of the lines in a log file. Nothing is read
    as markup, and control characters are escaped, so any method takes a model's text. No method raises for
    the log file, or a screen that `standard_streams.make_lasting` keeps."""

    def __init__(self, file: TextIO | None = None, quiet_s: float = QUIET_S) -> None:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        self._rich = RichConsole(file=file, **plain)
        self._errors = self._rich if file is not None else RichConsole(stderr=True, **plain)
        if not self._rich.is_terminal:
            self._rich.width = 120
        # FORCE_COLOR makes rich take a pipe for a terminal; a bar needs a real one.
        self.interactive = self._rich.file.isatty() and not self._rich.is_dumb_terminal
        # rich plans cursor moves before it takes its lock: whatever prints or draws here takes this one.
        self._turn = threading.RLock()
        self._quiet_s = quiet_s
        self._live: Live | None = None
        self._bars: list[Bar] = []
        self._last_line = time.monotonic()
        self._pulse: threading.Thread | None = None
        self._closed = threading.Event()
        self._lines_since_header = 0
        self._header: list[step_line.Piece] = []
        self._log: TextIO | None = None

    def info(self, message: str) -> None:
        self._print([(message, "")])

    def warn(self, message: str) -> None:
        self._print([("warning: ", "bold yellow"), (message, "yellow")])

    def notice(self, message: str) -> None:
        """Print a message about the run itself, such as that it will stop, to the error stream."""
        # Nothing else may move the cursor of live bars.
        self._print([(message, "bold")], self._rich if self.interactive else self._errors)

    def log(self, message: str) -> None:
        """For what the screen shows in another way."""
        self._write_log(safe_text(message, keep_newlines=True))

    def table(self, title: str, rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
        cells = [[safe_text(str(value)) for value in row] for row in ([header] if header else []) + [*rows]]
        widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
        for line in (title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)):
            self.info(line)

    @contextlib.contextmanager
    def progress(self, title: str, total: float | None = None, keep: bool = True, since: float | None = None) -> Iterator[Bar]:
        """Show a bar for work of `total` units (None: unknown) that takes longer than a second.

        On a terminal it is live and gives way to a line with the seconds; elsewhere there is a line at start
        and end, and one per `quiet_s` without any. `keep=False` leaves no line: the step's line has the
        seconds. `since`: the monotonic time of a start before this call.
        """
        start = time.monotonic() if since is None else since
        if keep and not self.interactive:
            self.info(f"{title} ...")
        bar = Bar(safe_text(title), total)
        with self._turn:
            self._bars.append(bar)
            if self.interactive and self._live is None:
                self._live = Live(console=self._rich, get_renderable=self._drawn, transient=True, auto_refresh=False)
                self._live.start()
            if self._pulse is None:
                self._pulse = threading.Thread(target=self._beat, name="pulse", daemon=True)
                self._pulse.start()
        outcome = "stopped after"
        try:
            yield bar
            outcome = ""
        finally:
            with self._turn:
                self._bars.remove(bar)
                if not self._bars and self._live is not None:
                    self._live.stop()
                    self._live = None
            if keep or outcome:
                note = f" ({bar.note})" if bar.note else ""
                self.info(f"{title}{note}: {f'{outcome} ' if outcome else ''}{duration(time.monotonic() - start)}")

    def _drawn(self) -> Text:
        lines = "\n".join(bar.text(BAR_WIDTH) for bar in self._bars)
        return Text(encodable(lines, self._rich.encoding), no_wrap=True, overflow="ellipsis")

    def _beat(self) -> None:
        """Draw the live bars; without any, print where the work is after a while without a line."""
        while not self._closed.wait(DRAW_S if self.interactive else self._quiet_s / 10):
            with self._turn:
                if self._live is not None:
                    self._live.refresh()
                places = [bar.text() for bar in self._bars]
            if not self.interactive and places and time.monotonic() - self._last_line >= self._quiet_s:
                self.info("; ".join(places))

    def give_back_terminal(self) -> None:
        """Take the bars off the terminal and show its cursor, before this process ends. For signal handlers:
        takes no lock, and writes past rich, which prints nothing more."""
        if not self.interactive or self._live is None:
            return
        self._rich.quiet = True
        erased = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (len(self._bars) - 1)
        with contextlib.suppress(OSError, ValueError):
            os.write(self._rich.file.fileno(), f"{erased}\x1b[?25h".encode())

    def step(self, step: int, total: int, metrics: Metrics, left_s: float | None = None) -> None:
        """The header comes back every 25 lines, and if the columns change."""
        header = step_line.header(metrics)
        if header and (header != self._header or self._lines_since_header >= HEADER_EVERY):
            self._print(header)
            self._header, self._lines_since_header = header, 0
        self._print(step_line.line(step, total, metrics, left_s))
        self._lines_since_header += 1

    def log_to(self, path: Path) -> None:
        """Append every later line to `path`, with the time."""
        self._log = path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        self._closed.set()
        if self._pulse is not None:
            self._pulse.join(CLOSE_S)  # its last line must not meet a closed file
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):
                log.close()

    def _print(self, pieces: Sequence[step_line.Piece], console: RichConsole | None = None) -> None:
        encoding = self._rich.encoding
        line = Text.assemble(*((encodable(safe_text(text, keep_newlines=True), encoding), style) for text, style in pieces))
        self._last_line = time.monotonic()
        with self._turn:
            (console or self._rich).print(line, soft_wrap=True)
        self._write_log(line.plain)

    def _write_log(self, line: str) -> None:
        # ValueError: another thread has closed it.
        with contextlib.suppress(OSError, ValueError):
            if self._log is not None:
                self._log.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {line}\n")
                self._log.flush()
