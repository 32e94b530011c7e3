import pytest

from grpo_rl.data.draw_order import EpochOrder
from grpo_rl.errors import ConfigError, DataError


def rows(batch):
    return [row for row, _ in batch]


def test_without_shuffling_rows_come_in_order_and_the_rest_of_an_epoch_is_dropped():
    sampler = EpochOrder(num_rows=5, batch_size=2, shuffle=False, seed=0)
    assert sampler.next_batch() == [(0, "e0-r0"), (1, "e0-r1")]
    assert sampler.next_batch() == [(2, "e0-r2"), (3, "e0-r3")]
    assert sampler.next_batch() == [(0, "e1-r0"), (1, "e1-r1")]
    assert sampler.epoch == 1


def test_an_epoch_visits_every_row_once_in_a_new_order():
    sampler = EpochOrder(num_rows=12, batch_size=4, shuffle=True, seed=7)
    first, second = ([row for _ in range(3) for row in rows(sampler.next_batch())] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_the_order_depends_on_the_seed_alone():
    orders = [rows(EpochOrder(50, 50, True, seed).next_batch()) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("steps_before", range(8))
def test_a_restored_sampler_goes_on_with_the_exact_next_row(steps_before):
    original = EpochOrder(10, 3, True, 5)
    for _ in range(steps_before):
        original.next_batch()
    restored = EpochOrder(10, 3, True, 5)
    restored.load_state_dict(original.state_dict())
    assert [original.next_batch() for _ in range(7)] == [restored.next_batch() for _ in range(7)]


def test_another_batch_size_goes_on_from_the_same_row():
    original = EpochOrder(10, 4, False, 5)
    original.next_batch()
    restored = EpochOrder(10, 3, False, 5)
    restored.load_state_dict(original.state_dict())
    assert rows(restored.next_batch()) == [4, 5, 6]


def test_resuming_on_other_data_is_refused():
    state = EpochOrder(10, 2, True, 5).state_dict()
    with pytest.raises(DataError, match="num_rows was 10, now 11"):
        EpochOrder(11, 2, True, 5).load_state_dict(state)


def test_a_batch_larger_than_the_data_is_refused_with_the_largest_possible_one():
    with pytest.raises(ConfigError, match=r"train_batch_size=8 .* at most 5"):
        EpochOrder(5, 8, True, 0)
