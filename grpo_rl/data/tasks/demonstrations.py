"""Prompts with answers to imitate, for the supervised warm start of an embedded model."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_rl.data.tasks.registry import task_rows


class Demonstration(NamedTuple):
    """Tokens of a prompt and of the answer to imitate, the end-of-sequence token included."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    prompt: str
    answer: str


def demonstrations(task: str, tokenizer: Any) -> list[Demonstration]:
    """One demonstration per row of `task:NAME?...`: the chat-templated prompt, and the answer to imitate.

    That is `extra_info.demonstration` where the task made one (it may be wrong on purpose), else the ground truth.
    """
    pairs = []
    for row in task_rows(task):
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        answer = row["extra_info"].get("demonstration", row["reward_model"]["ground_truth"])
        prompt_ids, answer_ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        pairs.append(Demonstration(tuple(prompt_ids), (*answer_ids, tokenizer.eos_token_id), prompt, answer))
    return pairs
