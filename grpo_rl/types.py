"""The values that flow through a training step: prompts, rollouts, and the batch that is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from grpo_rl.columns import Array, Column, Fetch, RemoteColumn, TextView, View, consecutive, read_columns, values
from grpo_rl.frozen import frozen

Metrics = dict[str, float]
Versions = tuple[tuple[int, int], ...]
"""(version, number of tokens), run-length encoded in the tokens' order."""
FinishReason = Literal["stop", "length", "abort"]
GREEDY = -1
"""The sample index of a greedy response that others are compared with."""


class _ComparesArrays:
    """Equality of dataclasses that hold numpy arrays, which the generated `__eq__` cannot compare."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [f.name for f in dataclasses.fields(self) if f.compare]  # type: ignore[arg-type]
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray | View) else a == b for a, b in pairs)


def _as_array(record: object, name: str, dtype: type[np.int32] | type[np.float32]) -> None:
    value = getattr(record, name)
    if not isinstance(value, View):
        object.__setattr__(record, name, np.asarray(value, dtype=dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(_ComparesArrays):
    """One row of the data, rendered and tokenized. `uid` names this occurrence, and so its group."""

    uid: str
    token_ids: np.ndarray
    """int32 [tokens]."""
    text: str
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] | None = None
    """The messages that `text` was rendered from; None if the row has a string."""

    def __post_init__(self) -> None:
        _as_array(self, "token_ids", np.int32)


@frozen
class Sampling:
    """`temperature` 0 is greedy. `seed` None lets the engine draw freely."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    keep_support: bool = False

    @property
    def returns_support(self) -> bool:
        """Whether a completion has to contain the tokens it was sampled from."""
        return self.keep_support and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Support(_ComparesArrays):
    """The tokens that top-k, top-p and min-p left to sample from: the sampling mask."""

    counts: Array
    """int32 [tokens]: how many were left for each token of the response."""
    token_ids: Array
    """int32 [counts.sum()]: their ids, in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class Request(_ComparesArrays):
    request_id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    conversation: str = ""
    """Equal for a conversation's requests, which go to the replica with their keys and values."""

    def __post_init__(self) -> None:
        _as_array(self, "prompt_ids", np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_ComparesArrays):
    """An engine's answer to a Request."""

    request_id: str
    response_ids: Array
    """int32 [tokens], the end-of-sequence token included if it was sampled."""
    logprobs: Array
    """float32 [tokens], after temperature."""
    finish_reason: FinishReason
    versions: Versions
    support: Support | None = None
    text: str | TextView = ""
    """Decoded without special tokens, in the engine's process."""
    cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt whose keys and values the engine had; None if it does not report that."""

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "logprobs", np.float32)

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)


Ending = Literal["done", "turns", "tokens", "time", "failed"]
"""By the environment (or a turn without a tool call), or by a limit on turns, tokens or time."""
TRUNCATED: tuple[Ending, ...] = ("turns", "tokens", "time")


@frozen
class PlayedTurn:
    """The place of an assistant turn's sampled tokens in the response, and what it was worth."""

    start: int
    length: int
    reward: float | None = None
    cached_tokens: int | None = None
    context_tokens: int = 0
    state: int = 0
    """Equal in the episodes of one prompt if the states that the turns were taken in are."""

    @property
    def end(self) -> int:
        return self.start + self.length


