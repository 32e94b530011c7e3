"""Properties of every registered advantage estimator: the reference, order, zero signal, shift and scale."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import ragged_batches as reference
import torch
from advantage_cases import complete
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, AdvantageOutput
from grpo_rl.registry import needs_of

ALL = sorted(ADVANTAGES)
GROUPED = [name for name in ALL if "group" in needs_of(ADVANTAGES.get(name))]
"""Estimators whose scale is taken over the whole batch."""
INDICATORS = {"rft"}
"""Estimators that compare a reward with a fixed number, so that its zero and its scale mean something."""
SCALE_WITH_REWARDS = {"dr_grpo", "rloo", "opo", "gpg", "remax", "gigpo"}
COUNT_TURNS = {"gigpo"}
"""Estimators to which a constant for every turn means something: what lies ahead grows with the turns that are left."""


def run(name: str, inp: AdvantageInput) -> AdvantageOutput:
    return ADVANTAGES.get(name)(inp)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(2))
def test_permuting_the_rollouts_permutes_the_advantages(name: str, seed: int) -> None:
    data = reference.ragged(seed)
    order = list(range(len(data.lengths)))
    random.Random(seed).shuffle(order)
    permuted = data.select(order)
    before = data.nested(run(name, complete(data)).advantages_T.tolist())
    after = permuted.nested(run(name, complete(permuted)).advantages_T.tolist())
    for position, i in enumerate(order):
        assert after[position] == pytest.approx(before[i], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", GROUPED)
@settings(deadline=None, max_examples=25)
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    length=st.integers(1, 3),
)
def test_groups_of_equal_rewards_and_groups_of_one_give_exactly_zero(
    name: str, reward: float, sizes: list[int], length: int
) -> None:
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    rewards = torch.tensor([reward * (g + 1) for g in group], dtype=torch.float32).tolist()
    rows = len(group)
    data = reference.Ragged(
        lengths=[length] * rows,
        group=group,
        rewards=rewards,
        parts=[[r, -0.1] for r in rewards],
        steps=[[(0, r), (length - 1, r)] for r in rewards],
        baselines=[0.0] * rows,
        group_tokens=[0] * rows,
        **{column: [0.0] * (rows * length) for column in reference.TOKEN_COLUMNS},
    )
    advantages_T = run(name, complete(data)).advantages_T
    assert len(advantages_T) == length * rows
    assert (advantages_T == 0).all()


@pytest.mark.parametrize("name", sorted(set(ALL) - INDICATORS))
def test_a_constant_added_to_all_rewards_changes_nothing_and_a_factor_only_what_has_no_spread_to_divide_by(name: str) -> None:
    data = reference.ragged(1, num_rollouts=20)
    # Exact in float32 after the shift, too. A group estimator forgives another shift in each group.
    shift = {g: 16.0 * (k + 1 if name in GROUPED else 1) for k, g in enumerate(sorted(set(data.group)))}
    filled = [i for i, length in enumerate(data.lengths) if length]
    data = data.select(filled)

    def changed(factor: float, shifts: bool) -> list[float]:
        def new(value: float, i: int) -> float:
            return factor * round(value * 8) / 8 + (shift[data.group[i]] if shifts else 0.0)

        token_owner = [i for i, length in enumerate(data.lengths) for _ in range(length)]
        other = replace(
            data,
            rewards=[new(value, i) for i, value in enumerate(data.rewards)],
            values=[new(value, i) for i, value in zip(token_owner, data.values, strict=True)],
            baselines=[new(value, i) for i, value in enumerate(data.baselines)],
            parts=[[new(value, i) for value in parts] for i, parts in enumerate(data.parts)],
            steps=[[(end, new(value, i)) for end, value in steps] for i, steps in enumerate(data.steps)],
        )
        return run(name, complete(other)).advantages_T.tolist()

    base = changed(1.0, shifts=False)
    assert max(map(abs, base)) > 0.5
    if name not in COUNT_TURNS:
        assert changed(1.0, shifts=True) == pytest.approx(base, rel=1e-5, abs=1e-5)
    expected = [4.0 * value for value in base] if name in SCALE_WITH_REWARDS else base
    assert changed(4.0, shifts=False) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 1, 0]])
def test_batches_with_hardly_a_token_give_finite_numbers(name: str, lengths: list[int]) -> None:
    rows, tokens = len(lengths), sum(lengths)
    data = reference.Ragged(
        lengths=lengths,
        group=[0] * rows,
        rewards=[1.0] * rows,
        parts=[[1.0, 2.0]] * rows,
        steps=[[]] * rows,
        baselines=[0.5] * rows,
        group_tokens=[tokens] * rows,
        **{column: [0.0] * tokens for column in reference.TOKEN_COLUMNS},
    )
    inp = complete(data)
    if not rows:
        inp = replace(inp, reward_parts_NP=torch.zeros(0, 2))
    out = run(name, inp)
    assert len(out.advantages_T) == tokens and torch.isfinite(out.advantages_T).all()
    assert out.returns_T is None or len(out.returns_T) == tokens
