"""Preference pairs: every format that is read, every row that is refused, and the batches they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.collate import collate
from grpo_rl.data.row_set import BadRows
from grpo_rl.data.rows import BadRow
from grpo_rl.data.training_rows.pairs import (
    LabelledSet,
    PairSet,
    labelled_texts,
    pair_texts,
    pairs_of_groups,
    with_sides,
)
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.types import Prompt, Rollout

TOKENIZER = build_tokenizer(128)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


GOOD: dict[str, Any] = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
HH = "\n\nHuman: 1+1?\n\nAssistant: It"


# ---- formats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        (GOOD, "1+1=", "2", "3"),
        ({"prompt": [user("1+1=")], "chosen": "2", "rejected": "3"}, [user("1+1=")], "2", "3"),
        # TRL, conversational with an explicit prompt.
        ({"prompt": [user("1+1=")], "chosen": [assistant("2")], "rejected": [assistant("3")]}, [user("1+1=")], "2", "3"),
        # TRL, and OpenRLHF without a prompt_key: conversational with the prompt in both sides.
        ({"chosen": [user("1+1="), assistant("2")], "rejected": [user("1+1="), assistant("3")]}, [user("1+1=")], "2", "3"),
        # The first assistant message that both share is part of the prompt.
        (
            {side: [user("a"), assistant("b"), user("c"), assistant(side)] for side in ("chosen", "rejected")},
            [user("a"), assistant("b"), user("c")],
            "chosen",
            "rejected",
        ),
        # UltraFeedback: the prompt as text, and again as the first message of both sides.
        (
            {"prompt": "1+1=", "chosen": [user("1+1="), assistant("2")], "rejected": [user("1+1="), assistant("3")]},
            [user("1+1=")],
            "2",
            "3",
        ),
        ({"prompt": "1+1=", "chosen": [assistant("2")], "rejected": [assistant("3")]}, [user("1+1=")], "2", "3"),
        # A prompt column, and whole conversations beside it.
        (
            {"prompt": [user("q")], "chosen": [user("q"), assistant("2")], "rejected": [user("q"), assistant("3")]},
            [user("q")],
            "2",
            "3",
        ),
        # HH-RLHF: plain texts that begin alike; words are not cut in two.
        ({"chosen": HH + " is 12.", "rejected": HH + " is 13."}, HH + " is", " 12.", " 13."),
    ],
)
def test_every_format_gives_the_same_pair(row: dict[str, Any], prompt: Any, chosen: str, rejected: str) -> None:
    assert pair_texts(row, DataConfig(), with_margin=True) == (prompt, chosen, rejected, None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1=", "rejected": "3"}, r"there is no column 'chosen'\. The row has prompt, rejected"),
        ({**GOOD, "chosen": None}, r"column 'chosen' is None \(NoneType\); expected a text, or a list"),
        ({**GOOD, "chosen": "3"}, "columns 'chosen' and 'rejected' have the same answer; expected two that differ"),
        ({**GOOD, "rejected": " \n"}, "column 'rejected' has an empty answer; expected one with text"),
        ({**GOOD, "prompt": ""}, r"column 'prompt' is '' \(str\); expected a list of .*, or a non-empty string"),
        ({"chosen": "two", "rejected": "three"}, "no column 'prompt', and 'chosen' and 'rejected' do not begin with the same"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "there is no prompt: neither a column 'prompt' nor"),
        (
            {"chosen": [], "rejected": [], "prompt": "q"},
            r"column 'chosen' is \[\] \(list\); expected a list of \{role, content\} messages",
        ),
        ({"prompt": "q", "chosen": [assistant("a")], "rejected": "b"}, r"column 'rejected' is 'b' \(str\); expected a list"),
        (
            {"prompt": [user("q")], "chosen": [assistant("a"), user("b")], "rejected": [assistant("c")]},
            "column 'chosen' goes on with messages of assistant, user; expected one of the assistant",
        ),
        (
            {"prompt": "other", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            "column 'prompt' is 'other'.*expected what the user says in 'chosen' and 'rejected'",
        ),
        ({**GOOD, "margin": "far"}, r"column 'margin' is 'far' \(str\); expected a finite number or nothing"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        pair_texts(row, DataConfig(), with_margin=True)


# ---- files --------------------------------------------------------------------------------------------


def write(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def load(file: str, bad_rows: BadRows | None = None, **options: Any) -> PairSet:
    config = Config(data=DataConfig(responses="rows", **options))
    return PairSet([file], config, TOKENIZER, bad_rows=bad_rows).checked()


def test_answers_are_the_tokens_that_the_policy_would_sample_and_its_end(tmp_path: Path) -> None:
    data = load(write(tmp_path, GOOD, {**GOOD, "chosen": "1+1=2"}))
    pair = data.row(0)
    assert TOKENIZER.decode(pair.prompt_ids) == "1+1=" and TOKENIZER.decode(pair.chosen_ids[:-1]) == "2"
    assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == TOKENIZER.eos_token_id
    assert (len(data), pair.prompt_ids.dtype) == (2, np.int32)


def test_a_chat_template_makes_prompt_and_answer_together_the_rendered_conversation(tmp_path: Path) -> None:
    # A template that writes something after the assistant's end-of-sequence token, as Qwen's does.
    template = (
        "{% for m in messages %}{{ '#' if m['role'] == 'user' else '' }}{{ m['content'] }}{{ '" + TOKENIZER.eos_token + "+' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '' }}{% endif %}"
    )
    rows = [{"prompt": [user("1+1")], "chosen": [assistant("2")], "rejected": [assistant("3")]}]
    pair = load(write(tmp_path, *rows), chat_template=template).row(0)
    whole = TOKENIZER.apply_chat_template([user("1+1"), assistant("2")], chat_template=template, tokenize=True)
    whole = whole if isinstance(whole, list) else whole["input_ids"]
    # All but the '+' behind the end: nothing samples that.
    assert [*pair.prompt_ids.tolist(), *pair.chosen_ids.tolist()] == whole[:-1]
    assert pair.chosen_ids[-1] == TOKENIZER.eos_token_id and pair.chosen_ids.tolist().count(TOKENIZER.eos_token_id) == 1


def test_a_long_pair_is_never_cut(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, {**GOOD, "prompt": "1+" * 30 + "1="}, {**GOOD, "chosen": "1" * 40})
    with pytest.raises(DataError, match=r"line 2: has 64 tokens, more than the longest sequence of 32; 2 rows are too long"):
        load(file, max_length=32, truncation="left")
    assert len(load(file, max_length=32, filter_overlong_prompts=True)) == 1


def test_a_batch_has_both_sides_of_every_pair(tmp_path: Path) -> None:
    data = load(write(tmp_path, GOOD, {"prompt": "10+10=", "chosen": "20", "rejected": "1"}, GOOD))
    batch = data.batch([1, 0])
    assert batch.group_N.tolist() == [0, 0, 1, 1] and batch.chosen_N is not None and batch.advantages_T is not None
    assert batch.chosen_N.tolist() == [True, False, True, False]
    assert batch.prompt_lengths_N.tolist() == [6, 6, 4, 4] and batch.trained_lengths_N.tolist() == [3, 2, 2, 2]
    assert batch.advantages_T.tolist() == [1, 1, 1, -1, -1, 1, 1, -1, -1]
    texts = [TOKENIZER.decode(ids) for ids in batch.token_ids_S.split(batch.sequence_lengths_N.tolist())]
    assert [text.removesuffix(TOKENIZER.eos_token) for text in texts] == ["10+10=20", "10+10=1", "1+1=2", "1+1=3"]
    assert batch.counts().num_groups == 2
    pairs = Pairs.of(batch.group_N, batch.chosen_N)
    assert (pairs.chosen_P.tolist(), pairs.rejected_P.tolist()) == ([0, 2], [1, 3])


# ---- groups of rollouts -------------------------------------------------------------------------------


def rollout(uid: str, index: int, reward: float | None, ids: list[int] | None = None) -> Rollout:
    prompt = Prompt(uid, [5, 6], "p", "s")
    ids = [7, 8 + index] if ids is None else ids
    return Rollout(prompt, index, ids, [-1.0] * len(ids), "stop", ((0, len(ids)),), reward=reward)


def test_the_best_is_paired_with_the_worst_of_each_group() -> None:
    rollouts = [
        *(rollout("a", i, reward) for i, reward in enumerate([0.5, 1.0, 0.0, 1.0, 0.0])),
        *(rollout("tie", i, 1.0) for i in range(3)),
        rollout("alone", 0, 1.0),
        *(rollout("b", i, reward) for i, reward in enumerate([None, float("nan"), -2.0, -1.0])),
        rollout("empty", 0, 1.0),
        rollout("empty", 1, 0.0, ids=[]),
        rollout("same", 0, 1.0, ids=[9]),
        rollout("same", 1, 0.0, ids=[9]),
    ]
    pairs = pairs_of_groups(rollouts)
    assert [(p.prompt.uid, p.sample_index, q.sample_index) for p, q in pairs] == [("a", 1, 2), ("b", 3, 2)]
    batch = with_sides(collate([member for pair in pairs for member in pair]))
    assert batch.chosen_N is not None and batch.chosen_N.tolist() == [True, False, True, False]
    assert batch.group_N.tolist() == [0, 0, 1, 1] and batch.rewards_N.tolist() == [1.0, 0.0, -1.0, -2.0]
    assert batch.rollout_logprobs_T.tolist() == [-1.0] * 8


# ---- labelled answers: TRL's unpaired preferences -------------------------------------------------------


@pytest.mark.parametrize("prompt", ["1+1=", [user("1+1=")]])
@pytest.mark.parametrize("completion", ["2", [assistant("2")]])
def test_labelled_rows_are_read_in_both_of_trls_forms(prompt: Any, completion: Any) -> None:
    row = {"prompt": prompt, "completion": completion, "label": True}
    assert labelled_texts(row, DataConfig()) == (prompt, "2", True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": 1}, r"column 'label' is 1 \(int\); expected true where the answer is desirable, else false"),
        ({"completion": " "}, "column 'completion' has an empty answer"),
        ({"completion": [user("2")]}, "expected a text, or one message of the assistant"),
    ],
)
def test_labelled_rows_that_say_nothing_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        labelled_texts({"prompt": "1+1=", "completion": "2", "label": True} | changed, DataConfig())


def test_a_labelled_row_comes_with_the_answer_of_the_next_one_to_its_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1), "label": i % 2 == 0} for i in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = LabelledSet([str(file)], Config(), TOKENIZER).checked().batch([2, 0])
    texts = [
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in batch.token_ids_S.split(batch.sequence_lengths_N.tolist())
    ]
    assert texts == ["2+1=3", "2+1=1", "0+1=1", "0+1=2"]
    assert batch.group_N.tolist() == [0, 0, 1, 1] and batch.chosen_N is not None and batch.chosen_N.all()
