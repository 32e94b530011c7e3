"""Seconds predicted from the runs of this machine, and graded."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.plan import calibration
from grpo_rl.plan.cost import SPREAD
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan

HERE = Machine(num_gpus=0, num_cpus=2, device="cpu")


def planned(*words: str, machine: Machine = HERE) -> Plan:
    return make_plan(compose(["recipe=arithmetic/grpo", *words]), machine)


def records(**seconds: float) -> list[dict[str, float]]:
    phases = {f"timing_s/{name}": value for name, value in seconds.items()}
    first = {"step": 1.0, "response_length/mean": 4.0, "timing_s/gen": 90.0, "timing_s/step": 99.0}
    return [first, *({"step": step, "response_length/mean": 4.0, **phases} for step in (2.0, 3.0, 4.0))]


MEASURED = records(gen=1.5, reward=0.1, ref=0.1, update_actor=0.6, sync_weights=0.1, testing=0.5, step=3.0)


def test_the_run_that_was_measured_is_predicted_as_it_was(tmp_path: Path) -> None:
    plan = planned()
    assert calibration.predict(plan, tmp_path) == {}
    calibration.learn(plan, tmp_path, MEASURED)
    predicted = calibration.predict(plan, tmp_path)
    # The first step is not counted, validation is none of the step's own, and 0.1 s lie beside the phases.
    phases = {"sampling": 1.5, "reward": 0.1, "reference": 0.1, "update": 0.6, "weight transfer": 0.1}
    assert predicted == pytest.approx(phases | {"other": 0.1, "step": 2.5})
    table = calibration.grade(predicted | {"sampling": 1.8}, calibration.measure(MEASURED))
    assert "+20%" in table and len(table.splitlines()) == 7
    assert calibration.grade({}, calibration.measure(MEASURED)) == "" and calibration.measure(MEASURED[:2]) == {}


def test_a_larger_batch_takes_longer_and_another_machine_is_not_known(tmp_path: Path) -> None:
    plan = planned()
    calibration.learn(plan, tmp_path, MEASURED)
    batch = plan.config.data.train_batch_size
    words = [f"data.train_batch_size={4 * batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={4 * batch}"]
    more, once = calibration.predict(planned(*words), tmp_path), calibration.predict(plan, tmp_path)
    assert more["reward"] == pytest.approx(4 * once["reward"]) and more["other"] == once["other"]
    assert once["sampling"] < more["sampling"] < 4 * once["sampling"], "what each token waits for is the same"
    assert calibration.predict(planned(machine=Machine(num_gpus=0, num_cpus=4, device="cpu")), tmp_path) == {}


def test_the_spread_of_lengths_is_what_the_longest_responses_say(tmp_path: Path) -> None:
    plan, forced = planned(), planned("actor_rollout_ref.rollout.ignore_eos=true")
    for run, longest, spread in (
        (plan, 4.0, 0.0),
        (plan, 16.0, math.log(4) / math.sqrt(2 * math.log(512))),
        (forced, 4.0, SPREAD),
    ):
        calibration.learn(run, tmp_path, [record | {"response_length/max": longest} for record in MEASURED])
        (learnt,) = json.loads((tmp_path / calibration.FILE).read_text()).values()
        assert learnt["spread"] == pytest.approx(spread)


def test_a_file_that_is_none_is_not_read(tmp_path: Path) -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": {"seconds": {"gen": "x"}, "length": 1}}'):
        (tmp_path / calibration.FILE).write_text(text)
        assert calibration.predict(planned(), tmp_path) == {}
