"""Rates of the cluster model: found again in a run that was made with known ones, and what data sheets give."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("simpy", reason="pip install '.[simulate]'")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
GROUPS, SIZE, PROMPT, SLOTS = 4, 4, 12, 6
OVERHEAD, SEQUENCE, FIXED, TOKEN, TRANSFER, REST = 0.004, 0.0008, 0.3, 0.0007, 0.05, 0.02


@pytest.fixture
def validation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("cluster_validation")


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("cluster_rates")


def run_config(schedule: str) -> dict[str, Any]:
    """Return what the model reads of a run's configuration, with pools apart."""
    rollout = {"n": SIZE, "nnodes": 1, "n_gpus_per_node": 1, "tensor_model_parallel_size": 1, "max_num_seqs": SLOTS}
    return {
        "data": {"train_batch_size": GROUPS},
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"schedule": schedule, "nnodes": 1, "n_gpus_per_node": 1},
    }


def write_rollouts(folder: Path, step: int, lengths: np.ndarray, prompt: int = PROMPT) -> None:
    """Write the log of a step's rollouts."""
    records = [{"response_length": int(length), "prompt_length": prompt} for length in lengths]
    (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(
    validation: Any,
    folder: Path,
    lengths: list[np.ndarray],
    slower: float = 1.0,
    prompt: int = PROMPT,
    reading: float = 0.0,
) -> Path:
    """Write a run of the synchronous schedule as it is left behind, with times that follow from the rates above."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run_config("sync")))
    lines, now = [], 0.0
    for number, step in enumerate(lengths, start=1):
        sampling = OVERHEAD * validation.decode_steps(step, SLOTS) + SEQUENCE * int(step.sum()) + reading * GROUPS * prompt
        training = FIXED + TOKEN * (int(step.sum()) + prompt * len(step))
        if number > len(lengths) // 2:
            training *= slower
        start = now
        for role, seconds in (
            ("weights", TRANSFER),
            ("rollout", sampling),
            ("reference", training / 4),
            ("actor", training * 0.75),
        ):
            lines.append({"step": number, "role": role, "what": role, "start": now, "end": now + seconds})
            now += seconds
        now += REST
        lines.append({"step": number, "role": "step", "what": "step", "start": start, "end": now})
        write_rollouts(folder, number, step, prompt)
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


LONG, ENGINE_SLOWER, TRAINER_SLOWER, READING = 20, 1.5, 1.25, 0.0005


def write_overlapping_run(validation: Any, folder: Path, schedule: str = "one_step_off", num_steps: int = 14) -> Path:
    """Write a run of equal lengths whose engines work beside the trainer, which has the end of each step for itself."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run_config(schedule)))
    lengths = np.full(GROUPS * SIZE, LONG)
    sampling = ENGINE_SLOWER * (OVERHEAD * validation.decode_steps(lengths, SLOTS) + SEQUENCE * int(lengths.sum()))
    training = FIXED + TOKEN * int((lengths + PROMPT).sum()) + sampling * (1 - 1 / TRAINER_SLOWER)
    assert sampling < training
    lines, start = [], 0.0
    for number in range(1, num_steps + 1):
        begun = start + TRANSFER + REST
        for role, first, last in (
            ("weights", start, start + TRANSFER),
            ("rollout", begun, begun + sampling),
            ("actor", begun, begun + training),
            ("wait", begun, begun),
            ("step", start, begun + training),
        ):
            lines.append({"step": number, "role": role, "what": role, "start": first, "end": last})
        write_rollouts(folder, number, lengths)
        start = begun + training
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def ragged(num_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 60, GROUPS * SIZE) for _ in range(num_steps)]


def test_the_rates_of_a_run_are_found_again(validation: Any, tmp_path: Path) -> None:
    run = validation.read_run(write_run(validation, tmp_path / "run", ragged(12)))
    assert [step.number for step in run.steps] == list(range(3, 13)), "the first two are warm-up"
    found = validation.rates_of(run, run.steps)
    assert (found.engine.overhead_s, found.engine.sequence_s) == pytest.approx((OVERHEAD, SEQUENCE), rel=0.01)
    assert (found.trainer.fixed_s, found.trainer.token_s) == pytest.approx((FIXED, TOKEN), rel=0.01)
    assert (found.transfer_s, found.controller_step_s) == pytest.approx((TRANSFER, REST), rel=0.01)


