"""The batch: selecting rollouts, and the denominators of the averages."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.types import Batch, Counts


def make_batch(lengths: list[tuple[int, int]], groups: list[int] | None = None, optional: bool = True) -> Batch:
    """Token and column values say where they come from: 1000 * rollout + position, so that a wrong one is seen."""
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    token_ids = [1000 * n + t for n, (p, r) in enumerate(lengths) for t in range(p + r)]
    trained = torch.tensor([1000.0 * n + t for n, r in enumerate(responses) for t in range(r)])
    num_steps = [max(0, r - n % 2) for n, r in enumerate(responses)]
    return Batch(
        prompt_lengths_N=torch.tensor(prompts, dtype=torch.long),
        response_lengths_N=torch.tensor(responses, dtype=torch.long),
        group_N=torch.tensor(groups if groups is not None else list(range(len(lengths))), dtype=torch.long),
        token_ids_S=torch.tensor(token_ids, dtype=torch.long),
        rewards_N=torch.arange(len(lengths), dtype=torch.float32),
        rollout_logprobs_T=trained,
        old_logprobs_T=trained + 0.25 if optional else None,
        ref_hidden_TD=torch.stack([trained, -trained], 1) if optional else None,
        # As many steps as tokens, one fewer on every second rollout.
        num_steps_N=torch.tensor(num_steps, dtype=torch.long) if optional else None,
        step_ends_K=torch.tensor([t for r in num_steps for t in range(r)], dtype=torch.long) if optional else None,
        step_rewards_K=torch.tensor([1000.0 * n + t for n, r in enumerate(num_steps) for t in range(r)]) if optional else None,
    )


def test_selecting_takes_all_columns_of_the_chosen_rollouts_in_the_order_asked_for():
    chosen = make_batch([(2, 1), (1, 2), (3, 0)], groups=[5, 5, 7]).select([1, 0])
    assert chosen.prompt_lengths_N.tolist() == [1, 2]
    assert chosen.response_lengths_N.tolist() == [2, 1]
    assert chosen.group_N.tolist() == [5, 5]
    assert chosen.token_ids_S.tolist() == [1000, 1001, 1002, 0, 1, 2]
    assert chosen.rewards_N.tolist() == [1, 0]
    assert chosen.rollout_logprobs_T.tolist() == [1000, 1001, 0]
    assert chosen.old_logprobs_T.tolist() == [1000.25, 1001.25, 0.25]
    assert chosen.ref_hidden_TD.tolist() == [[1000, -1000], [1001, -1001], [0, 0]]
    assert chosen.num_steps_N.tolist() == [1, 1]
    assert (chosen.step_ends_K.tolist(), chosen.step_rewards_K.tolist()) == ([0, 0], [1000, 0])
    assert chosen.ref_logprobs_T is None and chosen.advantages_T is None


def test_a_rollout_may_be_selected_twice_and_none_may_be_selected():
    batch = make_batch([(1, 1), (1, 2)])
    assert batch.select([1, 1]).token_ids_S.tolist() == [1000, 1001, 1002, 1000, 1001, 1002]
    nothing = batch.select([])
    assert nothing.num_rollouts == nothing.num_trained_tokens == len(nothing.token_ids_S) == 0
    assert nothing.ref_hidden_TD.shape == (0, 2)


rollout_lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=12)


@given(rollout_lengths, st.randoms(use_true_random=False), st.booleans())
def test_any_split_put_together_again_is_the_batch(lengths, random, optional):
    batch = make_batch(lengths, optional=optional)
    order = random.sample(range(len(lengths)), len(lengths))
    back = batch.select(order).select(torch.tensor(order).argsort())
    for column in dataclasses.fields(Batch):
        before, after = getattr(batch, column.name), getattr(back, column.name)
        assert (before is None and after is None) or torch.equal(before, after), column.name


@given(rollout_lengths)
def test_numbers_of_rollouts_and_tokens_are_those_of_the_columns(lengths):
    batch = make_batch(lengths)
    assert batch.num_rollouts == len(lengths)
    assert batch.num_trained_tokens == sum(r for _, r in lengths) == batch.counts().num_tokens
    assert batch.sequence_lengths_N.tolist() == [p + r for p, r in lengths]


def test_counts_leave_out_rollouts_and_groups_without_a_trained_token():
    batch = make_batch([(2, 3), (2, 0), (1, 0), (1, 1), (1, 4)], groups=[0, 0, 1, 2, 2])
    assert batch.counts() == Counts(num_tokens=8, num_sequences=3, num_groups=2)
    assert make_batch([(2, 0)]).counts() == Counts(0, 0, 0)


def test_replacing_a_column_leaves_the_others_and_the_original_alone():
    batch = make_batch([(1, 2)])
    changed = batch.replace(advantages_T=torch.tensor([1.0, 2.0]))
    assert changed.advantages_T.tolist() == [1, 2] and batch.advantages_T is None
    assert changed.token_ids_S is batch.token_ids_S
