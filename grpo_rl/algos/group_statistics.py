"""Statistics of the groups of a batch: the rollouts of one prompt, or their steps."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Groups:
    """Equal numbers in `group_N` belong together, in any order. Results are float64, per member."""

    def __init__(self, group_N: Tensor) -> None:
        groups, self.index_N = torch.unique(group_N, return_inverse=True)
        self.num_groups = len(groups)

    @cached_property
    def count_N(self) -> Tensor:
        return torch.bincount(self.index_N, minlength=self.num_groups).double()[self.index_N]

    def sum(self, x_N: Tensor) -> Tensor:
        zeros_G = torch.zeros(self.num_groups, dtype=torch.float64)
        return zeros_G.index_add(0, self.index_N, x_N.double())[self.index_N]

    def highest(self, x_N: Tensor) -> Tensor:
        return self._extreme(x_N, "amax")

    def constant(self, x_N: Tensor) -> Tensor:
        return self._extreme(x_N, "amax") == self._extreme(x_N, "amin")

    def deviation(self, x_N: Tensor) -> Tensor:
        """Distance to the group's mean: exactly 0 for equal values, whose floating-point mean may differ."""
        deviation_N = x_N.double() - self.sum(x_N) / self.count_N
        return torch.where(self.constant(x_N), 0.0, deviation_N)

    def std(self, deviation_N: Tensor) -> Tensor:
        """The group's sample standard deviation (n - 1), from the deviations; 0 in a group of one."""
        return (self.sum(deviation_N.square()) / (self.count_N - 1).clamp(min=1)).sqrt()

    def _extreme(self, x_N: Tensor, reduce: str) -> Tensor:
        zeros_G = torch.zeros(self.num_groups, dtype=torch.float64)
        return zeros_G.scatter_reduce(0, self.index_N, x_N.double(), reduce, include_self=False)[self.index_N]