@frozen
class Episode:
    """All tokens of the response outside of the turns are context."""

    turns: tuple[PlayedTurn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the row's prompt."""
    ended: Ending = "done"
    counts: Mapping[str, float] = field(default_factory=dict)
    """Logged as `episode/NAME`: tool_calls, failed_calls, malformed_calls, retries."""
    waits_s: tuple[float, ...] = ()
    info: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    failure_cause: str | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and length, in the response, of each run of sampled tokens."""
        return tuple((turn.start, turn.length) for turn in self.turns if turn.length)

    @property
    def num_sampled(self) -> int:
        return sum(turn.length for turn in self.turns)

    def score(self, discount: float) -> float:
        """Return the sum of the turns' rewards, discounted from the first turn."""
        return sum(turn.reward * discount**number for number, turn in enumerate(self.turns) if turn.reward is not None)


@dataclass(slots=True, eq=False)
class Rollout(_ComparesArrays):
    """A sampled response with everything known about it."""

    prompt: Prompt
    sample_index: int
    response_ids: Array
    """int32 [tokens]; a `View` if it comes from a rollout pool."""
    rollout_logprobs: Array
    finish_reason: FinishReason
    versions: Versions
    text: str | TextView = ""
    """Decoded without special tokens, as a reward function sees it."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    """Why the rollout has no reward of its own: reward_timeout, reward_error, reward_invalid, the like of a
    judge or reward model (judge_timeout), or baseline_failed. It is trained only if `reward` is a number."""
    failure_cause: str | None = None
    baseline: float | None = None
    """Reward of the greedy response to the same prompt."""
    steps: tuple[tuple[int, float], ...] | None = None
    """Index of each reasoning step's last token in the response, and the step's reward."""
    support: Support | None = None
    episode: Episode | None = None
    """Only its turns' tokens were sampled and count in `versions`; the others' log-probs are 0."""
    cached_tokens: int | None = field(default=None, compare=False)
    masked: bool = False
    """Compared with its group, and not trained."""

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "rollout_logprobs", np.float32)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and length, in the response, of each run of sampled tokens."""
        if self.episode is None:
            return ((0, len(self.response_ids)),) if len(self.response_ids) else ()
        return self.episode.spans

    @property
    def oldest_version(self) -> int | None:
        return min((version for version, _ in self.versions), default=None)

    def same_response(self, other: Rollout) -> bool:
        """Tokens that lie in the same place are not read."""
        response, other_response = self.response_ids, other.response_ids
        if response is other_response or (isinstance(response, View) and response.same_place(other_response)):
            return True
        return np.array_equal(response, other_response)


def extended(versions: Versions, version: int, num_tokens: int) -> Versions:
    if num_tokens < 1:
        return versions
    if versions and versions[-1][0] == version:
        return (*versions[:-1], (version, versions[-1][1] + num_tokens))
    return (*versions, (version, num_tokens))


@frozen
class Counts:
    """The global denominators of one optimizer step, the same on every rank."""

    num_tokens: int
    num_sequences: int
    num_groups: int

    @staticmethod
    def of(trained_lengths_N: Tensor, group_N: Tensor) -> Counts:
        """Without rollouts that have no trained token, and their groups."""
        alive_N = trained_lengths_N > 0
        return Counts(
            num_tokens=int(trained_lengths_N.sum()),
            num_sequences=int(alive_N.sum()),
            num_groups=int(group_N[alive_N].unique().numel()),
        )


C = TypeVar("C")
Reader = Literal["shard", "actor", "critic", "reward_model"]
"""Each of a set of ranks, in every pass over its shard of the batch, or the update of one role."""


def column(*read_by: Reader, need: str = "", dtype: torch.dtype = torch.float32) -> Any:
    """Declare an optional column that travels to `read_by`; a loss reads it only with `@needs(need)`."""
    return field(default=None, metadata={"read_by": read_by, "need": need, "dtype": dtype})


_SHARD = {"read_by": ("shard",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossColumns(Generic[C]):
    """The columns that a policy loss can read. A new one needs a field here and what fills it."""

    old_logprobs_T: C | None = column("actor")
    """Before the first update of the batch; None if nothing reads them (`LossInput.old_T`)."""
    ref_logprobs_T: C | None = column("actor", need="ref_logprobs")
    rollout_logprobs_T: C | None = column("shard")
    """As the engine reported them; None for tokens that no engine sampled."""
    teacher_logprobs_T: C | None = column("actor")
    teacher_top_logprobs_TK: C | None = column("actor")
    """The K highest log-probs of the teacher, for divergences."""
    weights_T: C | None = column("actor")
    """Constant factors of the policy loss, if rollouts are corrected."""
    selected_T: C | None = column(dtype=torch.bool)
    """The tokens that the loss clips or penalises, chosen for a whole mini-batch."""
    chosen_N: C | None = column("actor", "reward_model", need="pairs", dtype=torch.bool)
    """True for the preferred rollout of a pair, or a desirable labelled answer."""
    kl_N: C | None = column("actor", need="kl")
    """An estimate of the KL to the reference, the same for all rollouts, for loss_mode=kto."""
    group_tokens_N: C | None = column("actor", need="group_tokens", dtype=torch.long)
    """Trained tokens of the whole group in the mini-batch, for loss_agg_mode=prompt-mean."""


@frozen
class Batch(LossColumns[Column]):
    """Rollouts as columns over flat axes: no padding, so no masks.

    `token_ids_S` holds prompt and response of each rollout back to back; `positions_T` are the trained ones,
    which the policy sampled (None: all of every response), ascending. Columns `_T` cover the trained tokens
    in that order, `_K` reasoning steps, and `_M` has `support_counts_T` entries for each trained token.
    Columns that a run does not need are None.

    `values` reads a `RemoteColumn`, `local` all of a batch's. Ranks have only tensors.
    """

    prompt_lengths_N: Tensor = field(metadata=_SHARD)
    response_lengths_N: Tensor = field(metadata=_SHARD)
    """All tokens after each prompt, trained or not."""
    group_N: Tensor = field(metadata=_SHARD)
    token_ids_S: Column = field(metadata=_SHARD)
    rewards_N: Tensor = field(metadata=_SHARD)
    positions_T: Tensor | None = column("shard")
    trained_lengths_N: Tensor = column("shard")
    """Left out together with `positions_T`."""
    support_counts_T: Column | None = column("shard")
    """How many tokens top_p, top_k and min_p left to sample from."""
    support_ids_M: Column | None = column("shard")
    """Their ids, int32; every log-prob of the batch is normalised over them."""
    ref_hidden_TD: Column | None = column("actor")
    """The last hidden states, for kl_loss_type=full: [T, D] travels instead of [T, V]."""
    teacher_top_ids_TK: Column | None = column("actor")
    """int32."""
    values_T: Column | None = column("critic")
    """The critic's, of the state before each token, before the update."""
    returns_T: Tensor | None = column("critic")
    advantages_T: Tensor | None = column("actor")
    advantages_N: Tensor | None = column("actor")
    """In place of `advantages_T`, if all tokens of a rollout have the same."""
    baselines_N: Tensor | None = column()
    num_steps_N: Tensor | None = column()
    step_ends_K: Tensor | None = column()
    """Index of each step's last token among its rollout's trained tokens."""
    step_rewards_K: Tensor | None = column()
    step_states_K: Tensor | None = column()
    """The state that each step begins in, if the steps are turns of episodes."""
    reward_parts_NP: Tensor | None = column()
    truncated_N: Tensor | None = column()
    masked_N: Tensor | None = column()
    margins_N: Tensor | None = column("reward_model")
    """How much better the chosen rollout of a pair is, on both."""
    labels_T: Tensor | None = column("reward_model")
    """Targets from 0 to 1 of the scores of rated steps."""
    experts_S: Tensor | None = column()
    """The experts [S, layers, top_k] of an earlier pass whose routing is replayed."""

    def __post_init__(self) -> None:
        assert self.positions_T is None or self.trained_lengths_N is not None
        if self.trained_lengths_N is None:
            object.__setattr__(self, "trained_lengths_N", self.response_lengths_N)

    def positions(self) -> Tensor:
        return self.response_positions() if self.positions_T is None else self.positions_T

    def response_positions(self) -> Tensor:
        starts_N = self.sequence_lengths_N.cumsum(0) - self.response_lengths_N
        return _consecutive(starts_N, self.response_lengths_N)

    @property
    def num_rollouts(self) -> int:
        return len(self.response_lengths_N)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_lengths_N.sum())

    @property
    def sequence_lengths_N(self) -> Tensor:
        return self.prompt_lengths_N + self.response_lengths_N

    def counts(self) -> Counts:
        return Counts.of(self.trained_lengths_N, self.group_N)

    def local(self, fetch: Fetch) -> Batch:
        """Fetches all at once. Raises ValueError for a response whose support does not fit its tokens."""
        read = read_columns({column.name: getattr(self, column.name) for column in dataclasses.fields(self)}, fetch)
        batch = self.replace(**read)
        if "support_ids_M" in read:
            check_support(batch)
        return batch

    def select(self, index_K: Tensor | list[int]) -> Batch:
        index_K = torch.as_tensor(index_K, dtype=torch.long)
        columns: dict[str, Any] = {column.name: self.part_of(column.name, index_K) for column in dataclasses.fields(self)}
        if self.positions_T is not None:
            # A position is that of its rollout's first token and the distance from there; the first tokens have moved.
            starts_N, lengths_K = self.sequence_lengths_N.cumsum(0) - self.sequence_lengths_N, self.sequence_lengths_N[index_K]
            moved_K = lengths_K.cumsum(0) - lengths_K - starts_N[index_K]
            columns["positions_T"] = columns["positions_T"] + moved_K.repeat_interleave(self.trained_lengths_N[index_K])
        return Batch(**columns)

    def part_of(self, name: str, index_K: Tensor) -> Any:
        column, axis = getattr(self, name), name.rpartition("_")[2]
        if axis in ("N", "NP"):
            return None if column is None else column[index_K]
        lengths_N: Any = self.trained_lengths_N  # also of ids of a support that lies elsewhere: they are not cut here
        if axis == "S":
            lengths_N = self.sequence_lengths_N
        elif axis == "K":
            lengths_N = self.num_steps_N
        elif axis == "M" and isinstance(self.support_counts_T, Tensor):
            lengths_N = _segment_sums(self.support_counts_T, self.trained_lengths_N)
        return segments_at(column, lengths_N, index_K)

    def keep(self, trained_T: Tensor) -> Batch:
        """Train only these tokens; the others become context. Columns over reasoning steps are dropped."""
        trained_lengths_N = _segment_sums(trained_T, self.trained_lengths_N)
        kept_N = trained_lengths_N > 0
        by_rollout = bool((trained_lengths_N[kept_N] == self.trained_lengths_N[kept_N]).all())
        token_index = trained_T.nonzero()[:, 0]
        columns: dict[str, Any] = {}
        for name in (column.name for column in dataclasses.fields(Batch) if column.name.endswith(("_T", "_TD", "_TK"))):
            column = getattr(self, name)
            if isinstance(column, RemoteColumn) and by_rollout:
                columns[name] = column.keep(kept_N.numpy())
            else:
                columns[name] = None if column is None else values(column)[token_index]
        if isinstance(self.support_ids_M, RemoteColumn) and by_rollout:
            columns["support_ids_M"] = self.support_ids_M.keep(kept_N.numpy())
        elif self.support_counts_T is not None and self.support_ids_M is not None:
            of_tokens = segment_index(values(self.support_counts_T).long(), token_index)
            columns["support_ids_M"] = values(self.support_ids_M)[of_tokens]
        return self.replace(
            **columns | {"positions_T": self.positions()[token_index]},
            trained_lengths_N=trained_lengths_N,
            num_steps_N=None,
            step_ends_K=None,
            step_rewards_K=None,
            step_states_K=None,
        )

    def loss_columns(self, move: Callable[[Tensor], Tensor] = lambda values: values) -> dict[str, Tensor | None]:
        named = {name: getattr(self, name) for name in LOSS_COLUMNS}
        return {name: None if column is None else move(values(column)) for name, column in named.items()}

    def replace(self, **columns: Column | None) -> Batch:
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def token_advantages(self) -> Tensor | None:
        if self.advantages_N is None:
            return self.advantages_T
        return self.advantages_N.repeat_interleave(self.trained_lengths_N)

    def zero_advantage(self) -> Tensor | None:
        """Return which rollouts have no advantage but 0; None if there are no advantages."""
        if self.advantages_N is not None or self.advantages_T is None:
            return None if self.advantages_N is None else self.advantages_N == 0
        return _segment_sums(self.advantages_T != 0, self.trained_lengths_N) == 0

    def token_index(self, index_K: Tensor | list[int]) -> Tensor:
        """Return where these rollouts' trained tokens are on the axis T."""
        return segment_index(self.trained_lengths_N, torch.as_tensor(index_K, dtype=torch.long))


def segment_index(lengths_N: Tensor, index_K: Tensor) -> Tensor:
    """Return the flat positions of these segments of an axis that is cut into `lengths_N`."""
    starts_N = lengths_N.cumsum(0) - lengths_N
    return _consecutive(starts_N[index_K], lengths_N[index_K])


def _consecutive(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    return torch.from_numpy(consecutive(starts_N.numpy(), lengths_N.numpy()))


def segments_at(column: Any, lengths_N: Tensor, index_K: Tensor) -> Any:
    """Return these segments of a column cut into `lengths_N`. An index for every token would cost more."""
    if isinstance(column, RemoteColumn):
        return column.select(index_K.numpy())
    if column is None or not len(index_K):
        return None if column is None else column[:0]
    begin_K, size_K = (lengths_N.cumsum(0) - lengths_N)[index_K], lengths_N[index_K]
    return torch.cat([column.narrow(0, *piece) for piece in zip(begin_K.tolist(), size_K.tolist(), strict=True)])


def check_support(batch: Batch) -> None:
    """Raise ValueError unless each trained token has a support that contains it."""
    assert isinstance(batch.token_ids_S, Tensor)
    counts_T, ids_M = batch.support_counts_T, batch.support_ids_M
    assert isinstance(counts_T, Tensor) and isinstance(ids_M, Tensor)
    num_tokens, num_ids = batch.num_trained_tokens, int(counts_T.sum())
    if len(counts_T) != num_tokens or num_ids != len(ids_M):
        raise ValueError(
            f"{num_tokens} tokens were sampled from {len(counts_T)} sets of {num_ids} tokens, with {len(ids_M)} ids"
        )
    token_M = torch.repeat_interleave(counts_T.long())
    own_M = ids_M == batch.token_ids_S[batch.positions()][token_M]
    if len(token_M[own_M].unique()) < num_tokens:
        raise ValueError("a token is not among those it was sampled from")


def _segment_sums(x_T: Tensor, lengths_N: Tensor) -> Tensor:
    sums_before = torch.cat([torch.zeros(1, dtype=torch.long), x_T.long().cumsum(0)])
    ends_N = lengths_N.cumsum(0)
    return sums_before[ends_N] - sums_before[ends_N - lengths_N]


LOSS_COLUMNS = tuple(column.name for column in dataclasses.fields(LossColumns))


def columns_read_by(reader: Reader) -> tuple[str, ...]:
    return tuple(column.name for column in dataclasses.fields(Batch) if reader in column.metadata.get("read_by", ()))
