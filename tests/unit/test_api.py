"""`grpo_rl.train`: what it refuses at once, and how a run's process, its output and its errors come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir

import grpo_rl
from grpo_rl import api, errors
from grpo_rl.config.compose import compose
from grpo_rl.config.recipes import conf
from grpo_rl.errors import ClusterError, ConfigError, DataError, GrpoRlError, Preempted


def back(tmp_path: Path, error: BaseException) -> BaseException:
    """Return the exception that comes out of a process that ended with `error`."""
    file = tmp_path / "error.json"
    api._write_error(file, error)
    return api._raised(errors.exit_code_of(error), file, tmp_path)


def test_every_problem_is_raised_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ConfigError) as caught:
        grpo_rl.train(["trainer.save_frq=1", "trainer.test_freq=1.5"])
    assert [problem.split("=")[0].split(":")[0] for problem in caught.value.problems] == [
        "trainer.save_frq",
        "trainer.test_freq",
    ]
    for wrong, match in (
        ("recipe=arithmetic/grpo", "is one text; give a list"),
        (["trainer.dry_run=true"], "trains nothing"),
        (["--multirun", "seed=1,2"], "--multirun: is for python"),
    ):
        with pytest.raises(ConfigError, match=match):
            grpo_rl.train(wrong)  # type: ignore[arg-type]


def test_a_configuration_that_hydra_has_composed_means_what_its_words_mean() -> None:
    words = [
        "model=arithmetic",
        "data=arithmetic",
        "data.train_batch_size=64",
        "trainer.default_local_dir=runs/${trainer.seed}",
    ]
    with initialize_config_dir(str(conf()), version_base="1.3"):
        composed = hydra.compose("config", words)
    assert api._checked([composed, "trainer.seed=3"])[1].config == compose([*words, "trainer.seed=3"]).config
    composed.trainer.seed = -1
    with pytest.raises(ConfigError, match=r"trainer\.seed=-1"), grpo_rl.session(composed):
        pass
    with pytest.raises(ConfigError, match="3: neither a word such as key=value nor a configuration"), grpo_rl.session(3):  # type: ignore[arg-type]
        pass


def test_an_error_of_the_plan_comes_back_from_the_process_with_its_problems(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for quiet in (True, False):
        with pytest.raises(ConfigError, match="nonsense") as caught:
            grpo_rl.train([f"trainer.default_local_dir={tmp_path}", "algorithm.adv_estimator=nonsense"], quiet=quiet)
        assert len(caught.value.problems) == 1
        assert ("this configuration cannot be run, 1 problem" in capfd.readouterr().out) != quiet


def test_errors_keep_their_kind_their_place_and_their_notes(tmp_path: Path) -> None:
    cluster = ClusterError("actor 1 died")
    cluster.where, cluster.advice = "step 3, gen", "the same command goes on"
    cluster.add_note("log: x.log")
    found = back(tmp_path, cluster)
    assert isinstance(found, ClusterError) and errors.headline(found) == errors.headline(cluster)
    assert found.__notes__ == ["log: x.log", f"run folder: {tmp_path}"]
    config = back(tmp_path, ConfigError(["a", "b"]))
    assert isinstance(config, ConfigError) and config.problems == ["a", "b"] and str(config) == "a\nb"
    assert type(back(tmp_path, DataError("row 3"))) is DataError
    assert isinstance(back(tmp_path, Preempted("by SIGTERM")), Preempted)
    assert isinstance(back(tmp_path, KeyboardInterrupt()), KeyboardInterrupt)


def test_an_error_of_ours_is_named_and_never_another_class_of_the_module(tmp_path: Path) -> None:
    for error in (ValueError("odd"), type("headline", (Exception,), {})("odd"), type("Path", (Exception,), {})("odd")):
        found = back(tmp_path, error)
        assert type(found) is GrpoRlError and str(found) == f"unexpected {type(error).__name__}: odd"


def test_a_process_that_was_killed_is_a_cluster_error(tmp_path: Path) -> None:
    found = api._raised(-signal.SIGKILL, tmp_path / "none.json", tmp_path / "none")
    assert isinstance(found, ClusterError) and "ended by SIGKILL" in str(found)


def test_what_the_process_prints_appears_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); sys.exit(3)"
    assert api._run([sys.executable, "-c", program], quiet=False, grace_s=5) == 3
    assert capsys.readouterr().out == "out\nerr\n"


WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *a: (print('saving', flush=True), sys.exit(75)))
print('begun', flush=True)
time.sleep(60)
"""


def test_an_interrupt_lets_the_run_save_and_is_raised_again(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while "begun\n" not in written and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "write", written.append)
        with pytest.raises(KeyboardInterrupt):
            api._run([sys.executable, "-c", WAITS], quiet=False, grace_s=30)
    thread.join(120)
    # Threads that tests before this one left behind may flush with an empty text.
    assert [text for text in written if text] == ["begun\n", "saving\n"]
