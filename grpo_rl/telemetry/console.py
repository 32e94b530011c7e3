"""What a person sees while a run goes on: messages, progress bars, one line per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from grpo_rl.telemetry import step_line
from grpo_rl.telemetry.text import duration, encodable, safe_text

HEADER_EVERY = 25
SILENT_STEPS = 3
"""So many steps in a row without any advantage are told, once."""


class Bar:
    """A handle on one progress bar; safe to use from several threads."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self.note = ""

    def advance(self, k: float = 1, note: str | None = None) -> None:
        """Move on by `k`; `note` is shown beside the bar, and the last one on the closing line."""
        if note is not None:
            self.note = safe_text(note, limit=120)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=k, note=self.note)

    def set_total(self, total: float) -> None:
        """Say how long the work is, once that is known."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=total)


class Console:
    """Prints for people: live bars on a terminal, plain lines on a pipe, and a copy of the lines in a log file.

    Nothing that is printed is read as markup, and control characters are escaped, so text that a model
    wrote can be passed to any method.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._rich = RichConsole(file=file, markup=False, emoji=False, highlight=False)
        self._errors = self._rich if file is not None else RichConsole(stderr=True, markup=False, emoji=False, highlight=False)
        if not self._rich.is_terminal:
            self._rich.width = 120
        # A colour forced into a pipe (FORCE_COLOR) makes rich believe in a terminal; a bar needs a real one.
        self.interactive = self._rich.file.isatty() and not self._rich.is_dumb_terminal
        self._progress: Progress | None = None
        self._open_bars = 0
        self._lock = threading.Lock()
        self._lines_since_header = HEADER_EVERY
        self._silent_steps = 0
        self._untrained = False
        self._log: TextIO | None = None

    # ---- messages ----------------------------------------------------------------------------------

    def info(self, message: str) -> None:
        """Print a message; its line breaks are kept."""
        self._print([step_line.Cell(message)])

    def warn(self, message: str) -> None:
        """Print a message that a reader should not overlook."""
        self._print([step_line.Cell("warning: ", "bold yellow"), step_line.Cell(message, "yellow")])

    def error(self, message: str) -> None:
        """Print a message to the error stream."""
        self._print([step_line.Cell("error: ", "bold red"), step_line.Cell(message)], self._errors)

    def table(self, title: str, rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
        """Print `rows` in aligned columns under a title."""
        num_columns = max([len(header), *(len(row) for row in rows)], default=0)
        table = Table(title=self._text(title), title_justify="left", show_header=bool(header), show_edge=False)
        for index in range(num_columns):
            table.add_column(self._text(header[index]) if index < len(header) else "", overflow="fold")
        for row in rows:
            table.add_row(*(self._text(str(value)) for value in row))
        self._rich.print(table)
        for row in [[title], header, *rows]:
            self._write_log("  ".join(safe_text(str(value)) for value in row))

    # ---- progress ----------------------------------------------------------------------------------

    @contextmanager
    def progress(self, title: str, total: float | None = None, keep: bool = True) -> Iterator[Bar]:
        """A bar for work of `total` units (None: unknown) that takes longer than a second.

        On a terminal the bar is live and gives way to one line with the seconds; elsewhere there is one
        line at the start and one at the end. `keep=False` leaves no line: for the phases of a step, whose
        seconds are on the step's own line.
        """
        start = time.monotonic()
        if keep and not self.interactive:
            self.info(f"{title} ...")
        bar = self._open_bar(title, total)
        outcome = "stopped after"
        try:
            yield bar
            outcome = ""
        finally:
            self._close_bar(bar)
            if keep or outcome:
                note = f" ({bar.note})" if bar.note else ""
                self.info(f"{title}{note}: {f'{outcome} ' if outcome else ''}{duration(time.monotonic() - start)}")

    def _open_bar(self, title: str, total: float | None) -> Bar:
        if not self.interactive:
            return Bar(None, None)
        with self._lock:
            if self._progress is None:
                self._progress = self._new_progress()
                self._progress.start()
            self._open_bars += 1
            task = self._progress.add_task(str(self._text(title)), total=total, note="")
            return Bar(self._progress, task)

    def _close_bar(self, bar: Bar) -> None:
        if bar._progress is None or bar._task is None:
            return
        with self._lock:
            bar._progress.remove_task(bar._task)
            self._open_bars -= 1
            if self._open_bars == 0:
                bar._progress.stop()
                self._progress = None

    def _new_progress(self) -> Progress:
        return Progress(
            SpinnerColumn("line" if self._rich.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self._rich,
            transient=True,
        )

    # ---- steps -------------------------------------------------------------------------------------

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print one line for a training step, under a header that comes back every 25 lines."""
        if self._lines_since_header >= HEADER_EVERY:
            self._print(step_line.header())
            self._lines_since_header = 0
        self._print(step_line.line(step, total, metrics))
        self._lines_since_header += 1
        self._warn_untrained(metrics)
        if (silent_share := metrics.get("advantage/zero_group_fraction")) is None:  # the validation before training
            return
        self._silent_steps = self._silent_steps + 1 if silent_share == 1.0 else 0
        if self._silent_steps == SILENT_STEPS:
            self.warn(
                f"{SILENT_STEPS} steps in a row taught nothing: in every group all responses got the same reward. "
                "python -m grpo_rl.telemetry.browse RUN shows what was sampled and how it was scored; a model that never "
                "earns anything needs easier problems, a reward for parts of the way, or a warm start"
            )

    def _warn_untrained(self, metrics: Mapping[str, float]) -> None:
        """Say that the step trained no token, at the first of several such steps, and which key leaves the tokens out."""
        before, self._untrained = self._untrained, metrics.get("rollout/trained_token_fraction") == 0.0
        if self._untrained and not before:
            masked = metrics.get("rollout/masked_fraction", 0.0)
            causes = []
            if masked > 0.0:
                causes.append(
                    f"algorithm.mask_truncated leaves out the {masked:.0%} of the responses that were cut off: raise "
                    "data.max_response_length, or set algorithm.mask_truncated=false"
                )
            if masked < 1.0:
                causes.append(
                    "algorithm.rollout_correction.rollout_rs rejects all other tokens: widen rollout_rs_threshold, or find out "
                    "why the engine's log-probs (rollout_corr/*) are so far from the trainer's"
                )
            self.warn("no token of this step is trained, and no weight moves: " + "; ".join(causes))

    # ---- underneath --------------------------------------------------------------------------------

    def log_to(self, path: Path) -> None:
        """From now on also append every line, with the time, to `path`."""
        self._log = path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Close the log file."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _text(self, text: str, style: str = "") -> Text:
        return Text(encodable(safe_text(text, keep_newlines=True), self._rich.encoding), style=style)

    def _print(self, cells: Sequence[step_line.Cell], console: RichConsole | None = None) -> None:
        line = Text.assemble(*(self._text(cell.text, cell.style) for cell in cells))
        (console or self._rich).print(line, soft_wrap=True)
        self._write_log(line.plain)

    def _write_log(self, line: str) -> None:
        if self._log is not None:
            self._log.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {line}\n")
            self._log.flush()
