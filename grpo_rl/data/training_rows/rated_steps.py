"""Solutions whose steps are rated, for process reward models: from the formats in which they are published to tokens.

A row is one of
- `prompt`, `completions` (the steps), `labels`: TRL's stepwise supervision,
- `instruction`, `responses` (the steps before), `next_response`, `rating`: PRM800K as a table, one rated step a row,
- `question`, `label.steps`: PRM800K's own lines (arXiv 2305.20050), of which the path that the labelling followed is taken,
- `input`, `label`: Math-Shepherd (arXiv 2312.08935), with `ки` after every step of the one, and + or - in its place in the other.

A label is true or false, or a number from 0 (bad) to 1 (good); null is a step without one, which is read and not trained. A rating
of PRM800K is -1 (bad, label 0), 0 (neutral, label 0.5) or 1 (good).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_rl.config.derived import longest_sequence
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.row_set import TrainingSet, batch_of_sequences
from grpo_rl.data.rows import Asked, BadRow, Message, check_values, column, expect, finite, prompt_of, wrong
from grpo_rl.errors import ConfigError
from grpo_rl.types import Batch

STEP_MARK = "ки"
"""Math-Shepherd's mark at the end of a step."""
_FIRST_STEP = "Step 1:"
_RATINGS = {-1: 0.0, 0: 0.5, 1: 1.0}


@dataclass(frozen=True, slots=True)
class RatedTexts:
    """A row before it is rendered."""

    prompt: Asked
    steps: list[str]
    labels: list[float | None]
    """The label of each step, from 0 to 1; None: it has none."""
    is_whole: bool = True
    """The last step ends the response, so that no separator follows it."""


@dataclass(frozen=True, slots=True)
class RatedSteps:
    """A solution in tokens, with the last token of each labelled step."""

    token_ids: np.ndarray
    """int32 [tokens]: prompt and steps."""
    prompt_length: int
    positions: np.ndarray
    """int64 [labelled steps], ascending"""
    labels: np.ndarray
    """float32 [labelled steps]"""


# ---- one row -----------------------------------------------------------------------------------------


def rated_row(row: dict[str, Any], where: str, config: DataConfig) -> RatedTexts:
    """Return the solution of a row of any of the formats. Raises BadRow, with the place, for what is not one."""
    check_values(row, where)
    for columns, read in _FORMATS:
        if all(name in row for name in columns):
            found = read(row, where, config)
            break
    else:
        expected = "; ".join(", ".join(columns) for columns, _ in _FORMATS)
        raise BadRow(f"{where}: has the columns {', '.join(map(str, row))}; expected those of one of these formats: {expected}")
    for number, step in enumerate(found.steps):
        if not step.strip():
            raise BadRow(f"{where}: step {number + 1} of {len(found.steps)} has no text")
    if all(label is None for label in found.labels):
        raise BadRow(f"{where}: none of its {len(found.steps)} steps has a label; expected one at least")
    return found


def _of_lists(row: dict[str, Any], where: str, config: DataConfig) -> RatedTexts:
    prompt = prompt_of(column(row, config.prompt_key, where), where, config.prompt_key)
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise wrong(where, "completions", steps, "a list of texts, the steps")
    expect(labels, list, where, "labels", "a list with one label for each step")
    if len(labels) != len(steps):
        raise BadRow(
            f"{where}: labels has {len(labels)} entries, and completions has {len(steps)}; expected one label for each step"
        )
    numbers = [_label(label, where, number) for number, label in enumerate(labels)]
    # Whether the last step ends the solution is not known: a separator after it, as TRL has it, tells nothing about its label.
    return RatedTexts(prompt, steps, numbers, is_whole=False)


def _label(label: Any, where: str, number: int) -> float | None:
    if label is None:
        return None
    value = float(label) if isinstance(label, bool) else finite(label)
    if not 0 <= value <= 1:
        raise wrong(where, f"labels[{number}]", label, "true or false, a number from 0 to 1, or null for none")
    return value