def test_half_of_a_run_predicts_the_other_half(validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validation.validate([write_run(validation, tmp_path / "run", ragged(12))]) == 0
    assert "bar 10%: met" in capsys.readouterr().out


def test_a_run_that_the_model_does_not_explain_is_told_apart(
    validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_modelled = write_run(validation, tmp_path / "first", ragged(12))
    other = write_run(validation, tmp_path / "second", ragged(12), slower=3.0)
    assert validation.validate([as_modelled, other]) == 1
    assert "bar 10%: missed" in capsys.readouterr().out


def test_equal_lengths_have_one_rate(validation: Any, tmp_path: Path) -> None:
    run = validation.read_run(write_run(validation, tmp_path / "run", [np.full(GROUPS * SIZE, 20)] * 8))
    found = validation.rates_of(run, run.steps)
    assert validation.predicted(found, run, run.steps) == pytest.approx(run.step_s, rel=0.02)
    assert min(found.engine.overhead_s, found.engine.sequence_s) == 0.0


def test_how_much_both_sides_slow_each_other_is_found_in_an_overlapping_run(validation: Any, tmp_path: Path) -> None:
    alone = validation.read_run(write_run(validation, tmp_path / "alone", ragged(12)))
    beside = validation.read_run(write_overlapping_run(validation, tmp_path / "beside"))
    found = validation.beside_each_other(validation.rates_of(alone, alone.steps), beside, beside.steps)
    assert (found.engine_slowdown, found.trainer_slowdown) == pytest.approx((ENGINE_SLOWER, TRAINER_SLOWER), rel=0.02)
    assert validation.predicted(found, beside, beside.steps) == pytest.approx(beside.step_s, rel=0.02)
    assert validation.slowdown(10.0, 13.0, 9.0) == pytest.approx(1.5), "6 s of the 10 took 9 s, the other 4 s were alone"
    with pytest.raises(ValueError, match="too seldom"):
        validation.slowdown(10.0, 12.0, 0.0)


def test_rates_of_one_pair_of_runs_predict_another_pair_with_other_lengths(
    validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(validation, tmp_path / "alone", ragged(12)), write_overlapping_run(validation, tmp_path / "beside")]
    runs += [write_run(validation, tmp_path / "short", [step // 3 + 1 for step in ragged(12)])]
    assert validation.validate(runs) == 0
    printed = capsys.readouterr().out
    assert "| short | sync | alone |" in printed and "| alone and every 2nd step of beside |" in printed
    assert "a third of training" in printed and "the trainer 1.25 times as long" in printed


def test_what_reading_costs_is_found_in_a_run_of_long_prompts(
    validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(validation, tmp_path / "base", ragged(12), reading=READING)
    long = write_run(validation, tmp_path / "long", [np.full(GROUPS * SIZE, 2)] * 8, prompt=400, reading=READING)
    runs = [validation.read_run(folder) for folder in (base, long)]
    assert [run.is_reading() for run in runs] == [False, True]
    assert validation.reading_seconds(runs[1], runs[0]) == pytest.approx(READING, rel=0.02)
    assert validation.validate([long, base]) == 0
    assert "reading a token: 500" in capsys.readouterr().out


def test_engines_that_read_again_are_told_by_the_configuration(validation: Any, tmp_path: Path) -> None:
    folder = write_overlapping_run(validation, tmp_path / "run", "async")
    run = validation.read_run(folder)
    assert run.reads_again
    config = run_config("async")
    config["trainer"]["asynchronous"] = {"keep_cache": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    kept = validation.read_run(folder)
    assert not kept.reads_again
    alone = validation.read_run(write_run(validation, tmp_path / "alone", ragged(12)))
    rates = validation.rates_of(alone, alone.steps, READING)
    rates = validation.replace(rates, trainer=validation.TrainerRates(0.1, 0.0))
    # The update comes while the next batch is sampled, whose tokens up to there are read again.
    assert validation.predicted(rates, run, run.steps) > 1.02 * validation.predicted(rates, kept, kept.steps)


def test_runs_that_all_read_again_give_no_rates(validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validation.validate([write_overlapping_run(validation, tmp_path / "run", "async")]) == 2
    assert "no run to take rates from" in capsys.readouterr().err


def test_a_run_without_a_timeline_is_refused(validation: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validation.validate([tmp_path]) == 2
    assert "4 are needed" in capsys.readouterr().err


def test_slots_take_the_next_response_when_they_are_free(validation: Any) -> None:
    assert validation.decode_steps(np.array([5, 1, 1, 1]), 2) == 5
    assert validation.decode_steps(np.array([3, 3, 3]), 2) == 6
    assert validation.decode_steps(np.array([4, 2]), 8) == 4


def test_no_factor_of_a_fit_is_negative(validation: Any) -> None:
    columns = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]])
    assert validation.fitted(columns, np.array([1.0, 3.0, 5.0])).min() >= 0.0
    assert validation.fitted(columns, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 0.1])


def test_rates_from_data_sheets_scale_as_they_must(rates: Any) -> None:
    profiles, lengths = rates.Profiles(), rates.Lengths(512, 4096.0, 16384)
    small, large = profiles.model("qwen3-4b"), profiles.model("qwen3-32b")
    few = rates.cluster_rates(profiles, "h100", small, lengths, rates.Pools(32, 32))
    many = rates.cluster_rates(profiles, "h100", small, lengths, rates.Pools(64, 64))
    assert many.num_replicas == 2 * few.num_replicas and many.trainer.token_s == pytest.approx(few.trainer.token_s / 2)
    big = rates.cluster_rates(profiles, "h100", large, lengths, rates.Pools(64, 64))
    assert big.num_replicas == 16 and big.transfer_s > many.transfer_s and big.trainer.token_s > many.trainer.token_s
    # 8.2 GB of weights against 3.35 TB/s: no decode step is faster than 3.1 ms of reading.
    eight = rates.engine_rates(profiles, "h100", profiles.model("qwen3-8b"), lengths, 512)
    assert eight.step_s(1, 0.0) > 2 * 8.2e9 / 3.35e12 and eight.max_sequences < 512


def test_each_number_has_a_source(rates: Any) -> None:
    profiles = rates.Profiles()
    assert all(line.rpartition(": ")[2] for line in profiles.sources())
    for machine in profiles.content["machines"].values():
        assert all(entry["source"] for name, entry in machine.items() if name != "title")
    with pytest.raises(KeyError, match="there are qwen3"):
        profiles.model("qwen9")


def test_divisions_are_whole_replicas_and_leave_both_sides_something(rates: Any) -> None:
    for total, tensor_parallel in ((8, 1), (8, 4), (64, 4), (512, 8)):
        divisions = rates.candidates(total, tensor_parallel)
        assert divisions and all(one.gpus == total and min(one.rollout, one.trainer) >= 1 for one in divisions)
        assert all(one.rollout % tensor_parallel == 0 for one in divisions)
