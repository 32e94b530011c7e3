"""Files of a run that somebody sent: whatever is in them, a command that looks at the run ends, with a result or a clear error."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from run_folders import make_run

import grpo_rl
from grpo_rl import main as command
from grpo_rl import run_files
from grpo_rl.__main__ import main
from grpo_rl.cluster import run_session
from grpo_rl.errors import DataError, GrpoRlError
from grpo_rl.telemetry import report
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.telemetry.status import Status

FILES = ("config.yaml", "overrides.txt", "plan.txt", "status.json", "metrics.jsonl", "timeline.jsonl")
LOGS = ("rollouts/step_4.jsonl", "val/step_4.jsonl")
QUICK = (
    ["doctor", "{run}", "--json"],
    ["page", "{run}"],
    ["watch", "{run}", "--once"],
)
SLOW = (
    ["export", "{run}@start", "--output", "{out}"],
    ["export", "{run}@4", "--output", "{out}"],
    ["eval", "{run}@last", "--output", "{out}"],
)
"""Commands that read what the quick ones read, and load more: they are tried with a file of each kind."""
LONGEST_S = 60


def instead(file: str, put: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def spoil(run: Path) -> None:
        (run / file).unlink()
        put(run / file)

    return spoil


def text(file: str, content: str) -> Callable[[Path], Any]:
    return instead(file, lambda path: path.write_text(content))


def changed(file: str, **fields: Any) -> Callable[[Path], Any]:
    """Return a function that sets these fields in the last line of a file of JSON."""

    def spoil(run: Path) -> None:
        *lines, last = (run / file).read_text().splitlines() if file.endswith("l") else [(run / file).read_text()]
        (run / file).write_text("\n".join([*lines, json.dumps(json.loads(last) | fields)]) + "\n")

    return spoil


DEEP = "[" * 100_000 + "]" * 100_000
ALIASES = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
LONG = 10**400
WRONG: tuple[Any, ...] = ("x", [1], {"a": 1}, LONG, -1, 1e308, [[]], True)
FIELDS = ("uid", "reward_parts", "prompt", "reward", "sample", "reward", "token_ids", "response", "token_logprobs", "episode")
HOSTILE: dict[str, Callable[[Path], Any]] = {
    **{f"{file} is a FIFO": instead(file, os.mkfifo) for file in (*FILES, *LOGS)},
    **{f"{file} never ends": instead(file, lambda path: path.symlink_to("/dev/zero")) for file in (*FILES, *LOGS)},
    **{f"{file} is a folder": instead(file, Path.mkdir) for file in (*FILES, *LOGS)},
    **{f"{file} is deep": text(file, DEEP) for file in (*FILES, *LOGS)},
    **{f"{file} has lists": text(file, '{"step": 1}\n[1, 2]\n3\nnull\n') for file in (*FILES, *LOGS)},
    **{f"{file} is binary": instead(file, lambda path: path.write_bytes(bytes(range(256)))) for file in (*FILES, *LOGS)},
    "config.yaml has aliases": text("config.yaml", ALIASES),
    "config.yaml has sections that are none": text("config.yaml", "actor_rollout_ref: [1]\ndata: 3\ntrainer: x\n"),
    "config.yaml has wrong values": lambda run: (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace(": true", ": [x]").replace(": 8", f": {LONG}").replace(": null", ": {1: 2}")
    ),
    "config.yaml has a date": text("config.yaml", "trainer: {experiment_name: 2020-01-01, seed: 1e999}\n1: {2: 3}\n"),
    "status.json has a pid of no process": changed("status.json", state="running", pid=2**63, time=LONG, total="x", step="3"),
    **{
        f"status.json has {str(wrong)[:9]}": changed("status.json", **dict.fromkeys(Status()._fields, wrong), tokenizer=wrong)
        for wrong in WRONG
    },
    "status.json ends with a code of none": changed("status.json", state="failed", error={"exit_code": 2**70}),
    **{
        f"metrics.jsonl has {str(wrong)[:9]}": changed(
            "metrics.jsonl", **dict.fromkeys(("reward/mean", "timing_s/step", "time", "val/arithmetic/mean@1"), wrong)
        )
        for wrong in WRONG
    },
    **{f"metrics.jsonl has step {str(wrong)[:9]}": changed("metrics.jsonl", step=wrong) for wrong in (*WRONG, 10**12)},
    **{
        f"timeline.jsonl has {str(wrong)[:9]}": changed("timeline.jsonl", start=wrong, end=wrong, role=wrong) for wrong in WRONG
    },
    "metrics.jsonl has many names": changed("metrics.jsonl", **{f"m/{number}": 1.0 for number in range(20_000)}),
    **{
        f"{file} has {field} {str(wrong)[:9]}": changed(file, **{field: wrong})
        for file in LOGS
        for field, wrong in zip(FIELDS, (*WRONG, *WRONG), strict=False)
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    for name in ("sent", "other"):
        make_run(base, name, num_steps=4, rows=3, size=2)
    return base


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"after {LONGEST_S} s there was no end")  # the commands catch SystemExit

    # A log of 512 MiB is legitimate; what is tried here is larger than this in any case.
    monkeypatch.setattr(run_files.read_bytes, "__defaults__", (2**24,))
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("what", HOSTILE)
def test_looking_at_a_hostile_run_ends_with_a_result_or_a_clear_error(
    what: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(runs / "sent", tmp_path / "sent")
    HOSTILE[what](run)
    is_slow = any(
        word in what
        for word in (" is a FIFO", "metrics.jsonl has lists", "aliases", "sections", "wrong values", "metrics.jsonl has {")
    )
    for words in (*QUICK, *SLOW) if is_slow else QUICK:
        known = {"run": run, "other": runs / "other", "out": tmp_path / "out"}
        code = main([word.format(**known) for word in words])
        out, err = capsys.readouterr()
        # What ends in 6 is `watch`, of a run whose process is gone.
        assert code in (0, 2, 3, 4, 6) and "Traceback" not in out + err, (words, code, err)
    for look in ("metrics", "rollouts", "report", "config", "overrides", "__repr__", *(["plot"] if is_slow else [])):
        try:
            found = getattr(grpo_rl.Run(run), look)
            assert (found() if callable(found) else found) is not None
        except GrpoRlError as error:
            assert error.exit_code != 70


SESSION = "session.json"
GOING_ON: dict[str, Callable[[Path], Any]] = {
    **{what: spoil for what, spoil in HOSTILE.items() if " has " not in what},
    **{f"{file} is a FIFO": lambda run, file=file: os.mkfifo(run / file) for file in (SESSION, ".lock", "page.html")},
    **{f"{file} is deep": lambda run, file=file: (run / file).write_text(DEEP) for file in (SESSION, ".lock")},
    "plan.txt is a link": instead("plan.txt", lambda path: path.symlink_to(path.parents[1] / "mine")),
    "a rollout is a link": instead("rollouts/step_4.jsonl", lambda path: path.symlink_to(path.parents[2] / "mine")),
    "the logs are a link to another's file": lambda run: (run / "logs" / "console.log").symlink_to(run.parent / "mine"),
}
REFUSED = [what for what in GOING_ON if any(word in what for word in ("FIFO", "link", "never ends"))]
BEGINS = {
    kind: [what for what in GOING_ON if kind in what and what not in REFUSED] for kind in ("folder", "deep", "binary", "code")
}
"""What is in one folder together: one kind of spoilt file in place of each file."""


def test_every_spoilt_file_is_tried_by_a_training_that_goes_on() -> None:
    assert sorted([*REFUSED, *(what for names in BEGINS.values() for what in names)]) == sorted(GOING_ON)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("names", [*([what] for what in REFUSED), *BEGINS.values()], ids=[*REFUSED, *BEGINS])
def test_a_training_that_goes_on_in_a_hostile_folder_begins_or_is_refused(
    names: list[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the user's own command, which writes there; nothing outside of the folder is read or written."""
    run = shutil.copytree(runs / "sent", tmp_path / "sent", ignore=shutil.ignore_patterns(".lock"))
    (tmp_path / "mine").write_text("mine")
    for what in names:
        GOING_ON[what](run)
    begun: list[Path] = []

    def train(course: command.Course) -> None:
        run_dir = course.session.run_dir
        run_dir.metrics_file.touch()
        run_dir.timeline_file.touch()
        begun.append(run_dir.path)

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(run_session, "connecting", lambda *_, **__: nullcontext())
    monkeypatch.setattr(report, "final_report", lambda *_, **__: "the end")
    code = command.main(["recipe=arithmetic/grpo", f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=sent"])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert (code, bool(begun)) == ((2, False) if names[0] in REFUSED else (0, True)), err
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_wrong_row_is_named_with_what_is_expected(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "sent", tmp_path / "sent")
    changed("rollouts/step_4.jsonl", reward_parts=[1])(run)
    with pytest.raises(DataError, match=r"step_4.jsonl, line 6: reward_parts is '\[1\]', expected an object"):
        read_rollouts(run / "rollouts/step_4.jsonl")
