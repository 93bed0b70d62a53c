"""Triton forms of the mHC balancing and its gradient: a 4 x 4 matrix per token, in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


def forward(mix: Tensor, out: Tensor, divisors: Tensor, iters: int, eps: float) -> None:
    """mix, out: [n, 4, 4] fp32; divisors: [2 * iters - 1, n, 4] fp32. Fills out and divisors."""
    n = mix.shape[0]
    _forward[(triton.cdiv(n, BLOCK),)](mix, out, divisors, n, iters, eps, BLOCK=BLOCK)


def backward(grad: Tensor, out: Tensor, divisors: Tensor, result: Tensor, iters: int) -> None:
    """grad, out, result: [n, 4, 4] fp32. Fills result with the gradient by mix."""
    n = out.shape[0]
    _backward[(triton.cdiv(n, BLOCK),)](grad, out, divisors, result, n, iters, BLOCK=BLOCK)


@triton.jit
def _forward(mix, out, divisors, n, iters, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < n
    row = tl.arange(0, 4)
    place = token[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
    c = tl.load(mix + place, mask=live[:, None, None], other=1.0)
    side = token[:, None] * 4 + row[None, :]
    total = tl.sum(c, 1) + eps
    tl.store(divisors + side, total, mask=live[:, None])
    c = c / total[:, None, :]
    for step in range(1, iters):
        at = divisors + (2 * step - 1) * n * 4
        total = tl.sum(c, 2) + eps
        tl.store(at + side, total, mask=live[:, None])
        c = c / total[:, :, None]
        total = tl.sum(c, 1) + eps
        tl.store(at + n * 4 + side, total, mask=live[:, None])
        c = c / total[:, None, :]
    tl.store(out + place, c, mask=live[:, None, None])


@triton.jit
def _backward(grad, out, divisors, result, n, iters, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < n
    row = tl.arange(0, 4)
    place = token[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
    g = tl.load(grad + place, mask=live[:, None, None], other=0.0)
    c = tl.load(out + place, mask=live[:, None, None], other=0.0)
    side = token[:, None] * 4 + row[None, :]
    for back in range(1, iters):
        step = iters - back
        at = divisors + (2 * step - 1) * n * 4
        total = tl.load(at + n * 4 + side, mask=live[:, None], other=1.0)
        g = (g - tl.sum(g * c, 1)[:, None, :]) / total[:, None, :]
        c = c * total[:, None, :]
        total = tl.load(at + side, mask=live[:, None], other=1.0)
        g = (g - tl.sum(g * c, 2)[:, :, None]) / total[:, :, None]
        c = c * total[:, :, None]
    total = tl.load(divisors + side, mask=live[:, None], other=1.0)
    g = (g - tl.sum(g * c, 1)[:, None, :]) / total[:, None, :]
    tl.store(result + place, g, mask=live[:, None, None])
