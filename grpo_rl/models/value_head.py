"""A critic's model: the body of a causal LM and one number per trained token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.models.forward import PackedModel, Sequences


class ValueModel(PackedModel):
    """The value of the state in which each trained token is sampled: a float32 linear head on the body of `lm`.

    The head starts at 0, so that before its first update the critic says 0 everywhere and GAE is the
    discounted reward to go. `lm`'s own head is dropped.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__(lm.base_model)
        device = next(lm.parameters()).device
        self.head = nn.Linear(int(lm.config.hidden_size), 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, sequences: Sequences) -> Tensor:
        """`values_T`. The value of a response's first token is that of its prompt; later tokens are not looked at."""
        # A copy, not a view: FSDP hooks the outputs and cannot hook views.
        return self.head(self.hidden_TD(sequences).float())[:, 0].clone()
