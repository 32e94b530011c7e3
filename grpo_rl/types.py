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
        names = [f.name for f in dataclasses.fields(self) if f.compare]  # type: ignore[arg-type]
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray | View) else a == b for a, b in pairs)


def _as_array(record: object, name: str, dtype: type[np.int32] | type[np.float32]) -> None:
    """Make a field an array of this type: any sequence of numbers may be given, an array of the type is not copied.

    A view stays one: its values are not read.
    """
    value = getattr(record, name)
    if not isinstance(value, View):
        object.__setattr__(record, name, np.asarray(value, dtype=dtype))


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
    """The chat messages that `text` was rendered from; None if the row has a plain string."""

    def __post_init__(self) -> None:
        _as_array(self, "token_ids", np.int32)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request. `temperature` 0 is greedy. `seed` None lets the engine draw freely."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    """Leave out tokens less likely than this times the likeliest one."""
    ignore_eos: bool = False
    seed: int | None = None
    keep_support: bool = False
    """Return which tokens could be sampled, if top_p, top_k or min_p leave some out."""

    @property
    def returns_support(self) -> bool:
        """Return whether a completion has to contain the tokens it was sampled from. Greedy decoding is no sampling."""
        return self.keep_support and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Support(_ComparesArrays):
    """The tokens that top-k, top-p and min-p left to sample from, for each token of a response: the sampling mask."""

    counts: Array
    """int32 [tokens]: how many were left."""
    token_ids: Array
    """int32 [counts.sum()]: their ids, in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class Request(_ComparesArrays):
    """One response to sample: the unit that is dispatched to a rollout replica."""

    request_id: str
    prompt_ids: np.ndarray
    """int32 [tokens]; any sequence of integers may be given."""
    sampling: Sampling
    conversation: str = ""
    """A name that requests of one conversation share: the replica of the last one has its keys and values. Empty: it is by itself."""

    def __post_init__(self) -> None:
        _as_array(self, "prompt_ids", np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_ComparesArrays):
    """An engine's answer to a Request. Any sequence of numbers may be given for an array."""

    request_id: str
    response_ids: Array
    """int32 [tokens]: the sampled tokens, the end-of-sequence token included when it was sampled."""
    logprobs: Array
    """float32 [tokens]: the engine's log-probability of each sampled token, after temperature."""
    finish_reason: FinishReason
    versions: Versions
    """The version of the weights that each token was sampled with, as runs of equal versions."""
    support: Support | None = None
    """The tokens that each one was sampled from, if the request's sampling returns them."""
    text: str | TextView = ""
    """The response decoded without special tokens. Engines leave it empty; their process fills it in."""
    cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt whose keys and values the engine had already; None if it does not report that."""

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "logprobs", np.float32)

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)


Ending = Literal["done", "turns", "tokens", "time", "failed"]
"""The end of an episode: by its environment (or a turn without a tool call), or by a limit on turns, tokens or time."""
TRUNCATED: tuple[Ending, ...] = ("turns", "tokens", "time")


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One assistant turn: the place of its sampled tokens in the response, and what it was worth."""

    start: int
    length: int
    reward: float | None = None
    """The reward of the turn; None if the turn has none of its own."""
    cached_tokens: int | None = None
    """Tokens of its context whose keys and values the engine had already; None if the engine does not report it."""
    context_tokens: int = 0
    """Tokens of its context, the prompt included."""
    state: int = 0
    """A number for the state that it was taken in: equal in the turns of one prompt's episodes if the states are."""

    @property
    def end(self) -> int:
        """The index in the response after the turn's last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Episode:
    """The course of an episode. Between and behind the tokens of its turns everything in the response is context."""

    turns: tuple[PlayedTurn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the row's prompt: assistant turns as sampled, and what came between them."""
    ended: Ending = "done"
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the episode that are logged as `episode/NAME`: tool_calls, failed_calls, malformed_calls, retries."""
    waits_s: tuple[float, ...] = ()
    """Seconds that each answer of the environment took."""
    info: Mapping[str, float] = field(default_factory=dict)
    """The last value of each number that the environment reported."""
    failure: str | None = None
    """environment_error or environment_timeout, if the environment itself failed."""
    failure_cause: str | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and length, in the response, of each run of sampled tokens, ascending."""
        return tuple((turn.start, turn.length) for turn in self.turns if turn.length)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that were sampled."""
        return sum(turn.length for turn in self.turns)

    def score(self, discount: float) -> float:
        """Return the discounted sum of the turns' rewards, as seen from the first turn."""
        return sum(turn.reward * discount**number for number, turn in enumerate(self.turns) if turn.reward is not None)


