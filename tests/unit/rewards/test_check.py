"""`python -m grpo_rl.rewards.check`: what it shows, and its exit code."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from grpo_rl.rewards.check import gold_response, main
from grpo_rl.rewards.runtime.process import RewardProcess


def row(gold="18", source="math", **more):
    return {"data_source": source, "reward_model": {"style": "rule", "ground_truth": gold}, **more}


@pytest.fixture
def check(tmp_path):
    def run(function, rows, *arguments):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        shown = io.StringIO()
        code = main([str(function), "--data", str(path), *arguments], Console(file=shown, width=200))
        return code, shown.getvalue()

    return run


@pytest.fixture
def my_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    if solution_str == 'bad': raise KeyError('level')\n"
        "    if solution_str == 'nan': return {'score': 1.0, 'level': float('nan')}\n"
        "    if solution_str == 'text': return 'one'\n"
        "    return {'score': len(solution_str) + bonus, 'level': 3, 'note': 'x'}\n"
        "async def later(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.5\n"
        "def many(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [len(text) for text in solution_strs]\n"
    )
    return path


def test_each_row_is_shown_with_its_score_and_parts_and_the_timings(check):
    code, shown = check("math", [row("18"), row("19", response="\\boxed{18}\x1b[31m")])
    assert code == 0
    assert "The answer is \\boxed{18}" in shown and "acc 1" in shown
    assert "\x1b" not in shown and "·[31m" in shown
    assert "score: mean 0.5, least 0, greatest 1" in shown
    assert "p50" in shown and "p99" in shown and "max" in shown
    assert "2 rows, 0 failed" in shown


def test_a_function_that_fails_on_a_strange_response_is_found(check, tmp_path):
    (tmp_path / "last.py").write_text(
        "def last(data_source, solution_str, ground_truth, extra_info=None):\n    return float(solution_str.split()[-1] == ground_truth)\n"
    )
    code, shown = check(f"{tmp_path}/last.py:last", [row("18")])
    assert code == 2 and "1 rows, 0 failed" in shown
    assert "a response that is empty failed: reward_error: IndexError" in shown
    assert "strange responses to the first row: plain 1, wrong 0, long 0, foreign 0" in shown


def test_a_function_may_be_async_or_batched_or_have_options(check, my_file):
    rows = [row(response="four")]
    assert "score: mean 0.5" in check(f"{my_file}:later", rows)[1]
    assert "score: mean 4," in check(f"{my_file}:many", rows, "--batched")[1]
    assert "score: mean 6," in check(my_file, rows, "--options", '{"bonus": 2}')[1]
    code, shown = check("math", [row(response="x")], "--batched")
    assert code == 2 and "(with lists, as it is in reward.batched)" in shown


def test_columns_of_a_run_name_the_ground_truth_and_the_best_form_of_a_right_response_is_taken(check, tmp_path):
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == str(ground_truth) and data_source == 'people')\n"
    )
    rows = [{"question": "Ada is 36.", "age": 36}, {"question": "Bo is 7.", "age": 7}]
    words = ["data.ground_truth_key=age", "data.data_source=people"]
    code, shown = check(f"{tmp_path}/own.py", rows, *words)
    assert code == 0 and "responses: the bare ground truth" in shown and "score: mean 1," in shown
    rows = [{"age": 36, "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "36"}]}]
    assert "responses: the row's last assistant message" in check(f"{tmp_path}/own.py", rows, *words)[1]
    # A rule that looks for a mark finds what it cannot read equal to itself: the bare ground truth is no trial of it.
    assert "responses: the ground truth in the forms" in check("math", rows, *words)[1]
    code, shown = check("math", rows, "data.ground_truth_key=years")
    assert code == 2 and "there is no column 'years'" in shown


def test_a_recipe_gives_functions_weights_and_data(tmp_path):
    def run(*arguments):
        shown = io.StringIO()
        return main(arguments, Console(file=shown, width=200)), shown.getvalue()

    words = ["recipe=real/json_extraction", "reward.functions=[0.5*json_fields,2*json_schema]", "--rows", "3"]
    code, shown = run(*words)
    assert code == 0 and "responses: the row's demonstration" in shown and "score: mean 2.5, least 2.5" in shown
    assert "json_fields 1" in shown and "json_schema/json 1" in shown
    assert run("json_schema", "recipe=real/json_extraction", "--rows", "3")[1].count("json 1") == 3
    assert run("math") == (2, "--data is missing: a file, a folder, task:NAME; or a recipe with data.train_files\n")
    assert "belong to a function that is named" in run("recipe=real/json_extraction", "--batched")[1]


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_that_hangs_or_dies_costs_its_row_and_no_other(check, my_file, batched):
    with my_file.open("a") as file:
        file.write(
            "import os, time\n"
            "def wild(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    print('seen', solution_str)\n"
            "    if solution_str == 'hang': time.sleep(60)\n"
            "    if solution_str == 'die': os._exit(3)\n"
            "    return 1.0\n"
            "def wild_lists(data_sources, solution_strs, ground_truths, extra_infos):\n"
            "    return [wild('', text, '') for text in solution_strs]\n"
        )
    rows = [row(response=text) for text in ("fine", "hang", "fine", "die", "fine")]
    name = f"{my_file}:wild_lists" if batched else f"{my_file}:wild"
    code, shown = check(name, rows, "--timeout_s", "1", *(["--batched"] if batched else []))
    assert code == 2
    assert "score: mean 1," in shown and "5 rows, 2 failed" in shown
    assert "row 1: reward_timeout: took longer than reward.timeout_s=1" in shown
    assert "row 3: reward_error: the process exited with code 3" in shown
    assert "the end of what it printed:" in shown and "seen fine" in shown


def test_an_interrupt_ends_the_trial_and_its_process_and_shows_what_there_is(check, my_file, monkeypatch):
    asked = []

    def interrupted(worker, jobs):
        asked.append(worker)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ask(worker, jobs)

    ask = RewardProcess.ask
    monkeypatch.setattr(RewardProcess, "ask", interrupted)
    code, shown = check(my_file, [row(response="four")] * 3)
    assert code == 130
    assert "interrupted after 1 of 3 rows" in shown and "1 rows, 0 failed" in shown
    assert not asked[-1].child.alive


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("maths", [], "Did you mean math"),
        ("nowhere.py", [], "there is no file"),
        ("math", ["--options", '{"boxd": 1}'], "has no option boxd"),
        ("math", ["--options", "{"], "--options is no JSON"),
        ("math", ["--options", "[]"], "must be a JSON object"),
        ("math", ["--rows", "0"], "--rows: 0 must be at least 1"),
        ("math", ["--timeout_s", "0"], "--timeout_s is 0; it must be above 0"),
        ("math", ["--column", "answer"], "there is no column 'answer'. The row has data_source"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(check, function, arguments, message):
    code, shown = check(function, [row()], *arguments)
    assert code == 2
    assert message in shown


def test_a_right_response_is_made_where_the_ground_truth_tells_one():
    assert gold_response("openai/gsm8k", "18", {"answer": "so\n#### 18"}) == "so\n#### 18"
    assert gold_response("arithmetic", "18", {}) == "18"
    assert gold_response("math", ["a", "b"], {}) == "The answer is \\boxed{a}.\n#### a"
    assert gold_response("countdown", {"numbers": [1, 1], "target": 50}, {}) is None
    assert gold_response("else", None, {}) is None


def test_a_failure_in_a_users_own_function_names_its_file_and_line(check, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def helper(text):\n    return text.nothing\n\ndef compute_score(data_source, solution_str, **rest):\n    return helper(solution_str)\n"
    )
    code, shown = check(str(own), [row(response="four")])
    assert code == 2
    failure = f"AttributeError: 'str' object has no attribute 'nothing' ({own}, line 2, in helper)"
    assert "".join(failure.split()) in "".join(shown.split())
    # If the lines break depends on the length of the path.
    assert "".join(shown.split()).count(";itiscalledasfunction(data_source=...,") == 1


def test_a_module_beside_the_file_is_found_from_any_folder_and_replaces_no_library(tmp_path):
    """By the script as it is installed, which has no current folder on its path, and in the process of the reward."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "helper_of_mine.py").write_text("def worth(text): return len(text)\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the standard library has one')\n")
    (tmp_path / "own.py").write_text(
        "import colorsys\nfrom helper_of_mine import worth\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert colorsys.rgb_to_hsv(0, 0, 1)[2] == 1\n    return worth(solution_str)\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(row(response="abcd")))
    script = Path(sys.executable).with_name("grpo-rl")
    ended = subprocess.run(
        [script, "check-reward", "../own.py", "--data", "../rows.jsonl"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "score: mean 4, least 4, greatest 4" in ended.stdout
