"""Answers to imitate, for the supervised warm start of an embedded model."""

from __future__ import annotations

from typing import Any

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.data.training_rows.conversations import Demonstration, Tokenizing, conversation


def demonstrations(task: str, tokenizer: Any) -> list[Demonstration]:
    """Return one demonstration per row of `task:NAME?...`: the chat-templated prompt, and the answer to imitate.

    That is `extra_info.demonstration` where the task made one (it may be wrong on purpose), else the ground truth.
    """
    made, truth = (DataConfig(response_key=key) for key in ("extra_info.demonstration", "reward_model.ground_truth"))
    tokenizing = Tokenizing(truth, tokenizer)
    found = []
    for number, row in enumerate(task_rows(task)):
        where = f"{task}, row {number}"
        config = made if "demonstration" in row["extra_info"] else truth
        found.append(tokenizing(conversation(row, where, config), where))
    return found
