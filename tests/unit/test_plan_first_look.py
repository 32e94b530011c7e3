"""A look before the start sees what would make a run vain, and is silent about one that is well."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from compositions import compose

from grpo_rl import machine_memory
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import DataConfig, RewardConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.plan import first_look
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.first_look import RewardTrial, of_memory, of_plan, of_prompts, some_rows
from grpo_rl.plan.make import make_plan
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.types import Prompt

TOKENIZER = build_tokenizer(128)
MINE = """
def always_one(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def failing(data_source, solution_str, ground_truth, extra_info):
    return 1.0 / len(solution_str) if len(solution_str) > 9 else int("no number")
"""


def plan_of(*words: str) -> Plan:
    return make_plan(compose(["recipe=arithmetic/grpo", "trainer.device=cpu", *words]), Machine(0, 2, "cpu", cluster=False))


def rows_of(
    config: DataConfig | None = None, spec: str = "task:arithmetic?num_rows=40"
) -> list[tuple[Prompt, Mapping[str, Any]]]:
    return some_rows(PromptDataset([spec], config or DataConfig(max_prompt_length=32), TOKENIZER).checked())


def prompts_of(config: DataConfig | None = None) -> list[Prompt]:
    return [prompt for prompt, _ in rows_of(config)]


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RewardRunner]:
    (tmp_path / "mine.py").write_text(MINE)
    config = RewardConfig(functions=[request.param.replace("mine.py", str(tmp_path / "mine.py"))], num_workers=1)
    made = RewardRunner(RewardFunction.from_config(config), config, data_sources={"arithmetic"})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("runner", "text", "is_trouble"),
    [
        (
            "auto",
            "tried on 8 rows: the right answer (the ground truth in the forms of the known rules) gets 1, an empty one 0",
            False,
        ),
        ("gsm8k", "in 8 of 8 rows the right answer gets no more than an empty one (0 and 0), for instance '", True),
        ("mine.py:always_one", "no more than an empty one (1 and 1)", True),
        ("mine.py:failing", "it fails on 8 of 8 right answers", True),
    ],
    indirect=["runner"],
)
def test_the_reward_is_tried_on_right_answers_and_on_empty_ones(runner: RewardRunner, text: str, is_trouble: bool) -> None:
    line, warns = RewardTrial(rows_of(), runner, TOKENIZER).verdict()
    assert line.startswith("reward   ") and text in line and warns == is_trouble


@pytest.mark.parametrize(
    ("column", "function", "form"),
    [
        ({}, "exactly", "the bare ground truth"),
        ({"response": "<a>yes</a>"}, "tagged", "the row's response"),
        ({"extra_info": {"demonstration": "<a>yes</a>"}}, "tagged", "the row's demonstration"),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<a>yes</a>"}]},
            "tagged",
            "assistant message",
        ),
        ({}, "tagged", ""),
    ],
)
def test_a_right_answer_is_tried_in_each_form_that_the_row_has(
    column: dict[str, Any], function: str, form: str, tmp_path: Path
) -> None:
    """A reward of one's own that wants the answer alone, or in tags of its own, is as good as one that reads boxes."""
    (tmp_path / "own.py").write_text(
        "def exactly(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str == ground_truth)\n"
        "def tagged(data_source, solution_str, ground_truth, extra_info):\n    return float('<a>' in solution_str)\n"
    )
    row = {"data_source": "own", "prompt": "?", "reward_model": {"ground_truth": "yes"}, **column}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    config = RewardConfig(functions=[f"{tmp_path}/own.py:{function}"], num_workers=1)
    made = RewardRunner(RewardFunction.from_config(config), config, data_sources={"own"})
    try:
        line, warns = RewardTrial(rows_of(spec=str(tmp_path / "rows.jsonl")), made, TOKENIZER).verdict()
    finally:
        made.close()
    assert warns == (form == "")
    assert (form in line and "gets 1, an empty one 0" in line) if form else ("Tried: the ground truth in the forms" in line)


@pytest.mark.parametrize("runner", ["auto"], indirect=True)
def test_where_no_right_answer_can_be_made_it_says_so_and_warns_of_nothing(runner: RewardRunner) -> None:
    truths: list[object] = [{"tests": []}, {"numbers": 7, "target": "no number"}, None]
    rows = [(dataclasses.replace(row[0], ground_truth=truth), row[1]) for row, truth in zip(rows_of(), truths, strict=False)]
    line, warns = RewardTrial(rows, runner, TOKENIZER).verdict()
    assert "no right answer could be made" in line and not warns
    assert RewardTrial([], runner, TOKENIZER).verdict() == ("", False)


def test_prompts_that_are_cut_and_answers_that_do_not_fit_are_named_with_the_lengths_they_need() -> None:
    assert list(of_prompts(plan_of(), prompts_of(), TOKENIZER)) == []
    cut = DataConfig(max_prompt_length=5, truncation="left")
    [warning] = of_prompts(plan_of("data.max_prompt_length=5", "data.truncation=left"), prompts_of(cut), TOKENIZER)
    assert "8 of 8 reach data.max_prompt_length=5, and longer ones are cut (left)" in warning
    [warning] = of_prompts(plan_of("data.max_response_length=3"), prompts_of(), TOKENIZER)
    assert warning.startswith("answers") and "Raise it to" in warning


def test_plain_strings_are_named_where_the_tokenizer_has_a_template_that_they_are_not_put_into(tmp_path: Path) -> None:
    """Supervised fine-tuning puts them into it: a model trained so and measured on them as they are answers another question."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"data_source": "arithmetic", "prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}}) + "\n"
            for n in range(9)
        )
    )
    prompts = [prompt for prompt, _ in rows_of(spec=str(tmp_path / "rows.jsonl"))]
    assert prompts[0].text == "0+1="
    [warning] = of_prompts(plan_of(), prompts, TOKENIZER)
    assert "8 of 8 are plain strings" in warning and "without the chat template" in warning and "'0+1='" in warning
    without = build_tokenizer(128)
    without.chat_template = None
    assert list(of_prompts(plan_of(), prompts, without)) == []


def test_few_rows_and_a_disk_and_a_memory_that_are_too_small_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of("trainer.save_freq=10")
    assert [*of_plan(plan, tmp_path / "not" / "there"), *of_memory(plan)] == []
    size = plan.model
    assert size is not None
    large = dataclasses.replace(plan, model=dataclasses.replace(size, num_params=10**14))
    [warning] = of_plan(large, tmp_path / "not" / "there")
    assert "8 checkpoints take" in warning and str(tmp_path) in warning and "max_actor_ckpt_to_keep=2" in warning
    few = dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, num_train_rows=100))
    [warning] = of_plan(few, tmp_path)
    assert "100 rows, 64 in a batch, 80 steps: each row comes 51.2 times" in warning
    monkeypatch.setattr(first_look, "machine_memory", lambda: machine_memory.MachineMemory(1e6, 1e9))
    [warning] = of_memory(plan)
    assert warning.startswith("memory   all processes: about")


def test_a_containers_limit_counts_and_files_that_the_kernel_keeps_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(machine_memory, "OWN_GROUPS", tmp_path / "own")
    assert machine_memory.machine_memory() == (600 * 1024, 1000 * 1024, "machine")
    assert machine_memory.machine_memory().used_share == pytest.approx(0.4)
    for name, text in {
        "memory.max": "409600",
        "memory.current": "300000",
        "memory.stat": "anon 1\ninactive_file 200000",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine_memory.machine_memory() == (309600, 409600, "container")
    (tmp_path / "memory.max").write_text("max")
    assert machine_memory.machine_memory().total == 1000 * 1024
