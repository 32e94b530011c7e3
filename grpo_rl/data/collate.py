"""Makes the columns of a Batch from rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_rl.types import Batch, Rollout, Support


def collate(rollouts: Sequence[Rollout], parts: Sequence[str] = ()) -> Batch:
    """Return the rollouts, in their order, as flat columns; a response may be empty.

    `parts` name the columns of `reward_parts_NP`.

    `group_N` numbers the prompt uids in order of appearance, so the same text sampled under two uids
    makes two groups. Raises ValueError for a rollout without reward, or whose log-probs and tokens
    differ in number; where only some have a baseline, or steps, or a support; and where a support does not fit
    its tokens.
    """
    for rollout in rollouts:
        if rollout.reward is None:
            raise ValueError(f"rollout {_name(rollout)} has no reward")
        if len(rollout.rollout_logprobs) != len(rollout.response_ids):
            raise ValueError(
                f"rollout {_name(rollout)} has {len(rollout.response_ids)} tokens and {len(rollout.rollout_logprobs)} log-probs"
            )
    group_of: dict[str, int] = {}
    for rollout in rollouts:
        group_of.setdefault(rollout.prompt.uid, len(group_of))
    sequences = [ids for rollout in rollouts for ids in (rollout.prompt.token_ids, rollout.response_ids)]
    support_counts_T, support_ids_M = _supports(rollouts)
    return Batch(
        prompt_lengths_N=_column((len(rollout.prompt.token_ids) for rollout in rollouts), np.int64),
        response_lengths_N=_column((len(rollout.response_ids) for rollout in rollouts), np.int64),
        group_N=_column((group_of[rollout.prompt.uid] for rollout in rollouts), np.int64),
        token_ids_S=_joined(sequences, np.int64),
        rewards_N=_column((rollout.reward for rollout in rollouts), np.float32),
        rollout_logprobs_T=_joined([rollout.rollout_logprobs for rollout in rollouts], np.float32),
        support_counts_T=support_counts_T,
        support_ids_M=support_ids_M,
        truncated_N=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        reward_parts_NP=torch.tensor([[rollout.reward_parts[part] for part in parts] for rollout in rollouts])
        if parts
        else None,
        baselines_N=_column((rollout.baseline for rollout in rollouts), np.float32)
        if _all_have("baseline", rollouts)
        else None,
        **_step_columns(rollouts),
    )


def _step_columns(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return the steps of all rollouts back to back, where the rollouts have steps."""
    if not _all_have("steps", rollouts):
        return {}
    steps_N = [rollout.steps or () for rollout in rollouts]
    return {
        "num_steps_N": _column(map(len, steps_N), np.int64),
        "step_ends_K": _column((end for steps in steps_N for end, _ in steps), np.int64),
        "step_rewards_K": _column((reward for steps in steps_N for _, reward in steps), np.float32),
    }


def _all_have(name: str, rollouts: Sequence[Rollout]) -> bool:
    """Return whether the rollouts have a `name`. Raises ValueError when only some of them do."""
    without = [rollout for rollout in rollouts if getattr(rollout, name) is None]
    if without and len(without) < len(rollouts):
        raise ValueError(f"rollout {_name(without[0])} has no {name}, and others of the batch have")
    return bool(rollouts) and not without


def _supports(rollouts: Sequence[Rollout]) -> tuple[Tensor | None, Tensor | None]:
    """Return sizes [T] and ids [M] of the sets that every token was sampled from; None where nothing was left out."""
    given = [rollout for rollout in rollouts if rollout.support is not None]
    if not given:
        return None, None
    # A response without tokens was not sampled from anything.
    if any(rollout.support is None and len(rollout.response_ids) for rollout in rollouts):
        raise ValueError(
            "some rollouts contain the tokens they were sampled from and some do not: their log-probs cannot be compared"
        )
    for rollout in given:
        _check_support(rollout)
    supports = [rollout.support for rollout in given if rollout.support is not None]
    counts = np.concatenate([support.counts for support in supports])
    token_ids = np.concatenate([support.token_ids for support in supports])
    return torch.from_numpy(counts.astype(np.int64)), torch.from_numpy(token_ids.astype(np.int32))


def _check_support(rollout: Rollout) -> None:
    """Raise ValueError unless there is one set for each token, with that token in it."""
    support = rollout.support
    assert isinstance(support, Support)
    if len(support.counts) != len(rollout.response_ids) or int(support.counts.sum()) != len(support.token_ids):
        raise ValueError(
            f"rollout {_name(rollout)} has {len(rollout.response_ids)} tokens and {len(support.counts)} sets of "
            f"{int(support.counts.sum())} that they were sampled from, with {len(support.token_ids)} ids"
        )
    of_token = np.repeat(np.arange(len(support.counts)), support.counts)
    sampled = support.token_ids == rollout.response_ids[of_token]
    if len(np.unique(of_token[sampled])) < len(support.counts):
        raise ValueError(f"rollout {_name(rollout)} has a token that is not among those it was sampled from")


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.int64] | type[np.float32]) -> Tensor:
    """The arrays back to back."""
    return torch.from_numpy(np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype=dtype))


def _column(values: Iterable[int | float | None], dtype: type[np.int64] | type[np.float32]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=dtype))


def _name(rollout: Rollout) -> str:
    return f"{rollout.prompt.uid}, sample {rollout.sample_index},"
