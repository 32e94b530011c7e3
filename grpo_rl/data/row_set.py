"""The rows of a data set by their number: read, rendered and tokenized when they are drawn."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.rows import BadRow, Row, at
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import Fingerprint, Joined, custom_source, fingerprint_of
from grpo_rl.errors import DataError
from grpo_rl.frozen import frozen
from grpo_rl.run_files import append_lines
from grpo_rl.types import Batch

CHECKED_OF_MANY = 1000
"""First rows of a large data set that are checked at the start, and as many spread over all."""
LISTED = 10
SHOWN = 5
"""Bad rows met later that are shown; the file has them all."""

Tokenized = TypeVar("Tokenized")


class BadRows:
    """The bad rows of one data set, each counted once."""

    def __init__(
        self, action: Literal["error", "skip"], file: Path | None = None, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.action, self.file, self.warn = action, file, warn
        self.found: dict[int, str] = {}
        """What is wrong, by the row's number."""

    def report(self, num_checked: int) -> None:
        """Raises one DataError for all that was `found`, under `error`."""
        if not self.found:
            return
        messages = list(self.found.values())
        if self.action == "error" and len(messages) == 1:
            raise DataError(messages[0])
        self._write(messages)
        rest = [f"and {len(messages) - LISTED} more"] if len(messages) > LISTED else []
        if self.file is not None:
            rest.append(f"see {self.file}")
        # The first line has one of them: it may be all that is shown.
        title = f"{len(messages)} bad row{'s' * (len(messages) > 1)} of the {num_checked} checked: "
        text = "\n  ".join(filter(None, [title + messages[0], *messages[1:LISTED], ", ".join(rest)]))
        if self.action == "error":
            raise DataError(text)
        self.warn(f"left out {text}")

    def met(self, index: int, error: DataError) -> None:
        if self.action == "error":
            raise error
        if index in self.found:
            return
        self.found[index] = str(error)
        self._write([str(error)])
        if len(self.found) <= SHOWN:
            self.warn(f"bad row left out: {error}")

    def _write(self, messages: Sequence[str]) -> None:
        if self.file is not None:
            append_lines(self.file, (json.dumps({"bad_row": message}) + "\n" for message in messages))


@dataclass(slots=True)
class RowReport:
    num_rows: int
    """Rows in the files, after max_samples."""
    num_checked: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    num_bad: int = 0
    """Rows left out under data.on_bad_row=skip."""
    longest: int = 0
    """Tokens of the longest prompt or sequence."""
    num_control: int = 0
    """Rows with control words in their text."""
    num_from_text: int = 0
    """Sampled responses whose tokens are made of their texts, and may be others."""

    def __str__(self) -> str:
        text = f"{self.num_rows - self.num_dropped - self.num_bad} rows"
        if self.num_checked < self.num_rows:
            text = f"{self.num_rows} rows, {self.num_checked} of them checked and the others when they are drawn"
        text += f", longest {self.longest} tokens"
        if self.num_dropped:
            text += f", {self.num_dropped} of {self.num_checked} rows dropped as too long"
        if self.num_truncated:
            text += f", {self.num_truncated} cut"
        if self.num_bad:
            text += f", bad rows left out: {self.num_bad}"
        if self.num_control:
            text += f", {self.num_control} with control tokens in their text, read as plain text (data.control_tokens_in_text)"
        if self.num_from_text:
            text += (
                f", {self.num_from_text} sampled responses without their tokens, which are made of the text and may be others (a run "
                "logs tokens of trainer.log_token_groups groups of a step)"
            )
        return text


class TooLongRow(DataError): ...


