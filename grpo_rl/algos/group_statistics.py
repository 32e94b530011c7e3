"""Statistics of the groups of a batch: the rollouts of one prompt, or the steps of these rollouts."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Groups:
    """A partition of a batch: equal numbers in `group_N` belong together. Groups may differ in size and be interleaved.

    Everything is computed in float64 and returned per member.
    """

    def __init__(self, group_N: Tensor) -> None:
        groups, self.index_N = torch.unique(group_N, return_inverse=True)
        self.num_groups = len(groups)

    @cached_property
    def count_N(self) -> Tensor:
        return torch.bincount(self.index_N, minlength=self.num_groups).double()[self.index_N]

    def sum(self, x_N: Tensor) -> Tensor:
        """Sum over the member's group."""
        zeros_G = torch.zeros(self.num_groups, dtype=torch.float64)
        return zeros_G.index_add(0, self.index_N, x_N.double())[self.index_N]

    def highest(self, x_N: Tensor) -> Tensor:
        """Largest value in the member's group."""
        return self._extreme(x_N, "amax")

    def constant(self, x_N: Tensor) -> Tensor:
        """Return for each member whether all values of its group are equal."""
        return self._extreme(x_N, "amax") == self._extreme(x_N, "amin")

    def deviation(self, x_N: Tensor) -> Tensor:
        """Distance to the group's mean: exactly 0 in a group of equal values.

        The mean of equal numbers need not equal them in floating point, and such a residue divided by a standard
        deviation near 0 would be a signal out of nothing, so equality is tested on the values themselves.
        """
        deviation_N = x_N.double() - self.sum(x_N) / self.count_N
        return torch.where(self.constant(x_N), 0.0, deviation_N)

    def std(self, deviation_N: Tensor) -> Tensor:
        """The group's sample standard deviation (n - 1), from the members' deviations; 0 in a group of one."""
        return (self.sum(deviation_N.square()) / (self.count_N - 1).clamp(min=1)).sqrt()

    def _extreme(self, x_N: Tensor, reduce: str) -> Tensor:
        zeros_G = torch.zeros(self.num_groups, dtype=torch.float64)
        return zeros_G.scatter_reduce(0, self.index_N, x_N.double(), reduce, include_self=False)[self.index_N]
