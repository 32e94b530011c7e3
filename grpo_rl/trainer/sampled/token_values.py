"""Values of single tokens as an update saw them, of the rollouts whose tokens the log shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_rl.telemetry.rollouts.rollout_log import TokenValues
from grpo_rl.types import Batch, Rollout


def token_values(
    rollouts: Sequence[Rollout], trained: Batch, logprobs: Mapping[int, Tensor]
) -> dict[tuple[str, int], TokenValues]:
    """Return the values of the rollouts of `trained.shown_N`, by prompt uid and sample index.

    `rollouts` are those of the batch, in its order; `logprobs` has those of the trained policy by the numbers of `shown_N`,
    which are places in the batch. Advantages are given where tokens of a response have different ones.
    """
    assert trained.shown_N is not None
    lengths_N, sequences_N = trained.trained_lengths_N, trained.sequence_lengths_N
    ends_N = lengths_N.cumsum(0)
    response_starts_N = sequences_N.cumsum(0) - trained.response_lengths_N
    found = {}
    for number in trained.shown_N[trained.shown_N >= 0].tolist():
        tokens = slice(int(ends_N[number] - lengths_N[number]), int(ends_N[number]))
        if trained.positions_T is None:
            places = torch.arange(int(lengths_N[number]))
        else:
            places = trained.positions_T[tokens] - response_starts_N[number]
        policy = logprobs.get(number)
        found[rollouts[number].prompt.uid, rollouts[number].sample_index] = TokenValues(
            places.numpy(), None if policy is None else policy.numpy(), _different(trained.advantages_T, tokens)
        )
    return found


def _different(advantages_T: Tensor | None, tokens: slice) -> np.ndarray | None:
    """Return the advantages of these tokens; None where all are the same."""
    if advantages_T is None:
        return None
    some: np.ndarray = advantages_T[tokens].numpy()
    return some if len(some) and some.min() != some.max() else None