@dataclass(slots=True, eq=False)
class Rollout(_ComparesArrays):
    """A sampled response with everything known about it. Any sequence of numbers may be given for an array."""

    prompt: Prompt
    sample_index: int
    response_ids: Array
    """int32 [tokens]. From a rollout pool it is a view of a block, which is read if something asks for values."""
    rollout_logprobs: Array
    """float32 [tokens], likewise."""
    finish_reason: FinishReason
    versions: Versions
    """The version of the weights that each token was sampled with, as runs of equal versions."""
    text: str | TextView = ""
    """The response decoded without special tokens, as a reward function sees it; `str(rollout.text)` decodes that of a view."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    """The reason why the rollout has no reward of its own: reward_timeout, reward_error, reward_invalid, the like of a
    judge or reward model (judge_timeout), or baseline_failed. It is trained only if `reward` is a number all the
    same."""
    failure_cause: str | None = None
    """The failure in words."""
    baseline: float | None = None
    """Reward of the greedy response to the same prompt, if the estimator compares with it."""
    steps: tuple[tuple[int, float], ...] | None = None
    """Index of each reasoning step's last token in the response, ascending, and the step's reward."""
    support: Support | None = None
    episode: Episode | None = None
    """The turns and their rewards, if the response is an episode of several turns: then only the turns' tokens were sampled.
    `versions` counts these alone, and all others have a log-prob of 0 that nothing reads."""
    cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of the prompt that the engine did not have to compute; None if it does not report that."""
    masked: bool = False
    """True if the rollout is compared with its group and none of its tokens is trained."""

    def __post_init__(self) -> None:
        _as_array(self, "response_ids", np.int32)
        _as_array(self, "rollout_logprobs", np.float32)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and length, in the response, of each run of sampled tokens: all of it, but for an episode."""
        if self.episode is None:
            return ((0, len(self.response_ids)),) if len(self.response_ids) else ()
        return self.episode.spans

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that a token was sampled with; None for a response without tokens."""
        return min((version for version, _ in self.versions), default=None)

    def same_response(self, other: Rollout) -> bool:
        """Return whether both have the same response tokens; if they lie in the same place, they are not read."""
        response, other_response = self.response_ids, other.response_ids
        if response is other_response or (isinstance(response, View) and response.same_place(other_response)):
            return True
        return np.array_equal(response, other_response)


def extended(versions: Versions, version: int, num_tokens: int) -> Versions:
    """The run-length versions with `num_tokens` more tokens of `version` at the end."""
    if num_tokens < 1:
        return versions
    if versions and versions[-1][0] == version:
        return (*versions[:-1], (version, versions[-1][1] + num_tokens))
    return (*versions, (version, num_tokens))


@dataclass(frozen=True, slots=True)
class Counts:
    """The global denominators of one optimizer step, the same on every rank and in every micro-batch."""

    num_tokens: int
    num_sequences: int
    num_groups: int

    @staticmethod
    def of(trained_lengths_N: Tensor, group_N: Tensor) -> Counts:
        """Return the counts of these rollouts. Those without a trained token, and their groups, are not counted."""
        alive_N = trained_lengths_N > 0
        return Counts(
            num_tokens=int(trained_lengths_N.sum()),
            num_sequences=int(alive_N.sum()),
            num_groups=int(group_N[alive_N].unique().numel()),
        )


