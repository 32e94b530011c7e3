from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_rl.columns import Array, RemoteColumn, View
from grpo_rl.errors import RewardError
from grpo_rl.types import Batch, Rollout, Support, segment_index


def collate(rollouts: Sequence[Rollout], parts: Sequence[str] = ()) -> Batch:
    """Flat columns in the order of the rollouts; `parts` name the columns of `reward_parts_NP`.

    `group_N` numbers prompt uids in order of appearance. If responses are views of a rollout process's
    blocks, tokens, log-probs and supports are remote columns. Raises ValueError for a rollout without reward,
    for columns of different lengths, and if only some have a baseline, steps or a support.
    """
    for rollout in rollouts:
        if rollout.reward is None:
            raise ValueError(f"rollout {_name(rollout)} has no reward")
        if len(rollout.rollout_logprobs) != len(rollout.response_ids):
            raise ValueError(
                f"rollout {_name(rollout)} has {len(rollout.response_ids)} tokens and {len(rollout.rollout_logprobs)} log-probs"
            )
    group_of = {uid: number for number, uid in enumerate(dict.fromkeys(rollout.prompt.uid for rollout in rollouts))}
    prompt_lengths_N = _column(len(rollout.prompt.token_ids) for rollout in rollouts)
    response_lengths_N = _column(len(rollout.response_ids) for rollout in rollouts)
    sequences = [ids for rollout in rollouts for ids in (rollout.prompt.token_ids, rollout.response_ids)]
    token_ids_S = RemoteColumn.of_pieces("token_ids", sequences, np.full(len(rollouts), 2), torch.int32)
    batch = Batch(
        prompt_lengths_N=prompt_lengths_N,
        response_lengths_N=response_lengths_N,
        group_N=_column(group_of[rollout.prompt.uid] for rollout in rollouts),
        token_ids_S=token_ids_S,
        rewards_N=_column((rollout.reward for rollout in rollouts), np.float32),
        rollout_logprobs_T=_logprobs(rollouts),
        truncated_N=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        masked_N=torch.tensor(masked) if any(masked := [rollout.masked for rollout in rollouts]) else None,
        reward_parts_NP=torch.tensor([[_part(rollout, part) for part in parts] for rollout in rollouts]) if parts else None,
        baselines_N=_column((rollout.baseline for rollout in rollouts), np.float32)
        if _all_have("baseline", rollouts)
        else None,
        **_trained_columns(rollouts, prompt_lengths_N, response_lengths_N),
        **_step_columns(rollouts),
    )
    batch = batch.replace(**_support_columns(rollouts, batch))
    # Of an episode the blocks are here.
    is_here = all(isinstance(block, Mapping) for block in token_ids_S.blocks)
    return batch.local(lambda _: ()) if is_here else batch


def _part(rollout: Rollout, name: str) -> float:
    """A function's score, or a number that it gave beside it."""
    if name in rollout.reward_parts:
        return rollout.reward_parts[name]
    keys = [key for key in rollout.reward_parts if key.endswith(f"/{name}")]
    if len(keys) != 1:
        raise RewardError(
            f"prompt {rollout.prompt.uid}, sample {rollout.sample_index}: its reward has {len(keys)} parts called {name!r}, and the "
            f"advantage estimator reads one; it has {', '.join(sorted(rollout.reward_parts))}"
        )
    return rollout.reward_parts[keys[0]]


def _trained_columns(rollouts: Sequence[Rollout], prompt_lengths_N: Tensor, response_lengths_N: Tensor) -> dict[str, Any]:
    """Nothing if all tokens of the responses were sampled."""
    if all(rollout.episode is None for rollout in rollouts):
        return {}
    begins_N = (prompt_lengths_N + response_lengths_N).cumsum(0) - response_lengths_N
    positions = [begin + _sampled_positions(rollout) for begin, rollout in zip(begins_N.tolist(), rollouts, strict=True)]
    return {"positions_T": torch.from_numpy(np.concatenate(positions)), "trained_lengths_N": _column(map(len, positions))}


