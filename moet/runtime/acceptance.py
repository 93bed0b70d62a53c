"""Which drafted tokens hold: proposals and the target's distribution to tokens. Pure functions; no
sequence, slot or page is known here.

A drafted position is decided as the sampler would decide it: by the largest score at temperature 0,
else by the target's distribution p after every parameter of the request. The draft x was drawn from
q. It holds with the probability min(1, p(x) / q(x)); otherwise the token is drawn from what p has
over q. Either way the token is distributed as p, whatever q is (Leviathan et al., arXiv:2211.17192,
theorem 1). The token equals the draft exactly when that holds, so whoever reads the tokens needs no
second answer. The rule itself is `verify` of kernels/sampling.py, which steps on a device share.

What stays reproducible: at temperature 0 the tokens are those without drafts, bit for bit. Above
it a seeded request gives the same tokens for the same number of drafts per step, as every number
is a function of (seed, position, purpose); with another number it gives other tokens of the same
distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.kernels.sampling import Purpose as Purpose
from moet.kernels.sampling import draw as draw
from moet.kernels.sampling import verify as verify


def counter_uniform(seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """A number in [0, 1) for each (seed, position): [n] int64 each -> [n] fp64, 53 random bits.

    That of kernels/sampling.py, bit for bit, in a third of its time on the host.
    """
    seed = seeds.cpu().numpy().view(np.uint64)
    position = positions.cpu().numpy().view(np.uint64)
    mixed = _mix64(_mix64(seed + _GOLDEN) ^ (position * _GOLDEN))
    if purpose:
        mixed = _mix64(mixed ^ (np.full(1, purpose, dtype=np.uint64) * _GOLDEN))
    return torch.from_numpy((mixed >> _U11) * 2.0**-53).to(seeds.device)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U11, _U27, _U30, _U31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every input bit moves about half of the output bits."""
    x = (x ^ (x >> _U30)) * _FACTORS[0]
    x = (x ^ (x >> _U27)) * _FACTORS[1]
    return x ^ (x >> _U31)
