"""The interfaces between the training loop and the roles; `cluster/roles/` implements them over Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from grpo_rl.checkpoint.files import Files
from grpo_rl.types import Batch, Counts, Metrics, Prompt, Rollout, Sampling


@runtime_checkable
class Saved(Protocol):
    """A part of a checkpoint."""

    def save(self, folder: Path, in_background: bool) -> None:
        """Write weights, optimizer, scheduler and random states of this moment, or begin to."""

    def saved(self, wait_s: float) -> Files | None:
        """Return size and SHA-256 of each file; None if `save` has not ended. Raises CheckpointError."""

    def save_bytes(self) -> int: ...

    def load(self, folder: Path) -> None: ...


class Trained(Saved, Protocol):
    def update(self, batch: Batch) -> Metrics:
        """Take all optimizer steps on one batch (epochs x mini-batches)."""


class TrainedInParts(Trained, Protocol):
    """A role whose optimizer step may be made of several batches."""

    def forward_backward(self, batch: Batch, whole: Counts) -> None:
        """Add the gradient of a part of a mini-batch with the counts `whole`."""

    def optim_step(self, whole: Counts) -> Metrics:
        """Take the step of the gradients that have added up."""


class Actor(TrainedInParts, Protocol):
    @property
    def version(self) -> int:
        """The number of batches the weights were trained on."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_T` if something reads them."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the present policy's log-probability of each trained token."""

    def export(self, folder: Path, dtype: str = "float32") -> None: ...


class Reference(Protocol):
    def logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `ref_logprobs_T`, and `ref_hidden_TD` if the full KL reads it."""


class Teacher(Protocol):
    def logprobs(self, batch: Batch, rollouts: Sequence[Rollout] = ()) -> tuple[Batch, Metrics]:
        """`rollouts` are those of the batch, in its order; without any it is a batch of given answers."""


@runtime_checkable
class MovingReference(Reference, Saved, Protocol):
    """The reference of iterated training, which takes over the actor's weights from time to time."""

    def become(self, actor: Any) -> None: ...


class Critic(TrainedInParts, Protocol):
    def values(self, batch: Batch) -> Batch: ...


class TrainedRewardModel(Trained, Protocol):
    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step on the whole batch.

        Under loss=bradley_terry the batch has pairs (`chosen_N`, perhaps `margins_N`), each response scored
        at its last trained token; under loss=steps its trained tokens are the ends of the steps, with
        `labels_T`.
        """

    def scores(self, batch: Batch) -> Tensor:
        """Return the score of each rollout of pairs, or at each trained token of rated steps."""

    def export(self, folder: Path, dtype: str = "float32") -> None:
        """Write a Hugging Face folder that reward.reward_model.model_path loads."""


class StepInstruments(Protocol):
    """Used between steps, while no role works."""

    def begin(self, step: int) -> None: ...

    def end(self, metrics: Metrics) -> Metrics: ...


class RolloutPool(Protocol):
    @property
    def version(self) -> int: ...

    def sync_weights(self, actor: Any) -> Metrics:
        """Bring every replica to the current weights of `actor`, a role of the same cluster."""

    def keep_weights(self) -> AbstractContextManager[None]:
        """Inside, another thread works with the actor: replicas that come back serve after it."""

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        """Ask for n rollouts per prompt, beside those on their way; return their ids, by prompt and sample.

        With `greedy` each prompt's are followed by a greedy one, whose sample index is `GREEDY`.
        """

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        """Yield rollouts as they end, until none (of `only`) is missing, or for `wait_s`.

        Raises WeightVersionError for a rollout with a token of older weights than the pool allows.
        """

    def forget(self, ids: Collection[str]) -> None: ...

    def rest(self) -> None: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Return the rollouts of `submit`, in its order. `on_finish` is called as each ends."""


class TurnPool(RolloutPool, Protocol):
    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        """Ask for one rollout per (prompt, sampling, conversation); return their ids."""


class Rewarder(Protocol):
    factors: dict[str, float]
    """The factor of each part of the reward, by its name in `reward_parts`."""

    def submit(self, rollout: Rollout) -> None: ...

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with reward or `failure`. Submits those that were not."""
