"""Several sources mixed with weights, fixed ones or ones that follow the pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_rl.data.draw_order.curriculum import weight_of_rate
from grpo_rl.data.draw_order.sampler import Usable, check_identity, check_size, order_of
from grpo_rl.errors import DataError

RATE_MEMORY = 0.9
"""The share of a source's pass rate that stays when one more group is scored."""


class MixedSampler:
    """Batches in which each source has its share, draw by draw as even as whole rows allow.

    Every draw adds to each source its weight and takes 1 from the source that then has most and is drawn (smooth weighted
    round-robin): after t draws a source of share w had w·t of them, up to a fraction. Each source goes through its own
    rows in its own seeded order, pass after pass; a small one is repeated while a large one is at its first pass. An
    epoch is as many draws as there are rows in all sources. A source without a usable row is left out.

    With a `floor` the weights are multiplied by max(floor, 4p(1-p)), p a moving average of the source's pass rates.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        floor: float | None = None,
        size_key: str = "data.train_batch_size",
        is_usable: Usable | None = None,
        difficulty: np.ndarray | None = None,
    ) -> None:
        check_size(sum(sizes), batch_size, size_key)
        self.batch_size, self.least_rows = batch_size, 1
        self.wants_rates = floor is not None
        self._sizes, self._starts = list(sizes), np.cumsum([0, *sizes])
        self._weights = np.array(weights, dtype=np.float64) / sum(weights)
        self._shuffle, self._seed, self._floor = shuffle, seed, floor
        self._is_usable, self._difficulty = is_usable, difficulty
        self._credits = [0.0] * len(self._sizes)
        self._passes, self._places = [0] * len(self._sizes), [0] * len(self._sizes)
        self._num_drawn = self._epoch = self._first_epoch = 0
        self._rates = np.full(len(self._sizes), np.nan)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def shares(self) -> np.ndarray:
        """The share that each source has in the next draws."""
        weights = self._weights if self._floor is None else self._weights * weight_of_rate(self._rates, self._floor)
        return weights / weights.sum()

    def next_batch(self) -> list[tuple[int, str]]:
        before = self.position()
        try:
            batch = self._draw()
        except DataError:
            self.seek(before)
            raise
        self._epoch = self._first_epoch + self._num_drawn // sum(self._sizes)
        self._num_drawn += len(batch)
        return batch

    def _draw(self) -> list[tuple[int, str]]:
        shares = self.shares
        batch: list[tuple[int, str]] = []
        while len(batch) < self.batch_size:
            if not shares.any():
                raise DataError("no training row is left in any source, all are retired or cannot be used")
            source = int(np.argmax(np.where(shares > 0, self._credits + shares, -np.inf)))
            drawn = self._next_row(source)
            if drawn is None:
                shares[source], self._credits[source] = 0.0, 0.0
                shares = shares / (shares.sum() or 1.0)
                continue
            self._credits = (self._credits + shares).tolist()
            self._credits[source] -= 1.0
            batch.append(drawn)
        return batch

    def _next_row(self, source: int) -> tuple[int, str] | None:
        """The source's next usable row; None where a whole pass has none."""
        for _ in range(self._sizes[source]):
            if self._places[source] == self._sizes[source]:
                self._passes[source], self._places[source] = self._passes[source] + 1, 0
            place, number = self._places[source], self._passes[source]
            row = int(self._starts[source] + self._order(source, number)[place])
            self._places[source] += 1
            if self._is_usable is None or self._is_usable(row):
                return row, f"e{number}-r{row}"
        return None

    def _order(self, source: int, number: int) -> np.ndarray:
        if self._orders.get(source, (-1,))[0] != number:
            start, size = self._starts[source], self._sizes[source]
            difficulty = None if self._difficulty is None else self._difficulty[start : start + size]
            seed = (self._seed, source, number) if self._shuffle else None
            self._orders[source] = number, order_of(size, seed, difficulty)
        return self._orders[source][1]

    def record(self, row: int, rate: float) -> None:
        source = int(np.searchsorted(self._starts, row, side="right")) - 1
        before = self._rates[source]
        self._rates[source] = rate if np.isnan(before) else RATE_MEMORY * before + (1 - RATE_MEMORY) * rate

    def metrics(self) -> dict[str, float]:
        shares = {f"data/share/{source}": float(share) for source, share in enumerate(self.shares)}
        rates = {f"data/pass_rate/{source}": float(rate) for source, rate in enumerate(self._rates) if not np.isnan(rate)}
        return shares | rates

    def position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "first_epoch": self._first_epoch,
            "num_drawn": self._num_drawn,
            "credits": list(self._credits),
            "passes": list(self._passes),
            "places": list(self._places),
        }

    def seek(self, position: dict[str, Any]) -> None:
        self._epoch, self._first_epoch = position["epoch"], position["first_epoch"]
        self._num_drawn, self._credits = position["num_drawn"], list(position["credits"])
        self._passes, self._places = list(position["passes"]), list(position["places"])

    def state_dict(self) -> dict[str, Any]:
        rates = [None if np.isnan(rate) else rate for rate in self._rates.tolist()]
        return self.position() | self._identity() | {"rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        self.seek(state)
        self._rates = np.array([np.nan if rate is None else rate for rate in state["rates"]])

    def start_after(self, state: dict[str, Any]) -> None:
        self._epoch = self._first_epoch = int(state["epoch"]) + 1
        # Each occurrence of a row has a name of its own: no source may begin a pass that it has begun before.
        first = max([int(number) for number in state.get("passes", [])], default=self._epoch) + 1
        self._passes = [max(first, self._epoch)] * len(self._sizes)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": sum(self._sizes),
            "sizes": self._sizes,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "curriculum": "none" if self._difficulty is None else "difficulty",
            "weights": [*self._weights.tolist(), self._floor],
        }
