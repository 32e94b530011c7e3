from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.control_words import MARK, unmarked
from grpo_rl.data.prompts import truncate
from grpo_rl.data.row_set import RowSet
from grpo_rl.data.rows import BadRow, Example, Row, at, column, example, prompt_of
from grpo_rl.frozen import frozen
from grpo_rl.types import Prompt

TOKENIZED_AT_ONCE = 1024


@frozen
class PromptRow:
    example: Example
    text: str
    token_ids: np.ndarray
    """int32 [tokens]"""


class PromptDataset(RowSet[PromptRow]):
    kept_rows = 4096
    too_long = "the prompt has {length} tokens, more than data.max_prompt_length={longest}"
    ways_out = (
        "Raise max_prompt_length, drop such rows with data.filter_overlong_prompts=true, or cut them with "
        "data.truncation=left, right or middle"
    )

    def __init__(self, files: Sequence[str], config: DataConfig, tokenizer: Any, **options: Any) -> None:
        super().__init__(files, config, tokenizer, config.max_prompt_length, **options)
        self._data_sources: set[str] = set()

    @property
    def data_sources(self) -> list[str]:
        """Of the rows that were read."""
        return sorted(self._data_sources)

    def prompt(self, row_index: int, uid: str) -> Prompt:
        read = self.row(row_index)
        row = read.example
        messages = self.renderer.messages(row.prompt)
        return Prompt(uid, read.token_ids, read.text, row.data_source, row.ground_truth, row.extra_info, messages)

    def _example(self, row: Row, index: int) -> Example:
        return example(row, self.config)

    def _tokenized_all(self, indices: Sequence[int]) -> Iterator[tuple[int, PromptRow | BadRow]]:
        for start in range(0, len(indices), TOKENIZED_AT_ONCE):
            rows: list[tuple[int, Example, str]] = []
            for index in indices[start : start + TOKENIZED_AT_ONCE]:
                try:
                    stored = self._source.row(index)
                    with at(self._source.where(index)):
                        row = self._example(stored, index)
                        rows.append((index, row, self.renderer.render(row.prompt)))
                except BadRow as error:
                    yield index, error
            ids = self.renderer.tokenize([row.prompt for _, row, _ in rows], [text for _, _, text in rows])
            for (index, row, text), token_ids in zip(rows, ids, strict=True):
                self.report.num_control += MARK in text
                if token_ids:
                    yield index, PromptRow(row, unmarked(text), np.asarray(token_ids, dtype=np.int32))
                else:
                    yield index, BadRow(f"{self._source.where(index)}: column {self.config.prompt_key!r} has no tokens")

    def _cut(self, row: PromptRow) -> PromptRow:
        token_ids = truncate(row.token_ids, self.longest, self.config.truncation)
        return PromptRow(row.example, unmarked(self.renderer.tokenizer.decode(token_ids.tolist())), token_ids)

    def _keep(self, index: int, tokenized: PromptRow | BadRow) -> PromptRow:
        row = super()._keep(index, tokenized)
        self._data_sources.add(row.example.data_source)
        return row


class BarePromptDataset(PromptDataset):
    def _example(self, row: Row, index: int) -> Example:
        """Without a ground truth; a row without a source has the name of its file."""
        source = self.config.data_source or row.get(self.config.reward_fn_key)
        if not isinstance(source, str) or not source:
            source = Path(self._source.where(index).rpartition(", ")[0]).stem
        key = self.config.prompt_key
        return Example(prompt_of(column(row, key), key), source, None, {})
