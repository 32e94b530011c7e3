"""A terminal for tests: a command runs on a pseudo-terminal, keys are pressed, and the screen is what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

COLUMNS, LINES = 160, 60
_ESCAPE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]")


class Screen:
    """The lines that a terminal shows, for as much of its language as rich uses. All lines since the start are kept."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.row = self.column = 0
        self.cursor_is_visible = True

    def feed(self, text: str) -> None:
        """Show `text`."""
        position = 0
        while position < len(text):
            escape = _ESCAPE.match(text, position)
            if escape is not None:
                self._obey(escape.group(1) or "", escape.group(2) or "")
                position = escape.end()
                continue
            self._show(text[position])
            position += 1

    def _show(self, char: str) -> None:
        if char == "\n":
            self.row += 1
            self.column = 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif char == "\r":
            self.column = 0
        elif char >= " ":
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    def _obey(self, arguments: str, command: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif command == "K":
            line = self.lines[self.row]
            self.lines[self.row] = "" if arguments == "2" else line[: self.column]
        elif arguments == "?25":
            self.cursor_is_visible = command == "h"

    def text(self) -> str:
        """Return the lines that are not empty."""
        return "\n".join(line.rstrip() for line in self.lines if line.strip())


class Terminal:
    """A command on a terminal of its own, which is its controlling one: Ctrl-C reaches the whole process group."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        settings = os.environ | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"} | (environment or {})
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            settings.pop(name, None)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=settings,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.raw = b""
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.hang_up()

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def hang_up(self) -> None:
        """Close the terminal, as a window or a lost connection does: the kernel sends SIGHUP."""
        # A descriptor that another thread is reading from is not closed before that read ends.
        self._closing.set()
        self._reader.join(10.0)
        ours, self._ours = self._ours, -1
        if ours >= 0:
            os.close(ours)

    def until(self, seen: str | Callable[[], bool], seconds: float) -> None:
        """Wait until this text was on the screen, or this is true."""

        def found() -> bool:
            return seen in self.raw.decode(errors="replace") if isinstance(seen, str) else seen()

        deadline = time.monotonic() + seconds
        while not found():
            if self.process.poll() is not None:
                # The end of a process is seen before the last that it wrote has been read.
                self._reader.join(5.0)
                if found():
                    return
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {seen!r}\n{self.screen().text()}"
            assert time.monotonic() < deadline, f"{seen!r} not seen within {seconds} s\n{self.screen().text()}"
            time.sleep(0.02)  # polling: the screen is a stream of bytes

    def wait(self, seconds: float) -> int:
        """Return the exit code; past `seconds` the test fails with the screen."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError(f"did not end within {seconds} s\n{self.screen().text()}") from None
        self._reader.join(5.0)
        return code

    def screen(self) -> Screen:
        """Return what is on the screen now."""
        screen = Screen()
        screen.feed(self.raw.decode(errors="replace"))
        return screen

    def _read(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._ours], [], [], 0.05)[0]:
                continue
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return
            if not chunk:
                return
            self.raw += chunk
