"""Terms and choices around the update: overlong responses, groups without signal, entropy, prompts that are learnt."""

from __future__ import annotations

from collections.abc import Hashable
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
        if not (target_entropy > 0 and step > 0 and initial >= 0):
            raise ValueError(f"target_entropy={target_entropy}, step={step}, initial={initial}: > 0, > 0 and >= 0")
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

    def __init__(self, bound: float = 0.9, min_samples: int = 1) -> None:
        if not (0.0 < bound <= 1.0 and min_samples >= 1):
            raise ValueError(f"bound={bound}, min_samples={min_samples}: in (0, 1] and >= 1")
        self.bound = bound
        self.min_samples = min_samples
        self._rates: dict[Hashable, float] = {}
        self._retired: set[Hashable] = set()

    def record(self, prompt: Hashable, passed: int, sampled: int) -> None:
        """Note how many of the sampled responses to a prompt passed. Fewer than `min_samples` retire nothing."""
        if not 0 <= passed <= sampled or sampled == 0:
            raise ValueError(f"{passed} of {sampled} responses passed: not a pass rate")
        self._rates[prompt] = passed / sampled
        if sampled >= self.min_samples and passed >= self.bound * sampled:
            self._retired.add(prompt)

    def is_retired(self, prompt: Hashable) -> bool:
        return prompt in self._retired

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    def rate(self, prompt: Hashable) -> float | None:
        """The latest pass rate of a prompt, None before its first."""
        return self._rates.get(prompt)

    def state_dict(self) -> dict[str, Any]:
        # Pairs, as the keys of a mapping would come back from JSON as text.
        return {"rates": [list(item) for item in self._rates.items()], "retired": sorted(self._retired, key=repr)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rates, self._retired = dict(state["rates"]), set(state["retired"])