def _sampled_positions(rollout: Rollout) -> np.ndarray:
    """int64: places in the response, ascending."""
    return np.concatenate([np.arange(0), *(np.arange(start, start + length) for start, length in rollout.spans)])


def _logprobs(rollouts: Sequence[Rollout]) -> RemoteColumn:
    pieces = [_piece(rollout.rollout_logprobs, *span) for rollout in rollouts for span in rollout.spans]
    return RemoteColumn.of_pieces("logprobs", pieces, [len(rollout.spans) for rollout in rollouts])


def _piece(values: Array, start: int, length: int) -> Array:
    if isinstance(values, View):
        return View(values.block, values.name, values.start + start, length, values.finite)
    return values[start : start + length]


def _support_columns(rollouts: Sequence[Rollout], batch: Batch) -> dict[str, Any]:
    """Nothing if all tokens could be sampled."""
    if all(rollout.support is None for rollout in rollouts):
        return {}
    # A response without tokens was not sampled from anything.
    if any(rollout.support is None and len(rollout.response_ids) for rollout in rollouts):
        raise ValueError(
            "some rollouts contain the tokens they were sampled from and some do not: their log-probs cannot be compared"
        )
    nothing, ones = Support(*np.empty((2, 0), dtype=np.int32)), [1] * len(rollouts)
    supports = [rollout.support or nothing for rollout in rollouts]
    counts_T = RemoteColumn.of_pieces("support_counts", [support.counts for support in supports], ones, torch.int32)
    ids_M = RemoteColumn.of_pieces("support_ids", [support.token_ids for support in supports], ones, torch.int32)
    if batch.positions_T is None:
        return {"support_counts_T": counts_T, "support_ids_M": ids_M}
    # Between the turns of an episode lie tokens that are not trained.
    is_trained_S = torch.zeros(int(batch.sequence_lengths_N.sum()), dtype=torch.bool)
    is_trained_S[batch.positions_T] = True
    trained, counts_R = is_trained_S[batch.response_positions()].nonzero()[:, 0], counts_T.read().long()
    return {"support_counts_T": counts_R[trained], "support_ids_M": ids_M.read()[segment_index(counts_R, trained)]}


def _step_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    if not _all_have("steps", rollouts):
        return {}
    steps_N = [rollout.steps or () for rollout in rollouts]
    turns_N = [rollout.episode.turns if rollout.episode else () for rollout in rollouts]
    states_N = [{turn.end - 1: turn.state for turn in turns} for turns in turns_N]
    states_K = [states.get(end) for states, steps in zip(states_N, steps_N, strict=True) for end, _ in steps]
    return {
        "num_steps_N": _column(map(len, steps_N)),
        "step_ends_K": _column(end for rollout in rollouts for end in _trained_ends(rollout)),
        "step_rewards_K": _column((reward for steps in steps_N for _, reward in steps), np.float32),
        "step_states_K": None if None in states_K else _column(states_K),
    }


def _trained_ends(rollout: Rollout) -> list[int]:
    """Indices among the tokens that were sampled."""
    ends, sampled = [end for end, _ in rollout.steps or ()], _sampled_positions(rollout)
    if not np.isin(ends, sampled).all():
        wrong = np.setdiff1d(ends, sampled)[0]
        raise ValueError(f"rollout {_name(rollout)} has a step that ends at token {wrong}, which was not sampled")
    return np.searchsorted(sampled, ends).tolist()


def _all_have(name: str, rollouts: Sequence[Rollout]) -> bool:
    """Raises ValueError if only some rollouts have it."""
    without = [rollout for rollout in rollouts if getattr(rollout, name) is None]
    if without and len(without) < len(rollouts):
        raise ValueError(f"rollout {_name(without[0])} has no {name}, and others of the batch have")
    return bool(rollouts) and not without


def _column(values: Iterable[int | float | None], dtype: type[np.int64 | np.float32] = np.int64) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=dtype))


def _name(rollout: Rollout) -> str:
    return f"{rollout.prompt.uid}, sample {rollout.sample_index},"
