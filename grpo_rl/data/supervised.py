"""Demonstrations as training data: found at the start, read and tokenized when they are drawn, and put into batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_rl.config.derived import longest_sequence
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.conversations import Demonstration, Tokenizing, conversation
from grpo_rl.data.dataset import CHECKED_OF_MANY
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.custom import custom_source
from grpo_rl.data.sources.fingerprint import fingerprint_of
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import BadRow, Joined, Source
from grpo_rl.errors import DataError
from grpo_rl.types import Batch

KEPT_DEMONSTRATIONS = 65_536
"""Demonstrations kept ready after they were read: 64 MiB of tokens where each has 256."""


@dataclass(slots=True)
class DemonstrationReport:
    """The fate of the rows that were checked at the start."""

    num_rows: int
    """Rows in the files, after max_samples."""
    num_checked: int = 0
    num_dropped: int = 0
    """Rows left out because they are longer than the longest sequence."""
    num_bad: int = 0
    """Rows left out because something is wrong with them (data.on_bad_row=skip)."""
    longest: int = 0
    """Tokens of the longest row as read."""
    num_tokens: int = 0
    """Tokens of the rows that were checked and can be used."""
    num_trained: int = 0
    """Tokens among them that are trained."""

    def __str__(self) -> str:
        text = f"{self.num_rows - self.num_dropped - self.num_bad} rows"
        if self.num_checked < self.num_rows:
            text = f"{self.num_rows} rows, {self.num_checked} of them checked and the others when they are drawn"
        text += f", longest {self.longest} tokens, {self.num_trained / max(1, self.num_tokens):.0%} of all tokens trained"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_checked} rows dropped as too long"
        return text + (f", bad rows left out: {self.num_bad}" if self.num_bad else "")


class DemonstrationSet:
    """The demonstrations of one or several sources, by their row.

    As in a PromptDataset, one that was checked whole has rows that are all usable; of a larger one some rows turn out to be
    unusable when their turn comes.
    """

    def __init__(
        self, parts: Sequence[Source], config: DataConfig, longest: int, tokenizing: Tokenizing, bad_rows: BadRows, limit: int
    ) -> None:
        self.config, self.longest, self.bad_rows = config, longest, bad_rows
        self._source, self._tokenizing = Joined("all sources", parts), tokenizing
        total = len(self._source) if limit < 0 else min(limit, len(self._source))
        self.report = DemonstrationReport(total)
        self.fingerprint = fingerprint_of(parts)
        self._starts = np.cumsum([0, *map(len, parts)])
        self._rows: np.ndarray | None = None
        self._kept: OrderedDict[int, Demonstration] = OrderedDict()

    def __len__(self) -> int:
        return self.report.num_rows if self._rows is None else len(self._rows)

    @property
    def part_sizes(self) -> list[int]:
        """Rows of each source, in their order."""
        rows = np.arange(len(self)) if self._rows is None else self._rows
        return np.diff(np.searchsorted(rows, self._starts)).tolist()

    def demonstration(self, row: int) -> Demonstration:
        """Return row `row`. Raises DataError for one that cannot be used."""
        index = row if self._rows is None else int(self._rows[row])
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        self._kept[index] = self._read(index)
        if len(self._kept) > KEPT_DEMONSTRATIONS:
            self._kept.popitem(last=False)
        return self._kept[index]

    def usable(self, row: int) -> bool:
        """Return whether row `row` can be trained on; the same at any time, as the row alone decides.

        Raises DataError for a bad row under data.on_bad_row=error, and for a long one that is neither filtered nor cut.
        """
        if self._rows is not None:
            return True
        try:
            return self.demonstration(row) is not None
        except TooLongDemonstration:
            if not self.config.filter_overlong_prompts:
                raise
            return False
        except BadRow as error:
            self.bad_rows.found(row, error)
            return False

    def check(self, whole: bool, note: Callable[[str], None] | None = None) -> None:
        """Read all rows, or a sample of them; all that is wrong with these is reported at once.

        Raises DataError for bad rows under data.on_bad_row=error, for rows that are too long and neither dropped nor cut,
        and where no row is left.
        """
        total, report = self.report.num_rows, self.report
        indices: Sequence[int] = range(total)
        if not whole and total > 2 * CHECKED_OF_MANY:
            spread = np.linspace(CHECKED_OF_MANY, total - 1, CHECKED_OF_MANY, dtype=np.int64).tolist()
            indices = sorted({*range(CHECKED_OF_MANY), *spread})
        unusable: list[int] = []
        too_long: list[TooLongDemonstration] = []
        for number, index in enumerate(indices):
            try:
                self._count(self.demonstration(index))
            except TooLongDemonstration as error:
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
            raise DataError(f"{too_long[0]}{others}. {_WAYS_OUT}")
        report.num_dropped = len(too_long)
        if len(unusable) == len(indices):
            raise DataError(
                f"no rows are left: of {len(indices)} checked, {report.num_bad} are bad and {len(too_long)} are longer than "
                f"{self.longest} tokens"
            )
        if len(indices) == total:
            self._rows = np.setdiff1d(np.arange(total), np.asarray(unusable, dtype=np.int64))

    def _count(self, found: Demonstration) -> None:
        self.report.longest = max(self.report.longest, len(found.token_ids))
        self.report.num_tokens += len(found.token_ids)
        self.report.num_trained += len(found.positions)

    def _read(self, index: int) -> Demonstration:
        where = self._source.where(index)
        found = self._tokenizing(conversation(self._source.row(index), where, self.config), where)
        length = len(found.token_ids)
        if length <= self.longest:
            return found
        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            raise TooLongDemonstration(where, length, self.longest)
        cut = cut_to(found, self.longest, self.config.truncation)
        if not len(cut.positions):
            raise BadRow(
                f"{where}: has {length} tokens, and no trained one is left in the {self.longest} that "
                f"data.truncation={self.config.truncation} keeps"
            )
        return cut


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The rows that a supervised run learns from, and those on which its loss is measured beside."""

    train: DemonstrationSet
    val: DemonstrationSet | None = None


