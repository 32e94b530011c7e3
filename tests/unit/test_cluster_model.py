"""The model of the schedules: closed forms where lengths have no variance, and what must hold for any lengths."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("simpy", reason="pip install '.[simulate]'")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LENGTH, GROUPS, SIZE, PROMPT = 100, 8, 4, 10


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("cluster_model")


def source(name: str, *values: Any, **options: Any) -> Any:
    """Return a source of response lengths of this name."""
    return getattr(importlib.import_module("cluster_lengths"), name)(*values, **options)


def rates_of(model: Any, **changes: Any) -> Any:
    """One decode step takes 10 ms whatever the batch, so a batch of equal lengths takes 1 s; training takes 2 s."""
    engine = {"overhead_s": 0.01, "sequence_s": 0.0, "max_sequences": GROUPS * SIZE} | changes.pop("engine", {})
    trainer = {"fixed_s": 2.0, "token_s": 0.0} | changes.pop("trainer", {})
    return model.ClusterRates(model.EngineRates(**engine), model.TrainerRates(**trainer), **changes)


def work_of(model: Any, lengths: Any = None, **changes: Any) -> Any:
    return model.Work(
        **{"num_groups": GROUPS, "group_size": SIZE, "prompt_length": PROMPT, "steps": 10} | changes,
        lengths=lengths or source("constant", LENGTH),
    )


def test_sync_without_variance_takes_the_sum_of_its_phases(model: Any) -> None:
    rates = rates_of(
        model,
        engine={"overhead_s": 0.008, "sequence_s": 0.0001, "prefill_token_s": 0.002},
        trainer={"fixed_s": 0.5, "token_s": 0.001},
        transfer_s=0.25,
        controller_step_s=0.125,
        reward_s=0.0625,
    )
    rollouts = GROUPS * SIZE
    sampling = LENGTH * (0.008 + rollouts * 0.0001) + GROUPS * PROMPT * 0.002
    training = 0.5 + rollouts * (LENGTH + PROMPT) * 0.001
    result = model.simulate(rates, work_of(model), "sync")
    assert result.steps_s == pytest.approx([sampling + 0.0625 + 0.125 + training + 0.25] * 10, rel=1e-6)
    assert result.trainer_s == pytest.approx(10 * training) and result.busy_s == pytest.approx(10 * sampling)
    assert result.filled == pytest.approx(1.0)


def test_decoding_takes_the_longer_of_memory_and_computing(model: Any) -> None:
    rates = model.EngineRates(overhead_s=1.0, sequence_s=0.5, weights_s=2.0, context_s=0.25)
    assert rates.step_s(2, 4.0) == 1.0 + 3.0 and rates.step_s(8, 4.0) == 1.0 + 4.0


def test_shared_gpus_pay_for_the_change_between_sampling_and_training(model: Any) -> None:
    result = model.simulate(rates_of(model, switch_s=0.3), work_of(model), "colocated")
    assert result.step_s() == pytest.approx(1.0 + 2.0 + 2 * 0.3)


@pytest.mark.parametrize("training", [0.4, 2.0])
@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_overlapped_schedules_without_variance_take_the_longer_of_both_sides(
    model: Any, schedule: str, training: float
) -> None:
    rates = rates_of(model, trainer={"fixed_s": training}, transfer_s=0.1)
    # Two batches under way, of which the engine has slots for one: they are sampled one after the other.
    result = model.simulate(rates, work_of(model, steps=20, max_staleness=3), schedule)
    # The engines pause for the transfer.
    assert result.step_s(4) == pytest.approx(max(1.0, training) + 0.1, rel=0.02)


def test_async_without_staleness_is_sync(model: Any) -> None:
    rates = rates_of(model, engine={"sequence_s": 0.001, "max_sequences": 12}, transfer_s=0.2, num_replicas=2)
    times = []
    for schedule in ("sync", "async"):
        work = work_of(model, source("lognormal", LENGTH, 0.8, 1000, seed=3), max_staleness=0)
        result = model.simulate(rates, work, schedule)
        times.append(result.steps_s)
        assert set(result.staleness()) == {0}
    assert times[0] == pytest.approx(times[1], rel=1e-9)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_each_group_is_trained_once_and_none_is_staler_than_the_bound(model: Any, staleness: int) -> None:
    rates = rates_of(model, engine={"sequence_s": 0.0004, "max_sequences": 16}, transfer_s=0.05, num_replicas=3)
    work = work_of(model, source("lognormal", LENGTH, 1.2, 2000, seed=1), steps=25, max_staleness=staleness)
    result = model.simulate(rates, work, "async")
    assert len(result.groups) == 25 * GROUPS and all(group.trained_at is not None for group in result.groups)
    per_step = np.bincount([group.trained_at for group in result.groups])
    assert per_step.tolist() == [GROUPS] * 25
    assert min(result.staleness()) >= 0 and max(result.staleness()) == staleness
    lengths = np.concatenate([group.lengths for group in result.groups])
    trained = statistics.fmean(length for group in result.groups for length in group.lengths)
    assert trained == pytest.approx(lengths.mean()), "long responses are trained like short ones"


def test_one_step_off_is_one_version_stale_but_for_the_first_batch(model: Any) -> None:
    result = model.simulate(rates_of(model), work_of(model, source("lognormal", LENGTH, 1.0, 2000)), "one_step_off")
    assert result.staleness() == [0] * GROUPS + [1] * (9 * GROUPS)


def test_long_tails_cost_async_less_than_the_others(model: Any) -> None:
    rates = rates_of(model, engine={"sequence_s": 0.0002, "max_sequences": 64}, trainer={"fixed_s": 8.0}, num_replicas=2)
    steps = {}
    for schedule in ("sync", "one_step_off", "async"):
        work = work_of(model, source("lognormal", 400, 1.0, 4000, seed=5), steps=30, max_staleness=2)
        steps[schedule] = model.simulate(rates, work, schedule).step_s()
    assert steps["async"] < steps["one_step_off"] < steps["sync"]
    assert steps["async"] >= 8.0, "no faster than the trainer alone"


def test_a_controller_that_is_slower_than_the_engines_is_the_limit(model: Any) -> None:
    rates = rates_of(model, trainer={"fixed_s": 0.1}, controller_rollout_s=0.1)
    result = model.simulate(rates, work_of(model, steps=20), "async")
    assert result.step_s(4) >= GROUPS * SIZE * 0.1
    assert result.controller_s == pytest.approx(20 * GROUPS * SIZE * 0.1)


def test_a_cache_that_is_computed_anew_costs_async_the_reading_of_what_is_unfinished(model: Any) -> None:
    steps = {}
    for recomputes in (False, True):
        # Sampling is the longer side, and an update comes in its middle.
        rates = rates_of(model, engine={"prefill_token_s": 1e-4}, trainer={"fixed_s": 0.5}, recomputes_cache=recomputes)
        steps[recomputes] = model.simulate(rates, work_of(model, steps=30, max_staleness=3), "async").step_s(4)
    assert steps[False] < steps[True] < steps[False] + GROUPS * SIZE * (LENGTH + PROMPT) * 1e-4
    rates = rates_of(model, engine={"prefill_token_s": 1e-4}, recomputes_cache=True)
    assert model.simulate(rates, work_of(model), "sync").step_s() == pytest.approx(3.0 + GROUPS * PROMPT * 1e-4)


def test_a_prompt_is_read_again_once_for_all_responses_of_its_group(model: Any) -> None:
    """The update comes after 0.5 s of training, when p s of reading prompts and n = (0.5 - p) / 0.01 tokens each are done."""
    engine = {"prefill_token_s": 1e-4}
    rates = rates_of(model, engine=engine, trainer={"fixed_s": 0.5}, transfer_s=0.1, recomputes_cache=True)
    prompts_s = GROUPS * PROMPT * 1e-4
    responses_s = GROUPS * SIZE * (0.5 - prompts_s) / 0.01 * 1e-4
    expected = prompts_s + 1.0 + 0.1 + prompts_s + responses_s
    assert model.simulate(rates, work_of(model, steps=20), "async").step_s(4) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("training", "schedule", "expected"),
    [
        # The engine's 1 s takes 1.5 s; the trainer gets 1.5 / 1.25 s of its 2 s done meanwhile, the other 0.8 s alone.
        (2.0, "one_step_off", 1.5 + 0.8),
        (2.0, "async", 1.5 + 0.8),
        # The trainer's 0.4 s takes 0.5 s, in which the engine gets 1/3 s of its 1 s done.
        (0.4, "one_step_off", 0.5 + 2 / 3),
        (0.4, "sync", 1.4),
        (0.4, "colocated", 1.4),
    ],
)
def test_each_side_is_slower_only_while_the_other_one_works(
    model: Any, training: float, schedule: str, expected: float
) -> None:
    rates = rates_of(model, trainer={"fixed_s": training}, engine_slowdown=1.5, trainer_slowdown=1.25)
    result = model.simulate(rates, work_of(model, steps=20), schedule)
    assert result.step_s(4) == pytest.approx(expected, rel=1e-6)


def test_reading_is_slower_beside_the_trainer_too_and_the_work_is_the_same(model: Any) -> None:
    rates = rates_of(
        model, engine={"prefill_token_s": 0.01}, trainer={"fixed_s": 5.0}, engine_slowdown=2.0, trainer_slowdown=1.5
    )
    result = model.simulate(rates, work_of(model, steps=20), "one_step_off")
    alone = 1.0 + GROUPS * PROMPT * 0.01
    # The first batch has the machine for itself; all others are sampled beside the trainer, which is the longer side.
    assert result.busy_s == pytest.approx(alone + 19 * 2.0 * alone)
    assert result.trainer_s == pytest.approx(19 * (2 * alone + 5.0 - 2 * alone / 1.5) + 5.0)


def test_requests_are_spread_over_the_replicas(model: Any) -> None:
    alone = model.simulate(rates_of(model, engine={"max_sequences": 8}), work_of(model), "sync").step_s()
    four = model.simulate(rates_of(model, engine={"max_sequences": 8}, num_replicas=4), work_of(model), "sync").step_s()
    assert alone == pytest.approx(4.0 + 2.0) and four == pytest.approx(1.0 + 2.0)


def test_an_unknown_schedule_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="there are colocated, sync, one_step_off, async"):
        model.simulate(rates_of(model), work_of(model), "soon")


def test_lengths_have_the_mean_and_the_bound_that_were_asked_for(model: Any) -> None:
    lengths = source("lognormal", 500.0, 0.7, 100_000, seed=2)(200_000)
    assert lengths.mean() == pytest.approx(500, rel=0.02) and lengths.min() >= 1
    assert source("lognormal", 500.0, 2.0, 800)(10_000).max() == 800
    assert set(source("drawn_from", [3, 9])(100)) == {3, 9} and set(source("constant", 4)(3)) == {4}


def test_a_part_of_the_replicas_takes_as_long_as_all_of_them(model: Any) -> None:
    rates = rates_of(
        model,
        engine={"sequence_s": 0.0002, "max_sequences": 16},
        trainer={"fixed_s": 0.5, "token_s": 1e-5},
        num_replicas=48,
        controller_rollout_s=1e-4,
        transfer_s=0.1,
    )
    work = work_of(model, num_groups=192, steps=8)
    smaller, less = model.reduced(rates, work, 8)
    assert smaller.num_replicas == 8 and less.num_groups == 32
    for schedule in ("sync", "one_step_off", "async"):
        whole = model.simulate(rates, work, schedule).step_s()
        assert model.simulate(smaller, less, schedule).step_s() == pytest.approx(whole, rel=0.02)
