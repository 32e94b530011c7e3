"""What flows through a training step: prompts, rollouts, and the batch that is trained on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]
Versions = tuple[tuple[int, int], ...]
"""Weight versions of a response's tokens, run-length encoded: (version, number of tokens), in the tokens' order.

A response that lived through no weight update has one entry, one without tokens has none.
"""
FinishReason = Literal["stop", "length", "abort"]
GREEDY = -1
"""The sample index of a greedy response that others are compared with."""


class _ComparesArrays:
    """Equality of dataclasses that hold numpy arrays: of the same class, and equal in every field.

    The `__eq__` that dataclasses generate compares tuples of fields, and an array in a tuple has no truth value.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _as_array(record: object, name: str, dtype: type[np.int32] | type[np.float32]) -> None:
    """Make a field an array of this type: any sequence of numbers may be given, an array of the type is not copied."""
    object.__setattr__(record, name, np.asarray(getattr(record, name), dtype=dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(_ComparesArrays):
    """One row of the data, rendered and tokenized.

    `uid` names this occurrence of the row in the run; groups are formed by it and never by the text.
    """

    uid: str
    token_ids: np.ndarray
    """int32 [tokens]; any sequence of integers may be given."""
    text: str
    """The prompt as the model sees it, chat template applied."""
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] | None = None
    """The chat messages that `text` was rendered from; None where the row has a plain string."""

    def __post_init__(self) -> None:
        _as_array(self, "token_ids", np.int32)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. `seed` None lets the engine draw freely."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    """Leave out tokens less likely than this times the likeliest one."""
    ignore_eos: bool = False
    seed: int | None = None
    keep_support: bool = False
    """Return which tokens could be sampled, where top_p, top_k or min_p leave some out."""

    @property
    def returns_support(self) -> bool:
        """Whether a completion has to say what it was sampled from. Greedy is no sampling."""
        return self.keep_support and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Support(_ComparesArrays):
    """The tokens that top-k, top-p and min-p left to sample from, for each token of a response: the sampling mask."""

    counts: np.ndarray
    """int32 [tokens]: how many were left."""
    token_ids: np.ndarray
    """int32 [counts.sum()]: their ids, in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class Request(_ComparesArrays):
    """One response to sample: the unit that is dispatched to a rollout replica."""

    request_id: str
    prompt_ids: np.ndarray
    """int32 [tokens]; any sequence of integers may be given."""
    sampling: Sampling

    def __post_init__(self) -> None:
        _as_array(self, "prompt_ids", np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_ComparesArrays):
    """What an engine returns for a Request. Any sequence of numbers may be given for an array."""

    request_id: str
    response_ids: np.ndarray
    """int32 [tokens]: the sampled tokens, the end-of-sequence token included when it was sampled."""
    logprobs: np.ndarray
    """float32 [tokens]: the engine's log-probability of each sampled token, after temperature."""
    finish_reason: FinishReason
    versions: Versions
    """Which weights each token was sampled with."""
    support: Support | None = None
    """What each token was sampled from, where the request's sampling returns it."""
    text: str = ""
    """The response decoded without special tokens. Engines leave it empty; the process around the engine fills it in."""

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "logprobs", np.float32)


@dataclass(slots=True, eq=False)
class Rollout(_ComparesArrays):
    """A sampled response with everything known about it. Any sequence of numbers may be given for an array."""

    prompt: Prompt
    sample_index: int
    response_ids: np.ndarray
    """int32 [tokens]"""
    rollout_logprobs: np.ndarray
    """float32 [tokens]"""
    finish_reason: FinishReason
    versions: Versions
    """Which weights each token was sampled with."""
    text: str = ""
    """The response decoded without special tokens: what a reward function sees."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    """Why the rollout has no reward of its own: reward_timeout, reward_error, reward_invalid, the like of a
    judge or reward model (judge_timeout), or baseline_failed. It is trained
    only where `reward` is a number all the same."""
    failure_cause: str | None = None
    """The failure in words."""
    baseline: float | None = None
    """Reward of the greedy response to the same prompt, where the estimator compares with it."""
    steps: tuple[tuple[int, float], ...] | None = None
    """Index of each reasoning step's last token in the response, ascending, and the step's reward."""
    support: Support | None = None

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "rollout_logprobs", np.float32)

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that a token was sampled with; None for a response without tokens."""
        return min((version for version, _ in self.versions), default=None)

    def same_response(self, other: Rollout) -> bool:
        """Whether both have the same response tokens."""
        return np.array_equal(self.response_ids, other.response_ids)


def extended(versions: Versions, version: int, num_tokens: int) -> Versions:
    """The run-length versions with `num_tokens` more tokens of `version` at the end."""
    if num_tokens < 1:
        return versions
    if versions and versions[-1][0] == version:
        return (*versions[:-1], (version, versions[-1][1] + num_tokens))
    return (*versions, (version, num_tokens))


@dataclass(frozen=True, slots=True)
class Counts:
    """Global denominators of one optimizer step, the same on every rank and in every micro-batch."""

    num_tokens: int
    num_sequences: int
    num_groups: int


@dataclass(slots=True)
class Batch:
    """Rollouts as columns over flat axes: no padding, so no masks.

    `token_ids_S` holds prompt and response of each rollout back to back; per-token columns `_T` cover
    the response tokens only (the trained ones), in the same order; columns `_K` run over reasoning steps, a
    column `_M` holds `support_counts_T` entries for each trained token. Columns that a run does not need stay None.
    """

    prompt_lengths_N: Tensor
    response_lengths_N: Tensor
    group_N: Tensor
    """Index of the prompt group of each rollout; equal numbers belong to one prompt."""
    token_ids_S: Tensor
    rewards_N: Tensor
    rollout_logprobs_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    support_counts_T: Tensor | None = None
    """How many tokens the engine could sample from, where top_p, top_k or min_p leave some out."""
    support_ids_M: Tensor | None = None
    """Their ids, int32; every log-prob of the batch is normalised over them."""
    ref_hidden_TD: Tensor | None = None
    """The reference's last hidden states, only for kl_loss_type=full: [T, D] travels instead of [T, V]."""
    values_T: Tensor | None = None
    """The critic's value of the state before each token, as it was before the update."""
    returns_T: Tensor | None = None
    """What the critic learns."""
    advantages_T: Tensor | None = None
    baselines_N: Tensor | None = None
    """Rewards of greedy responses to the rollouts' prompts, only for estimators that compare with them."""
    num_steps_N: Tensor | None = None
    """Reasoning steps of each rollout, only for estimators that read them; the columns `_K` hold the steps back to back."""
    step_ends_K: Tensor | None = None
    """Index of each step's last token within its response."""
    step_rewards_K: Tensor | None = None
    reward_parts_NP: Tensor | None = None
    """The score of each reward function, before its factor."""
    truncated_N: Tensor | None = None
    """Responses that were cut off at the longest length."""
    weights_T: Tensor | None = None
    """Weights of the policy loss, where the rollouts are corrected."""
    keep_T: Tensor | None = None
    """Tokens that are trained, where not all are; the others leave every denominator."""
    selected_T: Tensor | None = None
    """Tokens of a mini-batch that the policy loss treats otherwise, only for losses that choose some."""
    group_tokens_N: Tensor | None = None
    """Trained tokens of each rollout's group in the mini-batch, only for loss_agg_mode=prompt-mean."""

    @property
    def num_rollouts(self) -> int:
        return len(self.response_lengths_N)

    @property
    def num_trained_tokens(self) -> int:
        return len(self.rollout_logprobs_T)

    @property
    def sequence_lengths_N(self) -> Tensor:
        return self.prompt_lengths_N + self.response_lengths_N

    def counts(self) -> Counts:
        """Denominators for all the averaging modes. Rollouts without a trained token are not counted."""
        alive_N = self.response_lengths_N > 0
        return Counts(
            num_tokens=int(self.response_lengths_N.sum()),
            num_sequences=int(alive_N.sum()),
            num_groups=int(self.group_N[alive_N].unique().numel()),
        )

    def select(self, index_K: Tensor | list[int]) -> Batch:
        """The rollouts at `index_K`, in that order, with all their columns."""
        index_K = torch.as_tensor(index_K, dtype=torch.long)
        token_index = _segments_index(self.response_lengths_N, index_K)
        columns: dict[str, Any] = {}
        for column in dataclasses.fields(self):
            value = getattr(self, column.name)
            if value is None:
                columns[column.name] = None
            elif column.name.endswith(("_N", "_NP")):
                columns[column.name] = value[index_K]
            elif column.name.endswith("_S"):
                columns[column.name] = value[_segments_index(self.sequence_lengths_N, index_K)]
            elif column.name.endswith("_K"):
                assert self.num_steps_N is not None
                columns[column.name] = value[_segments_index(self.num_steps_N, index_K)]
            elif column.name.endswith("_M"):
                assert self.support_counts_T is not None
                columns[column.name] = value[_segments_index(self.support_counts_T, token_index)]
            else:
                columns[column.name] = value[token_index]
        return Batch(**columns)

    def replace(self, **columns: Tensor | None) -> Batch:
        """The same batch with some columns exchanged."""
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]


def _segments_index(lengths_N: Tensor, index_K: Tensor) -> Tensor:
    """Flat positions of the segments `index_K` of an axis that is cut into `lengths_N`."""
    starts_N = lengths_N.cumsum(0) - lengths_N
    lengths_K = lengths_N[index_K]
    total = int(lengths_K.sum())
    within = torch.arange(total) - torch.repeat_interleave(lengths_K.cumsum(0) - lengths_K, lengths_K)
    return torch.repeat_interleave(starts_N[index_K], lengths_K) + within
