"""Rated steps: the tokens that are scored, and bad rows with their place."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.rows import BadRow
from grpo_rl.data.tasks.arithmetic import rated_sums, written_steps
from grpo_rl.data.training_rows.rated_steps import rated_batch, rated_row, tokenized_steps
from grpo_rl.models import builtin
from grpo_rl.rewards.models.rendering import ScorableRenderer as Scoring
from grpo_rl.types import Prompt, Rollout

DATA = DataConfig()
LISTS = {"prompt": "What is 2+3+4?", "completions": ["2+3=5", "5+4=10"], "labels": [True, False]}


@pytest.fixture(scope="module")
def tokenizer():
    return builtin.build_tokenizer(builtin.get_builtin("arithmetic").vocab_size)


def test_rows_as_trl_has_them():
    assert rated_row(LISTS, DATA) == ("What is 2+3+4?", ["2+3=5", "5+4=10"], [1.0, 0.0])
    assert rated_row({**LISTS, "labels": [0.75, None]}, DATA)[2] == [0.75, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**LISTS, "labels": [True]}, "labels has 1 entries, and completions has 2"),
        ({**LISTS, "labels": [True, 1.5]}, r"labels\[1\].*1\.5"),
        ({**LISTS, "labels": [None, None]}, "none of its 2 steps has a label"),
        ({**LISTS, "completions": ["a", "  "]}, "step 2 of 2 has no text"),
        ({"prompt": "q", "text": "x"}, "there is no column 'completions'"),
    ],
)
def test_a_bad_row_says_what_is_wrong(row, message):
    with pytest.raises(BadRow, match=message):
        rated_row(row, DATA)


def test_steps_are_read_where_a_reward_model_scores_the_same_text(tokenizer):
    row = {
        "prompt": [{"role": "user", "content": "7+8+9="}],
        "completions": ["7+8=15", "15+9=24\n", "24"],
        "labels": [1, None, 0],
    }
    separator = "\n"
    found = tokenized_steps(rated_row(row, DATA), Renderer(DATA, tokenizer), separator)
    text = "7+8=15\n15+9=24\n24\n"
    assert tokenizer.decode(found.token_ids[found.prompt_length :].tolist()) == text
    prompt = Prompt("0", found.token_ids[: found.prompt_length], "", "")
    ids = found.token_ids[found.prompt_length :]
    rollout = Rollout(prompt, 0, ids, [0.0] * len(ids), "stop", (), text)
    scored = Scoring(tokenizer.decode, separator=separator)(rollout)
    assert found.token_ids.tolist() == list(scored.token_ids)
    assert found.positions.tolist() == [scored.positions[0], scored.positions[2]] and found.labels.tolist() == [1.0, 0.0]


def test_a_batch_scores_the_ends_of_the_labelled_steps(tokenizer):
    renderer = Renderer(DATA, tokenizer)
    rows = [tokenized_steps(rated_row({**LISTS, "labels": labels}, DATA), renderer, "\n") for labels in ([1, 0], [None, 1])]
    batch = rated_batch(rows)
    assert batch.trained_lengths_N.tolist() == [2, 1] and batch.labels_T.tolist() == [1.0, 0.0, 1.0]
    length = len(rows[0].token_ids)
    assert batch.positions().tolist() == [*rows[0].positions.tolist(), length + rows[1].positions[0]]
    swapped = batch.select([1, 0])
    assert swapped.labels_T.tolist() == [1.0, 1.0, 0.0]
    ends = swapped.token_ids_S[swapped.positions()]
    assert torch.equal(ends, batch.token_ids_S[batch.positions()][[2, 0, 1]])


def test_the_embedded_task_ends_with_its_first_wrong_step():
    assert written_steps(47, 85) == ["7+5=12", "4+8+1=13", "132"]
    assert written_steps(47, 85, [True, True]) == ["7+5=12", "4+8=12", "122"]
    rows = list(rated_sums(num_rows=400, errors=0.6))
    right = [all(row["labels"]) for row in rows]
    assert 0.3 < sum(right) / len(rows) < 0.5
    for row in rows:
        left, plus = row["prompt"][0]["content"].rstrip("=").split("+")
        truth = written_steps(int(left), int(plus))
        assert [step == same for step, same in zip(row["completions"], truth, strict=False)] == row["labels"]
        assert row["reward_model"]["ground_truth"] == row["extra_info"]["demonstration"] == "\n".join(truth)
        assert all(row["labels"][:-1]) and (len(row["labels"]) == len(truth) or not row["labels"][-1])
    val = {row["prompt"][0]["content"] for row in rated_sums(num_rows=200, split="val")}
    assert not val & {row["prompt"][0]["content"] for row in rows}
