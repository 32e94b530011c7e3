"""Everything that can be wrong with a row is told with its place, and one bad row costs one row."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import BadRows
from grpo_rl.data.rows import BadRow, at, example
from grpo_rl.data.sources import jsonl
from grpo_rl.data.sources.locate import open_source
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer

TOKENIZER = build_tokenizer(128)
GOOD = {"data_source": "a", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "extra_info": {}}


def line(**columns: object) -> bytes:
    return json.dumps(GOOD | columns).encode() + b"\n"


def load(path: Path, action: str = "error", **options: object) -> PromptDataset:
    config = DataConfig(on_bad_row=action, **options)
    bad = BadRows(action, path.parent / "bad_rows.jsonl")
    return PromptDataset([str(path)], config, TOKENIZER, bad_rows=bad).checked()


BAD_LINES = [
    (b'{"a": 1,}\n', r"line 2, column 9: broken JSON: .*found '\}' \(byte 104 of the file\)"),
    (b'{"a": "\x00"}\n', r"line 2, column 8: broken JSON: a NUL byte; .*\(byte 103 of the file\)"),
    (b'{"a": "\xff"}\n', r"line 2: byte 0xff is not UTF-8 \(byte 103 of the file\); expected UTF-8"),
    (line(prompt="a\0b"), r"line 2: column 'prompt' has a NUL character at 1"),
    (line(prompt="a\ud800b"), r"line 2: column 'prompt' has the lone surrogate \\ud800 at 1"),
    (
        line(extra_info={"x": [1, float("nan")]}),
        r"line 2: broken JSON: NaN is not JSON, in column 'extra_info\.x\[1\]'; write null",
    ),
    (line(extra_info={"x": float("-inf")}), r"line 2: broken JSON: -Infinity is not JSON, in column 'extra_info\.x'"),
    (line()[:-2] + b', "n": 1e999}\n', r"line 2: column 'n' is inf \(float\); expected a finite number"),
    (line()[:-2] + b', "prompt": "x"}\n', r"line 2: broken JSON: the key 'prompt' is there twice, in column 'prompt'"),
    (line()[:-2] + b', "n": ' + b"9" * 5000 + b"}\n", r"line 2: broken JSON: Exceeds the limit"),
    (line()[:-2] + b', "n": ' + b"[" * 70 + b"]" * 70 + b"}\n", r"line 2: column 'n.* is nested deeper than 64"),
    (b"[" * 100_000 + b"\n", "line 2: broken JSON: maximum recursion depth"),
    (b'{"prompt": "1"}\n', r"line 2: there are no columns 'reward_model', 'data_source'\. The row has prompt"),
    (line(prompt=[{"role": "user"}]), r"line 2: column 'prompt\[0\]\.content' is None \(NoneType\); expected a string"),
    (line(reward_model=3), r"line 2: column 'reward_model' is 3 \(int\); expected an object with ground_truth"),
    (line(extra_info=7), r"line 2: column 'extra_info' is 7 \(int\); expected an object"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_LINES)
def test_a_bad_line_is_named_with_its_place_or_left_out(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() + bad + line(prompt="2+2="))
    with pytest.raises(DataError, match=rf"^{tmp_path}/a\.jsonl, {message}"):
        load(path)
    data = load(path, "skip")
    assert [data.prompt(index, "u").text for index in range(len(data))] == ["1+1=", "2+2="]
    assert (data.report.num_bad, str(data.report)[-20:]) == (1, "bad rows left out: 1")
    [record] = (tmp_path / "bad_rows.jsonl").read_text().splitlines()
    assert "a.jsonl, line 2" in json.loads(record)["bad_row"]


def test_all_bad_rows_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() + (b"{\n" + line(prompt=5)) * 6)
    with pytest.raises(DataError) as error:
        load(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("12 bad rows of the 13 checked: ") and "line 2, column 2" in lines[0]
    assert "line 3: column 'prompt' is 5" in lines[1]
    assert (len(lines), lines[-1].strip()) == (11, f"and 2 more, see {tmp_path}/bad_rows.jsonl")
    records = (tmp_path / "bad_rows.jsonl").read_text().splitlines()
    assert len(records) == 12 and "line 2, column 2" in records[0] and "line 13" in records[-1]


def test_text_that_is_no_utf8_in_parquet_is_named_with_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")]
    )
    columns = {"prompt": broken, "data_source": ["a", "a"], "reward_model": [{"ground_truth": "2"}] * 2}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: column 'prompt' cannot be read: .*utf-8"):
        load(path)
    assert len(load(path, "skip")) == 1


def test_lines_are_found_at_the_borders_of_the_blocks_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n\n  \n{"b":2}\r\n\r\n {"c":3}')
    for block in range(1, 12):
        monkeypatch.setattr(jsonl, "BLOCK", block)
        source = open_source(str(path))
        assert [source.row(index) for index in range(len(source))] == [{"a": 1}, {"b": 2}, {"c": 3}]
        assert [source.where(index).rpartition(" ")[2] for index in range(3)] == ["1", "4", "6"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
            st.fixed_dictionaries(
                {}, optional={key: st.text(max_size=3) | st.none() | st.just(value) for key, value in GOOD.items()}
            ).map(lambda value: json.dumps(value).encode()),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_reading_any_bytes_gives_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(end.join(lines))
    try:
        source = open_source(str(path))
    except DataError:
        return
    for index in range(len(source)):
        try:
            stored = source.row(index)
            with at(source.where(index)):
                row = example(stored, DataConfig())
        except BadRow as error:
            assert str(error).startswith(f"{path}, line ")
        else:
            json.dumps([row.prompt, row.ground_truth, row.extra_info], allow_nan=False).encode("utf-8")


def test_a_token_beyond_the_models_embedding_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line() + line(prompt="1+z="))
    token = TOKENIZER.convert_tokens_to_ids("z")
    data = PromptDataset([str(path)], DataConfig(), TOKENIZER, vocab_size=token)
    with pytest.raises(DataError, match=rf"a.jsonl, line 2: has the token 'z', number {token}, and .* embedding has {token};"):
        data.checked()
    whole = PromptDataset([str(path)], DataConfig(), TOKENIZER, vocab_size=token + 1).checked()
    assert len(whole) == 2
