"""Terms and choices around the update: overlong responses, entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def overlong_penalty(lengths_N: Tensor, max_length: int, buffer: int, penalty_factor: float = 1.0) -> Tensor:
    """Return the float32 term of each response's reward: 0 up to `max_length - buffer` tokens, then falling
    to -penalty_factor.

    Formula: penalty_factor · clip(((max_length - buffer) - length) / buffer, -1, 0)

    Soft overlong punishment: DAPO (arXiv 2503.14476), eq. 13, for a buffer from 1 to `max_length`.
    """
    over_N = (max_length - buffer - lengths_N.double()) / buffer
    return (penalty_factor * over_N.clamp(-1.0, 0.0)).float()


class AdaptiveEntropy:
    """An entropy coefficient that rises while the entropy is below its target, and acts only then.

    c <- max(0, c + step · sign(target - H)); the coefficient is c if H <= target, else 0: Skywork-OR1 (arXiv
    2505.22312), section 3.2. H is the mean entropy per trained token of the step before, in nats.
    """

    def __init__(self, target_entropy: float, step: float, initial: float = 0.0) -> None:
        self.target_entropy = target_entropy
        self.step = step
        self._coefficient = initial
        self._below = True

    @property
    def value(self) -> float:
        return self._coefficient if self._below else 0.0

    def update(self, entropy: float) -> None:
        """Raises ValueError for an entropy that is not a number >= 0."""
        if not entropy >= 0.0 or entropy == float("inf"):
            raise ValueError(f"the measured entropy is {entropy}: the policy has broken down")
        direction = (entropy < self.target_entropy) - (entropy > self.target_entropy)
        self._coefficient = max(0.0, self._coefficient + self.step * direction)
        self._below = entropy <= self.target_entropy

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self._coefficient, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coefficient, self._below = state["coefficient"], state["below"]
