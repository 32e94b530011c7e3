"""Demonstrations as training data: conversations whose assistant turns are learnt, and the batches that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_rl.config.derived import longest_sequence
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.source import BadRow
from grpo_rl.data.training_rows.conversations import Demonstration, Tokenizing, conversation
from grpo_rl.data.training_rows.training_set import RowSet, batch_of_sequences
from grpo_rl.types import Batch


class DemonstrationSet(RowSet[Demonstration]):
    """The demonstrations of one or several sources, by their row."""

    ways_out = (
        "Raise data.max_length, drop such rows with data.filter_overlong_prompts=true, or cut them with "
        "data.truncation=left, right or middle"
    )

    def __init__(
        self, files: Sequence[str], config: DataConfig, longest: int, tokenizer: Any, bad_rows: BadRows | None, limit: int
    ) -> None:
        # First: a template that marks no answers is refused before any file is opened.
        self._tokenizing = Tokenizing(config, tokenizer)
        self.renderer = self._tokenizing.renderer
        super().__init__(files, config, longest, tokenizer, bad_rows, limit)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return these rows as a batch: see `supervised_batch`."""
        return supervised_batch([self.row(row) for row in rows])

    def _sizes(self, row: Demonstration) -> tuple[int, int, int]:
        return len(row.token_ids), len(row.token_ids), len(row.positions)

    def _tokenized(self, row: dict[str, Any], where: str) -> Demonstration:
        return self._tokenizing(conversation(row, where, self.config), where)

    def _cut(self, row: Demonstration, length: int, where: str) -> Demonstration:
        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            return super()._cut(row, length, where)
        cut = cut_to(row, self.longest, self.config.truncation)
        if not len(cut.positions):
            raise BadRow(
                f"{where}: has {length} tokens, and no trained one is left in the {self.longest} that "
                f"data.truncation={self.config.truncation} keeps"
            )
        return cut


def cut_to(found: Demonstration, limit: int, side: str) -> Demonstration:
    """Return `limit` of the tokens: `left` and `right` cut off that side, `middle` keeps both ends.

    The first token that is left is not trained, for nothing comes before it.
    """
    head = {"left": 0, "right": limit}.get(side, limit // 2)
    gone = len(found.token_ids) - limit
    token_ids = np.concatenate([found.token_ids[:head], found.token_ids[head + gone :]])
    positions = found.positions
    positions = np.concatenate([positions[positions < head], positions[positions >= head + gone] - gone])
    return Demonstration(token_ids, positions[positions > 0])


def load_demonstrations(
    files: Sequence[str],
    config: Config,
    tokenizer: Any,
    *,
    max_samples: int,
    whole: bool = False,
    bad_rows: BadRows | None = None,
    note: Callable[[str], None] | None = None,
) -> DemonstrationSet:
    """Return the rows of all `files`, in order, as demonstrations; of these the first `max_samples` (-1: all).

    Up to `data.check_rows` rows, or any number that is wanted `whole`, are checked here; of more, a sample. Raises DataError
    with file, row and column, and ConfigError for a task or template option.
    """
    found = DemonstrationSet(files, config.data, longest_sequence(config), tokenizer, bad_rows, max_samples)
    return found.checked(whole, note)


def supervised_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """Return the demonstrations as a batch, each in a group of its own.

    The prompt of each ends before its first trained token; what is not trained after that is context between turns.
    """
    prompt_lengths = [int(found.positions[0]) for found in demonstrations]
    return batch_of_sequences(demonstrations, prompt_lengths, rewards=1.0)
