"""Rows that are trained on as they stand: read and tokenized when they are drawn, and made into batches.

`TrainingSet` is what a schedule needs of them, whatever a row holds. `RowSet` is what the kinds of rows share: where they
come from, bad and long ones, the check at the start. Each kind says how one row is read, how long it is, and what batch it makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import CHECKED_OF_MANY, control_words_in
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.custom import custom_source
from grpo_rl.data.sources.fingerprint import Fingerprint, fingerprint_of
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import BadRow, Joined, Source
from grpo_rl.errors import DataError
from grpo_rl.types import Batch

KEPT_ROWS = 65_536
"""Rows kept ready after they were read: 64 MiB of tokens where each has 256."""

Row = TypeVar("Row")
"""A row as tokens."""


@dataclass(slots=True)
class RowReport:
    """The fate of the rows that were checked at the start."""

    num_rows: int
    """Rows in the files, after max_samples."""
    num_checked: int = 0
    num_dropped: int = 0
    """Rows left out because they are longer than the longest sequence."""
    num_bad: int = 0
    """Rows left out because something is wrong with them (data.on_bad_row=skip)."""
    longest: int = 0
    """Tokens of the longest sequence as read."""
    num_tokens: int = 0
    """Tokens of the rows that were checked and can be used."""
    num_trained: int = 0
    """Tokens among them that are trained."""
    num_control: int = 0
    """Rows with control words in their text, which are plain text there."""

    def __str__(self) -> str:
        text = f"{self.num_rows - self.num_dropped - self.num_bad} rows"
        if self.num_checked < self.num_rows:
            text = f"{self.num_rows} rows, {self.num_checked} of them checked and the others when they are drawn"
        text += f", longest {self.longest} tokens, {self.num_trained / max(1, self.num_tokens):.0%} of all tokens trained"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_checked} rows dropped as too long"
        text += f", bad rows left out: {self.num_bad}" if self.num_bad else ""
        return text + control_words_in(self.num_control)


class TrainingSet(Protocol):
    """The rows of a training that samples nothing, of any kind."""

    fingerprint: Fingerprint
    """The fingerprint of the sources, as a checkpoint contains it."""
    report: RowReport

    def __len__(self) -> int: ...

    @property
    def part_sizes(self) -> list[int]:
        """Rows of each source, in their order."""

    def usable(self, row: int) -> bool:
        """Return whether row `row` can be trained on; the same at any time, as the row alone decides.

        Raises DataError for a row that ends the run.
        """

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return these rows as a batch; what a row makes, one rollout or several, is one group. Raises DataError for one that cannot be used."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The rows that a run learns from, and those on which its loss is measured beside."""

    train: TrainingSet
    val: TrainingSet | None = None


class TooLongRow(DataError):
    """A row that is longer than allowed, and not cut."""

    def __init__(self, where: str, length: int, longest: int) -> None:
        super().__init__(f"{where}: has {length} tokens, more than the longest sequence of {longest}")
        self.length = length


class Tokens(Protocol):
    """A row as one sequence of tokens, of which some are trained."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [tokens]"""

    @property
    def positions(self) -> np.ndarray:
        """int64 [trained tokens], ascending"""


def batch_of_sequences(rows: Sequence[Tokens], prompt_lengths: Sequence[int], rewards: float, **columns: Any) -> Batch:
    """Return rows as a batch of one rollout each, in a group of its own, with this reward and these further columns."""
    lengths_N = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.long)
    prompt_lengths_N = torch.tensor(prompt_lengths, dtype=torch.long)
    starts = (lengths_N.cumsum(0) - lengths_N).tolist()
    return Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=lengths_N - prompt_lengths_N,
        group_N=torch.arange(len(rows)),
        token_ids_S=torch.from_numpy(np.concatenate([row.token_ids for row in rows]).astype(np.int64)),
        rewards_N=torch.full((len(rows),), rewards),
        positions_T=torch.from_numpy(np.concatenate([row.positions + start for row, start in zip(rows, starts, strict=True)])),
        trained_lengths_N=torch.tensor([len(row.positions) for row in rows], dtype=torch.long),
        **columns,
    )


def _sources(files: Sequence[str], data: DataConfig, tokenizer: object) -> list[Source]:
    """Return the sources of `files`, or the one that a class of the user's makes of them."""
    if data.custom_cls.path is not None:
        return [custom_source(files, data, tokenizer)]
    return [open_source(name, data.cache_dir) for name in files]


