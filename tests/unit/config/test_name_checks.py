"""Names and options of tasks, data sets and rewards: told at once, from tables that say what the functions say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from config_tools import CPU
from machine_lacks import needs_reasoning_gym

from grpo_rl.config.checks import name_rules, option_tables
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.data.tasks.registry import TASKS
from grpo_rl.gym import REFUSED
from grpo_rl.rewards.registry import REWARDS

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/write_option_tables.py"


def problems(*words: str) -> list[str]:
    return list(name_rules.problems(compose(["recipe=arithmetic/grpo", *words]).config))


@needs_reasoning_gym
def test_the_tables_say_what_the_functions_and_the_package_say() -> None:
    spec = importlib.util.spec_from_file_location("write_option_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.task_options() == option_tables.TASK_OPTIONS
    assert script.reward_options() == option_tables.REWARD_OPTIONS
    assert script.gym_options() == option_tables.GYM_OPTIONS
    assert set(option_tables.TASK_OPTIONS) == set(TASKS) and set(option_tables.REWARD_OPTIONS) == set(REWARDS)
    assert option_tables.GYM_REFUSED == REFUSED


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.train_files=task:arithmetic?form=2+1", "task 'arithmetic' has no option 'form'. Did you mean forms?"),
        ("data.val_files=task:countdown?num_rows=many", "data.val_files=task:countdown?num_rows=many: num_rows=many must be a whole number"),
        ("data.train_files=task:countdown?whole_steps=yes", "whole_steps=yes must be true or false"),
        ("data.train_files=task:countdown?template=tag", "template=tag must be tags or short"),
        ("data.train_files=task:arithmetic?carrying=some", "carrying=some must be a number"),
        ("data.train_files=task:arithmetic?seed=1&seed=2", "'seed=2' must be option=value, each option once"),
        ("data.train_files=reasoning_gym:chain_som", "has no data set 'chain_som'. Did you mean chain_sum"),
        ("data.train_files=reasoning_gym:zzzz", "Known: ab, acre,"),
        ("data.train_files=reasoning_gym:composite", "cannot be used: it only mixes other data sets"),
        ("data.train_files=reasoning_gym:chain_sum?min_term=2", "chain_sum has no option 'min_term'. Did you mean min_terms"),
        ("data.train_files=reasoning_gym:chain_sum?size=2", "size is called num_rows here"),
        ("data.train_files=reasoning_gym:chain_sum?split=test", "split=test must be one of all, train, val"),
        ("reward.function_kwargs={arithmetic: {strict: true}}", "arithmetic has no option 'strict'. It takes none"),
        ("reward.function_kwargs={arithmetc: {}}", "'arithmetc' is not in the reward's sum. Did you mean arithmetic?"),
        ("reward.function_kwargs={arithmetic: 1}", "write its options by name"),
        ("reward.batched=[mine]", "reward.batched: 'mine' is not in the reward's sum. It has arithmetic"),
        ("reward.batched=[arithmetic]", "arithmetic takes one response at a time"),
        ("reward.functions=[nowhere.py:score]", "nowhere.py:score: there is no file"),
    ],
)  # fmt: skip
def test_a_misspelt_name_or_option_is_told_with_the_nearest(word: str, said: str) -> None:
    words = ["reward.functions=[2*arithmetic]"] if "reward" in word and "functions" not in word else []
    found = problems(*words, _quoted(word))
    assert [problem for problem in found if said in problem], found


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    return word if value[0] in "[{" else f"{key}=['{value}']"


@needs_reasoning_gym
def test_what_exists_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def score(**_): return 1.0\n")
    (tmp_path / "b.py").write_text("def score(**_): return 1.0\n")
    own = [f"{tmp_path}/{name}.py:score" for name in "ab"]
    words = [
        "data.train_files=['task:countdown?num_rows=9&template=short','reasoning_gym:chain_sum?max_terms=3&seed=1&split=train']",
        f"reward.functions=[2*math,{own[0]},0.5*{own[1]}]",
        "reward.batched=[a.score]",
        "reward.function_kwargs={math: {boxed_only: true}, b.score: {x: 1}}",
    ]
    assert problems(*words) == []


def test_of_another_version_of_the_package_only_its_own_words_count(monkeypatch: pytest.MonkeyPatch) -> None:
    word = "data.train_files=['reasoning_gym:new_set?new_option=1&split=odd']"
    monkeypatch.setattr(name_rules, "_gym_version", lambda: "9.9")
    assert [problem.rpartition(": ")[2] for problem in problems(word)] == ["split=odd must be one of all, train, val"]
    monkeypatch.setattr(name_rules, "_gym_version", lambda: None)
    assert "is not installed" in problems(word)[0]


def test_all_of_it_is_told_together_with_the_rest_and_nothing_heavy_is_loaded() -> None:
    words = ["data.train_files=['task:arithmetic?x=1']", "reward.function_kwargs={math: {y: 1}}", "data.train_batch_size=7"]
    words += ["reward.functions=[math]"]
    found = check(compose(["recipe=arithmetic/grpo", *words]).config, CPU)
    assert len([line for line in found if "'x'" in line or "'y'" in line or "train_batch_size=7" in line]) >= 3
    program = (
        "import grpo_rl.config.checks.all_rules, sys; print({'torch', 'numpy', 'reasoning_gym', 'datasets'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
