"""Solutions whose steps are rated, for process reward models, in the form of TRL's stepwise supervision.

`labels` of the steps in `completions` are true or false, or numbers from 0 (bad) to 1 (good); a step with
null is read and not trained. PRM800K (arXiv 2305.20050) and Math-Shepherd (arXiv 2312.08935) are published so
as trl-lib/prm800k and trl-lib/math_shepherd.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.row_set import TrainingSet, batch_of_sequences
from grpo_rl.data.rows import Asked, BadRow, Row, check_row, column, expect, finite, prompt_of, wrong
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.types import Batch

RatedTexts = tuple[Asked, list[str], list[float | None]]
"""The prompt, its steps, and the label of each from 0 to 1."""


@frozen
class RatedSteps:
    token_ids: np.ndarray
    """int32 [tokens]"""
    prompt_length: int
    positions: np.ndarray
    """int64 [labelled steps]: their last tokens, ascending"""
    labels: np.ndarray
    """float32 [labelled steps]"""


def rated_row(row: Row, config: DataConfig) -> RatedTexts:
    check_row(row)
    prompt = prompt_of(column(row, config.prompt_key), config.prompt_key)
    steps, labels = column(row, "completions"), column(row, "labels")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise wrong("completions", steps, "a list of texts, the steps")
    expect(labels, list, "labels", "a list with one label for each step")
    if len(labels) != len(steps):
        raise BadRow(f"labels has {len(labels)} entries, and completions has {len(steps)}; expected one label for each step")
    for number, step in enumerate(steps):
        if not step.strip():
            raise BadRow(f"step {number + 1} of {len(steps)} has no text")
    if all(label is None for label in labels):
        raise BadRow(f"none of its {len(steps)} steps has a label; expected one at least")
    return prompt, steps, [_label(label, number) for number, label in enumerate(labels)]


def _label(label: Any, number: int) -> float | None:
    if label is None:
        return None
    value = float(label) if isinstance(label, bool) else finite(label)
    if not 0 <= value <= 1:
        raise wrong(f"labels[{number}]", label, "true or false, a number from 0 to 1, or null for none")
    return value


class RatedStepSet(TrainingSet[RatedSteps]):
    ways_out = "Raise data.max_length, or drop such rows with data.filter_overlong_prompts=true"

    def __init__(self, files: Sequence[str], config: Config, tokenizer: Any, **options: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("reward.reward_model.step_separator: needs a fast tokenizer, which says where each token begins")
        super().__init__(files, config, tokenizer, **options)

    def batch(self, rows: Sequence[int]) -> Batch:
        return rated_batch([self.row(row) for row in rows])

    def _tokenized(self, row: Row) -> RatedSteps:
        separator = self.run.reward.reward_model.step_separator
        assert separator is not None
        return tokenized_steps(rated_row(row, self.config), self.renderer, separator.replace("\\n", "\n"))


def tokenized_steps(texts: RatedTexts, renderer: Renderer, separator: str) -> RatedSteps:
    """The separator stands behind each step: it tells nothing of a label.

    A step ends with the token of its last character, the separator included, as for a reward model
    (`rewards/models/rendering.py`). Raises BadRow for two steps that end in one token.
    """
    prompt, steps, labels = texts
    prompt_ids = renderer.prompt_ids(prompt, renderer.render(prompt))
    words = renderer.words
    text, ends = "", []
    for step in steps:
        # A separator inside of a step would cut it in two.
        text += words.marked(" ".join(piece for piece in step.split(separator) if piece.strip()).strip()) + separator
        ends.append(len(text))
    encoded = words.encode(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    places = [bisect_left(starts, end) - 1 for end in ends]
    if len(set(places)) < len(places):
        raise BadRow(f"two of its {len(places)} steps end in the same token")
    labelled = [(len(prompt_ids) + place, label) for place, label in zip(places, labels, strict=True) if label is not None]
    return RatedSteps(
        np.asarray([*prompt_ids, *encoded["input_ids"]], dtype=np.int32),
        len(prompt_ids),
        np.asarray([place for place, _ in labelled], dtype=np.int64),
        np.asarray([label for _, label in labelled], dtype=np.float32),
    )


def rated_batch(rows: Sequence[RatedSteps]) -> Batch:
    """Each solution is a group; trained are the ends of the labelled steps."""
    labels_T = torch.from_numpy(np.concatenate([row.labels for row in rows]))
    positions = [row.positions for row in rows]
    return batch_of_sequences(
        [row.token_ids for row in rows], [row.prompt_length for row in rows], 0.0, positions, labels_T=labels_T
    )
