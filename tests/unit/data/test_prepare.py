import os
from pathlib import Path

import pyarrow.parquet
import pytest

from grpo_rl.__main__ import main
from grpo_rl.data.prepare import math

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def run(kind, source, folder, *words):
    return main(["prepare", kind, "--from", str(source), "--to", str(folder), *words])


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_the_original_gsm8k_becomes_verls_file_row_by_row(tmp_path, capsys):
    original, expected = DATA / "gsm8k" / "gsm8k_test.jsonl", DATA / "gsm8k" / "gsm8k_test.parquet"
    if not original.is_file() or not expected.is_file():
        pytest.skip(f"needs {original} and {expected}")
    assert run("gsm8k", original, tmp_path, "--split", "test") == 0
    assert read(tmp_path / "test.parquet") == read(expected)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/test.parquet: 1319 rows of gsm8k, split test, longest prompt ")


def test_a_math_row_has_the_columns_and_words_of_verls_file():
    path = DATA / "math" / "train.parquet"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    expected = read(path)[0]
    instruction = " Let's think step by step and output the final answer within \\boxed{}."
    record = {
        "problem": expected["prompt"][0]["content"].removesuffix(instruction),
        "solution": r"So $a+b=-3+3=\boxed{0}$.",
        "level": "Level 5",
        "type": "Algebra",
    }
    assert math(record, "train", 0) == expected


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("gsm8k", '{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n', "a.jsonl, line 2: there is no 'answer'"),
        ("gsm8k", '\n{"question": "q", "answer": "one"}\n', "a.jsonl, line 2: the answer does not end with '#### NUMBER'"),
        ("gsm8k", '{"question": "q",\n', "a.jsonl, line 1, column 18: broken JSON"),
        ("gsm8k", "[1]\n", "line 1: expected an object with the row's columns, found list"),
        ("math", '{"problem": "p", "solution": "s"}', "line 1: the solution has no complete \\boxed{...}"),
        ("gsm8k", "\n\n", "the file has no rows"),
        (
            "math",
            '{"data_source": "m", "prompt": [], "reward_model": {}}',
            "it is in verl's format already: data.train_files takes",
        ),
    ],
)
def test_a_bad_record_is_told_with_its_file_and_line_and_nothing_is_written(kind, content, message, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(content)
    assert run(kind, tmp_path / "a.jsonl", tmp_path / "out") == 3
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "#### 1"}')
    (tmp_path / "train.parquet").write_text("mine")
    assert run("gsm8k", tmp_path / "a.jsonl", tmp_path) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "train.parquet").read_text() == "mine"
    assert run("gsm8k", tmp_path / "a.jsonl", tmp_path, "--overwrite") == 0
    assert len(read(tmp_path / "train.parquet")) == 1
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "train.parquet"]
