"""Seconds predicted from the runs of this machine, and graded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from compositions import compose

from grpo_rl.config.derived import Machine
from grpo_rl.plan import cost
from grpo_rl.plan.cost import SPREAD
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.text import describe
from grpo_rl.telemetry.metrics.grades import grades, measured
from grpo_rl.telemetry.page.run_data import run_data
from grpo_rl.telemetry.report import report_text
from grpo_rl.telemetry.rundir import RunDir

HERE = Machine(num_gpus=0, num_cpus=2, device="cpu")


def planned(*words: str, machine: Machine = HERE) -> Plan:
    return make_plan(compose(["recipe=arithmetic/grpo", *words]), machine)


def records(**seconds: float) -> list[dict[str, float]]:
    phases = {f"timing_s/{name}": value for name, value in seconds.items()}
    first = {"step": 1, "response_length/mean": 4.0, "timing_s/gen": 90.0, "timing_s/step": 99.0}
    return [first, *({"step": step, "response_length/mean": 4.0, **phases} for step in (2, 3, 4))]


MEASURED = records(gen=1.5, reward=0.1, ref=0.1, update_actor=0.6, sync_weights=0.1, testing=0.5, step=3.0)


def test_the_run_that_was_measured_is_predicted_as_it_was(tmp_path: Path) -> None:
    plan = planned()
    assert cost.predict(plan, tmp_path) == {}
    cost.learn(plan, tmp_path, MEASURED)
    predicted = cost.predict(plan, tmp_path)
    # The first step is not counted, validation is none of the step's own, and 0.1 s lie beside the phases.
    phases = {"sampling": 1.5, "reward": 0.1, "reference": 0.1, "update": 0.6, "weight transfer": 0.1}
    assert predicted == pytest.approx(phases | {"other": 0.1, "step": 2.5})
    assert measured(MEASURED[:2]) == {}, "fewer than three steps"


def test_the_longest_step_is_that_of_a_run_whose_responses_were_all_cut(tmp_path: Path) -> None:
    plan = planned()
    longest = float(plan.config.data.max_response_length)
    for name in ("short", "cut"):
        (tmp_path / name).mkdir()
    cost.learn(plan, tmp_path / "short", MEASURED)
    short = cost.predict(plan, tmp_path / "short")
    most = cost.predict(plan, tmp_path / "short", longest=True)
    assert most["sampling"] > short["sampling"] and most["update"] > short["update"]
    # The same factors, learnt from responses that were all cut.
    cut = [record | {"response_length/mean": longest, "response_length/max": longest} for record in MEASURED]
    cost.learn(plan, tmp_path / "cut", cut)
    assert cost.predict(plan, tmp_path / "cut", longest=True) == pytest.approx(cost.predict(plan, tmp_path / "cut"))
    runs = f"trainer.default_local_dir={tmp_path / 'short'}"
    assert f"a step takes {most['step']:.3f} s" in " ".join(
        describe(compose(["recipe=arithmetic/grpo", runs]), planned(runs)).split()
    )


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    plan = planned(f"trainer.default_local_dir={tmp_path}")
    cost.learn(plan, tmp_path, MEASURED)
    expected = cost.expected(plan)
    assert expected["plan/timing_s/gen"] == pytest.approx(1.5) and expected["plan/timing_s/step"] == pytest.approx(2.5)
    on_a_gpu = cost.expected(planned(machine=Machine(num_gpus=1, num_cpus=2, device="cuda", gpu_memory=80 * 2**30)))
    assert set(on_a_gpu) == {"plan/perf/memory/actor_gib", "plan/perf/memory/ref_gib"}
    foretold = {"plan/timing_s/gen": 1.8, "plan/timing_s/values": 1.0, "plan/perf/memory/actor_gib": 3.0}
    foretold["plan/timing_s/reward"] = 0.02  # measured: 0.001 of 2.5
    took = {"perf/memory/actor/update/allocated_gib": 2.0, "perf/memory/actor/update/reserved_gib": 9.0}
    took |= {"perf/memory/actor/logprobs/allocated_gib": 1.0}
    took["timing_s/reward"] = 0.001
    found = grades([one | foretold | took for one in MEASURED])
    assert found == [("timing_s/gen", 1.8, 1.5), ("perf/memory/actor_gib", 3.0, 2.0)]
    run_dir = RunDir.create(str(tmp_path), "graded")
    run_dir.metrics_file.write_text("".join(f"{json.dumps(one | foretold | took)}\n" for one in MEASURED))
    assert re.search(r"timing_s/gen +1.800 +1.500 +\+20%\n", report_text(run_dir))
    assert run_data(run_dir.path, tmp_path)["graded"] == [list(row) for row in found]


def test_a_larger_batch_takes_longer_and_another_machine_is_not_known(tmp_path: Path) -> None:
    plan = planned()
    cost.learn(plan, tmp_path, MEASURED)
    batch = plan.config.data.train_batch_size
    words = [f"data.train_batch_size={4 * batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={4 * batch}"]
    more, once = cost.predict(planned(*words), tmp_path), cost.predict(plan, tmp_path)
    assert more["reward"] == pytest.approx(4 * once["reward"]) and more["other"] == once["other"]
    assert once["sampling"] < more["sampling"] < 4 * once["sampling"], "what each token waits for is the same"
    assert cost.predict(planned(machine=Machine(num_gpus=0, num_cpus=4, device="cpu")), tmp_path) == {}


def test_a_busy_run_changes_nothing_and_a_model_is_foretold_by_the_one_of_the_nearest_size(tmp_path: Path) -> None:
    small, large = planned("actor_rollout_ref.model.path=builtin:arithmetic_half"), planned()
    cost.learn(large, tmp_path, MEASURED)
    before = cost.predict(large, tmp_path)
    assert 0 < cost.predict(small, tmp_path)["step"] < before["step"]
    cost.learn(large, tmp_path, records(gen=6.0, reward=0.4, ref=0.4, update_actor=2.4, sync_weights=0.4, step=9.8))
    assert cost.predict(large, tmp_path) == before
    cost.learn(small, tmp_path, records(gen=3.0, update_actor=1.2, step=4.5))
    assert cost.predict(small, tmp_path)["sampling"] == pytest.approx(3.0) and cost.predict(large, tmp_path) == before
    cost.learn(large, tmp_path, records(gen=0.3, update_actor=0.1, step=0.5))
    assert cost.predict(large, tmp_path)["sampling"] == pytest.approx(0.3)
    cost.learn(planned("schedule=async"), tmp_path, records(gen=0.2, update_actor=0.2, step=0.3))
    assert cost.predict(large, tmp_path)["sampling"] == pytest.approx(0.3), "training beside it was on the same cores"


def test_the_spread_of_lengths_is_what_the_longest_responses_say(tmp_path: Path) -> None:
    plan, forced = planned(), planned("actor_rollout_ref.rollout.ignore_eos=true")
    for run, longest, spread in (
        (plan, 4.0, 0.0),
        (plan, 16.0, math.log(4) / math.sqrt(2 * math.log(512))),
        (forced, 4.0, SPREAD),
    ):
        cost.learn(run, tmp_path, [record | {"response_length/max": longest} for record in MEASURED])
        (learnt,) = json.loads((tmp_path / cost.FILE).read_text()).values()
        assert learnt["spread"] == pytest.approx(spread)


def test_a_file_that_is_none_is_not_read(tmp_path: Path) -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": {"seconds": {"gen": "x"}, "length": 1}}'):
        (tmp_path / cost.FILE).write_text(text)
        assert cost.predict(planned(), tmp_path) == {}


def test_a_reward_file_that_was_changed_is_measured_anew(tmp_path: Path) -> None:
    reward = tmp_path / "rw.py"
    reward.write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    words = [f"reward.functions=[{reward}:score]"]
    cost.learn(planned(*words), tmp_path, MEASURED)
    assert cost.predict(planned(*words), tmp_path) and cost.predict(planned(), tmp_path) == {}
    reward.write_text(reward.read_text() + "# slower\n")
    assert cost.predict(planned(*words), tmp_path) == {}