def _of_next_step(row: dict[str, Any], where: str, config: DataConfig) -> RatedTexts:
    del config
    problem, before, step = row["instruction"], row["responses"] or [], row["next_response"]
    if not isinstance(problem, str) or not problem:
        raise wrong(where, "instruction", problem, "a non-empty text")
    if not isinstance(before, list) or not all(isinstance(text, str) for text in before):
        raise wrong(where, "responses", before, "a list of texts, the steps before")
    expect(step, str, where, "next_response", "a text, the step that is rated")
    labels = [None] * len(before) + [_rating(row["rating"], where, "rating")]
    return RatedTexts(_asked(problem), [*before, step], labels, bool(row.get("is_solution")))


def _rating(rating: Any, where: str, key: str) -> float | None:
    if rating is None:
        return None
    if isinstance(rating, bool) or rating not in _RATINGS:
        raise wrong(where, key, rating, "-1, 0 or 1, or null for none")
    return _RATINGS[rating]


def _of_prm800k(row: dict[str, Any], where: str, config: DataConfig) -> RatedTexts:
    del config
    problem = column(row, "question.problem", where)
    if not isinstance(problem, str) or not problem:
        raise wrong(where, "question.problem", problem, "a non-empty text")
    listed = column(row, "label.steps", where)
    if not isinstance(listed, list) or not listed:
        raise wrong(where, "label.steps", listed, "a list of steps, each with its completions")
    steps: list[str] = []
    labels: list[float | None] = []
    for number, step in enumerate(listed):
        key = f"label.steps[{number}]"
        taken, goes_on = _taken(step, where, key)
        if not isinstance(taken, dict) or not isinstance(taken.get("text"), str):
            raise wrong(where, f"{key}.completions", taken, "{text, rating}")
        steps.append(taken["text"])
        # What a person wrote in place of bad completions is right, and has no rating.
        labels.append(1.0 if taken is step.get("human_completion") else _rating(taken.get("rating"), where, f"{key}.rating"))
        if not goes_on:
            break
    return RatedTexts(_asked(problem), steps, labels, column(row, "label.finish_reason", where, optional=True) == "solution")


def _taken(step: Any, where: str, key: str) -> tuple[Any, bool]:
    """Return the completion of a step with which its solution went on, and True; the first one and False where it ended there."""
    if not isinstance(step, dict) or not isinstance(step.get("completions") or [], list):
        raise wrong(where, key, step, "{completions, chosen_completion, human_completion}")
    completions, chosen = step.get("completions") or [], step.get("chosen_completion")
    if chosen is not None:
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(completions):
            raise wrong(where, f"{key}.chosen_completion", chosen, f"the number of one of {len(completions)} completions")
        return completions[chosen], True
    if step.get("human_completion") is not None:
        return step["human_completion"], True
    return (completions[0] if completions else None), False


def _of_marks(row: dict[str, Any], where: str, config: DataConfig) -> RatedTexts:
    del config
    text, rated = row["input"], row["label"]
    for key, value in (("input", text), ("label", rated)):
        expect(value, str, where, key, "a text")
    *pieces, rest = text.split(STEP_MARK)
    if not pieces or _FIRST_STEP not in pieces[0]:
        raise BadRow(f"{where}: column 'input' is no problem, {_FIRST_STEP!r}, and {STEP_MARK!r} after every step")
    labels: list[float | None] = []
    at = 0
    for number, piece in enumerate(pieces):
        end = at + len(piece)
        sign = rated[end : end + 1]
        if rated[at:end] != piece or sign not in ("+", "-"):
            raise BadRow(
                f"{where}: column 'label' is not 'input' with + or - in place of each of its {len(pieces)} {STEP_MARK!r}: "
                f"it differs at step {number + 1}"
            )
        labels.append(1.0 if sign == "+" else 0.0)
        at = end + 1
    if rated[at:] != rest or rest.strip():
        raise BadRow(f"{where}: columns 'input' and 'label' go on after the last step; expected nothing there")
    problem, _, first = pieces[0].partition(_FIRST_STEP)
    if not problem.strip():
        raise BadRow(f"{where}: column 'input' has no problem before {_FIRST_STEP!r}")
    return RatedTexts(_asked(problem.strip()), [_FIRST_STEP + first, *pieces[1:]], labels)


