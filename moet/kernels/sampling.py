"""Drawing tokens by weights: the ops of sampling inside a captured step. Knows rows over a
vocabulary; nothing of parameters by name, of slots and of requests.

Every random number is a function of (seed, position, purpose), and a row's token depends on that
row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op


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
    mixed = _mix64(_mix64(seeds + GOLDEN) ^ (positions * GOLDEN))
    if purpose:
        mixed = _mix64(mixed ^ signed(int(purpose) * GOLDEN))
    uniform: Tensor = _shifted(mixed, 11).double() * 2.0**-53
    return uniform


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = signed(0x9E3779B97F4A7C15)
FACTORS = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def _shifted(x: Tensor, num_bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    shifted: Tensor = (x >> num_bits) & (2 ** (64 - num_bits) - 1)
    return shifted


def _mix64(x: Tensor) -> Tensor:
    """A bijection of 64 bits in which every input bit moves about half of the output bits."""
    x = (x ^ _shifted(x, 30)) * FACTORS[0]
    x = (x ^ _shifted(x, 27)) * FACTORS[1]
    return x ^ _shifted(x, 31)


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


@op(tolerance=2**-18)
def weigh(scores: Tensor, temperature: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's weights, up to a factor of the row, its likeliest token, and whether the scores
    are no numbers: NaN or infinity is among them.

    scores: [n, V] fp32, rows may lie apart. temperature, min_p: [n] fp32; weights are those at
    temperature 1 where it is 0, and 0 below min_p times the largest. Returns [n, V] fp32, [n] int64
    (the first of equals) and [n] bool.
    """
    top, token_ids = scores.max(-1, keepdim=True)  # documented to take the first of equals
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    probs = ((scores - top) / temperature).softmax(-1)
    floor = min_p[:, None] * probs.amax(-1, keepdim=True)
    weights = torch.where(probs >= floor, probs, 0.0)
    return weights, token_ids[:, 0], ~(top < torch.inf)[:, 0]


@op(tolerance=2**-18)
def rank_weights(
    weights: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, needed: Tensor
) -> Tensor:
    """Weights that top_k, then top_p, then min_p leave; the others are 0.

    weights: [n, V] fp32, contiguous, up to a factor of the row. ids: [n, V] int64, tokens of each
    row, the likeliest first. top_k: [n] int64. top_p: [n] fp64, the share of what top_k leaves that
    the tokens before one must not reach. min_p: [n] fp32, share of the largest weight. needed: [n]
    bool, rows that only min_p acts on have False. Returns [n, V] fp32.
    """
    ordered = weights.gather(-1, ids)
    rank = torch.arange(weights.shape[1], device=weights.device)
    probs = torch.where(rank < top_k[:, None], ordered, 0.0)
    upto = probs.cumsum(-1, dtype=torch.float64)
    kept = (upto - probs < top_p[:, None] * upto[:, -1:]) | (top_p[:, None] >= 1.0)
    probs = torch.where(kept, probs, 0.0)
    ranked = torch.zeros_like(weights).scatter(-1, ids, probs)
    left = torch.where(needed[:, None], ranked, weights)
    return torch.where(left >= min_p[:, None] * left.amax(-1, keepdim=True), left, 0.0)


@op(tolerance=0.0)
def draw_weights(
    weights: Tensor, seeds: Tensor, positions: Tensor, *, purpose: Purpose = Purpose.DRAW
) -> Tensor:
    """A token of each row by its weights. weights: [n, V] fp32, contiguous. seeds, positions: [n]
    int64. Returns [n] int64."""
    return draw(weights, counter_uniform(seeds, positions, purpose))


@op(tolerance=0.0)
def verify_weights(
    weights: Tensor,
    probs: Tensor,
    places: Tensor,
    drafts: Tensor,
    there: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """As draw_weights, but as `verify` says for the rows that have a draft.

    weights: [n, V] fp32, contiguous. probs: [m, V] fp32, contiguous; places: [n] int64, the row of
    each one's draft in it. drafts, seeds, positions: [n] int64. there: [n] bool. Returns [n] int64.
    """
    drawn = draw(weights, counter_uniform(seeds, positions))
    verified = verify(
        weights,
        probs[places],
        drafts,
        counter_uniform(seeds, positions, Purpose.ACCEPT),
        counter_uniform(seeds, positions, Purpose.RESIDUAL),
    )
    return torch.where(there, verified, drawn)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The forms of one arch."""

    weigh: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    rank_weights: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw_weights: Callable[..., Tensor]
    verify_weights: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

    @classmethod
    def bind(cls, arch: str) -> SamplingOps:
        return cls(
            weigh.bind(arch=arch),
            rank_weights.bind(arch=arch),
            draw_weights.bind(arch=arch),
            verify_weights.bind(arch=arch),
        )


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


weigh.impl_in("moet.kernels.triton_sampling", "triton", supports=_on_gpu)


rank_weights.impl_in("moet.kernels.triton_sampling", "triton", supports=_on_gpu)


draw_weights.impl_in("moet.kernels.triton_sampling", "triton", supports=_on_gpu)


verify_weights.impl_in("moet.kernels.triton_sampling", "triton", supports=_on_gpu)
