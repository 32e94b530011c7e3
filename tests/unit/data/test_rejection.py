"""Rejection sampling: which responses become rows, and that these are read back as they were sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.config.schema.tree import Config, DataConfig, RejectionConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.training_rows import rejection
from grpo_rl.data.training_rows.conversations import DemonstrationSet
from grpo_rl.data.training_rows.pairs import PairSet
from grpo_rl.data.training_rows.rejection import Kept, reading
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.rollout_log import record_of
from grpo_rl.types import Prompt, Rollout
from tests.unit.envs.chat_templates import GEMMA, LLAMA3, QWEN25, tokenizer_of


def rollout(text: str, reward: float | None, *, row: int = 0, sample: int = 0, finish: str = "stop") -> Rollout:
    tokenizer = build_tokenizer(128)
    asked = f"<|user|>{row}+1=<|assistant|>"
    prompt_ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    prompt = Prompt(f"row-{row}", prompt_ids, asked, "sums", str(row + 1), messages=({"role": "user", "content": f"{row}+1="},))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [tokenizer.eos_token_id] if finish == "stop" else []
    return Rollout(prompt, sample, ids, [0.0] * len(ids), finish, ((0, len(ids)),), text=text, reward=reward)


def answer_rows(rollouts: list[Rollout], min_reward: float) -> list[dict[str, Any]]:
    return rejection.answer_rows(
        [record_of(one) | {"token_ids": np.asarray(one.response_ids).tolist()} for one in rollouts], min_reward
    )


def kept(rows: list[dict[str, Any]], **options: Any) -> tuple[list[str], Kept]:
    chosen = Kept(RejectionConfig(**options))
    return [row["response"] for row in rows if chosen.takes(row)], chosen


def test_each_response_to_a_prompt_is_kept_once_also_where_the_prompt_comes_again() -> None:
    again = rollout("1", 1.0, row=0)
    again.prompt = Prompt("row-9", again.prompt.token_ids, again.prompt.text, "sums")
    rows = answer_rows([rollout("1", 1.0), rollout("1", 1.0, sample=1), rollout("1", 1.0, row=1), again], 1.0)
    texts, chosen = kept(rows)
    assert texts == ["1", "1"] and (chosen.num_kept, chosen.num_duplicates) == (2, 2)
    assert len(kept(rows, deduplicate=False)[0]) == 4


def test_the_cap_keeps_the_first_of_each_prompt() -> None:
    sampled = [rollout(text, 1.0, row=row, sample=n) for row in (0, 1) for n, text in enumerate("1213")]
    texts, chosen = kept(answer_rows(sampled, 1.0), max_per_prompt=2)
    assert texts == ["1", "2", "1", "2"]
    assert (chosen.num_kept, chosen.num_duplicates, chosen.num_over) == (4, 2, 2)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_collected_row_is_read_as_the_tokens_that_were_sampled(tmp_path: Path, finish: str) -> None:
    sampled = [rollout("12", 1.0, row=11, finish=finish), rollout("8", 1.0, row=7, finish=finish)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in answer_rows(sampled, 1.0)))
    # The columns of the prompts are the user's; collected rows have their own.
    data = DataConfig(responses="initial_policy", prompt_key="question", response_key="extra.answer", system_prompt="Be right.")
    config = reading(Config(data=data), str(file))
    rows = DemonstrationSet(config.data.train_files, config, build_tokenizer(128)).checked()
    for number, one in enumerate(sampled):
        expected = np.concatenate([one.prompt.token_ids, one.response_ids])
        assert rows.row(number).token_ids.tolist() == expected.tolist()
        assert rows.row(number).positions.tolist() == list(range(len(one.prompt.token_ids), len(expected)))


# ---- what was sampled is trained by its tokens -----------------------------------------------------------------


def odd(text: str, template: str, end: str, *, reward: float = 1.0, sample: int = 0) -> tuple[Any, Rollout]:
    """Return a tokenizer and a response that was sampled in single letters, which the tokenizer would merge, with this end."""
    tokenizer = tokenizer_of(template, "<|endoftext|>")
    messages = ({"role": "user", "content": "?"},)
    asked = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    prompt = Prompt("row-0", tokenizer(asked, add_special_tokens=False)["input_ids"], asked, "a", "x", messages=messages)
    ids = [number for letter in text for number in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert ids != tokenizer(text, add_special_tokens=False)["input_ids"]
    ids.append(tokenizer.convert_tokens_to_ids(end))
    return tokenizer, Rollout(prompt, sample, ids, [0.0] * len(ids), "stop", ((0, len(ids)),), text=text, reward=reward)


def record(one: Rollout) -> dict[str, Any]:
    return record_of(one) | {"token_ids": np.asarray(one.response_ids).tolist(), "messages": one.prompt.messages}


FAMILIES = [(GEMMA, "<end_of_turn>"), (QWEN25, "<|im_end|>"), (LLAMA3, "<|eot_id|>")]


@pytest.mark.parametrize(("template", "end"), FAMILIES)
def test_a_collected_response_keeps_its_tokens_and_its_end_where_its_text_would_give_others(
    tmp_path: Path, template: str, end: str
) -> None:
    tokenizer, sampled = odd("an ant in 1st", template, end)
    file, config = tmp_path / "train.jsonl", reading(Config(data=DataConfig(responses="initial_policy")), "")
    for with_ids in (True, False):
        rows = rejection.answer_rows([record(sampled)], 1.0)
        rows = rows if with_ids else [{name: value for name, value in row.items() if name != "token_ids"} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DemonstrationSet([str(file)], config, tokenizer).checked()
        learnt = data.row(0).token_ids[len(sampled.prompt.token_ids) :].tolist()
        assert (learnt == np.asarray(sampled.response_ids).tolist()) == with_ids
        # Without them the text is learnt, which is told; the end is the one that the template writes.
        assert tokenizer.convert_ids_to_tokens(learnt[-1]) == end and learnt.count(learnt[-1]) == 1
        assert ("1 sampled responses without their tokens" in str(data.report)) != with_ids


@pytest.mark.parametrize(("template", "end"), FAMILIES)
def test_collected_pairs_keep_their_tokens_and_written_ones_end_once(tmp_path: Path, template: str, end: str) -> None:
    tokenizer, best = odd("an ant", template, end)
    worst = odd("in an inn", template, end, reward=0.0, sample=1)[1]
    (row,) = rejection.pair_rows([record(best), record(worst)])
    file = tmp_path / "pairs.jsonl"
    for pair in (row, {name: value for name, value in row.items() if not name.endswith("_ids")}):
        file.write_text(json.dumps(pair) + "\n")
        read = PairSet([str(file)], Config(data=DataConfig(responses="rows")), tokenizer).checked().row(0)
        for ids, sampled in ((read.chosen_ids, best), (read.rejected_ids, worst)):
            assert tokenizer.decode(ids, skip_special_tokens=True).strip() == sampled.text
            assert tokenizer.convert_ids_to_tokens(int(ids[-1])) == end
            assert tokenizer.eos_token_id not in ids.tolist()
            assert (ids.tolist() == np.asarray(sampled.response_ids).tolist()) == (pair is row)


def test_tokens_of_another_tokenizer_are_not_taken() -> None:
    tokenizer, sampled = odd("an ant", QWEN25, "<|im_end|>")
    renderer = Renderer(DataConfig(), tokenizer)
    assert renderer.sampled(np.asarray(sampled.response_ids).tolist(), "an ant") == np.asarray(sampled.response_ids).tolist()
    for ids in (None, [], [1, 2], ["1"], [10**6], [True], [-1]):
        assert renderer.sampled(ids, "an ant") is None