def _asked(problem: str) -> list[Message]:
    return [{"role": "user", "content": problem}]


_FORMATS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any], str, DataConfig], RatedTexts]], ...] = (
    (("completions", "labels"), _of_lists),
    (("instruction", "responses", "next_response", "rating"), _of_next_step),
    (("question", "label"), _of_prm800k),
    (("input", "label"), _of_marks),
)


# ---- a whole data set --------------------------------------------------------------------------------


class RatedStepSet(TrainingSet[RatedSteps]):
    """The rated solutions of one or several sources, by their row."""

    ways_out = "Raise data.max_length, or drop such rows with data.filter_overlong_prompts=true"

    def __init__(self, files: Sequence[str], config: Config, tokenizer: Any, **options: Any) -> None:
        """Open the sources with the options of a RowSet. Raises ConfigError for a tokenizer that does not say where its tokens begin."""
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("reward.reward_model.step_separator: needs a fast tokenizer, which says where each token begins")
        super().__init__(files, config.data, tokenizer, longest_sequence(config), **options)
        separator = config.reward.reward_model.step_separator
        assert separator is not None
        self._separator = separator.replace("\\n", "\n")

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return these rows as a batch: see `rated_batch`."""
        return rated_batch([self.row(row) for row in rows])

    def _tokenized(self, row: dict[str, Any], where: str) -> RatedSteps:
        return tokenized_steps(rated_row(row, where, self.config), self.renderer, self._separator, where)


def tokenized_steps(texts: RatedTexts, renderer: Renderer, separator: str, where: str) -> RatedSteps:
    """Return a solution in tokens: the rendered prompt, and the steps with the separator between them.

    A step ends with the token of its last character, the separator's after it included, as a reward model reads the steps of
    a response (`rewards/models/rendering.py`). Raises BadRow for two steps that end in one token.
    """
    (prompt_ids,) = renderer.tokenize([texts.prompt], [renderer.render(texts.prompt, where)])
    words = renderer.words
    text, ends = "", []
    for number, step in enumerate(texts.steps):
        # A separator inside of a step would cut it in two.
        text += words.marked(" ".join(piece for piece in step.split(separator) if piece.strip()).strip())
        if number < len(texts.steps) - 1 or not texts.is_whole:
            text += separator
        ends.append(len(text))
    encoded = words.encode(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    places = [bisect_left(starts, end) - 1 for end in ends]
    if len(set(places)) < len(places):
        raise BadRow(f"{where}: two of its {len(places)} steps end in the same token")
    if not prompt_ids:
        raise BadRow(f"{where}: the prompt has no tokens")
    labelled = [
        (len(prompt_ids) + place, label) for place, label in zip(places, texts.labels, strict=True) if label is not None
    ]
    return RatedSteps(
        np.asarray([*prompt_ids, *encoded["input_ids"]], dtype=np.int32),
        len(prompt_ids),
        np.asarray([place for place, _ in labelled], dtype=np.int64),
        np.asarray([label for _, label in labelled], dtype=np.float32),
    )


def rated_batch(rows: Sequence[RatedSteps]) -> Batch:
    """Return solutions as a batch, each in a group of its own, whose trained tokens are the ends of the labelled steps."""
    labels_T = torch.from_numpy(np.concatenate([row.labels for row in rows]))
    return batch_of_sequences(rows, [row.prompt_length for row in rows], rewards=0.0, labels_T=labels_T)
