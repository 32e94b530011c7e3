"""Random numbers of sampling as a function of (seed, position, token): no request has a generator.

A token is drawn as the one with the largest p_v / q_v, where the q_v are independent and exponential (the
Gumbel-max trick). One operation draws for all rows, and a request gets the same tokens in any batch and
replica.

A row's key comes from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Within a row, v is hashed by the 32-bit mixer `lowbias32` of Chris Wellons ("Prospecting for
hash functions", nullprogram.com, 2018) before each half of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 17
"""Numbers that a CPU draws at a time: they stay in its cache."""
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0x7FEB352D, 0x846CA68B - 2**32)
"""Signed, as int32 has them."""


def row_keys(seeds: Sequence[int], positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return uint64 [B], for the token after `positions` tokens of a request with that seed."""
    seeds_B = np.fromiter((seed & 0xFFFFFFFFFFFFFFFF for seed in seeds), dtype=np.uint64, count=len(seeds))
    return _splitmix(_splitmix(seeds_B) ^ np.asarray(positions, dtype=np.uint64))


def exponential_noise(keys_B: np.ndarray, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [B, V]: exponential numbers of mean 1, above 0 and finite."""
    halves_B2 = torch.from_numpy(keys_B.view(np.int32).reshape(-1, 2)).to(device)
    base_V = _base(num_tokens, str(device))
    noise_BV = torch.empty(len(keys_B), num_tokens, device=device)
    rows = max(1, PIECE // num_tokens) if noise_BV.device.type == "cpu" else len(keys_B)
    for start in range(0, len(keys_B), rows):
        _draw(halves_B2[start : start + rows], base_V, noise_BV[start : start + rows])
    return noise_BV


def _draw(halves_B2: Tensor, base_V: Tensor, out_BV: Tensor) -> None:
    x_BV = _mixed_(base_V ^ halves_B2[:, :1])
    x_BV = _mixed_(x_BV.bitwise_xor_(halves_B2[:, 1:]))
    # |x| / 2^31 is uniform over (0, 1) once both ends are cut off. The smallest q win, and float32 is finest near 0.
    out_BV.copy_(x_BV).abs_().mul_(2.0**-31).clamp_(2.0**-33, 1 - 2.0**-24).neg_().log1p_().neg_()


def _mixed_(x: Tensor) -> Tensor:
    """In place, int32; masks make the shifts unsigned."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX[0])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_MIX[1])
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


@lru_cache(maxsize=8)
def _base(num_tokens: int, device: str) -> Tensor:
    return _mixed_(torch.arange(num_tokens, dtype=torch.int32, device=device))


def _splitmix(x_B: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z_B = x_B + np.uint64(_GOLDEN)
        z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z_B ^ (z_B >> np.uint64(31))
