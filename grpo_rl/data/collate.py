"""Makes the columns of a Batch from rollouts, and reads the tokens of a batch that only says where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_rl.errors import RewardError
from grpo_rl.tokens import Array, Held, Stretch
from grpo_rl.types import Batch, Rollout, segment_index


def collate(rollouts: Sequence[Rollout], parts: Sequence[str] = ()) -> Batch:
    """Return the rollouts, in their order, as flat columns; a response may be empty.

    `parts` name the columns of `reward_parts_NP`.

    `group_N` numbers the prompt uids in order of appearance, so the same text sampled under two uids
    makes two groups. Where responses are stretches of a rollout process's blocks, the batch has no token of them: `held`
    says where they lie. Raises ValueError for a rollout without reward, or whose log-probs and tokens differ in number;
    where only some have a baseline, or steps, or a support; and where a support does not fit its tokens, as far as they
    are read here.
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
    prompt_lengths_N = _column((len(rollout.prompt.token_ids) for rollout in rollouts), np.int64)
    response_lengths_N = _column((len(rollout.response_ids) for rollout in rollouts), np.int64)
    num_tokens = int(response_lengths_N.sum())
    trained = _trained_columns(rollouts, prompt_lengths_N, response_lengths_N)
    batch = Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=response_lengths_N,
        group_N=_column((group_of[rollout.prompt.uid] for rollout in rollouts), np.int64),
        token_ids_S=torch.empty(int(prompt_lengths_N.sum()) + num_tokens, dtype=torch.long, device="meta"),
        rewards_N=_column((rollout.reward for rollout in rollouts), np.float32),
        rollout_logprobs_T=torch.empty(len(trained.get("positions_T", range(num_tokens))), device="meta"),
        held=_held(rollouts),
        truncated_N=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        masked_N=torch.tensor([rollout.masked for rollout in rollouts])
        if any(rollout.masked for rollout in rollouts)
        else None,
        reward_parts_NP=torch.tensor([[_part(rollout, part) for part in parts] for rollout in rollouts]) if parts else None,
        baselines_N=_column((rollout.baseline for rollout in rollouts), np.float32)
        if _all_have("baseline", rollouts)
        else None,
        **trained,
        **_step_columns(rollouts),
    )
    lies_elsewhere = any(isinstance(rollout.response_ids, Stretch) for rollout in rollouts)
    return batch if lies_elsewhere else with_tokens(batch)


def _part(rollout: Rollout, name: str) -> float:
    """Return the part of the reward with this name: a function's score, or a number that one gave beside it by this key."""
    found = [key for key in rollout.reward_parts if key == name or key.endswith(f"/{name}")]
    if len(found) != 1 and name not in found:
        raise RewardError(
            f"prompt {rollout.prompt.uid}, sample {rollout.sample_index}: its reward has {len(found)} parts called {name!r}, and the "
            f"advantage estimator reads one; it has {', '.join(sorted(rollout.reward_parts))}"
        )
    return rollout.reward_parts[name if name in found else found[0]]


def _trained_columns(rollouts: Sequence[Rollout], prompt_lengths_N: Tensor, response_lengths_N: Tensor) -> dict[str, Any]:
    """Return the places of the sampled tokens, where some tokens of the responses were not sampled; else nothing."""
    if all(rollout.episode is None for rollout in rollouts):
        return {}
    ends_N = (prompt_lengths_N + response_lengths_N).cumsum(0)
    begins = (ends_N - response_lengths_N).tolist()
    pieces = [
        np.arange(begin + start, begin + start + length)
        for begin, rollout in zip(begins, rollouts, strict=True)
        for start, length in rollout.spans
    ]
    lengths = (sum(length for _, length in rollout.spans) for rollout in rollouts)
    positions_T = torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64))
    return {"positions_T": positions_T, "trained_lengths_N": _column(lengths, np.int64)}


def with_tokens(batch: Batch) -> Batch:
    """Return the batch with the values of its tokens, read where `held` says they lie; one that has them as it is.

    The tokens that are trained, and the columns that the batch has, stay what they are. Raises ValueError where a support
    does not fit its tokens.
    """
    held = batch.held
    if held is None:
        return batch
    sequences = [ids for pair in zip(held.prompt_ids, held.response_ids, strict=True) for ids in pair]
    token_ids_S = _joined(sequences, np.int64)
    trained = _trained(batch)
    counts, ids = None, None
    if held.support_counts is not None and held.support_ids is not None:
        for number in range(batch.num_rollouts):
            _check_support(held, number)
        counts, ids = _joined(held.support_counts, np.int64), _joined(held.support_ids, np.int32)
        if trained is not None:
            counts, ids = counts[trained], ids[segment_index(counts, trained)]
    if batch.trains_whole_responses:
        batch = batch.replace(positions_T=batch.response_positions())
    return batch.replace(
        token_ids_S=token_ids_S,
        rollout_logprobs_T=_logprobs(held, trained),
        support_counts_T=counts,
        support_ids_M=ids,
        held=None,
    )


