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
        # Token t of a response has 1 + t % 3 entries, each the token's own value.
        support_counts_T=(1 + trained.long() % 1000 % 3) if optional else None,
        support_ids_M=trained.int().repeat_interleave(1 + trained.long() % 1000 % 3) if optional else None,
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
    assert chosen.support_counts_T.tolist() == [1, 2, 1]
    assert chosen.support_ids_M.tolist() == [1000, 1001, 1001, 0]
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


def test_counts_leave_out_rollouts_and_groups_without_a_trained_token():
    batch = make_batch([(2, 3), (2, 0), (1, 0), (1, 1), (1, 4)], groups=[0, 0, 1, 2, 2])
    assert batch.counts() == Counts(num_tokens=8, num_sequences=3, num_groups=2)
    assert make_batch([(2, 0)]).counts() == Counts(0, 0, 0)


# ---- which tokens are trained -------------------------------------------------------------------------


def several_turns() -> Batch:
    """Two rollouts: prompt 2, then trained 1, tool output 2, trained 2; and prompt 1, trained 1, context 1."""
    return Batch(
        prompt_lengths_N=torch.tensor([2, 1]),
        response_lengths_N=torch.tensor([5, 2]),
        group_N=torch.tensor([0, 0]),
        token_ids_S=torch.tensor([10, 11, 12, 13, 14, 15, 16, 20, 21, 22]),
        rewards_N=torch.zeros(2),
        rollout_logprobs_T=torch.tensor([12.0, 15.0, 16.0, 21.0]),
        positions_T=torch.tensor([2, 5, 6, 8]),
        trained_lengths_N=torch.tensor([3, 1]),
    )


def test_in_one_turn_the_trained_tokens_are_the_responses():
    batch = make_batch([(2, 1), (1, 2), (3, 0)])
    assert batch.positions_T is None and batch.positions().tolist() == [2, 4, 5]
    assert batch.trained_lengths_N.tolist() == [1, 2, 0]


def test_context_between_trained_tokens_is_read_and_not_counted():
    batch = several_turns()
    assert batch.token_ids_S[batch.positions_T].tolist() == batch.rollout_logprobs_T.tolist()
    assert batch.counts() == Counts(num_tokens=4, num_sequences=2, num_groups=1)
    other_order = batch.select([1, 0])
    assert other_order.positions_T.tolist() == [1, 5, 8, 9]
    assert other_order.token_ids_S[other_order.positions_T].tolist() == other_order.rollout_logprobs_T.tolist()


def test_keeping_tokens_makes_a_smaller_batch_with_right_counts():
    batch = several_turns().replace(advantages_T=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    kept = batch.keep(torch.tensor([False, True, True, False]))
    assert (kept.positions_T.tolist(), kept.trained_lengths_N.tolist()) == ([5, 6], [2, 0])
    assert kept.advantages_T.tolist() == [2.0, 3.0]
    assert kept.counts() == Counts(num_tokens=2, num_sequences=1, num_groups=1)
    assert kept.token_ids_S is batch.token_ids_S and kept.num_rollouts == 2
    nothing = batch.keep(torch.zeros(4, dtype=torch.bool))
    assert nothing.counts() == Counts(0, 0, 0) and nothing.trained_lengths_N.tolist() == [0, 0]


@given(rollout_lengths, st.randoms(use_true_random=False))
def test_every_kept_token_still_names_itself_in_every_column(lengths, random):
    batch = make_batch(lengths)
    trained_T = torch.tensor([random.random() < 0.5 for _ in range(batch.num_trained_tokens)], dtype=torch.bool)
    order = random.sample(range(len(lengths)), len(lengths))
    kept = batch.keep(trained_T).select(order)
    # A token's id is 1000 * rollout + place in the sequence, its columns 1000 * rollout + place in the response.
    owner_T = torch.tensor(order).repeat_interleave(kept.trained_lengths_N)
    prompt_T = torch.tensor([p for p, _ in lengths])[owner_T]
    assert torch.equal(kept.token_ids_S[kept.positions_T] - prompt_T, kept.rollout_logprobs_T.long())
    assert torch.equal(kept.old_logprobs_T, kept.rollout_logprobs_T + 0.25)
    assert torch.equal(kept.support_ids_M, kept.rollout_logprobs_T.int().repeat_interleave(kept.support_counts_T))
    # Choosing tokens and choosing rollouts may change places.
    other = batch.select(order).keep(trained_T[batch.token_index(order)])
    assert torch.equal(other.positions_T, kept.positions_T)
    assert torch.equal(other.trained_lengths_N, kept.trained_lengths_N)
