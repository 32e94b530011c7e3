import io
import re
import sys
import time
from pathlib import Path

import pytest
from terminal import Terminal

from grpo_rl.telemetry.terminal.console import Console


class Pipe(io.TextIOWrapper):
    """A text stream that is no terminal, in a chosen encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, write_through=True)

    def lines(self) -> list[str]:
        return self.bytes.getvalue().decode(self.encoding).splitlines()


def test_on_a_pipe_a_bar_is_one_line_at_the_start_and_one_at_the_end() -> None:
    pipe = Pipe()
    with Console(pipe).progress("starting the engine", total=3) as bar:
        for index in range(3):
            bar.advance(note=f"layer {index}")
    first, last = pipe.lines()
    assert first == "starting the engine ..."
    assert last.startswith("starting the engine (layer 2): ")
    assert last.endswith(" s")


def test_hostile_text_is_escaped_and_brackets_are_not_markup() -> None:
    pipe = Pipe()
    console = Console(pipe)
    console.info("[red]\x1b[2J[/red] :smile: [/nothing]")
    console.warn("w\x07")
    console.notice("e\x1b]0;title\x07")
    console.table("[b]T[/b]", [["\x1b[31m", "[link=x]y[/link]"]], header=["a", "[i]b"])
    text = "\n".join(pipe.lines())
    assert "\x1b" not in text and "\x07" not in text
    assert pipe.lines()[:3] == ["[red]\\x1b[2J[/red] :smile: [/nothing]", "warning: w\\x07", "e\\x1b]0;title\\x07"]
    for shown in ("[b]T[/b]", "\\x1b[31m", "[link=x]y[/link]", "[i]b"):
        assert shown in text


def test_the_log_file_has_every_line_that_was_printed(tmp_path: Path) -> None:
    console = Console(Pipe())
    console.log_to(tmp_path / "console.log")
    console.info("é \x1b[1m")
    console.step(1, 2, {})
    console.table("T", [["a", 1]])
    console.close()
    lines = [line[21:] for line in (tmp_path / "console.log").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == "é \\x1b[1m"
    assert lines[2].split()[0] == "1/2"
    assert lines[-1] == "a  1"


TERMINAL_PROGRAM = """
import os, time
from grpo_rl.telemetry.terminal.console import Console
console = Console()
assert console.interactive
with console.progress("outer", total=2) as outer, console.progress("inner", total=None, keep=False) as inner:
    outer.advance(note="[red]n\\x1b[5m")
    inner.advance()
    while not os.path.exists("seen"):
        time.sleep(0.01)
    console.info("between")
console.info("end")
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_on_a_terminal_nested_bars_are_live_and_leave_one_line(tmp_path: Path, encoding: str) -> None:
    with Terminal([sys.executable, "-c", TERMINAL_PROGRAM], tmp_path, {"PYTHONIOENCODING": encoding}) as terminal:
        terminal.until("[===============---------------] 1 of 2", 120)
        terminal.until("inner", 120)
        (tmp_path / "seen").touch()
        assert terminal.wait(120) == 0, terminal.screen().text()
        shown, lines = terminal.raw.decode(), terminal.screen().text().splitlines()
    assert "[red]n\\x1b[5m" in shown and "\x1b[5m" not in shown
    assert lines[0] == "between" and lines[1].startswith("outer ([red]n\\x1b[5m): ") and lines[2:] == ["end"]


def test_on_a_pipe_long_work_says_where_it_is_now_and_then() -> None:
    pipe = Pipe()
    console = Console(pipe, quiet_s=0.5)
    with console.progress("training", 9, keep=False) as outer, console.progress("validating", 4, keep=False) as inner:
        outer.advance(2, "updating the actor")
        outer.left(125.0)
        inner.advance()
        deadline = time.monotonic() + 120
        while len(pipe.lines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    first, second = pipe.lines()[:2]
    assert re.match(r"training 2 of 9: updating the actor, \d\S* s so far, about \d min ", first)
    assert "; validating 1 of 4, " in first and second != first
    silent = len(pipe.lines())
    time.sleep(1.0)
    assert len(pipe.lines()) == silent, "nothing goes on any more"
    console.close()
