"""Sweeps: which runs the words make, what is refused before the first one, what is skipped, what a signal does, the result."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from compositions import compose
from test_run_folder import ended, write_run

from grpo_rl.config import overrides, recipes
from grpo_rl.config.compose import read
from grpo_rl.errors import ClusterError, ConfigError, Preempted
from grpo_rl.main import main
from grpo_rl.sweep import outcome
from grpo_rl.sweep.outcome import Point, name_of, read_points, score_until
from grpo_rl.sweep.points import Sweep, sweep_of
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile, read_metrics
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status

LR = "actor_rollout_ref.actor.optim.lr"


def sweep_words(tmp_path: Path, *words: str) -> list[str]:
    return [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=s", "trainer.device=cpu", *words]


def described(words: list[str]) -> Sweep:
    return sweep_of(read(words))


def test_every_combination_is_a_run_and_the_last_key_changes_fastest(tmp_path: Path) -> None:
    sweep = described(sweep_words(tmp_path, f"{LR}=1e-3,1e-4", "seed=1,2", "trainer.total_training_steps=3"))
    assert [point.name for point in sweep.points] == [
        "lr=0.001,seed=1",
        "lr=0.001,seed=2",
        "lr=0.0001,seed=1",
        "lr=0.0001,seed=2",
    ]
    last = sweep.composed["lr=0.0001,seed=2"].config
    assert last.actor_rollout_ref.actor.optim.lr == 1e-4 and last.trainer.total_training_steps == 3
    assert (last.trainer.seed, last.data.seed, last.actor_rollout_ref.rollout.seed) == (2, 2, 2)
    assert last.trainer.experiment_name == "s/lr=0.0001,seed=2" and sweep.folder == tmp_path / "s"


def test_hydras_words_for_several_values_are_understood() -> None:
    found = overrides.axes(
        ["a.b=choice(x,y)", "c.d=range(1,4)", "e.f=[1,2],[3]", "g.h=[1,2]", "i.j='a,b'", "~k.l"], [recipes.conf()]
    )
    assert found.values == {"a.b": ["x", "y"], "c.d": ["1", "2", "3"], "e.f": ["[1,2]", "[3]"]}
    assert found.fixed == ["g.h=[1,2]", "i.j='a,b'", "~k.l"] and not found.problems


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["trainer.seed=1"], "no setting has several values"),
        (["seed=1,2", "seed=3,4"], "has a list of values already"),
        (["seed=1,1"], "a value stands there twice"),
        ([f"{LR}=interval(0,1)"], "needs single values"),
        (["seed=range(1,2000)"], "1,999 runs; at most 1,000"),
        (["trainer.experiment_name=a,b"], "a sweep has one name"),
        (["trainer.default_local_dir=a,b"], "lie in one folder"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        described(words)


def test_a_wrong_value_is_refused_before_the_first_run_with_the_runs_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a run was started"))
    words = sweep_words(tmp_path, "--multirun", f"{LR}=1e-3,-1", "trainer.test_freq=1,2.5", "trainer.save_frq=3")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "3 problems" in err and not (tmp_path / "s").exists()
    assert f"{LR}=-1" in err and "(in run lr=-1,test_freq=1, lr=-1,test_freq=2.5)" in err
    assert "trainer.save_frq: unknown key. Did you mean trainer.save_freq?\n" in err
    # What only the plan sees: a name that no registry has, and a file that is not there.
    assert main(sweep_words(tmp_path, "-m", "algorithm.adv_estimator=grpo,nonsense")) == 2
    assert "(in run adv_estimator=nonsense)" in capsys.readouterr().err


def test_a_single_run_says_how_several_values_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{LR}=1e-3,1e-4"]) == 2
    assert "--multirun makes a run for each" in capsys.readouterr().err
    assert main(["--multirun", "--cfg", "seed=1,2"]) == 2
    assert "a sweep has several configurations" in capsys.readouterr().err


def test_a_dry_sweep_shows_every_plan_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sweep_words(tmp_path, "--multirun", "recipe=arithmetic/grpo,arithmetic/dapo", "trainer.dry_run=true")) == 0
    out = capsys.readouterr().out
    assert "=== run 1 of 2: recipe=arithmetic-grpo-" in out and "=== run 2 of 2: recipe=arithmetic-dapo-" in out
    assert out.count("optimizer step") >= 2 and not (tmp_path / "s").exists()


def test_names_of_runs_depend_on_nothing_but_their_values_and_no_two_share_a_folder() -> None:
    assert name_of({"a.lr": "1e-3", "b.lr": "2"}) == "a.lr=1e-3,b.lr=2"
    names = [name_of({"k": value}) for value in ("a/b", "a b", "a-b", "'a-b'", "a:b", "x" * 80, "x" * 81)]
    assert len(set(names)) == 6 and names[2] == names[3] == "k=a-b"
    assert all("/" not in name and len(name) < 80 for name in names)


def write_files_of_a_run(words: list[str]) -> None:
    """Write a run's files at once; as the variable DO says, wait to be stopped, at a step or before the first one."""
    composed = compose(words)
    trainer, rate = composed.config.trainer, composed.config.actor_rollout_ref.actor.optim.lr
    run_dir = RunDir.create(trainer.default_local_dir, trainer.experiment_name)
    run_dir.write_config(composed.yaml(), composed.overrides)
    status = Status(run_dir.status_file)

    def stop(*_: object) -> None:
        status.end(Preempted("by SIGTERM"))
        os._exit(Preempted.exit_code)

    signal.signal(signal.SIGTERM, stop)
    if os.environ.get("DO") == "wait":
        print("waits", flush=True)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    if trainer.seed == 13:
        status.end(ClusterError("died"))
        sys.exit(6)
    file, done = MetricsFile(run_dir.metrics_file), len(read_metrics(run_dir.metrics_file))
    if os.environ.get("DO") == "pause":
        status.update(total=trainer.total_training_steps)
        for step in range(done + 1, trainer.total_training_steps + 1):
            file.log(step, {"reward/mean": rate * (1 + 0.001 * (-1) ** step)})
            if step == {0: 10, 10: 20}.get(done):
                time.sleep(60)
    else:
        for step in range(1, 7):
            file.log(step, {"reward/mean": trainer.seed / 10 + rate * step, "timing_s/step": 1.0})
    status.end()


