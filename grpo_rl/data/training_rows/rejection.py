"""Rejection sampling: which sampled responses are trained on, and the rows that they become."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from grpo_rl.config.schema.tree import Config, DataConfig, RejectionConfig
from grpo_rl.data.rows import Row
from grpo_rl.data.training_rows.pairs import best_and_worst

_OF_LOG = (
    *("prompt", "response", "token_ids", "reward", "data_source", "ground_truth", "uid", "sample", "finish_reason"),
    *("prompt_length", "response_length"),
)
"""Columns of the log of rollouts that a collected row has."""
_COLUMNS = ("prompt_key", "response_key", "chosen_key", "rejected_key", "messages_key", "custom_cls", "system_prompt")


def parts_of(config: Config, num_prompts: int) -> list[range]:
    size = config.gen_batch_size
    return [range(start, min(start + size, num_prompts)) for start in range(0, num_prompts, size)]


def reading(config: Config, file: str) -> Config:
    """Collected rows have the default columns, whatever the prompts' are."""
    columns = {name: getattr(DataConfig(), name) for name in _COLUMNS}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train_files=[file], **columns))


class Kept:
    """Chooses rows in their order: no response twice for a prompt, and at most `max_per_prompt`."""

    def __init__(self, rejection: RejectionConfig) -> None:
        self.rejection = rejection
        self.num_kept = self.num_duplicates = self.num_over = 0
        self._seen: set[bytes] = set()
        self._of_prompt: Counter[bytes] = Counter()

    def takes(self, row: Row) -> bool:
        prompt = _digest(row["prompt"])
        answer = _digest([row["prompt"], row.get("response"), row.get("chosen"), row.get("rejected")])
        if self.rejection.deduplicate and answer in self._seen:
            self.num_duplicates += 1
            return False
        self._seen.add(answer)
        if self.rejection.max_per_prompt is not None and self._of_prompt[prompt] >= self.rejection.max_per_prompt:
            self.num_over += 1
            return False
        self._of_prompt[prompt] += 1
        self.num_kept += 1
        return True


def answer_rows(records: Sequence[Mapping[str, Any]], min_reward: float) -> list[Row]:
    accepted = [row for row in records if row["reward"] is not None and row["reward"] >= min_reward and row["response"].strip()]
    return [{name: record[name] for name in _OF_LOG} for record in accepted]


def pair_rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The best and the worst response of each group whose rewards and texts differ."""
    answered = [record for record in records if record["response_length"]]
    extremes = best_and_worst(answered, itemgetter("uid"), itemgetter("reward"), itemgetter("sample"))
    return [
        {
            "prompt": best["prompt"] if best["messages"] is None else list(best["messages"]),
            "chosen": best["response"],
            "rejected": worst["response"],
            "chosen_ids": best["token_ids"],
            "rejected_ids": worst["token_ids"],
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
            "data_source": best["data_source"],
            "ground_truth": best["ground_truth"],
            "uid": best["uid"],
        }
        for best, worst in extremes
        if best["response"].strip() and worst["response"].strip() and best["response"] != worst["response"]
    ]


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()
