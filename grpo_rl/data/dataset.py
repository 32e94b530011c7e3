"""Prompts of a data set: rows found at the start, and read, rendered and tokenized when they are drawn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.control_words import MARK, unmarked
from grpo_rl.data.prompts import TOKENIZED_AT_ONCE, Renderer, truncate
from grpo_rl.data.rows import Example, difficulty_of, example
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.custom import custom_source
from grpo_rl.data.sources.fingerprint import fingerprint_of
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import BadRow, Joined, Source, read_numbers
from grpo_rl.errors import DataError
from grpo_rl.types import Prompt

CHECKED_OF_MANY = 1000
"""Rows of a large data set that are checked at the start: so many first ones, and so many spread over all."""
KEPT_PROMPTS = 4096
"""Prompts kept ready after they were drawn."""


@dataclass(slots=True)
class LoadReport:
    """Counts of the rows that were checked at the start and of those drawn since."""

    num_rows: int
    """Rows in the files, after max_samples."""
    num_checked: int = 0
    """Rows read, rendered and tokenized before the start."""
    num_dropped: int = 0
    """Rows left out because their prompt is longer than max_prompt_length."""
    num_truncated: int = 0
    """Rows whose prompt was cut to max_prompt_length."""
    num_bad: int = 0
    """Rows left out because something is wrong with them (data.on_bad_row=skip)."""
    longest_prompt: int = 0
    """Tokens of the longest prompt as read."""
    num_control: int = 0
    """Rows with control words in their text, which are plain text there."""

    def __str__(self) -> str:
        if self.num_checked < self.num_rows:
            text = f"{self.num_rows} rows, {self.num_checked} of them checked and the others when they are drawn; "
            text += f"longest checked prompt {self.longest_prompt} tokens"
        else:
            num_kept = self.num_rows - self.num_dropped - self.num_bad
            text = f"{num_kept} prompts, longest as read {self.longest_prompt} tokens"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_checked} rows dropped as too long"
        if self.num_truncated:
            text += f", {self.num_truncated} prompts cut"
        if self.num_bad:
            text += f", bad rows left out: {self.num_bad}"
        return text + control_words_in(self.num_control)


def control_words_in(num_rows: int) -> str:
    """Return the end of a report's line that says how many rows have control words in their text; empty for none."""
    if not num_rows:
        return ""
    return f", {num_rows} with control tokens in their text, read as plain text (data.control_tokens_in_text)"


@dataclass(frozen=True, slots=True)
class _Read:
    """A row as far as it needs no name."""

    example: Example
    text: str
    token_ids: np.ndarray


