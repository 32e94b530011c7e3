import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.models.builtin import build_tokenizer

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(128)


def row(content="1+1=", answer="2", **columns):
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
        **columns,
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(path)


def load(files, tokenizer, max_samples=-1, **options):
    return PromptDataset(
        [files] if isinstance(files, str) else files, DataConfig(**options), tokenizer, max_samples=max_samples
    ).checked()


# ---- reading ------------------------------------------------------------------------------------------


def test_a_chat_row_becomes_the_templated_prompt_and_its_tokens(tmp_path, tokenizer):
    data = load(write_jsonl(tmp_path / "a.jsonl", [row("47+8=", "55")]), tokenizer)
    prompt = data.prompt(0, "e0-r0")
    assert prompt.text == "<|user|>47+8=<|assistant|>"
    assert prompt.token_ids.tolist() == tokenizer.encode("<|user|>47+8=<|assistant|>")
    assert (prompt.uid, prompt.data_source, prompt.ground_truth) == ("e0-r0", "arithmetic", "55")
    assert prompt.extra_info == {"index": 0}


def test_parquet_json_and_jsonl_give_the_same_prompts(tmp_path, tokenizer):
    rows = [row("1+1=", "2"), row("2+2=", "4")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    loaded = [load(str(tmp_path / name), tokenizer) for name in ("a.jsonl", "a.json", "a.parquet")]
    assert loaded[0].prompt(1, "x") == loaded[1].prompt(1, "x") == loaded[2].prompt(1, "x")
    assert [len(data) for data in loaded] == [2, 2, 2]


def test_template_options_reach_the_template_and_ours_are_refused(tmp_path):
    tokenizer = build_tokenizer(128)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if terse %}!{% endif %}"
    name = write_jsonl(tmp_path / "a.jsonl", [row("x")])
    assert load(name, tokenizer, apply_chat_template_kwargs={"terse": True}).prompt(0, "u").text == "x!"
    with pytest.raises(ConfigError, match="tokenize is set by the program"):
        load(name, tokenizer, apply_chat_template_kwargs={"tokenize": True})


# ---- length ---------------------------------------------------------------------------------------------


def test_overlong_prompts_are_refused_with_the_ways_out_or_dropped_and_counted(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", [row("1", "short"), row("1" * 20), row("1" * 30)])
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the prompt has 22 tokens.*=3; 2 rows are too long .*longest: 32"):
        load(name, tokenizer, max_prompt_length=3)
    data = load(name, tokenizer, max_prompt_length=3, filter_overlong_prompts=True)
    assert [data.prompt(i, "u").ground_truth for i in range(len(data))] == ["short"]
    assert (data.report.num_rows, data.report.num_dropped, data.report.longest) == (3, 2, 32)
    assert "2 of 3 rows dropped as too long" in str(data.report)


def test_a_cut_prompt_keeps_the_limit_and_its_text_is_what_the_model_sees(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", [row(prompt="123456789"), row(prompt="12")])
    data = load(name, tokenizer, max_prompt_length=4, truncation="left")
    assert data.prompt(0, "u").text == "6789" == tokenizer.decode(data.prompt(0, "u").token_ids)
    assert data.prompt(1, "u").text == "12"
    assert data.report.num_truncated == 1


# ---- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(10**9) %}{% endfor %}", "{{ 1 // 0 }}", "{{ messages[7].content.x }}", "{{ 'a' * 10**7 }}", "{% if %}"],
)
def test_a_template_that_fails_in_any_way_is_an_error_of_the_data(tmp_path, template):
    write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(DataError, match=r"line 1: the chat template in data\.chat_template (refuses the messages|makes)"):
        PromptDataset([str(tmp_path / "a.jsonl")], DataConfig(chat_template=template), build_tokenizer(128)).checked()


# ---- real data ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")
def test_gsm8k_loads_with_the_qwen_tokenizer_and_its_chat_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen2.5")
    data = load(str(SHARED / "gsm8k" / "gsm8k_test.parquet"), tokenizer, filter_overlong_prompts=True)
    prompt = data.prompt(0, "u")
    assert len(data) == 1319 and data.report.num_dropped == 0
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info["index"]) == ("openai/gsm8k", "18", 0)
    assert prompt.text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    messages = [
        {
            "role": "user",
            "content": prompt.extra_info["question"] + ' Let\'s think step by step and output the final answer after "####".',
        }
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt.token_ids.tolist() == expected