C = TypeVar("C")
Reader = Literal["shard", "actor", "critic", "reward_model"]
"""What reads a column: each of a set of ranks, in every pass over its shard of the batch, or the update of one role."""


def column(*read_by: Reader, need: str = "", dtype: torch.dtype = torch.float32) -> Any:
    """Declare a column of a batch that may be absent. The suffix of its name is its axis.

    It travels to the ranks that `read_by` names. With `need` a loss reads it only if it declares `@needs(need)`.
    """
    return field(default=None, metadata={"read_by": read_by, "need": need, "dtype": dtype})


_SHARD = {"read_by": ("shard",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossColumns(Generic[C]):
    """The columns that a policy loss can read, by their names in a `Batch` and in a `LossInput`.

    A field here is all that a new one needs besides what fills it: it is sent to the actor's ranks with the update, cut into
    micro-batches by its axis, moved to their device, and given to the loss; the trial of losses makes numbers for it.
    """

    old_logprobs_T: C | None = column("actor")
    """Log-probs before the first update of the batch. Filled by the actor or the engine; None: nothing reads them (`LossInput.old_T`)."""
    ref_logprobs_T: C | None = column("actor", need="ref_logprobs")
    """Log-probs under the frozen reference, which fills them."""
    rollout_logprobs_T: C | None = column("shard")
    """Log-probs that the engine reported when it sampled; None for tokens that no engine sampled, such as demonstrations."""
    teacher_logprobs_T: C | None = column("actor")
    """Log-probs under the teacher of each rollout, which fills them."""
    teacher_top_logprobs_TK: C | None = column("actor")
    """The highest log-probs of the teacher where each trained token was sampled, K of them, for divergences."""
    weights_T: C | None = column("actor")
    """Constant factors of the policy loss, which the objective applies after the loss. Filled if rollouts are corrected."""
    selected_T: C | None = column(dtype=torch.bool)
    """The tokens that the loss clips or penalises, chosen once for a whole mini-batch and sent with its step."""
    chosen_N: C | None = column("actor", "reward_model", need="pairs", dtype=torch.bool)
    """The side of each rollout in its pair, two rollouts of one group: True for the preferred one. Of labelled answers: the desirable ones."""
    kl_N: C | None = column("actor", need="kl")
    """An estimate of the policy's KL to the reference, the same for all rollouts, for loss_mode=kto."""
    group_tokens_N: C | None = column("actor", need="group_tokens", dtype=torch.long)
    """Trained tokens of each rollout's whole group in the mini-batch, for loss_agg_mode=prompt-mean."""


@dataclass(frozen=True, slots=True)
class Batch(LossColumns[Column]):
    """Rollouts as columns over flat axes: no padding, so no masks.

    `token_ids_S` holds prompt and response of each rollout back to back. `positions_T` says which of these tokens are
    trained: those that the policy sampled. In a rollout of one turn they are the response; in one of several turns, tool
    output and other context lie between them, which the model reads and nothing trains. Columns `_T` cover the trained
    tokens only, in that order; columns `_K` run over reasoning steps; a column `_M` holds `support_counts_T` entries for
    each trained token. Columns that a run does not need stay None.

    A column is a tensor, or a `RemoteColumn` whose values lie with the processes that made them: `values` reads one, and
    `local` all of a batch's. Ranks have only tensors.
    """

    prompt_lengths_N: Tensor = field(metadata=_SHARD)
    response_lengths_N: Tensor = field(metadata=_SHARD)
    """The number of tokens after each prompt, trained or not."""
    group_N: Tensor = field(metadata=_SHARD)
    """Index of the prompt group of each rollout; equal numbers belong to one prompt."""
    token_ids_S: Column = field(metadata=_SHARD)
    rewards_N: Tensor = field(metadata=_SHARD)
    positions_T: Tensor | None = column("shard")
    """Positions of the trained tokens in `token_ids_S`, ascending. None: all of every response."""
    trained_lengths_N: Tensor = column("shard")
    """The number of trained tokens of each rollout; left out together with `positions_T`."""
    support_counts_T: Column | None = column("shard")
    """The number of tokens the engine could sample from, if top_p, top_k or min_p leave some out."""
    support_ids_M: Column | None = column("shard")
    """The ids of those tokens, int32; every log-prob of the batch is normalised over them."""
    ref_hidden_TD: Column | None = column("actor")
    """The reference's last hidden states, only for kl_loss_type=full: [T, D] travels instead of [T, V]."""
    teacher_top_ids_TK: Column | None = column("actor")
    """The ids of the tokens of `teacher_top_logprobs_TK`, int32."""
    values_T: Column | None = column("critic")
    """The critic's value of the state before each token, as it was before the update."""
    returns_T: Tensor | None = column("critic")
    """The targets of the critic."""
    advantages_T: Tensor | None = column("actor")
    advantages_N: Tensor | None = column("actor")
    """Advantages in place of `advantages_T`, if all tokens of a rollout have the same."""
    baselines_N: Tensor | None = column()
    """Rewards of greedy responses to the rollouts' prompts, only for estimators that compare with them."""
    num_steps_N: Tensor | None = column()
    """The number of reasoning steps of each rollout, only for estimators that read them."""
    step_ends_K: Tensor | None = column()
    """Index of each step's last token among its rollout's trained tokens."""
    step_rewards_K: Tensor | None = column()
    step_states_K: Tensor | None = column()
    """The number of the state that each step begins in, if the steps are turns of episodes."""
    reward_parts_NP: Tensor | None = column()
    """The score of each reward function, before its factor."""
    truncated_N: Tensor | None = column()
    """Responses that were cut off at the longest length."""
    masked_N: Tensor | None = column()
    """Rollouts that are compared and not trained, only if there are some."""
    margins_N: Tensor | None = column("reward_model")
    """The distance by which the chosen rollout of a pair is better, on both of them; only for reward models that learn from pairs."""
    labels_T: Tensor | None = column("reward_model")
    """Targets from 0 to 1 of the scores at the trained tokens, only for reward models that learn from rated steps."""
    experts_S: Tensor | None = column()
    """The experts [S, layers, top_k] of each token in an earlier pass, only if that pass's routing is replayed."""

    def __post_init__(self) -> None:
        assert self.positions_T is None or self.trained_lengths_N is not None
        if self.trained_lengths_N is None:
            object.__setattr__(self, "trained_lengths_N", self.response_lengths_N)

    def positions(self) -> Tensor:
        """Return the flat positions of the trained tokens."""
        return self.response_positions() if self.positions_T is None else self.positions_T

    def response_positions(self) -> Tensor:
        """Return the flat positions of all tokens after the prompts, trained or not."""
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
        """Return the denominators for all the averaging modes."""
        return Counts.of(self.trained_lengths_N, self.group_N)

    def local(self, fetch: Fetch) -> Batch:
        """Return the batch with the values of its remote columns, all of them fetched at once.

        Raises ValueError for a response whose support does not fit its tokens.
        """
        read = read_columns({column.name: getattr(self, column.name) for column in dataclasses.fields(self)}, fetch)
        batch = self.replace(**read)
        if "support_ids_M" in read:
            check_support(batch)
        return batch

    def select(self, index_K: Tensor | list[int]) -> Batch:
        """Return the rollouts at `index_K`, in that order, with all their columns."""
        index_K = torch.as_tensor(index_K, dtype=torch.long)
        columns: dict[str, Any] = {column.name: self.part_of(column.name, index_K) for column in dataclasses.fields(self)}
        if self.positions_T is not None:
            # A position is that of its rollout's first token and the distance from there; the first tokens have moved.
            starts_N, lengths_K = self.sequence_lengths_N.cumsum(0) - self.sequence_lengths_N, self.sequence_lengths_N[index_K]
            moved_K = lengths_K.cumsum(0) - lengths_K - starts_N[index_K]
            columns["positions_T"] = columns["positions_T"] + moved_K.repeat_interleave(self.trained_lengths_N[index_K])
        return Batch(**columns)

    def part_of(self, name: str, index_K: Tensor) -> Any:
        """Return the values of one column for the rollouts at `index_K`, one rollout after the other."""
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
        """Return the batch that trains the tokens of `trained_T` only, a bool for each token that is trained now.

        The rollouts and their tokens stay as they are, and so does the numbering of groups; the tokens that are left
        out are context from then on, and leave every count. Columns over reasoning steps are dropped: they number
        tokens that may be gone.
        """
        trained_lengths_N = _segment_sums(trained_T, self.trained_lengths_N)
        kept_N = trained_lengths_N > 0
        by_rollout = bool((trained_lengths_N[kept_N] == self.trained_lengths_N[kept_N]).all())
        token_index = trained_T.nonzero()[:, 0]
        columns: dict[str, Any] = {}
        for name in _columns_with("_T", "_TD", "_TK"):
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
        """Return the columns that a loss can read, by their names; `move` brings each to a device."""
        named = {name: getattr(self, name) for name in LOSS_COLUMNS}
        return {name: None if column is None else move(values(column)) for name, column in named.items()}

    def replace(self, **columns: Column | None) -> Batch:
        """Return the same batch with some columns exchanged."""
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def token_advantages(self) -> Tensor | None:
        """Return the advantage of each trained token, whichever of the two columns it comes from."""
        if self.advantages_N is None:
            return self.advantages_T
        return self.advantages_N.repeat_interleave(self.trained_lengths_N)

    def zero_advantage(self) -> Tensor | None:
        """Return which rollouts have no advantage but 0; None for a batch without advantages."""
        if self.advantages_N is not None or self.advantages_T is None:
            return None if self.advantages_N is None else self.advantages_N == 0
        return _segment_sums(self.advantages_T != 0, self.trained_lengths_N) == 0

    def token_index(self, index_K: Tensor | list[int]) -> Tensor:
        """Return where the trained tokens of the rollouts at `index_K` are on the axis T."""
        return segment_index(self.trained_lengths_N, torch.as_tensor(index_K, dtype=torch.long))


def segment_index(lengths_N: Tensor, index_K: Tensor) -> Tensor:
    """Return the flat positions of the segments `index_K` of an axis that is cut into `lengths_N`."""
    starts_N = lengths_N.cumsum(0) - lengths_N
    return _consecutive(starts_N[index_K], lengths_N[index_K])


def _consecutive(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    return torch.from_numpy(consecutive(starts_N.numpy(), lengths_N.numpy()))


def segments_at(column: Any, lengths_N: Tensor, index_K: Tensor) -> Any:
    """Return the segments `index_K` of a column that is cut into `lengths_N`, one after the other.

    They are copied whole: an index for every token would cost more.
    """
    if isinstance(column, RemoteColumn):
        return column.select(index_K.numpy())
    if column is None or not len(index_K):
        return None if column is None else column[:0]
    begin_K, size_K = (lengths_N.cumsum(0) - lengths_N)[index_K], lengths_N[index_K]
    return torch.cat([column.narrow(0, *piece) for piece in zip(begin_K.tolist(), size_K.tolist(), strict=True)])


def check_support(batch: Batch) -> None:
    """Raise ValueError unless a batch that is here has one support for each trained token, with that token in it."""
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
    """Return the sum of each segment of a column of integers."""
    sums_before = torch.cat([torch.zeros(1, dtype=torch.long), x_T.long().cumsum(0)])
    ends_N = lengths_N.cumsum(0)
    return sums_before[ends_N] - sums_before[ends_N - lengths_N]


LOSS_COLUMNS = tuple(column.name for column in dataclasses.fields(LossColumns))


def columns_read_by(reader: Reader) -> tuple[str, ...]:
    """Return the names of the columns that travel to these ranks."""
    return tuple(column.name for column in dataclasses.fields(Batch) if reader in column.metadata.get("read_by", ()))


def _columns_with(*suffixes: str) -> list[str]:
    """Return the names of the batch's columns over the axes of these suffixes."""
    return [column.name for column in dataclasses.fields(Batch) if column.name.endswith(suffixes)]
