"""The order of rows: weights, rows that turn out to be unusable, and all of it after a resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from grpo_rl.data.draw_order import EpochOrder, MixedOrder, RowOrder
from grpo_rl.errors import ConfigError, DataError


def rows(batch: list[tuple[int, str]]) -> list[int]:
    return [row for row, _ in batch]


def mixed(**options: object) -> MixedOrder:
    return MixedOrder([4, 100], [3, 1], 8, True, 5, **options)


SAMPLERS = {
    "one order": lambda: EpochOrder(50, 8, True, 5),
    "mixed": mixed,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_run_draws_the_same_rows(name: str) -> None:
    def go_on(sampler: RowOrder, num_batches: int) -> list[list[tuple[int, str]]]:
        batches = []
        for _ in range(num_batches):
            batches.append(sampler.next_batch())
        return batches

    whole, part, resumed = (SAMPLERS[name]() for _ in range(3))
    expected = go_on(whole, 20)
    assert go_on(part, 9) == expected[:9]
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert go_on(resumed, 11) == expected[9:]
    assert resumed.epoch == whole.epoch
    uids = [uid for batch in expected for _, uid in batch]
    assert len(set(uids)) == len(uids)


@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_that_cannot_be_used_are_passed_over_and_a_failure_moves_nothing(name: str) -> None:
    sampler = SAMPLERS[name]()
    sampler._is_usable = lambda row: row % 2 == 0
    assert all(row % 2 == 0 for _ in range(6) for row in rows(sampler.next_batch()))
    before = sampler.state_dict()

    def broken(row: int) -> bool:
        raise DataError("line 7 is broken")

    sampler._is_usable = broken
    with pytest.raises(DataError, match="line 7"):
        sampler.next_batch()
    assert sampler.state_dict() == before


@pytest.mark.parametrize("name", SAMPLERS)
def test_other_data_begin_with_the_next_epoch_and_no_name_comes_twice(name: str) -> None:
    old, new = SAMPLERS[name](), SAMPLERS[name]()
    names = [uid for _ in range(15) for _, uid in old.next_batch()]
    state = json.loads(json.dumps(old.state_dict()))
    new.start_after(state)
    later = [uid for _ in range(15) for _, uid in new.next_batch()]
    assert not set(names) & set(later)
    assert new.epoch > old.epoch or name == "mixed"


def test_each_source_has_its_share_in_every_batch_and_small_ones_are_repeated() -> None:
    sampler = mixed()
    batches = [sampler.next_batch() for _ in range(13)]
    # Weights 3 and 1: of 8 draws 6 are rows 0 to 3, and 2 are rows 4 to 103.
    assert all(sum(row < 4 for row in rows(batch)) == 6 for batch in batches)
    counts = Counter(row for batch in batches for row in rows(batch))
    # 13 batches are 78 draws of the four rows, 19 or 20 each, and 26 different ones of the hundred.
    assert sorted(counts[row] for row in range(4)) == [19, 19, 20, 20]
    assert [count for row, count in counts.items() if row >= 4] == [1] * 26
    # An epoch is 104 draws, 13 batches.
    assert sampler.epoch == 0
    sampler.next_batch()
    assert sampler.epoch == 1


def test_a_source_without_a_usable_row_leaves_its_share_to_the_others() -> None:
    sampler = mixed(is_usable=lambda row: row >= 4)
    assert all(row >= 4 for row in rows(sampler.next_batch()))
    sampler = mixed(is_usable=lambda row: False)
    with pytest.raises(DataError, match="no training row is left in any source"):
        sampler.next_batch()


def test_other_weights_cannot_go_on_in_the_middle() -> None:
    with pytest.raises(DataError, match="weights was"):
        MixedOrder([4, 100], [2, 1], 8, True, 5).load_state_dict(mixed().state_dict())
    with pytest.raises(DataError, match="weights was"):
        EpochOrder(104, 8, True, 5).load_state_dict(mixed().state_dict())


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    one, other = EpochOrder(20, 20, True, 0), EpochOrder(20, 20, True, 1)
    orders = [tuple(rows(sampler.next_batch())) for sampler in (one, one, one, other)]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(20)) for order in orders)


def test_without_shuffling_rows_come_in_order_and_the_rest_of_an_epoch_is_dropped() -> None:
    sampler = EpochOrder(num_rows=5, batch_size=2, shuffle=False, seed=0)
    assert sampler.next_batch() == [(0, "e0-r0"), (1, "e0-r1")]
    assert sampler.next_batch() == [(2, "e0-r2"), (3, "e0-r3")]
    assert sampler.next_batch() == [(0, "e1-r0"), (1, "e1-r1")]
    assert sampler.epoch == 1


def test_a_batch_larger_than_the_data_is_refused_with_the_largest_possible_one() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size=8 .* at most 5"):
        EpochOrder(5, 8, True, 0)
