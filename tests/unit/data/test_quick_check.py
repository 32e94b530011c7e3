"""Data files that cannot be used are found within a second, before anything heavy starts."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.data import CustomClsConfig
from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import example
from grpo_rl.data.sources.locate import check_data_files, open_source
from grpo_rl.errors import DataError

ROOT = Path(__file__).resolve().parents[3]
GOOD = {"data_source": "a", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}
TABLE = pa.Table.from_pylist([GOOD] * 2000)


def check(*paths: Path, **options: object) -> list[str]:
    return check_data_files(DataConfig(train_files=[str(path) for path in paths], **options))


def lines(rows: list[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def arrow_file(path: Path, table: pa.Table = TABLE, stream: bool = False) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


def test_good_files_of_every_kind_have_no_problem(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([GOOD] * 50))
    (tmp_path / "b.jsonl").write_bytes(b"\n\n" + lines([GOOD] * 50)[:-1])
    (tmp_path / "c.json").write_bytes(json.dumps([GOOD] * 50).encode())
    pq.write_table(TABLE, tmp_path / "f.parquet", row_group_size=100)
    arrow_file(tmp_path / "g.arrow")
    arrow_file(tmp_path / "h.arrow", stream=True)
    assert check(*sorted(tmp_path.iterdir())) == check(tmp_path) == []
    assert check_data_files(DataConfig(train_files=["task:arithmetic?nonsense=1", "hf:a/b?split=train"])) == []
    [wrong] = check_data_files(DataConfig(train_files=["task:arithmetic"], prompt_key="nosuch"))
    assert wrong.startswith("task:arithmetic, row 0: ") and "nosuch" in wrong
    own = DataConfig(train_files=["/nowhere.jsonl"], custom_cls=CustomClsConfig("a.py", "A"))
    assert check_data_files(own) == []


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"\n \n", "the file has no rows"),
        ("a.jsonl", b"\xff\xfe{}", "line 1: the file starts with a byte-order mark"),
        ("a.jsonl", lines([GOOD]) + b"{\n", "line 2, column 2: broken JSON"),
        (
            "a.jsonl",
            lines([GOOD, {"prompt": "1"}]),
            "line 2: there are no columns 'reward_model', 'data_source'. The row has prompt",
        ),
        ("a.jsonl", b"x" * 9_000_000, "line 1: the line has 9000000 bytes; expected at most 8388608"),
        ("a.json", b"[{", "line 1, column 3: broken JSON"),
        ("a.json", b"[]", "the file has no rows"),
        ("a.json", b"[1]", "row 0: expected an object"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
        ("a.arrow", b"ARROW1\0\0 and nothing", "not a readable Arrow file"),
        ("a.tsv", b"a,b", "a data file must end in"),
        ("a.csv", b"a,b\n", "the file has no rows"),
        ("a.csv", b"a,b\n1,2,3\n", "Expected 2 columns, got 3"),
        ("a.csv", b"a,a\n1,2\n", "two columns are called 'a'"),
        ("a.csv", b"a,b\n\xff,2\n", "not a readable CSV file"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_why(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    [found] = check(tmp_path / name)
    assert found.startswith(str(tmp_path / name)) and problem in found


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_that_is_cut_anywhere_is_found(tmp_path: Path, kind: str, kept: float) -> None:
    path = tmp_path / f"a.{kind}"
    pq.write_table(TABLE, path) if kind == "parquet" else arrow_file(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    [found] = check(path)
    assert found.startswith(f"{path}: not a readable {'parquet' if kind == 'parquet' else 'Arrow'} file: ")


def test_tables_without_rows_or_columns_are_found(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 0), tmp_path / "a.parquet")
    pq.write_table(TABLE.drop_columns(["prompt"]), tmp_path / "b.parquet")
    arrow_file(tmp_path / "c.arrow", TABLE.slice(0, 0))
    found = check(*sorted(tmp_path.iterdir()))
    assert found[:2] == [f"{tmp_path}/a.parquet: the file has no rows", f"{tmp_path}/c.arrow: the file has no rows"]
    assert found[2].startswith(f"{tmp_path}/b.parquet, row 0: there is no column 'prompt'")
    # All rows of a table lack the same: one line.
    assert len(found) == 3


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.arrow"])
def test_a_fifo_is_refused_everywhere_and_never_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert check(tmp_path / name) == [f"{tmp_path}/{name}: is a FIFO; expected a regular file"]
    with pytest.raises(DataError, match="is a FIFO"):
        open_source(str(tmp_path / name))
    with pytest.raises(DataError, match="is a FIFO"):
        open_source(str(tmp_path))


def test_every_column_that_is_missing_is_named_at_once_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "Ada is 36.", "age": 36}]))
    [problem] = check(tmp_path / "a.jsonl")
    assert "there are no columns 'prompt', 'reward_model', 'data_source'. The row has age, text: name them" in problem
    assert "data.prompt_key=text data.ground_truth_key=COLUMN data.data_source=NAME" in problem
    config = DataConfig(
        train_files=[str(tmp_path / "a.jsonl")], prompt_key="txt", ground_truth_key="ages", data_source="people"
    )
    [problem] = check_data_files(config)
    assert problem.endswith("name them, as data.prompt_key=text data.ground_truth_key=age")
    [problem] = check_data_files(replace(config, prompt_key="text"))
    assert "there is no column 'ages'. The row has age, text" in problem
    assert check_data_files(replace(config, prompt_key="text", ground_truth_key="age")) == []


def test_a_csv_file_is_rows_of_text_by_the_keys_of_its_columns(tmp_path: Path) -> None:
    """What was written is what is compared: no number loses its zeros."""
    (tmp_path / "a.csv").write_text('\ufeffquestion,id\n"Which, ""if any""\nid?",007\nWhat?,1e3\n', encoding="utf-8")
    config = DataConfig(train_files=[str(tmp_path / "a.csv")], prompt_key="question", ground_truth_key="id", data_source="ids")
    assert check_data_files(config) == []
    source = open_source(str(tmp_path / "a.csv"))
    rows = [example(source.row(index), config) for index in range(len(source))]
    assert [(row.prompt, row.ground_truth) for row in rows] == [('Which, "if any"\nid?', "007"), ("What?", "1e3")]


def test_rows_with_a_question_and_an_answer_are_told_the_keys_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]))
    [found] = check(tmp_path / "a.jsonl")
    assert "data.prompt_key=question data.ground_truth_key=answer data.data_source=NAME" in found
