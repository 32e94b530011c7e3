"""Watching a run: what is shown, how it ends, and that nothing of a run can drive the terminal or is touched."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import make_run

from grpo_rl.__main__ import main
from grpo_rl.commands.watch_run import ended_with, new_lines
from grpo_rl.telemetry.status import read_status


def log_lines(run: Path, *lines: str) -> None:
    """Append lines to the log of a run, as its console does."""
    (run / "logs").mkdir(exist_ok=True)
    with (run / "logs" / "console.log").open("a") as log:
        log.write("".join(f"{line}\n" for line in lines))


def going(base: Path, **status: object) -> Path:
    """Return a run of this process."""
    own = {"state": "running", "total": 10, "phase": "gen", "last_commit": 2, "pid": os.getpid(), "host": socket.gethostname()}
    return make_run(base, "going", num_steps=3, **(own | status))


def write_status(run: Path, **changed: object) -> None:
    """Change the status of a run, as the run itself would."""
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | changed))


def test_a_running_run_is_shown_with_its_last_lines_and_followed_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = going(tmp_path)
    log_lines(run, *(f"step {number}" for number in range(40)))
    ended = {"state": "preempted", "error": {"exit_code": 75, "message": "by SIGTERM"}}
    events = iter([lambda: log_lines(run, "step 40"), lambda: (log_lines(run, "saved"), write_status(run, **ended))])
    monkeypatch.setattr("grpo_rl.commands.watch_run.time.sleep", lambda seconds: next(events)())
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("going | running | step 3 of 10 | phase gen | last commit: step 2")
    assert shown[-1] == "step 39" and len(shown) < 30
    assert main(["watch", str(run)]) == 75
    out = capsys.readouterr().out
    assert out.startswith("\n".join(shown)) and "\nstep 39\nstep 40\nsaved\n" in out and "exit code 75: by SIGTERM" in out


def test_every_line_is_passed_on_once_and_whole(tmp_path: Path) -> None:
    run = going(tmp_path)
    assert new_lines(run, None) == ([], 0), "no log yet"
    log_lines(run, "one", "two")
    lines, end = new_lines(run, None)
    assert lines == ["one", "two"] and new_lines(run, end) == ([], end)
    with (run / "logs" / "console.log").open("a") as log:
        log.write("hal")
    assert new_lines(run, end) == ([], end), "half a line waits for its end"
    log_lines(run, "f")
    assert new_lines(run, end)[0] == ["half"]
    log_lines(run, *("x" * 100 for _ in range(2000)))
    lines, _ = new_lines(run, None)
    assert set(lines) == {"x" * 100} and len(lines) < 700, "of a long log the end"


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [("done", None, 0), ("failed", {"exit_code": 3, "message": "rows.jsonl, line 3: no prompt"}, 3)],
)
def test_it_ends_with_the_runs_exit_code(
    state: str, error: object, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = going(tmp_path, state=state, error=error)
    log_lines(run, "step 1", "step 2")
    assert main(["watch", str(run)]) == code
    out = capsys.readouterr().out
    assert f"the run has ended with exit code {code}" in out and "step 1\nstep 2\n" in out
    assert main(["watch", str(run), "--once"]) == code
    assert ("line 3: no prompt" in capsys.readouterr().out) == (state == "failed")


def test_a_process_that_is_gone_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = going(tmp_path)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, timeout=240)
    write_status(run, pid=int(ended.stdout))
    assert main(["watch", str(run)]) == 6
    assert "is gone and left no word" in capsys.readouterr().out
    write_status(run, host="elsewhere")
    assert ended_with(read_status(run)) is None, "another machine's processes cannot be seen"


def test_a_hostile_run_does_not_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = going(tmp_path)
    evil = "\x1b[2J\x1b]0;owned\x07\r\u202eeslaf"
    log_lines(run, evil)
    write_status(run, phase=evil, error={"exit_code": 1, "message": evil})
    main(["watch", str(run), "--once"])
    out = capsys.readouterr().out
    assert "owned" in out and not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
