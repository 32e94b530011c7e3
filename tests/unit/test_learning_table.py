"""The table that shows that every algorithm learns: it leaves none out, and every line of it can be run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.plan.make import make_plan
from grpo_rl.registry import needs_of

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "learning_table.py"
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = load()


def test_every_estimator_is_in_the_table() -> None:
    assert {pair.estimator for pair in TABLE.PAIRS} == set(ADVANTAGES)


def test_every_loss_is_in_the_table() -> None:
    on_rollouts = {name for name in POLICY_LOSSES if name != "sft" and "pairs" not in needs_of(POLICY_LOSSES.get(name))}
    assert {pair.loss for pair in TABLE.PAIRS} == on_rollouts


@pytest.mark.parametrize("pair", TABLE.PAIRS, ids=lambda pair: pair.name)
def test_every_line_of_the_table_is_a_run_that_can_be_planned(pair) -> None:
    plan = make_plan(compose([*pair.overrides(), "trainer.total_training_steps=25"]), CPU)
    assert f"[{pair.estimator}]" in plan.render()


def test_names_of_the_table_differ() -> None:
    names = [pair.name for pair in TABLE.PAIRS]
    assert len(set(names)) == len(names)


def test_the_reward_is_taken_from_the_first_and_last_fifth_and_the_accuracy_from_the_validations() -> None:
    steps = [{"reward/mean": float(step)} for step in range(10)]
    records = [{TABLE.ACCURACY: 0.25}, *steps[:-1], {**steps[-1], TABLE.ACCURACY: 0.75}]
    result = TABLE.summary(records, 3.0)
    assert (result.rewards, result.accuracies, result.learnt) == ((0.5, 8.5), (0.25, 0.75), True)
    assert not TABLE.summary([{**step, TABLE.ACCURACY: 0.0} for step in reversed(steps)], 3.0).learnt


def test_the_second_reward_of_the_table_is_the_share_of_right_digits() -> None:
    assert TABLE.digits(data_source="arithmetic", solution_str="435", ground_truth="445", extra_info=None) == pytest.approx(
        2 / 3
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_algorithm_raises_the_reward() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout
