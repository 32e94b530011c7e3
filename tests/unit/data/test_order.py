"""The order of rows: rows that turn out to be unusable, and all of it after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_rl.data.draw_order import RowOrder
from grpo_rl.errors import ConfigError, DataError


def rows(batch: list[tuple[int, str]]) -> list[int]:
    return [row for row, _ in batch]


def test_a_resumed_run_draws_the_same_rows_and_names_each_occurrence_once() -> None:
    whole, part, resumed = (RowOrder(50, 8, True, 5) for _ in range(3))
    expected = [whole.next_batch() for _ in range(20)]
    assert [part.next_batch() for _ in range(9)] == expected[:9]
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert [resumed.next_batch() for _ in range(11)] == expected[9:]
    assert resumed.epoch == whole.epoch
    uids = [uid for batch in expected for _, uid in batch]
    assert len(set(uids)) == len(uids)
    with pytest.raises(DataError, match="its order has changed: seed was 5, now 6"):
        RowOrder(50, 8, True, 6).load_state_dict(part.state_dict())


def test_entries_have_the_shares_of_their_weights_and_go_on_where_they_were_after_a_resume() -> None:
    sizes, weights = (10, 30, 60), (3.0, 1.0, 1.0)

    def order() -> RowOrder:
        return RowOrder(100, 20, True, 5, shares=list(zip(sizes, weights, strict=True)))

    whole, part, resumed = (order() for _ in range(3))
    expected = [whole.next_batch() for _ in range(15)]
    for epoch in range(3):
        drawn = [row for batch in expected[5 * epoch : 5 * epoch + 5] for row in rows(batch)]
        # 60, 20 and 20 of 100: the first entry six times, a third of the second, a third of the last.
        assert np.bincount(np.digitize(drawn, [10, 40])).tolist() == [60, 20, 20]
        assert np.bincount(drawn)[:10].tolist() == [6] * 10
    drawn = np.concatenate([rows(batch) for batch in expected])
    assert np.bincount(drawn)[10:40].tolist() == [2] * 30 and np.bincount(drawn)[40:].tolist() == [1] * 60
    uids = [uid for batch in expected for _, uid in batch]
    assert len(set(uids)) == len(uids)
    assert [part.next_batch() for _ in range(7)] == expected[:7]
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert [resumed.next_batch() for _ in range(8)] == expected[7:]


def test_rows_that_cannot_be_used_are_passed_over_and_a_failure_moves_nothing() -> None:
    broken = False

    def usable(row: int) -> bool:
        if broken:
            raise DataError("line 7 is broken")
        return row % 2 == 0

    order = RowOrder(50, 8, True, 5, is_usable=usable)
    assert all(row % 2 == 0 for _ in range(6) for row in rows(order.next_batch()))
    before, broken = order.state_dict(), True
    with pytest.raises(DataError, match="line 7"):
        order.next_batch()
    assert order.state_dict() == before
    with pytest.raises(DataError, match="fewer than 8 of 50 training rows are left"):
        RowOrder(50, 8, True, 5, is_usable=lambda row: row < 7).next_batch()


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    one, other = RowOrder(20, 20, True, 0), RowOrder(20, 20, True, 1)
    orders = [tuple(rows(order.next_batch())) for order in (one, one, one, other)]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(20)) for order in orders)


def test_without_shuffling_rows_come_in_order_and_the_rest_of_an_epoch_is_dropped() -> None:
    order = RowOrder(num_rows=5, batch_size=2, shuffle=False, seed=0)
    batches = [order.next_batch() for _ in range(3)]
    assert batches == [[(0, "e0-r0"), (1, "e0-r1")], [(2, "e0-r2"), (3, "e0-r3")], [(0, "e1-r0"), (1, "e1-r1")]]
    assert order.epoch == 1


def test_a_batch_larger_than_the_data_is_refused_with_the_largest_possible_one() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size=8 .* at most 5"):
        RowOrder(5, 8, True, 0)