class RowSet(ABC, Generic[Tokenized]):
    """If all rows were checked at the start, the set has the usable ones alone, numbered without gaps.

    A row of larger data may turn out to be unusable when it is drawn: `usable` says so, always the same.
    """

    kept_rows: ClassVar[int] = 65_536
    """64 MiB of tokens if each row has 256."""
    too_long: ClassVar[str] = "has {length} tokens, more than the longest sequence of {longest}"
    ways_out: ClassVar[str]
    """Advice for rows that are too long."""

    def __init__(
        self,
        files: Sequence[str],
        config: DataConfig,
        tokenizer: Any,
        longest: int,
        *,
        max_samples: int = -1,
        bad_rows: BadRows | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`longest` is in tokens; `vocab_size` is of the model's embedding."""
        if not files:
            raise DataError("no data files are given")
        self.config, self.longest, self.vocab_size = config, longest, vocab_size
        # First: a template that cannot be used is refused before any file is opened.
        self.renderer = Renderer(config, tokenizer)
        self.bad_rows = bad_rows or BadRows(config.on_bad_row)
        is_custom = config.custom_cls.path is not None
        parts = [custom_source(files, config, tokenizer)] if is_custom else [open_source(name) for name in files]
        self._source = Joined("all sources", parts)
        total = len(self._source) if max_samples < 0 else min(max_samples, len(self._source))
        self.report = RowReport(total)
        self.fingerprint: Fingerprint = fingerprint_of(parts)
        self._rows: range | np.ndarray = range(total)
        self._kept: OrderedDict[int, Tokenized] = OrderedDict()

    def _tokenized(self, row: Row) -> Tokenized:
        raise NotImplementedError

    def _length(self, row: Any) -> int:
        return len(row.token_ids)

    def _cut(self, row: Tokenized) -> Tokenized | None:
        """A shorter row; None for a kind that is never cut."""
        return None

    def _tokenized_all(self, indices: Sequence[int]) -> Iterator[tuple[int, Tokenized | BadRow]]:
        for index in indices:
            num_texts = self.renderer.words.num_texts
            try:
                row = self._source.row(index)
                with at(self._source.where(index)):
                    tokenized = self._tokenized(row)
                yield index, tokenized
            except BadRow as error:
                yield index, error
            self.report.num_control += self.renderer.words.num_texts > num_texts

    def __len__(self) -> int:
        return len(self._rows)

    def entry_sizes(self) -> list[int]:
        ends = accumulate(map(len, self._source.parts))
        return np.diff([bisect_left(self._rows, end) for end in ends], prepend=0).tolist()

    def row(self, row: int) -> Tokenized:
        """Raises DataError for a row that cannot be used."""
        index = int(self._rows[row])
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        [(_, tokenized)] = self._tokenized_all([index])
        return self._keep(index, tokenized)

    def as_stored(self, row: int) -> Row:
        return self._source.row(int(self._rows[row]))

    def usable(self, row: int) -> bool:
        """Raises DataError for a row that may not be skipped."""
        if self.report.num_checked == self.report.num_rows:
            return True
        try:
            return self.row(row) is not None
        except TooLongRow as error:
            if not self.config.filter_overlong_prompts:
                raise DataError(f"{error}. {self.ways_out}") from None
            return False
        except BadRow as error:
            self.bad_rows.met(row, error)
            return False

    def checked(self, whole: bool = False, note: Callable[[str], None] | None = None) -> Self:
        """Read up to `data.check_rows`, or all if `whole`; of more, a sample.

        Raises one DataError for all bad rows and rows that are too long, and if no row is left.
        """
        total, report = self.report.num_rows, self.report
        indices: Sequence[int] = range(total)
        if not whole and total > max(self.config.check_rows, 2 * CHECKED_OF_MANY):
            spread = np.linspace(CHECKED_OF_MANY, total - 1, CHECKED_OF_MANY, dtype=np.int64).tolist()
            indices = [*range(CHECKED_OF_MANY), *spread]
        too_long: dict[int, TooLongRow] = {}
        for number, (index, tokenized) in enumerate(self._tokenized_all(indices), start=1):
            try:
                self._keep(index, tokenized)
            except TooLongRow as error:
                too_long[index] = error
            except BadRow as error:
                self.bad_rows.found[index] = str(error)
            if note is not None and number % CHECKED_OF_MANY == 0:
                note(f"{number} of {len(indices)} rows checked")
        report.num_checked, report.num_bad = len(indices), len(self.bad_rows.found)
        self.bad_rows.report(len(indices))
        if too_long and not self.config.filter_overlong_prompts:
            rest = f"; {len(too_long)} rows are too long (longest: {report.longest})" if len(too_long) > 1 else ""
            raise DataError(f"{next(iter(too_long.values()))}{rest}. {self.ways_out}")
        report.num_dropped = len(too_long)
        if len(too_long) + report.num_bad == len(indices):
            raise DataError(
                f"no rows are left: of {len(indices)} checked, {report.num_bad} are bad and {len(too_long)} have more than "
                f"{self.longest} tokens"
            )
        if len(indices) == total:
            self._rows = np.delete(np.arange(total), [*too_long, *self.bad_rows.found])
        return self

    def _keep(self, index: int, tokenized: Tokenized | BadRow) -> Tokenized:
        if isinstance(tokenized, BadRow):
            raise tokenized
        with at(self._source.where(index)):
            self._kept[index] = row = self._usable(tokenized)
        if len(self._kept) > self.kept_rows:
            self._kept.popitem(last=False)
        return row

    def _usable(self, row: Tokenized) -> Tokenized:
        """Return the row, cut if need be. Raises BadRow and TooLongRow."""
        if self.vocab_size is not None and (token := largest_token(row)) >= self.vocab_size:
            text = self.renderer.tokenizer.convert_ids_to_tokens(token)
            raise BadRow(
                f"has the token {text!r}, number {token}, and the model's embedding has {self.vocab_size}; expected text without "
                "it, or the tokenizer that belongs to the model"
            )
        length = self._length(row)
        self.report.longest = max(self.report.longest, length)
        if length <= self.longest:
            return row
        may_cut = not self.config.filter_overlong_prompts and self.config.truncation != "error"
        cut = self._cut(row) if may_cut else None
        if cut is None:
            raise TooLongRow(self.too_long.format(length=length, longest=self.longest))
        self.report.num_truncated += 1
        return cut


def largest_token(row: Any) -> int:
    arrays = [getattr(row, field.name) for field in fields(row) if field.name.endswith("ids")]
    return max((int(ids.max()) for ids in arrays if len(ids)), default=-1)


class TrainingSet(RowSet[Tokenized]):
    def __init__(self, files: Sequence[str], config: Config, tokenizer: Any, **options: Any) -> None:
        super().__init__(files, config.data, tokenizer, config.longest_sequence, **options)
        self.run = config

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """What a row makes, one rollout or several, is one group."""


@frozen
class TrainingRows:
    train: TrainingSet[Any]
    val: TrainingSet[Any] | None = None


def batch_of_sequences(
    token_ids: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    rewards: float,
    positions: Sequence[np.ndarray] | None = None,
    **columns: Any,
) -> Batch:
    """Each sequence is a rollout and a group.

    `positions` are the trained tokens of each (int64, ascending), the whole response by default.
    """
    lengths_N = torch.tensor(list(map(len, token_ids)), dtype=torch.long)
    prompt_lengths_N = torch.tensor(prompt_lengths, dtype=torch.long)
    if positions is not None:
        trained_lengths_N = torch.tensor(list(map(len, positions)), dtype=torch.long)
        if not torch.equal(trained_lengths_N, lengths_N - prompt_lengths_N):
            starts = (lengths_N.cumsum(0) - lengths_N).tolist()
            positions_T = np.concatenate([places + start for places, start in zip(positions, starts, strict=True)])
            columns |= {"positions_T": torch.from_numpy(positions_T), "trained_lengths_N": trained_lengths_N}
    return Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=lengths_N - prompt_lengths_N,
        group_N=torch.arange(len(token_ids)),
        token_ids_S=torch.from_numpy(np.concatenate([np.empty(0, np.int32), *token_ids], dtype=np.int32)),
        rewards_N=torch.full((len(token_ids),), rewards),
        **columns,
    )
