"""Which tokens of a row the assistant wrote: by hand for templates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.row_set import BadRows
from grpo_rl.data.rows import BadRow
from grpo_rl.data.training_rows.conversations import (
    Demonstration,
    DemonstrationSet,
    Tokenizing,
    conversation,
    cut_to,
    supervised_batch,
)
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer

# As ChatML, with other brackets: a newline follows the end of every turn, and the role stands on a line of its own.
LINES = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }};\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}.{% endgeneration %}"
    "{% else %}Q:{{ m['content'] }}{% endif %}{% endfor %}"
)
# Only the last answer keeps its thoughts, as Qwen3's template has it.
FORGETS = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('=')[-1] }}{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+3"},
    {"role": "assistant", "content": "5!"},
    {"role": "user", "content": "thanks"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per character, and one for each of the special words."""
    return build_tokenizer(128)


def found(row: dict[str, Any], tokenizer: Any, **data: Any) -> Demonstration:
    config = DataConfig(**data)
    return Tokenizing(Renderer(config, tokenizer))(conversation(row, config))


def shown(demonstration: Demonstration, tokenizer: Any) -> str:
    """The text, with the trained tokens in brackets."""
    trained = set(demonstration.positions.tolist())
    pieces = [
        f"«{piece}»" if index in trained else piece
        for index, piece in enumerate(tokenizer.convert_ids_to_tokens(demonstration.token_ids.tolist()))
    ]
    return "".join(pieces).replace("»«", "")


def test_every_turn_of_the_assistant_is_trained_as_the_template_ends_it(tokenizer: Any) -> None:
    text = shown(found({"messages": TALK}, tokenizer, chat_template=LINES), tokenizer)
    assert text == ("[system]\nbe brief;\n[user]\n1+1;\n[assistant]\n«2;\n»[user]\n2+3;\n[assistant]\n«5!;\n»"), (
        "and nothing of what follows the last answer"
    )


def test_a_template_with_marks_says_itself_what_is_generated(tokenizer: Any) -> None:
    assert shown(found({"messages": TALK[1:]}, tokenizer, chat_template=MARKED), tokenizer) == "Q:1+1A:«2.»Q:2+3A:«5!.»"


