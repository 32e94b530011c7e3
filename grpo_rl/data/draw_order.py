"""The order in which rows are trained on: seeded per epoch or by a curriculum, resumable to the exact row."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.data.rows import Example
from grpo_rl.data.sources.source import differences
from grpo_rl.errors import CheckpointError, ConfigError, DataError, FunctionError
from grpo_rl.frozen import frozen
from grpo_rl.registry import Registry


@frozen
class Draw:
    """A question to a curriculum; a row may be named more than once."""

    size: int
    num_rows: int
    pass_rates: Mapping[int, float]
    """Of each answered row: the share of its latest responses that pass (data.retire_metric)."""
    row: Callable[[int], Example]
    """Raises DataError for a row that cannot be used."""
    usable: Callable[[int], bool]
    """False only with data.on_bad_row=skip or filtered long prompts."""
    rng: np.random.Generator
    """The same after a resume."""
    state: dict[str, Any]
    """Remembered from draw to draw, as JSON; a part of every checkpoint."""


CURRICULA: Registry[Callable[[Draw], Sequence[int]]] = Registry(
    "curriculum", "next_rows(draw: grpo_rl.data.draw_order.Draw) -> list of draw.size row numbers"
)


class RowOrder:
    """Batches of rows, epoch after epoch; the order is a function of (seed, epoch) and of nothing else.

    With `shares`, (rows, weight) of each entry, an epoch is divided by weight; an entry's rows are gone
    through in one permutation after another. Rows left over at the end of an epoch are dropped (verl's
    `drop_last`). Rows that are not usable when their turn comes are skipped. A draw that fails leaves the
    position as it was.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        size_key: str = "data.train_batch_size",
        is_usable: Callable[[int], bool] = lambda row: True,
        shares: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`size_key` is the key that set the batch's size."""
        if num_rows < batch_size:
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
                f"give a batch of at most {num_rows}, or more data"
            )
        self.batch_size = batch_size
        self._is_usable = is_usable
        self._identity: dict[str, Any] = {"num_rows": num_rows, "shuffle": shuffle, "seed": seed}
        self._identity |= {"shares": [list(share) for share in shares]} if shares else {}
        self.num_named = 0
        self.seek(0, 0)

    def seek(self, epoch: int, position: int) -> None:
        """The next batch is of this epoch unless too few rows are left."""
        self.epoch, self.position, self._order = epoch, position, self._order_of(epoch)

    @contextmanager
    def rewinding(self) -> Iterator[None]:
        """After a DataError in the body the next draw begins with the same rows again."""
        epoch, position, num_named = self.epoch, self.position, self.num_named
        try:
            yield
        except DataError:
            self.seek(epoch, position)
            self.num_named = num_named
            raise

    def next_batch(self) -> list[tuple[int, str]]:
        """Pairs of row index and uid, which names the occurrence and ends in `-r` and the row."""
        for epoch, position in ((self.epoch, self.position), (self.epoch + 1, 0)):
            order = self._order if epoch == self.epoch else self._order_of(epoch)
            drawn, num_looked_at = self._first_usable(map(int, order[position:]))
            if len(drawn) == self.batch_size:
                break
        else:
            raise DataError(
                f"fewer than {self.batch_size} of {len(order)} training rows are left, the others are retired or cannot be used"
            )
        self.epoch, self.position, self._order = epoch, position + num_looked_at, order
        occurrences = [divmod(entry, self._identity["num_rows"]) for entry in drawn]
        return [(row, f"e{epoch}{f'.{number}' if number else ''}-r{row}") for number, row in occurrences]

    def named(self, rows: Sequence[int]) -> list[tuple[int, str]]:
        """Pairs for rows that were chosen elsewhere."""
        num_rows = self._identity["num_rows"]
        if wrong := [row for row in rows if not 0 <= row < num_rows]:
            raise ValueError(f"there is no row {wrong[0]}: the training data have {num_rows} rows, from 0 on")
        first, self.num_named = self.num_named, self.num_named + len(rows)
        return [(row, f"s{number}-r{row}") for number, row in enumerate(rows, start=first)]

    def state_dict(self) -> dict[str, Any]:
        named = {"num_named": self.num_named} if self.num_named else {}
        return {"epoch": self.epoch, "position": self.position, **self._identity, **named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError if the order would be another one."""
        changes = [f"{key} was {state.get(key)}, now {new}" for key, new in self._identity.items() if state.get(key) != new]
        if changes:
            raise DataError(f"cannot resume in the middle of the training data, its order has changed: {'; '.join(changes)}")
        self.seek(state["epoch"], state["position"])
        self.num_named = int(state.get("num_named", 0))

    def _first_usable(self, entries: Iterable[int]) -> tuple[list[int], int]:
        """A batch, and how many rows were looked at; fewer rows than a batch, and 0, if no more are left."""
        usable: list[int] = []
        for number, entry in enumerate(entries, start=1):
            if self._is_usable(entry % self._identity["num_rows"]):
                usable.append(entry)
                if len(usable) == self.batch_size:
                    return usable, number
        return usable, 0

    def _order_of(self, epoch: int) -> np.ndarray:
        """int64; the n-th occurrence of a row in an epoch has n times the number of rows added."""
        num_rows, shuffle, seed = (self._identity[key] for key in ("num_rows", "shuffle", "seed"))
        if not shuffle:
            return np.arange(num_rows)
        rows: np.ndarray | int = num_rows
        if shares := self._identity.get("shares"):
            weights = np.array([weight for _, weight in shares])
            counts = np.diff(np.rint(np.cumsum(weights) / weights.sum() * num_rows).astype(np.int64), prepend=0)
            firsts = np.cumsum([0, *(size for size, _ in shares)])
            entries = enumerate(zip(shares, counts.tolist(), firsts.tolist(), strict=False))
            rows = np.concatenate(
                [first + self._part(number, size, epoch * count, count) for number, ((size, _), count, first) in entries]
            )
        return np.random.default_rng((seed, epoch)).permutation(rows)

    def _part(self, number: int, size: int, start: int, count: int) -> np.ndarray:
        """Rows from `start` on in the entry's successive permutations."""
        num_rows, seed = self._identity["num_rows"], self._identity["seed"]
        first = start // size
        rounds = range(first, (start + count - 1) // size + 1)
        drawn = [np.random.default_rng((seed, number, turn)).permutation(size) + (turn - first) * num_rows for turn in rounds]
        return np.concatenate(drawn or [np.arange(0)])[start - first * size :][:count]


class Curriculum(RowOrder):
    """The rows that a user's function chooses; what it is told and remembers is in checkpoints."""

    def __init__(self, name: str, data: PromptDataset, batch_size: int, seed: int, size_key: str) -> None:
        super().__init__(len(data), batch_size, False, seed, size_key=size_key, is_usable=data.usable)
        self._name, self._data, self._choose = name, data, CURRICULA.get(name)
        self.pass_rates: dict[int, float] = {}
        self.state: dict[str, Any] = {}

    def next_batch(self) -> list[tuple[int, str]]:
        state = copy.deepcopy(self.state)
        try:
            rows = self._chosen()
        except DataError:
            self.state = state
            raise
        drawn = self.named(rows)
        self.epoch = (self.num_named - 1) // len(self._data)
        return drawn

    def _chosen(self) -> list[int]:
        num_rows, rng = len(self._data), np.random.default_rng((self._identity["seed"], self.num_named))
        draw = Draw(
            self.batch_size,
            num_rows,
            MappingProxyType(self.pass_rates),
            lambda row: self._data.row(row).example,
            self._is_usable,
            rng,
            self.state,
        )
        answer: Any = self._choose(draw)
        try:
            rows = [operator.index(row) for row in answer]
        except TypeError:
            rows = []
        if len(rows) != self.batch_size or not all(0 <= row < num_rows for row in rows):
            raise FunctionError(
                f"curriculum {self._name} returned {str(answer)[:80]}; it returns {self.batch_size} row numbers from 0 to {num_rows - 1}"
            )
        if bad := [row for row in rows if not self._is_usable(row)]:
            raise FunctionError(
                f"curriculum {self._name} chose row {bad[0]}, which cannot be used: leave out what draw.usable denies"
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"pass_rates": list(self.pass_rates.items()), "curriculum": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.pass_rates = {int(row): float(rate) for row, rate in state.get("pass_rates", ())}
        self.state = copy.deepcopy(state.get("curriculum", {}))


def make_row_order(
    config: Config, dataset: PromptDataset | TrainingSet[Any], is_retired: Callable[[int], bool] = lambda row: False
) -> RowOrder:
    data = config.data
    size_key = "data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size"
    if data.curriculum is not None and isinstance(dataset, PromptDataset):
        return Curriculum(data.curriculum, dataset, config.gen_batch_size, data.seed, size_key)
    sizes = dataset.entry_sizes()
    if data.train_weights is not None and 0 in sizes:
        raise ConfigError(
            f"data.train_weights: {data.train_files[sizes.index(0)]} has no rows to draw (data.train_max_samples takes the first ones); "
            "leave it out of data.train_files"
        )
    return RowOrder(
        len(dataset),
        config.gen_batch_size,
        data.shuffle,
        data.seed,
        size_key=size_key,
        is_usable=lambda row: not is_retired(row) and dataset.usable(row),
        shares=() if data.train_weights is None else list(zip(sizes, data.train_weights, strict=True)),
    )


def resume_order(
    sampler: RowOrder, data: PromptDataset | TrainingSet[Any], state: dict[str, Any], *, allow_change: bool
) -> bool:
    """Let the sampler continue where `state` was taken; return False if data have changed and their next epoch begins instead.

    Raises CheckpointError for data that have changed, unless that is allowed.
    """
    changes = differences(state["data"], data.fingerprint) if "data" in state else []
    num_rows = state.get("num_rows")
    if not changes and num_rows is not None and num_rows != len(data):
        changes = [f"{num_rows} rows were used, now {len(data)} are"]
    if not changes and (shares := sampler.state_dict().get("shares")) != state.get("shares"):
        changes = [f"rows and data.train_weights of the entries were {state.get('shares')}, now {shares}"]
    if changes and not allow_change:
        raise CheckpointError(
            f"the training data have changed since the checkpoint: {'; '.join(changes)}. Its position in them means nothing "
            "now; give the data of before, or start the next epoch with the new ones by data.allow_change=true"
        )
    if changes:
        sampler.seek(int(state["epoch"]) + 1, 0)
        return False
    sampler.load_state_dict(state)
    return True
