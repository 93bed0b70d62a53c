"""Which drafted tokens hold: proposals and the target's distribution to tokens. Pure functions; no
sequence, slot or page is known here.

A drafted position is decided as the sampler would decide it: by the largest score at temperature 0,
else by the target's distribution p after every parameter of the request. The draft x was drawn from
q. It holds with the probability min(1, p(x) / q(x)); otherwise the token is drawn from what p has
over q. Either way the token is distributed as p, whatever q is (Leviathan et al., arXiv:2211.17192,
theorem 1). The token equals the draft exactly when that holds, so whoever reads the tokens needs no
second answer.

What stays reproducible: at temperature 0 the tokens are those without drafts, bit for bit. Above
it a seeded request gives the same tokens for the same number of drafts per step, as every number
is a function of (seed, position, purpose); with another number it gives other tokens of the same
distribution.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Purpose(IntEnum):
    """What a random number decides; numbers of one position but of two purposes are unrelated."""

    DRAW = 0  # a token, without a draft
    DRAFT = 1  # a proposal
    ACCEPT = 2  # whether a proposal holds
    RESIDUAL = 3  # the token instead of one that does not


def counter_uniform(seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """A number in [0, 1) for each (seed, position): [n] int64 each -> [n] fp64, 53 random bits.

    Rounds of the splitmix64 finaliser, position and purpose mixed in between; no state anywhere.
    """
    seed = seeds.cpu().numpy().view(np.uint64)
    position = positions.cpu().numpy().view(np.uint64)
    mixed = _mix64(_mix64(seed + _GOLDEN) ^ (position * _GOLDEN))
    if purpose:
        mixed = _mix64(mixed ^ (np.full(1, purpose, dtype=np.uint64) * _GOLDEN))
    return torch.from_numpy((mixed >> _U11) * 2.0**-53).to(seeds.device)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds uniform times the sum.

    probs: [m, n] fp32, not negative, any sum above 0. uniform: [m] fp64. Returns [m] int64.
    """
    upto = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(upto, uniform[:, None] * upto[:, -1:], right=True)[:, 0]
    return drawn.clamp(max=probs.shape[-1] - 1)  # only a row of NaN gets past the end


def verify(
    probs: Tensor,
    proposals: Tensor,
    draft_token_ids: Tensor,
    accept_uniform: Tensor,
    residual_uniform: Tensor,
) -> Tensor:
    """Tokens at drafted positions: the draft where it holds, one of the residual elsewhere.

    probs, proposals: [m, vocab_size] fp32, p and q up to a factor each. draft_token_ids: [m] int64,
    drawn from q. accept_uniform, residual_uniform: [m] fp64 in [0, 1). Returns [m] int64; a row's
    token depends on that row alone.
    """
    p = probs.double() / probs.sum(-1, keepdim=True, dtype=torch.float64)
    q = proposals.double() / proposals.sum(-1, keepdim=True, dtype=torch.float64)
    drafts = draft_token_ids[:, None]
    p_draft, q_draft = p.gather(-1, drafts)[:, 0], q.gather(-1, drafts)[:, 0]
    holds = accept_uniform * q_draft < p_draft
    residual = (p - q).clamp(min=0)
    # p never over q is p == q but for rounding, and then a draft is refused with probability ~0.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(holds, draft_token_ids, draw(residual, residual_uniform))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U11, _U27, _U30, _U31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every input bit moves about half of the output bits."""
    x = (x ^ (x >> _U30)) * _FACTORS[0]
    x = (x ^ (x >> _U27)) * _FACTORS[1]
    return x ^ (x >> _U31)
