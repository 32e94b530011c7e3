"""The process that writes the page beside a run: when it begins, what it may cost, how it ends."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from run_folders import make_run

from grpo_rl.telemetry.page import beside_run


class PageBeside(beside_run.PageBeside):
    """Its processes have the priority of others: one of idle time may have no turn on a busy machine before a test gives up."""

    def _start(self, run: Path, state: str, parent: str) -> None:
        super()._start(run, state.removeprefix(beside_run.IDLE), parent)


def test_a_page_is_written_when_it_is_due_and_not_while_one_is_under_way(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    beside = PageBeside(run, 2)
    for step in (0, 1):
        beside.step(step)
        assert beside._process is None
    beside.step(2)
    first = beside._process
    assert first is not None
    beside.step(4)
    assert beside._process is first
    beside.wait(120)
    assert "a_run" in (run / "page.html").read_text() and beside._process is None
    beside.step(6)
    assert beside._process is None, f"a page may be under way for {beside_run.SHARE:.0%} of the time"


def test_a_failure_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "page.html").mkdir()
    warnings: list[str] = []
    beside = PageBeside(run, 1, warnings.append)
    for step in (1, 2):
        beside._took = 0.0
        beside.step(step)
        beside.wait(120)
    assert len(warnings) == 1 and "page.html" in warnings[0] and "training goes on" in warnings[0]


def test_the_last_page_takes_the_place_of_one_under_way_and_has_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running")
    beside = PageBeside(run, 1)
    beside.step(1)
    beside.last("done")
    beside.wait(120)
    text = (run / "page.html").read_text()
    assert '"state":"done"' in text and '"live":null' in text
    assert [path.name for path in run.iterdir() if path.name.endswith(".tmp")] == []


def test_the_last_page_may_outlive_a_run_that_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running")
    script = (
        "import os, sys; from pathlib import Path; from grpo_rl.telemetry.page.beside_run import PageBeside;"
        "os.environ['GRPO_SESSION'] = 'token';"
        "beside = PageBeside(Path(sys.argv[1]), 1); beside.last('failed', outlives=True);"
        "print(beside._process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE, text=True, timeout=240)
    pid = int(done.stdout)
    with contextlib.suppress(OSError):
        assert b"GRPO_SESSION" not in Path(f"/proc/{pid}/environ").read_bytes()
    deadline = time.monotonic() + 120
    while not (run / "page.html").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert '"state":"failed"' in (run / "page.html").read_text()