class PromptDataset:
    """The prompts of one or several sources, by their row.

    A data set that was checked whole has rows that are all usable, numbered without those left out. Of a larger one
    some rows turn out to be unusable when their turn comes: `usable` reports it, the same at any time.
    """

    def __init__(self, parts: Sequence[Source], config: DataConfig, renderer: Renderer, bad_rows: BadRows, limit: int) -> None:
        self.config = config
        self.bad_rows = bad_rows
        self._source = Joined("all sources", parts)
        self._renderer = renderer
        total = len(self._source) if limit < 0 else min(limit, len(self._source))
        self.report = LoadReport(total)
        self._starts = np.cumsum([0, *map(len, parts)])
        self._rows: np.ndarray | None = None
        self._kept: OrderedDict[int, _Read] = OrderedDict()
        self._data_sources: set[str] = set()
        self._difficulty: np.ndarray | None = None
        self.fingerprint = fingerprint_of(parts)

    def __len__(self) -> int:
        return self.report.num_rows if self._rows is None else len(self._rows)

    @property
    def data_sources(self) -> list[str]:
        """The values of data_source in the rows that were checked, sorted: an `auto` reward needs a rule for each."""
        return sorted(self._data_sources)

    @property
    def part_sizes(self) -> list[int]:
        """Rows of each source, in their order."""
        rows = np.arange(len(self)) if self._rows is None else self._rows
        return np.diff(np.searchsorted(rows, self._starts)).tolist()

    def prompt(self, row_index: int, uid: str) -> Prompt:
        """Row `row_index` as a Prompt that is called `uid` in this run. Raises DataError for one that cannot be used."""
        read = self._read(self._index(row_index))
        row = read.example
        messages = self._renderer.messages(row)
        return Prompt(uid, read.token_ids, read.text, row.data_source, row.ground_truth, row.extra_info, messages)

    def usable(self, row_index: int) -> bool:
        """Return whether row `row_index` can be trained on; the same at any time, as the row alone decides.

        Raises DataError for a bad row under data.on_bad_row=error, and for a long prompt that is neither filtered nor cut.
        """
        if self._difficulty is not None and np.isnan(self._difficulty[row_index]):
            return False
        if self._rows is not None:
            return True
        index = self._index(row_index)
        try:
            return self._read(index) is not None
        except _TooLong as error:
            if not self.config.filter_overlong_prompts:
                raise DataError(f"{error}. {_WAYS_OUT}") from None
            return False
        except BadRow as error:
            self.bad_rows.found(index, error)
            return False

    def difficulty(self, note: Callable[[int], None] | None = None) -> np.ndarray:
        """Return what `data.difficulty_key` holds, per row; NaN for a bad row, which is not usable.

        The first call reads this column of all rows, and calls `note` with how many are done.
        """
        if self._difficulty is None:
            rows = np.arange(len(self)) if self._rows is None else self._rows
            parts, key = self._source.parts, self.config.difficulty_key
            self._difficulty = read_numbers(parts, key, rows, self._difficulty_of, note)
        return self._difficulty

    def check(self, whole: bool, note: Callable[[str], None] | None = None) -> None:
        """Read, render and tokenize all rows, or a sample of them; all that is wrong with these is reported at once.

        Raises DataError for bad rows under data.on_bad_row=error, for prompts that are too long and neither dropped nor
        cut, and where no row is left.
        """
        total = self.report.num_rows
        indices: Sequence[int] = range(total)
        if not whole and total > 2 * CHECKED_OF_MANY:
            spread = np.linspace(CHECKED_OF_MANY, total - 1, CHECKED_OF_MANY, dtype=np.int64).tolist()
            indices = [*range(CHECKED_OF_MANY), *spread]
        unusable: set[int] = set()
        too_long: list[tuple[int, int]] = []
        for index, row, length in self._checked(indices, note):
            if row is None:
                unusable.add(index)
                continue
            self._data_sources.add(row.data_source)
            self.report.longest_prompt = max(self.report.longest_prompt, length)
            if length > self.config.max_prompt_length:
                too_long.append((index, length))
        self.report.num_checked, self.report.num_bad = len(indices), len(unusable)
        self.bad_rows.raise_collected(len(indices))
        self.bad_rows.report_collected(len(indices))
        unusable |= self._fit(too_long)
        if len(unusable) == len(indices):
            raise DataError(self._none_left(len(too_long)))
        if len(indices) == total:
            self._rows = np.setdiff1d(np.arange(total), np.fromiter(unusable, np.int64, len(unusable)))

    # ---- underneath ----------------------------------------------------------------------------------

    def _index(self, row_index: int) -> int:
        return row_index if self._rows is None else int(self._rows[row_index])

    def _example(self, index: int) -> tuple[Example, str]:
        """The checked row and its text."""
        where = self._source.where(index)
        row = example(self._source.row(index), where, self.config)
        return row, self._renderer.render(row, where)

    def _tokens(self, rows: Sequence[tuple[int, Example, str]]) -> Iterator[tuple[int, list[int] | BadRow]]:
        ids = self._renderer.tokenize([row for _, row, _ in rows], [text for _, _, text in rows])
        for (index, _, _), token_ids in zip(rows, ids, strict=True):
            if token_ids:
                yield index, token_ids
            else:
                yield index, BadRow(f"{self._source.where(index)}: column {self.config.prompt_key!r} has no tokens")

    def _checked(self, indices: Sequence[int], note: Callable[[str], None] | None) -> Iterator[tuple[int, Example | None, int]]:
        """Each of the rows with the tokens of its prompt; None for a bad one, which is noted."""
        remaining, done = iter(indices), 0
        while chunk := list(islice(remaining, TOKENIZED_AT_ONCE)):
            rows = []
            for index in chunk:
                try:
                    rows.append((index, *self._example(index)))
                except BadRow as error:
                    self.bad_rows.found(index, error, collect=True)
                    yield index, None, 0
            self.report.num_control += sum(MARK in text for _, _, text in rows)
            by_index = {index: row for index, row, _ in rows}
            for index, token_ids in self._tokens(rows):
                if isinstance(token_ids, BadRow):
                    self.bad_rows.found(index, token_ids, collect=True)
                    yield index, None, 0
                else:
                    yield index, by_index[index], len(token_ids)
            done += len(chunk)
            if note is not None:
                note(f"{done} of {len(indices)} rows checked")

    def _read(self, index: int) -> _Read:
        """Row `index`, from what is kept ready or from its source. Raises BadRow, and _TooLong for one that is not cut."""
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        row, text = self._example(index)
        ((_, token_ids),) = self._tokens([(index, row, text)])
        if isinstance(token_ids, BadRow):
            raise token_ids
        limit, side = self.config.max_prompt_length, self.config.truncation
        if len(token_ids) > limit:
            if self.config.filter_overlong_prompts or side == "error":
                raise _TooLong(_too_long(self._source.where(index), len(token_ids), limit))
            token_ids = truncate(token_ids, limit, side)
            text = self._renderer.tokenizer.decode(token_ids)
        self._kept[index] = _Read(row, unmarked(text), np.asarray(token_ids, dtype=np.int32))
        if len(self._kept) > KEPT_PROMPTS:
            self._kept.popitem(last=False)
        return self._kept[index]

    def _fit(self, too_long: list[tuple[int, int]]) -> set[int]:
        """Return which of the rows with too long prompts are left out."""
        if too_long and self.config.filter_overlong_prompts:
            self.report.num_dropped = len(too_long)
            return {index for index, _ in too_long}
        if too_long and self.config.truncation == "error":
            index, length = min(too_long)
            message = _too_long(self._source.where(index), length, self.config.max_prompt_length)
            longest = self.report.longest_prompt
            raise DataError(f"{message}, as have {len(too_long) - 1} other rows (longest: {longest}). {_WAYS_OUT}")
        self.report.num_truncated = len(too_long)
        return set()

    def _none_left(self, num_too_long: int) -> str:
        checked, limit, longest = self.report.num_checked, self.config.max_prompt_length, self.report.longest_prompt
        if num_too_long == checked:
            return (
                f"no rows are left: all {checked} prompts are longer than data.max_prompt_length={limit} (longest: {longest})"
            )
        return (
            f"no rows are left: of {checked} checked, {self.report.num_bad} are bad and {num_too_long} have prompts longer than "
            f"data.max_prompt_length={limit}"
        )

    def _difficulty_of(self, row_index: int) -> float:
        index = self._index(row_index)
        try:
            return difficulty_of(self._source.row(index), self._source.where(index), self.config)
        except BadRow as error:
            self.bad_rows.found(index, error)
            return float("nan")


