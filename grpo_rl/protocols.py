"""The interfaces between the training loop and the rest of the system: a few small Protocols.

`cluster/roles/` implements them over Ray worker groups, `rewards/combined.py` the rewarder; tests may implement
them in-process.
Placement, retries, sleeping engines and deadlines live below these lines, never in the loop.
"""

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
    """A part of a checkpoint: it has a state that decides the steps to come."""

    def save(self, folder: Path, in_background: bool) -> None:
        """Write weights, optimizer, scheduler and random states of this moment into `folder`, or begin to, in the background."""

    def saved(self, wait_s: float) -> Files | None:
        """Return size and SHA-256 of each file that the last `save` wrote; None when it has not ended within `wait_s`.

        Raises CheckpointError when it failed.
        """

    def save_bytes(self) -> int:
        """Return about how many bytes `save` writes."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""


class Trained(Saved, Protocol):
    """A role that is trained: the actor, the critic."""

    def update(self, batch: Batch) -> Metrics:
        """Take all optimizer steps on one batch (epochs x mini-batches); return their metrics."""


class TrainedInParts(Trained, Protocol):
    """A role whose optimizer step may be made of several batches: the actor, the critic."""

    def forward_backward(self, batch: Batch, whole: Counts) -> None:
        """Add the gradient of a part of a mini-batch, whose counts are those of the `whole` one."""

    def optim_step(self, whole: Counts) -> Metrics:
        """Take the optimizer step of the gradients that have added up; return its metrics."""


class Actor(TrainedInParts, Protocol):
    """The policy being trained."""

    @property
    def version(self) -> int:
        """The version of the weights: the number of batches they were trained on."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_T` filled if something reads them, unchanged otherwise."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the present policy's log-probability of each trained token."""

    def export(self, folder: Path, dtype: str = "float32") -> None:
        """Write the policy as an ordinary Hugging Face model folder, its weights in this number type."""


class Reference(Protocol):
    """The frozen policy that the KL term compares with."""

    def logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `ref_logprobs_T` filled, and `ref_hidden_TD` if the full KL reads it."""


class Teacher(Protocol):
    """The models whose distributions the policy learns."""

    def logprobs(self, batch: Batch, rollouts: Sequence[Rollout] = ()) -> tuple[Batch, Metrics]:
        """Return the batch with `teacher_logprobs_T`, and the teachers' likeliest tokens if a divergence reads them; and metrics.

        `rollouts` are those of the batch, in its order; without any it is one of given answers.
        """


@runtime_checkable
class MovingReference(Reference, Saved, Protocol):
    """The reference of iterated training, which becomes the policy from time to time."""

    def become(self, actor: Any) -> None:
        """Take over the weights of `actor`, a role of the same cluster, as they are now."""


class Critic(TrainedInParts, Protocol):
    """The estimate of how good the state before each token is, which learns beside the policy."""

    def values(self, batch: Batch) -> Batch:
        """Return the batch with `values_T` filled."""


class TrainedRewardModel(Trained, Protocol):
    """The reward model if the run trains it. The same processes score rollouts for the reward, with the weights they have."""

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step on the whole batch; return its metrics.

        Under loss=bradley_terry the batch is one of pairs, with `chosen_N` and perhaps `margins_N`, each response scored at
        its last trained token; under loss=steps its trained tokens are the ends of the steps, with `labels_T`.
        """

    def scores(self, batch: Batch) -> Tensor:
        """Return the present score of each rollout of pairs, or that at each trained token of rated steps."""

    def export(self, folder: Path, dtype: str = "float32") -> None:
        """Write the model as a Hugging Face folder that reward.reward_model.model_path loads."""


class StepInstruments(Protocol):
    """The instruments of a run's workers. They are used between steps, while no role works."""

    def begin(self, step: int) -> None:
        """Order the instruments of this step."""

    def end(self, metrics: Metrics) -> Metrics:
        """Return what the instruments found in the step that has these metrics."""


class RolloutPool(Protocol):
    """All rollout replicas together."""

    @property
    def version(self) -> int:
        """The version of the weights that the engines hold."""

    def sync_weights(self, actor: Any) -> Metrics:
        """Bring every replica to the current weights of `actor`, one of the same cluster."""

    def keep_weights(self) -> AbstractContextManager[None]:
        """Return a context inside of which nothing is asked of the actor, because another thread works with it.

        Replicas that come back serve after it.
        """

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        """Ask for n rollouts per prompt, while others may be on their way; return their ids, by prompt and sample.

        With `greedy` each prompt's are followed by a greedy one, whose sample index is `GREEDY`.
        """

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        """Yield rollouts as they end, until none is missing of those asked for (of `only`, if given), or for `wait_s`.

        Raises WeightVersionError for a rollout with a token that was sampled with older weights than the pool allows.
        """

    def forget(self, ids: Collection[str]) -> None:
        """Hand these rollouts over no more."""

    def rest(self) -> None:
        """Let the engines give their memory back, if they do that and nothing is asked for."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Return the rollouts of `submit`, ordered by prompt and sample. `on_finish` is called with each one as it ends."""


class TurnPool(RolloutPool, Protocol):
    """The pool that single turns of conversations are asked of."""

    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        """Ask for one rollout per prompt, sampled exactly as it says, as a turn of a conversation; return their ids."""


class Rewarder(Protocol):
    """Scores rollouts while others are still being sampled."""

    factors: dict[str, float]
    """The factor of each part of the reward, by the part's name in `reward_parts`."""

    def submit(self, rollout: Rollout) -> None:
        """Start scoring one rollout; returns at once."""

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with `reward`, `reward_parts` and `steps` filled, or with `failure`. Submits those that were not."""
