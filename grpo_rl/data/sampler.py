"""The order in which rows are trained on: seeded per epoch, and resumable to the exact row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_rl.errors import ConfigError, DataError


class PromptSampler:
    """Batches of rows, epoch after epoch; the order is a function of (seed, epoch) and of nothing else.

    Rows left over at the end of an epoch, fewer than a batch, are dropped (verl's `drop_last`). Rows that `is_retired`
    when their turn comes are skipped. As a row comes once in an epoch, and retires only after it came, that depends on
    earlier epochs alone. `size_key` is the key that set the batch's size.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        size_key: str = "data.train_batch_size",
        is_retired: Callable[[int], bool] | None = None,
    ) -> None:
        if num_rows < batch_size:
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training data, which has {num_rows} rows: "
                f"give a batch of at most {num_rows}, or more data"
            )
        self._num_rows, self._batch_size, self._shuffle, self._seed = num_rows, batch_size, shuffle, seed
        self._is_retired = is_retired
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self._num_rows // self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch that `next_batch` gave last."""
        return self._epoch

    def next_batch(self) -> list[tuple[int, str]]:
        """`batch_size` pairs of row index and uid; the uid names the occurrence, e.g. `e0-r17`.

        Raises DataError when fewer rows than that are not retired.
        """
        rows = self._take()
        if rows is None:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
            rows = self._take()
        if rows is None:
            raise DataError(f"fewer than {self._batch_size} of {self._num_rows} training rows are left, the others are retired")
        return [(row, f"e{self._epoch}-r{row}") for row in rows]

    def _take(self) -> list[int] | None:
        """The next rows of this epoch; None, and no step forward, where fewer than a batch are left."""
        rest = self._order[self._position :].tolist()
        places = [place for place, row in enumerate(rest) if self._is_retired is None or not self._is_retired(row)]
        if len(places) < self._batch_size:
            return None
        chosen = places[: self._batch_size]
        self._position += chosen[-1] + 1
        return [rest[place] for place in chosen]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the order would be another one."""
        differences = [f"{key} was {state[key]}, now {value}" for key, value in self._identity().items() if state[key] != value]
        if differences:
            raise DataError(
                f"cannot resume in the middle of the training data, its order has changed: {'; '.join(differences)}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows, "shuffle": self._shuffle, "seed": self._seed}

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_rows)