def test_a_prompt_and_an_answer_are_a_conversation_of_two_turns(tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [
        {"messages": talk},
        {"prompt": "1+1", "response": "2"},
        {"prompt": talk[:1], "response": "2"},
        {"q": {"text": "1+1"}, "a": {"text": "2"}},
    ]
    keys: list[dict[str, Any]] = [{}, {}, {}, {"prompt_key": "q.text", "response_key": "a.text"}]
    texts = {shown(found(row, tokenizer, **data), tokenizer) for row, data in zip(rows, keys, strict=True)}
    assert texts == {"<|user|>1+1<|assistant|>«2<|end|>»"}


def test_without_a_template_a_text_goes_on_with_the_answer_and_the_end_of_sequence() -> None:
    bare = build_tokenizer(128)
    bare.chat_template = None
    assert shown(found({"prompt": "1+1=", "response": "2"}, bare), bare) == "1+1=«2<|end|>»"
    with pytest.raises(BadRow, match="has no chat template"):
        found({"messages": TALK}, bare)


def rollout(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    record = {"prompt": "<|user|>1+1<|assistant|>", "response": "2", "prompt_length": 5, "response_length": 2}
    return record | {"finish_reason": "stop"} | changes


def test_a_logged_rollout_is_learnt_with_the_end_that_was_sampled(tokenizer: Any) -> None:
    assert shown(found(rollout(tokenizer), tokenizer), tokenizer) == "<|user|>1+1<|assistant|>«2<|end|>»"
    cut_off = rollout(tokenizer, finish_reason="length")
    assert shown(found(cut_off, tokenizer), tokenizer) == "<|user|>1+1<|assistant|>«2»"
    with pytest.raises(BadRow, match=r"^this tokenizer makes 5 tokens of the prompt, .* had 9"):
        found(rollout(tokenizer, prompt_length=9), tokenizer)


def test_a_template_that_changes_what_stood_before_is_refused_with_the_place(tokenizer: Any) -> None:
    talk = [dict(message) for message in TALK[1:5]]
    assert shown(found({"messages": talk}, tokenizer, chat_template=FORGETS), tokenizer) == "u:1+1;a:«2;»u:2+3;a:«5!;»"
    talk[1]["content"] = "think=2"
    with pytest.raises(BadRow, match=r"^the chat template does not only append: with message 2 the text before it is "):
        found({"messages": talk}, tokenizer, chat_template=FORGETS)
    assert shown(found({"messages": talk[:2]}, tokenizer, chat_template=FORGETS), tokenizer) == "u:1+1;a:«think=2;»"


def test_a_token_that_reaches_into_the_answer_is_cut_where_the_model_begins() -> None:
    """A vocabulary that has one token for two newlines, and an answer that begins with one."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = {symbol: index for index, symbol in enumerate([*"abcdefghijklmnopqrstuvwxyz[];1+ !2", "\n", "\n\n"])}
    core = Tokenizer(BPE(vocab=words, merges=[("\n", "\n")]))
    core.decoder = decoders.Fuse()
    merging = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=";", clean_up_tokenization_spaces=False)
    merging.chat_template = LINES
    demonstration = found({"prompt": "1+1", "response": "\n2"}, merging)
    assert shown(demonstration, merging) == "[user]\n1+1;\n[assistant]\n«\n2;\n»"
    whole = merging(merging.decode(demonstration.token_ids))["input_ids"]
    assert len(whole) == len(demonstration.token_ids) - 1, "the text as a whole has one token across the border"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK[:2]}, "has no assistant turn to learn, only system, user"),
        ({"messages": TALK[2:]}, "begins with the assistant's turn"),
        ({"messages": [TALK[1], {"role": "assistant", "content": " \n"}]}, r"'messages\[1\].content' is ' \\n' .*not empty"),
        ({"messages": [TALK[1], "2"]}, r"'messages\[1\]' is '2' \(str\)"),
        ({"prompt": "1+1", "response": ""}, "column 'response' is '' .*expected the answer to learn"),
        ({"prompt": "1+1", "answer": "2"}, "there is no column 'response'.*has 'messages', or a prompt and a response"),
        ({"messages": TALK, "tools": "7"}, "column 'tools' is 7 .*a list of tools"),
        ({"messages": TALK, "enable_thinking": "no"}, "column 'enable_thinking' is 'no'"),
    ],
)
def test_a_row_without_an_answer_is_named_with_its_place(row: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(BadRow, match=message):
        found(row, tokenizer)


def test_a_call_of_a_tool_is_an_answer_and_empty_parts_of_a_table_are_none(tmp_path: Path) -> None:
    calls = [{"name": "add"}]
    messages = [
        {"role": "user", "content": "1+1", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    chat = conversation({"messages": messages, "tools": None, "enable_thinking": False}, DataConfig())
    assert chat.messages == [  # type: ignore[union-attr]
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    assert chat.options == {"enable_thinking": False}  # type: ignore[union-attr]


# ---- demonstrations of files: long rows, and the batch that they make ---------------------------------------


def load(path: Path, rows: list[Any], tokenizer: Any, **data: Any) -> DemonstrationSet:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(responses="rows", train_files=[str(path)], **data)
    whole = Config(data=config)
    return DemonstrationSet([str(path)], whole, tokenizer, bad_rows=BadRows(config.on_bad_row)).checked()


def pair(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def test_rows_that_are_too_long_are_refused_dropped_or_cut(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [pair("1+1", "2"), pair("1", "23456789"), pair("123456789", "0")]
    with pytest.raises(
        DataError, match=r"line 2: has 12 tokens, more than the longest sequence of 8; 2 rows are too long \(longest: 13"
    ):
        load(path, rows, tokenizer, max_length=8)
    dropped = load(path, rows, tokenizer, max_length=8, filter_overlong_prompts=True)
    assert len(dropped) == 1 and dropped.report.num_dropped == 2
    with pytest.raises(DataError, match="no rows are left: of 2 checked, 0 are bad and 2 have more than 8 tokens"):
        load(path, rows[1:], tokenizer, max_length=8, filter_overlong_prompts=True)
    cut = load(path, rows[:2], tokenizer, max_length=8, truncation="right")
    assert tokenizer.decode(cut.row(1).token_ids) == "<|user|>1<|assistant|>23456"
    with pytest.raises(DataError, match=r"line 3: has 13 tokens, and no trained one is left"):
        load(path, rows, tokenizer, max_length=8, truncation="right")


def test_what_is_cut_moves_the_trained_tokens_with_it() -> None:
    whole = Demonstration(np.arange(10, 20, dtype=np.int32), np.array([2, 3, 7, 8, 9]))
    for side, ids, positions in (
        ("left", [16, 17, 18, 19], [1, 2, 3]),
        ("right", [10, 11, 12, 13], [2, 3]),
        ("middle", [10, 11, 18, 19], [2, 3]),
    ):
        cut = cut_to(whole, 4, side)
        assert (cut.token_ids.tolist(), cut.positions.tolist()) == (ids, positions)
    assert cut_to(whole, 3, "left").positions.tolist() == [1, 2], "the first token has nothing before it"


def test_a_batch_trains_the_assistants_tokens_and_reads_the_others() -> None:
    several = Demonstration(np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([1, 2, 4]))
    batch = supervised_batch([several, Demonstration(np.array([4, 3], dtype=np.int32), np.array([1]))])
    assert batch.prompt_lengths_N.tolist() == [1, 1] and batch.response_lengths_N.tolist() == [4, 1]
    assert batch.token_ids_S.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert batch.positions().tolist() == [1, 2, 4, 6] and batch.trained_lengths_N.tolist() == [3, 1]
    assert batch.group_N.tolist() == [0, 1] and batch.num_trained_tokens == 4
    assert batch.advantages_T is None and batch.rollout_logprobs_T is None and batch.old_logprobs_T is None
    assert batch.counts().num_tokens == 4
    other = batch.select([1, 0])
    assert other.token_ids_S.tolist() == [4, 3, 5, 6, 7, 8, 9] and other.positions().tolist() == [1, 3, 4, 6]


def test_a_folder_of_rollouts_is_data(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (1, 2):
        (folder / f"step_{step}.jsonl").write_text(json.dumps(rollout(tokenizer, response=str(step))) + "\n")
    data = DemonstrationSet([str(folder)], Config(data=DataConfig(responses="rows")), tokenizer).checked()
    texts = [tokenizer.decode(data.row(row).token_ids) for row in (0, 1)]
    assert texts == [f"<|user|>1+1<|assistant|>{step}<|end|>" for step in (1, 2)]
