"""Prompts from files, folders, hubs and classes of one's own: what they become, and data too large to be checked whole."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.tree import Config, CustomClsConfig, DataConfig
from grpo_rl.data import row_set
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.draw_order import make_row_order
from grpo_rl.data.sources import tables
from grpo_rl.data.sources.locate import open_source
from grpo_rl.errors import CheckpointError, ConfigError, DataError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.trainer.sampled.selection import Selection

TOKENIZER = build_tokenizer(128)
SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"


def row(number: int, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "a",
        "prompt": [{"role": "user", "content": str(number)}],
        "reward_model": {"ground_truth": str(number)},
        "extra_info": {"index": number},
    } | columns


def asked(content: str, answer: str = "2") -> dict[str, Any]:
    return row(0, prompt=[{"role": "user", "content": content}], reward_model={"ground_truth": answer})


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(item if isinstance(item, str) else json.dumps(item) + "\n" for item in rows))
    return str(path)


def load(files: str | list[str], **options: Any) -> PromptDataset:
    return PromptDataset([files] if isinstance(files, str) else files, DataConfig(**options), TOKENIZER).checked()


def truths(data: PromptDataset) -> list[Any]:
    return [data.prompt(index, "u").ground_truth for index in range(len(data))]


# ---- formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "compressed", "categories"])
def test_any_row_of_a_table_can_be_read_alone(tmp_path: Path, kind: str) -> None:
    rows = [row(number) for number in range(200)]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.feather" if kind == "compressed" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=150)
    elif kind == "compressed":
        pyarrow.feather.write_feather(table, path, chunksize=70)
    else:
        if kind == "categories":
            table = table.set_column(0, "data_source", table["data_source"].dictionary_encode())
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    source = open_source(str(path))
    assert len(source) == 200
    assert [source.row(index) for index in (199, 0, 63, 64, 149, 150)] == [rows[index] for index in (199, 0, 63, 64, 149, 150)]
    assert isinstance(source, tables.Table) and source.where(199) == f"{path}, row 199"


def test_a_folder_that_datasets_saved_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([row(number) for number in range(6)])
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved.select([4])}).save_to_disk(tmp_path / "splits")
    assert truths(load(str(tmp_path / "one"))) == ["0", "1", "2", "3", "4", "5"]
    assert truths(load(f"{tmp_path}/splits?split=test")) == ["4"]
    with pytest.raises(DataError, match=r"has the splits test, train; name one: .*\?split=NAME"):
        load(str(tmp_path / "splits"))


def test_a_folder_of_data_files_is_read_by_name_and_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, number in (("train-1.jsonl", 2), ("train-0.jsonl", 1), ("test-0.jsonl", 3)):
        write(tmp_path / "data" / name, [row(number)])
    assert truths(load(str(tmp_path))) == ["3", "1", "2"]
    assert truths(load(f"{tmp_path}?split=train")) == ["1", "2"]
    with pytest.raises(DataError, match=r"no file begins with 'val'; the folder has test-0\.jsonl"):
        load(f"{tmp_path}?split=val")
    with pytest.raises(ConfigError, match="'spilt=train' must be option=value"):
        load(f"{tmp_path}?spilt=train")


def test_a_hub_name_needs_the_package_its_split_and_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"name the data set and its split, as in hf:openai/gsm8k\?split=train"):
        open_source("hf:openai/gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="datasets is not installed; install the extra `data`"):
        open_source("hf:openai/gsm8k?split=train")


def test_a_hub_that_cannot_be_reached_is_told_at_once_and_a_folder_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens: a connection is refused
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(
            DataError, match=r"no such data set .*127\.0\.0\.1 cannot be reached \(Connection refused\); give a folder"
        ):
            open_source("hf:nobody/nothing?split=train")
        (tmp_path / "mine").mkdir()
        write(tmp_path / "mine" / "train.jsonl", [row(1), row(2)])
        assert len(open_source(f"hf:{tmp_path}/mine?split=train")) == 2


# ---- columns and prompts ----------------------------------------------------------------------------------


def test_every_column_can_be_named_also_inside_another(tmp_path: Path) -> None:
    item = {"task": {"question": "1+1=", "answer": 2}, "a.b": "mine", "meta": {"k": 1}}
    options = {
        "prompt_key": "task.question",
        "reward_fn_key": "a.b",
        "ground_truth_key": "task.answer",
        "extra_info_key": "meta",
    }
    name = write(tmp_path / "a.jsonl", [item])
    prompt = load(name, **options).prompt(0, "u")
    assert (prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("1+1=", "mine", 2, {"k": 1})
    assert load(name, **options | {"reward_fn_key": "data_source"}, data_source="set").prompt(0, "u").data_source == "set"
    with pytest.raises(DataError, match=r"line 1: column 'task' has no ansver; it has answer, question"):
        load(name, **options | {"ground_truth_key": "task.ansver"})


def test_the_system_prompt_stands_before_messages_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "2"}]
    name = write(tmp_path / "a.jsonl", [row(1), row(2, prompt=own)])
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    data = load(name, system_prompt="ours", chat_template=template)
    assert [data.prompt(index, "u").text for index in range(2)] == ["[system:ours][user:1]", "[system:own][user:2]"]
    (tmp_path / "t.jinja").write_text("file:{{ messages | map(attribute='content') | join }}")
    assert load(name, chat_template=str(tmp_path / "t.jinja")).prompt(0, "u").text == "file:1"
    with pytest.raises(DataError, match=r"line 1: column 'prompt' is plain text, which data\.system_prompt"):
        load(write(tmp_path / "b.jsonl", [row(1, prompt="1")]), system_prompt="ours")


def test_a_class_of_ones_own_gives_the_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Doubled:\n"
        "    def __init__(self, data_files, tokenizer, config):\n"
        "        self.numbers = [int(name) for name in data_files]\n"
        "    def __len__(self):\n"
        "        return len(self.numbers)\n"
        "    def __getitem__(self, index):\n"
        "        number = 6 // self.numbers[index]\n"
        "        return {'data_source': 'a', 'prompt': str(number), 'reward_model': {'ground_truth': 2 * number}}\n"
        "def function(): ...\n"
    )
    custom = CustomClsConfig(str(tmp_path / "mine.py"), "Doubled")
    assert truths(load(["3", "2"], custom_cls=custom)) == [4, 6]
    with pytest.raises(DataError, match=r"mine\.py:Doubled, row 1: ZeroDivisionError: .*mine\.py, line 7, in __getitem__\)"):
        load(["3", "0"], custom_cls=custom)
    with pytest.raises(DataError) as caught:
        load(["3", "four"], custom_cls=custom)
    first, place, interface = str(caught.value).splitlines()
    assert "custom_cls" in first and "mine.py:Doubled failed: ValueError: invalid literal for int()" in first
    assert place.startswith(f"  in {tmp_path / 'mine.py'}, line 3, in ") and "int(name) for name in data_files" in place
    assert interface == "  it is called as Doubled(data_files=[...], tokenizer=..., config=...), then len() is taken of it"
    with pytest.raises(ConfigError, match="it must be a class that has both"):
        load(["3"], custom_cls=CustomClsConfig(str(tmp_path / "mine.py"), "function"))


# ---- data too large to be checked whole -----------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PromptDataset]:
    """Makes 30 rows, of which 20 are checked: rows 0 to 9, and 10, 12, 14, ... of the rest."""
    monkeypatch.setattr(row_set, "CHECKED_OF_MANY", 10)

    def make(changes: dict[int, Any], **options: Any) -> PromptDataset:
        name = write(tmp_path / "large.jsonl", [changes.get(number, row(number % 10)) for number in range(30)])
        return load(name, check_rows=25, **options)

    return make


def test_a_row_of_large_data_is_parsed_when_it_is_drawn(large: Callable[..., PromptDataset]) -> None:
    data = large({13: "{broken\n"})
    assert (len(data), data.report.num_checked, data.data_sources) == (30, 20, ["a"])
    assert str(data.report).startswith("30 rows, 20 of them checked and the others when they are drawn")
    assert data.prompt(28, "u").ground_truth == "8"
    with pytest.raises(DataError, match=r"large\.jsonl, line 14, column 2: broken JSON"):
        data.usable(13)


def test_bad_and_long_rows_that_are_met_late_are_passed_over_every_time(large: Callable[..., PromptDataset]) -> None:
    options = {"on_bad_row": "skip", "filter_overlong_prompts": True, "max_prompt_length": 8, "train_batch_size": 4}
    data = large({13: "{broken\n", 15: row(10**20)}, shuffle=False, **options)
    sampler = make_row_order(Config(data=data.config), data)
    for _ in range(2):
        sampler.seek(0, 11)
        assert [number for number, _ in sampler.next_batch()] == [11, 12, 14, 16]
        assert len(data.bad_rows.found) == 1


def test_weights_are_those_of_entries_and_count_their_usable_rows(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", [row(1), "{\n", row(3)]), ("b", [row(4)] * 4))]
    config = DataConfig(
        train_files=[str(file) for file in files], train_weights=[1.0, 2.0], train_batch_size=6, on_bad_row="skip"
    )
    data = PromptDataset(config.train_files, config, TOKENIZER).checked()
    assert data.entry_sizes() == [2, 4]
    assert sorted(number for number, _ in make_row_order(Config(data=config), data).next_batch()) == [0, 1, 2, 3, 4, 5]
    few = PromptDataset(config.train_files, config, TOKENIZER, max_samples=2).checked()
    with pytest.raises(ConfigError, match=r"data\.train_weights: .*b\.jsonl has no rows to draw"):
        make_row_order(Config(data=config), few)


# ---- resuming ---------------------------------------------------------------------------------------------------


def test_resuming_on_changed_data_is_refused_unless_allowed(tmp_path: Path) -> None:
    def selection(rows: list[Any], **options: Any) -> Selection:
        data = load(write(tmp_path / "a.jsonl", rows), **{"train_batch_size": 2, "shuffle": False} | options)
        return Selection(Config(data=data.config), data, {"auto": 1.0})

    first = selection([row(1), row(2), row(3), row(4)])
    first.sampler.next_batch()
    state = json.loads(json.dumps(first.state_dict()))
    selection([row(1), row(2), row(3), row(4)]).load_state_dict(state)
    changed = [row(1), row(2), row(3), row(5)]
    with pytest.raises(CheckpointError, match=r"a\.jsonl: some rows have another content.*data\.allow_change=true"):
        selection(changed).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"a\.jsonl: bytes was \d+, now \d+, rows was 4, now 3"):
        selection(changed[:3]).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data\.train_weights of the entries were None, now \[\[4, 1\.0\]\]"):
        selection([row(1), row(2), row(3), row(4)], shuffle=True, train_files=["a"], train_weights=[1.0]).load_state_dict(state)
    allowed = selection(changed[:3], allow_change=True)
    allowed.load_state_dict(state)
    assert allowed.sampler.next_batch() == [(0, "e1-r0"), (1, "e1-r1")]


# ---- prompts ------------------------------------------------------------------------------------------------------


def test_a_chat_row_becomes_the_templated_prompt_and_its_tokens(tmp_path: Path) -> None:
    prompt = load(write(tmp_path / "a.jsonl", [asked("47+8=", "55")])).prompt(0, "e0-r0")
    assert prompt.text == "<|user|>47+8=<|assistant|>"
    assert prompt.token_ids.tolist() == TOKENIZER.encode("<|user|>47+8=<|assistant|>")
    assert (prompt.uid, prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("e0-r0", "a", "55", {"index": 0})


def test_parquet_json_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [asked("1+1=", "2"), asked("2+2=", "4")]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, *others = (load(str(tmp_path / name)) for name in ("a.jsonl", "a.json", "a.parquet"))
    assert all(len(data) == len(first) == 2 and data.prompt(1, "x") == first.prompt(1, "x") for data in others)


def test_template_options_reach_the_template_and_ours_are_refused(tmp_path: Path) -> None:
    name, template = write(tmp_path / "a.jsonl", [asked("x")]), "{{ messages[0]['content'] }}{% if terse %}!{% endif %}"
    assert load(name, chat_template=template, apply_chat_template_kwargs={"terse": True}).prompt(0, "u").text == "x!"
    with pytest.raises(ConfigError, match="tokenize is set by the program"):
        load(name, apply_chat_template_kwargs={"tokenize": True})


def test_overlong_prompts_are_refused_with_the_ways_out_or_dropped_and_counted(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", [asked("1", "short"), asked("1" * 20), asked("1" * 30)])
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the prompt has 22 tokens.*=3; 2 rows are too long .*longest: 32"):
        load(name, max_prompt_length=3)
    data = load(name, max_prompt_length=3, filter_overlong_prompts=True)
    assert truths(data) == ["short"]
    assert (data.report.num_rows, data.report.num_dropped, data.report.longest) == (3, 2, 32)
    assert "2 of 3 rows dropped as too long" in str(data.report)


def test_a_cut_prompt_keeps_the_limit_and_its_text_is_what_the_model_sees(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", [row(0, prompt="123456789"), row(0, prompt="12")])
    data = load(name, max_prompt_length=4, truncation="left")
    assert data.prompt(0, "u").text == "6789" == TOKENIZER.decode(data.prompt(0, "u").token_ids)
    assert data.prompt(1, "u").text == "12" and data.report.num_truncated == 1


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(10**9) %}{% endfor %}", "{{ 1 // 0 }}", "{{ messages[7].content.x }}", "{{ 'a' * 10**7 }}", "{% if %}"],
)
def test_a_template_that_fails_in_any_way_is_an_error_of_the_data(tmp_path: Path, template: str) -> None:
    with pytest.raises(DataError, match=r"line 1: the chat template in data\.chat_template (refuses the messages|makes)"):
        load(write(tmp_path / "a.jsonl", [asked("1+1=")]), chat_template=template)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")
def test_gsm8k_loads_with_the_qwen_tokenizer_and_its_chat_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5")
    file = str(SHARED / "gsm8k" / "gsm8k_test.parquet")
    data = PromptDataset([file], DataConfig(filter_overlong_prompts=True), tokenizer).checked()
    prompt = data.prompt(0, "u")
    assert len(data) == 1319 and data.report.num_dropped == 0
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info["index"]) == ("openai/gsm8k", "18", 0)
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    instruction = ' Let\'s think step by step and output the final answer after "####".'
    messages = [{"role": "user", "content": prompt.extra_info["question"] + instruction}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt.token_ids.tolist() == expected