def with_rollout_logprobs(batch: Batch) -> Batch:
    """Return the batch with the engine's log-probs, where it lacks them: for what the controller computes with them."""
    if batch.held is None or batch.rollout_logprobs_T is None or not batch.rollout_logprobs_T.is_meta:
        return batch
    return batch.replace(rollout_logprobs_T=_logprobs(batch.held, _trained(batch)))


def _logprobs(held: Held, trained: Tensor | None) -> Tensor:
    logprobs = _joined(held.logprobs, np.float32)
    return logprobs if trained is None else logprobs[trained]


def _trained(batch: Batch) -> Tensor | None:
    """Return which of the responses' tokens are trained, as indices into all of them; None for all."""
    if batch.num_trained_tokens == int(batch.response_lengths_N.sum()):
        return None
    is_trained_S = torch.zeros(len(batch.token_ids_S), dtype=torch.bool)
    is_trained_S[batch.positions_T] = True
    return is_trained_S[batch.response_positions()].nonzero()[:, 0]


def _held(rollouts: Sequence[Rollout]) -> Held:
    supports = [rollout.support for rollout in rollouts]
    has_support = any(support is not None for support in supports)
    # A response without tokens was not sampled from anything.
    if has_support and any(rollout.support is None and len(rollout.response_ids) for rollout in rollouts):
        raise ValueError(
            "some rollouts contain the tokens they were sampled from and some do not: their log-probs cannot be compared"
        )
    nothing = np.empty(0, dtype=np.int32)
    return Held(
        tuple(rollout.prompt.token_ids for rollout in rollouts),
        tuple(rollout.response_ids for rollout in rollouts),
        tuple(rollout.rollout_logprobs for rollout in rollouts),
        tuple(nothing if one is None else one.counts for one in supports) if has_support else None,
        tuple(nothing if one is None else one.token_ids for one in supports) if has_support else None,
    )


def _step_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the steps of all rollouts back to back, where the rollouts have steps."""
    if not _all_have("steps", rollouts):
        return {}
    steps_N = [rollout.steps or () for rollout in rollouts]
    return {
        "num_steps_N": _column(map(len, steps_N), np.int64),
        "step_ends_K": _column((end for one in rollouts for end in _trained_ends(one)), np.int64),
        "step_rewards_K": _column((reward for steps in steps_N for _, reward in steps), np.float32),
    }


def _trained_ends(rollout: Rollout) -> list[int]:
    """Return the index of each step's last token among the tokens that were sampled."""
    ends = [end for end, _ in rollout.steps or ()]
    if rollout.episode is None:
        return ends
    place_of: dict[int, int] = {}
    before = 0
    for start, length in rollout.spans:
        place_of.update(zip(range(start, start + length), range(before, before + length), strict=True))
        before += length
    if wrong := [end for end in ends if end not in place_of]:
        raise ValueError(f"rollout {_name(rollout)} has a step that ends at token {wrong[0]}, which was not sampled")
    return [place_of[end] for end in ends]


def _all_have(name: str, rollouts: Sequence[Rollout]) -> bool:
    """Return whether the rollouts have a `name`. Raises ValueError when only some of them do."""
    without = [rollout for rollout in rollouts if getattr(rollout, name) is None]
    if without and len(without) < len(rollouts):
        raise ValueError(f"rollout {_name(without[0])} has no {name}, and others of the batch have")
    return bool(rollouts) and not without


def _check_support(held: Held, number: int) -> None:
    """Raise ValueError unless there is one set for each token, with that token in it."""
    assert held.support_counts is not None and held.support_ids is not None
    response_ids = np.asarray(held.response_ids[number])
    counts, token_ids = np.asarray(held.support_counts[number]), np.asarray(held.support_ids[number])
    where = f"rollout {number} of {len(held.response_ids)}"
    if len(counts) != len(response_ids) or int(counts.sum()) != len(token_ids):
        raise ValueError(
            f"{where} has {len(response_ids)} tokens and {len(counts)} sets of {int(counts.sum())} that they were sampled "
            f"from, with {len(token_ids)} ids"
        )
    of_token = np.repeat(np.arange(len(counts)), counts)
    sampled = token_ids == response_ids[of_token]
    if len(np.unique(of_token[sampled])) < len(counts):
        raise ValueError(f"{where} has a token that is not among those it was sampled from")


def _joined(arrays: Sequence[Array], dtype: type[np.int64] | type[np.int32] | type[np.float32]) -> Tensor:
    """Return the arrays back to back."""
    read = [np.asarray(one) for one in arrays]
    return torch.from_numpy(np.concatenate(read, dtype=dtype) if read else np.empty(0, dtype=dtype))


def _column(values: Iterable[int | float | None], dtype: type[np.int64] | type[np.float32]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=dtype))


def _name(rollout: Rollout) -> str:
    return f"{rollout.prompt.uid}, sample {rollout.sample_index},"