class Forked:
    """What a sweep asks of a run's process, of a fork of this one: nothing is imported again."""

    def __init__(self, words: list[str]) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=write_files_of_a_run, args=(words,))
        self.process.start()

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a run", timeout)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Put stand-ins in place of the runs' processes; return the command line of each."""
    compose(sweep_words(tmp_path))  # the files are composed once, and not by each fork
    started: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], *args: object, **options: object) -> object:
        if command[1:3] != ["-m", "grpo_rl.main"]:
            return real(command, *args, **options)  # type: ignore[call-overload]
        started.append(command[3:])
        return Forked(command[3:])

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def test_runs_go_one_after_the_other_and_end_with_a_table(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    words = sweep_words(tmp_path, "--multirun", f"{LR}=0.01,0.02", "seed=1,3")
    assert main(words) == 0
    out = capfd.readouterr().out
    assert [line[-1] for line in stand_in] == [
        f"trainer.experiment_name='s/lr={lr},seed={seed}'" for lr in ("0.01", "0.02") for seed in (1, 3)
    ]
    # lr 0.01: the last five steps of seed 1 have 0.1 + 0.01 * (2 + ... + 6) / 5 = 0.14, of seed 3 0.34; mean 0.24, spread 0.1414
    [row] = [line for line in out.splitlines() if line.startswith("lr=0.01 ")]
    assert row.split() == ["lr=0.01", "2/2", "0.240", "±", "0.141", "1.000", "±", "0.000"]
    assert (tmp_path / "s/sweep.txt").read_text().splitlines()[0].split() == ["setting", "done", "reward", "s/step"]


def test_finished_runs_are_skipped_and_changed_or_new_ones_run(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    words = sweep_words(tmp_path, "--multirun", f"{LR}=0.01")
    assert main([*words, "seed=1,2"]) == 0 and len(stand_in) == 2
    assert main([*words, "seed=1,2,3"]) == 0 and len(stand_in) == 3
    assert "sweep: 3 runs in" in (out := capfd.readouterr().out) and "2 of them are done and skipped" in out
    assert main([*words, "seed=1,2", "trainer.total_training_steps=9"]) == 0 and len(stand_in) == 5


def test_a_run_that_fails_keeps_no_other_from_running_and_decides_the_exit_code(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(sweep_words(tmp_path, "--multirun", "seed=13,2")) == 6
    assert len(stand_in) == 2
    out = capfd.readouterr().out
    assert "seed=13: failed, 0 steps" in out and "1/2" in out


def test_halving_stops_the_worse_settings_and_says_how_far_they_came(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DO", "pause")
    monkeypatch.setattr("grpo_rl.sweep.points._LOOK_S", 0.05)
    rates = ["0.01", "0.04", "0.02", "0.03"]
    words = sweep_words(
        tmp_path, "--multirun", f"{LR}={','.join(rates)}", "sweep.halving=true", "trainer.total_training_steps=40"
    )
    assert main(words) == 0
    out = capfd.readouterr().out
    assert [word.rpartition("=")[2].rstrip("'") for *_, word in stand_in] == [*rates, "0.04", "0.03", "0.04"]
    steps = {rate: len(read_metrics(tmp_path / f"s/lr={rate}/metrics.jsonl")) for rate in rates}
    assert steps == {"0.01": 10, "0.02": 10, "0.03": 20, "0.04": 40}
    assert re.search(r"lr=0.03: preempted, 20 of 40 steps; reward 0\.030*$", out, re.MULTILINE)
    # The same command knows what was stopped: nothing is left to do.
    assert main(words) == 0 and len(stand_in) == 7


def test_optuna_draws_values_and_writes_the_best_ones(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="scripts/setup.sh sweep")
    words = sweep_words(
        tmp_path, "-m", "hydra/sweeper=optuna", f"{LR}=tag(log,interval(1e-4,1e-1))", "hydra.sweeper.n_trials=4"
    )
    assert main(words) == 0
    drawn = [float(word.partition("=")[2]) for line in stand_in for word in line if word.startswith(f"{LR}=")]
    assert len(drawn) == 4 and all(1e-4 <= rate <= 1e-1 for rate in drawn)
    best = yaml.safe_load((tmp_path / "s/optimization_results.yaml").read_text())
    # The reward of the stand-in grows with the learning rate.
    assert best["best_params"] == {f"++{LR}": max(drawn)}
    assert capfd.readouterr().out.count("1/1") == 4


def test_a_launcher_that_is_not_installed_and_a_literal_secret_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_rl.sweep.points.find_spec", lambda name: None)
    key = "reward.custom_reward_function.reward_kwargs.api_key"
    assert main(sweep_words(tmp_path, "-m", "seed=1,2", "hydra/launcher=joblib", f"{key}=canary-12345")) == 2
    err = capsys.readouterr().err
    assert "hydra/launcher=joblib: is not installed; python -m pip install 'grpo_rl[sweep]'" in err
    assert f"{key}: a sweep's words are written to files" in err and "canary" not in err and not (tmp_path / "s").exists()


def test_halving_of_seeds_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="differ by their seeds alone"):
        described(sweep_words(tmp_path, "seed=1,2", "hydra/sweeper=halving"))


def test_a_signal_lets_the_run_save_starts_no_other_and_says_how_to_go_on(
    tmp_path: Path, stand_in: list[list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("DO", "wait")
    assert main(sweep_words(tmp_path, "--multirun", "seed=1,2")) == Preempted.exit_code
    out, err = capfd.readouterr()
    assert len(stand_in) == 1 and "waits" in out and "seed=1: preempted" in out and "seed=2: not started" in out
    assert "stopped: by SIGTERM; the same command goes on" in err
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_table_of_runs_that_were_submitted_one_by_one_goes_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, reward in ((1, 0.2), (2, 0.4)):
        run_dir = write_run(tmp_path / "s", f"seed={seed}", rewards=[reward] * 3)
        ended(run_dir)
    assert outcome.main([str(tmp_path / "s")]) == 0
    out = capsys.readouterr().out
    assert "all runs" in out and "0.300 ± 0.141" in out and f"grpo-rl page {tmp_path}/s/seed=1 {tmp_path}/s/seed=2\n" in out
    assert outcome.main([str(tmp_path / "s/seed=1")]) == 3
    assert read_points(tmp_path / "s") == [Point({"seed": "1"}, "seed=1"), Point({"seed": "2"}, "seed=2")]


def test_what_a_run_had_reached_is_its_last_measurement_until_then_and_not_its_first(tmp_path: Path) -> None:
    def scored(*records: dict[str, float]) -> float:
        lines = (json.dumps({"step": step, "time": 1.0} | record) for step, record in enumerate(records))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return score_until(tmp_path, 3)

    validated = [{"val/a/mean@1": value, "val/a/response_length": 1.0} for value in (0.9, 0.1, 0.4, 0.6, 0.2)]
    assert scored(*validated) == 0.6, "neither the start, nor the first, nor a later one"
    assert scored({}, *({"reward/mean": value} for value in (0.0, 0.5, 1.0, 9.0))) == pytest.approx(0.5)
    assert scored({}, *({"train/loss": value} for value in (3.0, 2.0, 1.0, 9.0))) == -1.0