class RowSet(ABC, Generic[Row]):
    """The rows of one or several sources, by their number.

    As in a PromptDataset, one that was checked whole has rows that are all usable; of a larger one some rows turn out to be
    unusable when their turn comes.
    """

    ways_out: str
    """The advice for rows that are too long."""
    renderer: Renderer

    def __init__(
        self, files: Sequence[str], config: DataConfig, longest: int, tokenizer: Any, bad_rows: BadRows | None, limit: int
    ) -> None:
        self.config, self.longest = config, longest
        self.bad_rows = BadRows(config.on_bad_row) if bad_rows is None else bad_rows
        parts = _sources(files, config, tokenizer)
        self._source = Joined("all sources", parts)
        total = len(self._source) if limit < 0 else min(limit, len(self._source))
        self.report = RowReport(total)
        self.fingerprint = fingerprint_of(parts)
        self._starts = np.cumsum([0, *map(len, parts)])
        self._rows: np.ndarray | None = None
        self._kept: OrderedDict[int, Row] = OrderedDict()

    @abstractmethod
    def _tokenized(self, row: dict[str, Any], where: str) -> Row:
        """Return a row of the source, at this place, as tokens. Raises BadRow."""

    @abstractmethod
    def _sizes(self, row: Row) -> tuple[int, int, int]:
        """Return the tokens of the row's longest sequence, all its tokens, and those among them that are trained."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return these rows as a batch."""

    def _cut(self, row: Row, length: int, where: str) -> Row:
        """Return a row that is too long as a shorter one. Raises TooLongRow where it is not cut."""
        raise TooLongRow(where, length, self.longest)

    def _read(self, index: int) -> Row:
        """Return row `index` of the source as tokens. Raises BadRow, and TooLongRow where it is neither short enough nor cut."""
        where = self._source.where(index)
        row = self._tokenized(self._source.row(index), where)
        length, _, _ = self._sizes(row)
        return row if length <= self.longest else self._cut(row, length, where)

    def __len__(self) -> int:
        return self.report.num_rows if self._rows is None else len(self._rows)

    @property
    def part_sizes(self) -> list[int]:
        """Rows of each source, in their order."""
        rows = np.arange(len(self)) if self._rows is None else self._rows
        return np.diff(np.searchsorted(rows, self._starts)).tolist()

    def row(self, row: int) -> Row:
        """Return row `row`. Raises DataError for one that cannot be used."""
        index = row if self._rows is None else int(self._rows[row])
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        self._kept[index] = self._read(index)
        if len(self._kept) > KEPT_ROWS:
            self._kept.popitem(last=False)
        return self._kept[index]

    def usable(self, row: int) -> bool:
        """Return whether row `row` can be trained on; the same at any time, as the row alone decides.

        Raises DataError for a bad row under data.on_bad_row=error, and for a long one that is neither filtered nor cut.
        """
        if self._rows is not None:
            return True
        try:
            return self.row(row) is not None
        except TooLongRow:
            if not self.config.filter_overlong_prompts:
                raise
            return False
        except BadRow as error:
            self.bad_rows.found(row, error)
            return False

    def checked(self, whole: bool = False, note: Callable[[str], None] | None = None) -> Self:
        """Return these rows, after reading all of up to `data.check_rows` or where they are wanted `whole`; of more, a sample.

        All that is wrong is reported at once. Raises DataError for bad rows under data.on_bad_row=error, for rows that are too
        long and neither dropped nor cut, and where no row is left.
        """
        total, report = self.report.num_rows, self.report
        indices: Sequence[int] = range(total)
        if not whole and total > max(self.config.check_rows, 2 * CHECKED_OF_MANY):
            spread = np.linspace(CHECKED_OF_MANY, total - 1, CHECKED_OF_MANY, dtype=np.int64).tolist()
            indices = sorted({*range(CHECKED_OF_MANY), *spread})
        unusable: list[int] = []
        too_long: list[TooLongRow] = []
        for number, index in enumerate(indices):
            try:
                before = self.renderer.words.num_texts
                self._count(self.row(index))
                report.num_control += self.renderer.words.num_texts > before
            except TooLongRow as error:
                report.longest = max(report.longest, error.length)
                too_long.append(error)
                unusable.append(index)
            except BadRow as error:
                self.bad_rows.found(index, error, collect=True)
                unusable.append(index)
            if note is not None and number % CHECKED_OF_MANY == CHECKED_OF_MANY - 1:
                note(f"{number + 1} of {len(indices)} rows checked")
        report.num_checked, report.num_bad = len(indices), self.bad_rows.num_rows
        self.bad_rows.raise_collected(len(indices))
        self.bad_rows.report_collected(len(indices))
        if too_long and not self.config.filter_overlong_prompts:
            others = f"; {len(too_long)} rows are too long (longest: {report.longest})" if len(too_long) > 1 else ""
            raise DataError(f"{too_long[0]}{others}. {self.ways_out}")
        report.num_dropped = len(too_long)
        if len(unusable) == len(indices):
            raise DataError(
                f"no rows are left: of {len(indices)} checked, {report.num_bad} are bad and {len(too_long)} are longer than "
                f"{self.longest} tokens"
            )
        if len(indices) == total:
            self._rows = np.setdiff1d(np.arange(total), np.asarray(unusable, dtype=np.int64))
        return self

    def _count(self, row: Row) -> None:
        longest, num_tokens, num_trained = self._sizes(row)
        self.report.longest = max(self.report.longest, longest)
        self.report.num_tokens += num_tokens
        self.report.num_trained += num_trained
