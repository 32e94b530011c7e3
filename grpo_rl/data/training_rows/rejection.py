"""Rejection sampling: which of the sampled responses are trained on, and the rows that they become."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_rl.config.derived import gen_batch_size
from grpo_rl.config.schema.tree import Config, DataConfig, RejectionConfig
from grpo_rl.data.training_rows.pairs import pairs_of_groups
from grpo_rl.types import Rollout

Rows = list[dict[str, Any]]
_COLUMNS = ("prompt_key", "response_key", "chosen_key", "rejected_key", "messages_key", "custom_cls", "system_prompt")


def parts_of(config: Config, num_prompts: int) -> list[range]:
    """Return the prompts that are sampled at a time, by their rows."""
    size = gen_batch_size(config)
    return [range(start, min(start + size, num_prompts)) for start in range(0, num_prompts, size)]


def reading(config: Config, file: str) -> Config:
    """Return the configuration with which collected rows are read: theirs are the default columns, whatever the prompts' are."""
    columns = {name: getattr(DataConfig(), name) for name in _COLUMNS}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train_files=[file], **columns))


class Kept:
    """The choice among rows in their order: no response twice for the same prompt, and at most `max_per_prompt` of them."""

    def __init__(self, rejection: RejectionConfig) -> None:
        self.rejection = rejection
        self.num_kept = self.num_duplicates = self.num_over = 0
        self._seen: set[bytes] = set()
        self._of_prompt: Counter[bytes] = Counter()

    def takes(self, row: dict[str, Any]) -> bool:
        """Return whether the row is kept, and count it."""
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


def answer_rows(rollouts: Sequence[Rollout], min_reward: float) -> Rows:
    """Return a row for each response with a reward of at least `min_reward` and with text, as `data.responses=rows` reads it.

    Prompt and response are the texts that the model read and wrote, as in the log of rollouts, whose columns these are.
    """
    kept = [r for r in rollouts if r.reward is not None and r.reward >= min_reward and str(r.text).strip()]
    return [
        {
            "prompt": rollout.prompt.text,
            "response": str(rollout.text),
            "reward": rollout.reward,
            "data_source": rollout.prompt.data_source,
            "ground_truth": rollout.prompt.ground_truth,
            "uid": rollout.prompt.uid,
            "sample": rollout.sample_index,
            "finish_reason": rollout.finish_reason,
            "prompt_length": len(rollout.prompt.token_ids),
            "response_length": len(rollout.response_ids),
        }
        for rollout in kept
    ]


def pair_rows(rollouts: Sequence[Rollout]) -> Rows:
    """Return a row with the best and the worst response of each group whose rewards differ."""
    return [
        {
            "prompt": best.prompt.text if best.prompt.messages is None else list(best.prompt.messages),
            "chosen": str(best.text),
            "rejected": str(worst.text),
            "chosen_reward": best.reward,
            "rejected_reward": worst.reward,
            "data_source": best.prompt.data_source,
            "ground_truth": best.prompt.ground_truth,
            "uid": best.prompt.uid,
        }
        for best, worst in pairs_of_groups(rollouts)
        if str(best.text).strip() and str(worst.text).strip() and best.text != worst.text
    ]


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()
