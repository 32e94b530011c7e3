"""Terms and choices around the update: overlong responses, groups without signal, entropy, prompts that are learnt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_rl.algos.group_statistics import Groups


def overlong_penalty(lengths_N: Tensor, max_length: int, buffer: int, penalty_factor: float = 1.0) -> Tensor:
    """Return the term that is added to each response's reward, in float32: 0 up to `max_length - buffer` tokens,
    then falling to -penalty_factor.

    Formula: penalty_factor · clip(((max_length - buffer) - length) / buffer, -1, 0)

    Soft overlong punishment: DAPO (arXiv 2503.14476), eq. 13. Raises ValueError for a buffer that is not between
    1 and `max_length`.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"an overlong buffer of {buffer} tokens for responses of at most {max_length}; 1 to {max_length}")
    over_N = (max_length - buffer - lengths_N.double()) / buffer
    return (penalty_factor * over_N.clamp(-1.0, 0.0)).float()


def with_signal(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Rollouts in groups whose scores differ; a group of one has no signal.

    Dynamic sampling: DAPO (arXiv 2503.14476), section 3.2; zero-variance filter: ScaleRL (arXiv 2510.13786), section 3.
    Compared on the scores themselves, not on a standard deviation that rounding keeps from 0.
    """
    return ~Groups(group_N).constant(scores_N)


class AdaptiveEntropy:
    """An entropy coefficient that rises while the entropy is below its target, and acts only then.

    c <- max(0, c + step · sign(target - H)); the coefficient is c where H <= target, else 0: Skywork-OR1 (arXiv
    2505.22312), section 3.2. H is the mean entropy per trained token of the step before, in nats.
    """

    def __init__(self, target_entropy: float, step: float, initial: float = 0.0) -> None:
        self.target_entropy = target_entropy
        self.step = step
        self._coefficient = initial
        self._below = True

    @property
    def value(self) -> float:
        """The coefficient for the next step."""
        return self._coefficient if self._below else 0.0

    def update(self, entropy: float) -> None:
        """Take in the entropy measured in a step. Raises ValueError for one that is not a number >= 0."""
        if not entropy >= 0.0 or entropy == float("inf"):
            raise ValueError(f"the measured entropy is {entropy}: the policy has broken down")
        direction = (entropy < self.target_entropy) - (entropy > self.target_entropy)
        self._coefficient = max(0.0, self._coefficient + self.step * direction)
        self._below = entropy <= self.target_entropy

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self._coefficient, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coefficient, self._below = state["coefficient"], state["below"]


class PassRates:
    """A record of the prompts that are learnt: those whose latest pass rate reached the bound. They stay retired.

    No-Positive-Resampling: ScaleRL (arXiv 2510.13786), section 3 (bound 0.9). Prompts are named by their row in the
    data, not by an occurrence in the run.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._retired: set[int] = set()

    def record(self, row: int, passed: int, sampled: int) -> None:
        """Note how many of the sampled responses to a prompt passed."""
        if passed >= self.bound * sampled:
            self._retired.add(row)

    def is_retired(self, row: int) -> bool:
        return row in self._retired

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    def state_dict(self) -> dict[str, Any]:
        return {"retired": sorted(self._retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._retired = set(state["retired"])
