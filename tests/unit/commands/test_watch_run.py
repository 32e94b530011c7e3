"""Watching a run: what is shown, how it ends, and that nothing of a run can drive the terminal or is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_folders import make_run
from terminal import Terminal

from grpo_rl.__main__ import main
from grpo_rl.commands.watch_run import look_at, picture
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.rollouts.rollout_log import write_rollouts


def test_a_running_run_is_shown_with_phase_time_left_alarms_and_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path, "going", state="running")
    log = MetricsFile(run / "metrics.jsonl")
    log.log(4, {"reward/mean": 0.4, "timing_s/step": 4.0, "alarm/kl_runaway": 1.0})
    log.close()
    look = look_at(run, 2)
    text = "\n".join(picture(look))
    assert "going | running | step 3 of 10 | phase gen" in text and "last commit: step 2" in text
    # Steps 2 to 4 took 2, 2 and 4 s, the first one does not count; six are left.
    assert look.seconds_left == pytest.approx((2 + 2 + 4) / 3 * 6)
    assert "about 16.0 s left" in text
    assert "step 4: kl_runaway" in text and "grpo-rl doctor" in text
    assert "the last samples, of step 3:" in text and text.count("-> 3") == 2
    assert look.ended_with is None


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 3)])
def test_it_ends_with_the_runs_exit_code(state: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "over", state=state)
    assert main(["watch", str(run)]) == code
    out = capsys.readouterr().out
    assert f"the run has ended with exit code {code}" in out and out.count("\n") >= 5
    assert main(["watch", str(run), "--once"]) == code
    assert ("line 3: no prompt" in capsys.readouterr().out) == (state == "failed")


def test_a_process_that_is_gone_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "killed", state="running")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, timeout=60)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"pid": int(ended.stdout)}))
    assert main(["watch", str(run)]) == 6
    assert "is gone and left no word" in capsys.readouterr().out
    (run / "status.json").write_text(json.dumps(status | {"pid": int(ended.stdout), "host": "elsewhere"}))
    assert look_at(run, 0).ended_with is None, "another machine's processes cannot be seen"


def test_hostile_responses_do_not_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from command_folders import rollout

    run = make_run(tmp_path, "hostile")
    evil = "\x1b[2J\x1b]0;owned\x07\r\u202eeslaf"
    write_rollouts(run / "rollouts" / "step_3.jsonl", [rollout(row, 0.0, text=evil) for row in range(4)])
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"phase": evil, "error": {"exit_code": 1, "message": evil}}))
    main(["watch", str(run), "--once"])
    out = capsys.readouterr().out
    assert "owned" in out and not {"\x1b", "\x07", "\r", "\u202e"} & set(out)


def test_on_a_terminal_one_picture_follows_the_run_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path, "live", state="running")
    command = [sys.executable, "-m", "grpo_rl", "watch", str(run), "--every", "0.2"]
    with Terminal(command, tmp_path) as terminal:
        terminal.until("step 3 of 10", 60)
        log = MetricsFile(run / "metrics.jsonl")
        log.log(4, {"reward/mean": 0.987, "timing_s/step": 4.0})
        log.close()
        terminal.until("0.987", 20)
        status = json.loads((run / "status.json").read_text())
        temporary = run / "status.tmp"
        temporary.write_text(json.dumps(status | {"state": "preempted", "error": {"exit_code": 75, "message": "by SIGTERM"}}))
        os.replace(temporary, run / "status.json")
        assert terminal.wait(20) == 75
        shown = terminal.screen()
    assert shown.cursor_is_visible and "exit code 75" in shown.text()
    assert sum("live |" in line for line in shown.lines) == 1, "drawn in place"