class TooLongDemonstration(DataError):
    """A row that is longer than allowed, and not cut."""

    def __init__(self, where: str, length: int, longest: int) -> None:
        super().__init__(f"{where}: has {length} tokens, more than the longest sequence of {longest}")
        self.length = length


_WAYS_OUT = (
    "Raise data.max_length, drop such rows with data.filter_overlong_prompts=true, or cut them with "
    "data.truncation=left, right or middle"
)


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
    data = config.data
    tokenizing = Tokenizing(data, tokenizer)
    parts: list[Source] = (
        [custom_source(files, data, tokenizer)]
        if data.custom_cls.path is not None
        else [open_source(name, data.cache_dir) for name in files]
    )
    bad_rows = BadRows(data.on_bad_row) if bad_rows is None else bad_rows
    found = DemonstrationSet(parts, data, longest_sequence(config), tokenizing, bad_rows, max_samples)
    found.check(whole or len(found) <= data.check_rows, note)
    return found


def supervised_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """Return the demonstrations as a batch, each in a group of its own.

    The prompt of each ends before its first trained token; what is not trained after that is context between turns.
    """
    lengths_N = torch.tensor([len(found.token_ids) for found in demonstrations])
    prompt_lengths_N = torch.tensor([int(found.positions[0]) for found in demonstrations])
    starts = (lengths_N.cumsum(0) - lengths_N).tolist()
    positions = [found.positions + start for found, start in zip(demonstrations, starts, strict=True)]
    return Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=lengths_N - prompt_lengths_N,
        group_N=torch.arange(len(demonstrations)),
        token_ids_S=torch.from_numpy(np.concatenate([found.token_ids for found in demonstrations]).astype(np.int64)),
        rewards_N=torch.ones(len(demonstrations)),
        positions_T=torch.from_numpy(np.concatenate(positions)),
        trained_lengths_N=torch.tensor([len(found.positions) for found in demonstrations]),
    )
