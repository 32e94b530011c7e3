"""Dealing rollouts to ranks and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_rl.data.balance import LINEAR_COST, UNEVEN, Prompts, cut_shards, split_over_ranks

lengths = st.lists(st.integers(1, 300), max_size=60)
ranks = st.integers(1, 5)


def cost(length: int) -> int:
    return LINEAR_COST * length + length * length


def plan_micro_batches(lengths_N, num_ranks, *, units=None, **limit):
    return cut_shards(split_over_ranks(lengths_N, num_ranks, units=units), lengths_N, units=units, **limit)


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [index for rank in plan for rows in rank for index in rows]


@given(lengths, ranks, st.integers(0, 300), st.booleans())
def test_a_budget_is_kept_and_nothing_is_lost(lengths_N, num_ranks, extra, by_tokens):
    budget = max(lengths_N, default=1) + extra if by_tokens else 1 + extra % 10
    plan = plan_micro_batches(lengths_N, num_ranks, **{"max_tokens" if by_tokens else "max_rollouts": budget})
    assert sorted(flat(plan)) == list(range(len(lengths_N)))
    assert all((sum(lengths_N[i] for i in rows) if by_tokens else len(rows)) <= budget for rank in plan for rows in rank)


@given(lengths, ranks, st.integers(1, 8))
def test_evening_out_costs_no_extra_pass(lengths_N, num_ranks, times):
    assume(lengths_N)
    budget = max(lengths_N) * times
    plan = plan_micro_batches(lengths_N, num_ranks, max_tokens=budget)
    for rank in plan:
        passes = [sum(lengths_N[i] for i in rows) for rows in rank if rows]
        # Two neighbours that fit into one budget together would be a wasted pass.
        share = [i for rows in rank for i in rows]
        filled, fewest = budget + 1, 0
        for i in share:
            if filled + lengths_N[i] > budget:
                fewest, filled = fewest + 1, 0
            filled += lengths_N[i]
        assert len(passes) == fewest


# ---- units, and mini-batches ----------------------------------------------------------------------------

units_of_three = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), max_size=40)


@given(units_of_three, ranks, st.booleans())
def test_rollouts_of_a_unit_land_in_one_micro_batch_on_one_rank(pairs, num_ranks, by_tokens):
    lengths_N, units = [length for length, _ in pairs], [unit for _, unit in pairs]
    members = {unit: [i for i, other in enumerate(units) if other == unit] for unit in units}
    most = max((sum(lengths_N[i] for i in rows) if by_tokens else len(rows) for rows in members.values()), default=1)
    rule = {"max_tokens": most + 10} if by_tokens else {"max_rollouts": most + 1}
    plan = plan_micro_batches(lengths_N, num_ranks, units=units, **rule)
    assert sorted(flat(plan)) == list(range(len(lengths_N)))
    for rows in members.values():
        assert sum(set(rows) <= set(micro_batch) for rank in plan for micro_batch in rank) == 1
    sizes = [sum(lengths_N[i] for i in rows) if by_tokens else len(rows) for rank in plan for rows in rank]
    assert max(sizes) <= next(iter(rule.values()))
    assert len({len(rank) for rank in plan}) == 1


@pytest.mark.parametrize(
    ("lengths_N", "options", "message"),
    [
        ([3, 9], {"max_tokens": 8}, "a sequence of 9 tokens does not fit into a micro-batch of 8"),
        ([6, 6, 3], {"max_tokens": 10, "units": [0, 0, 1]}, "12 tokens that stay together do not fit into a micro-batch of 10"),
        (
            [6, 6, 3],
            {"max_rollouts": 1, "units": [0, 0, 1]},
            "2 rollouts that stay together do not fit into a micro-batch of 1",
        ),
    ],
)
def test_what_alone_is_over_the_budget_is_refused(lengths_N, options, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(lengths_N, 1, **options)


@given(st.lists(st.integers(0, 40), max_size=40), ranks, st.integers(1, 3), st.booleans())
def test_units_go_one_by_one_to_the_rank_with_the_least_work_of_their_mini_batches(lengths_N, num_ranks, num_parts, in_one):
    # The rule as its sentence says it, rank by rank; in_one: every mini-batch is the whole batch, as epochs over it are.
    everything = list(range(len(lengths_N)))
    parts = [everything if in_one else everything[start::num_parts] for start in range(num_parts)]
    loads, shares = [[0] * num_ranks for _ in parts], [[] for _ in range(num_ranks)]
    for index in sorted(everything, key=lambda i: (-lengths_N[i], i)):
        mine = [number for number, part in enumerate(parts) if index in part]
        work = [sum(cost(lengths_N[i]) for i in share) for share in shares]
        sort_by = [(sum(loads[n][rank] for n in mine), work[rank], len(shares[rank]), rank) for rank in range(num_ranks)]
        rank = min(sort_by)[-1]
        for number in mine:
            loads[number][rank] += cost(lengths_N[index])
        shares[rank].append(index)
    assert split_over_ranks(lengths_N, num_ranks, mini_batches=parts) == shares


# ---- prompts that are computed once for all their responses ----------------------------------------------

groups_of_responses = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=9)), min_size=1, max_size=8
)


def sequences(groups: list[tuple[int, list[int]]]) -> tuple[list[int], Prompts]:
    """Lengths, and prompts, of responses of all groups in turns, so that those of a group do not lie side by side."""
    flat_rows = [(place, group, prompt, own) for group, (prompt, rows) in enumerate(groups) for place, own in enumerate(rows)]
    flat_rows.sort()
    lengths_N = [prompt + own for _, _, prompt, own in flat_rows]
    return lengths_N, Prompts([group for _, group, _, _ in flat_rows], [prompt for _, _, prompt, _ in flat_rows])


def work(rows: list[int], lengths_N: list[int], prompts: Prompts) -> int:
    """What a rank computes of these sequences, each prompt once."""
    once = {prompts.group_N[i]: prompts.lengths_N[i] for i in rows}
    responses = sum(cost(lengths_N[i]) - cost(prompts.lengths_N[i]) for i in rows)
    return responses + sum(cost(length) for length in once.values())


@given(groups_of_responses, ranks)
def test_groups_stay_together_unless_ranks_would_be_uneven(groups, num_ranks):
    lengths_N, prompts = sequences(groups)
    shares = split_over_ranks(lengths_N, num_ranks, prompts=prompts)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths_N)))
    members = {group: [i for i, other in enumerate(prompts.group_N) if other == group] for group in prompts.group_N}
    whole = split_over_ranks(lengths_N, num_ranks, units=prompts.group_N, prompts=prompts)
    slowest = [max(work(share, lengths_N, prompts) for share in some) for some in (whole, shares)]
    assert slowest[1] <= slowest[0]
    if slowest[0] <= UNEVEN * sum(work(rows, lengths_N, prompts) for rows in members.values()) / num_ranks:
        assert all(any(set(rows) <= set(share) for share in shares) for rows in members.values())


@given(groups_of_responses, st.integers(0, 200))
def test_a_prompt_counts_once_in_a_micro_batch_and_groups_come_together(groups, extra):
    lengths_N, prompts = sequences(groups)
    limit = max(lengths_N) + extra
    ((*micro_batches,),) = cut_shards([list(range(len(lengths_N)))], lengths_N, max_tokens=limit, prompts=prompts)
    assert sorted(index for rows in micro_batches for index in rows) == list(range(len(lengths_N)))
    computed = 0
    for rows in micro_batches:
        once = {prompts.group_N[i]: prompts.lengths_N[i] for i in rows}
        tokens = sum(lengths_N[i] - prompts.lengths_N[i] for i in rows) + sum(once.values())
        assert tokens <= limit
        computed += tokens
    # A group that meets the end of a micro-batch goes on in the next: each cut costs one prompt at most.
    least = sum(prompt + sum(own) for prompt, own in groups)
    assert computed - least <= (len(micro_batches) - 1) * max(prompts.lengths_N)


def test_pairs_that_share_a_prompt_fit_into_a_smaller_micro_batch():
    prompts, pairs = Prompts([0, 0, 1, 1], [8, 8, 8, 8]), [0, 0, 1, 1]
    assert cut_shards([[0, 1, 2, 3]], [10] * 4, max_tokens=12, units=pairs, prompts=prompts) == [[[0, 1], [2, 3]]]
    with pytest.raises(ValueError, match="20 tokens that stay together"):
        cut_shards([[0, 1, 2, 3]], [10] * 4, max_tokens=12, units=pairs)