class _TooLong(DataError):
    """A prompt that is longer than allowed, and not cut."""


_WAYS_OUT = (
    "Raise max_prompt_length, drop such rows with data.filter_overlong_prompts=true, or cut them with "
    "data.truncation=left, right or middle"
)


def _too_long(where: str, length: int, limit: int) -> str:
    return f"{where}: the prompt has {length} tokens, more than data.max_prompt_length={limit}"


def load_dataset(
    files: Sequence[str],
    config: DataConfig,
    tokenizer: Any,
    *,
    max_samples: int,
    whole: bool = False,
    bad_rows: BadRows | None = None,
    note: Callable[[str], None] | None = None,
) -> PromptDataset:
    """The rows of all `files`, in order, as prompts; of these the first `max_samples` (-1: all).

    `locate.open_source` describes what a name may be. Up to `data.check_rows` rows, or any number that is wanted
    `whole`, are checked here; of more, a sample. Prompts longer than `max_prompt_length` are dropped, cut or refused,
    as `filter_overlong_prompts` and `truncation` say. Raises DataError with file, row and column, and ConfigError for a
    task or template option.
    """
    if not files:
        raise DataError("no data files are given")
    renderer = Renderer(config, tokenizer)
    if config.custom_cls.path is not None:
        parts: list[Source] = [custom_source(files, config, tokenizer)]
    else:
        parts = [open_source(name, config.cache_dir) for name in files]
    bad_rows = BadRows(config.on_bad_row) if bad_rows is None else bad_rows
    data = PromptDataset(parts, config, renderer, bad_rows, max_samples)
    data.check(whole or len(data) <= config.check_rows, note)
    return data
