"""Manifold-constrained hyper-connections: the residual is several streams, collapsed before a
sublayer and mixed after it by a doubly stochastic matrix. All arithmetic is fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.gemm import matmul
from moet.kernels.registry import op


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). The library's own form differs between whole vectors and remainders."""
    return 1 / (1 + torch.exp(-x))


def _mixing_logits(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """[n, h, dim] streams -> [n, rows of fn]: fn on the normalised, flattened streams."""
    flat = streams.float().flatten(1)
    return matmul(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams, in ascending order, rounded once."""
    x = streams.float()
    total = x[:, 0] * pre[:, :1]
    for j in range(1, x.shape[1]):
        total = total + x[:, j] * pre[:, j : j + 1]
    return total.to(streams.dtype)


def sinkhorn(logits: Tensor, *, num_iters: int, eps: float) -> Tensor:
    """Row softmax, then alternate normalisation towards a doubly stochastic matrix.

    logits: [n, h, h] fp32. Starts and ends with columns: num_iters column steps and one row step
    fewer. Returns [n, h, h] fp32.
    """
    mix = torch.exp(logits - logits.amax(-1, keepdim=True))
    mix = mix / mix.sum(-1, keepdim=True) + eps
    mix /= mix.sum(-2, keepdim=True).add_(eps)
    for _ in range(num_iters - 1):
        mix /= mix.sum(-1, keepdim=True).add_(eps)
        mix /= mix.sum(-2, keepdim=True).add_(eps)
    return mix


@op(tolerance=2**-8)
def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams to a sublayer's input and find how its output is spread.

    streams: [n, h, dim] fp32 or bf16. fn: [2h + h*h, h*dim], base: [2h + h*h], scale: [3], fp32.
    Returns x [n, dim] in the dtype of streams, post [n, h] fp32 in (0, 2), mix [n, h, h] fp32.
    """
    h = streams.shape[1]
    m = _mixing_logits(streams, fn, norm_eps)
    pre = sigmoid(m[:, :h] * scale[0] + base[:h]) + hc_eps
    post = 2 * sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h])
    logits = (m[:, 2 * h :] * scale[2] + base[2 * h :]).view(-1, h, h)
    return _collapse(streams, pre), post, sinkhorn(logits, num_iters=num_iters, eps=hc_eps)


@op(tolerance=2**-8)
def hc_post(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New streams: stream k is post[k] * y plus the old streams j weighted by mix[j, k].

    y: [n, dim]. streams: [n, h, dim]. post: [n, h], mix: [n, h, h] fp32. Returns [n, h, dim] in
    the dtype of streams, summed in ascending j and rounded once.
    """
    x = streams.float()
    total = y.float().unsqueeze(1) * post.unsqueeze(2)
    for j in range(x.shape[1]):
        total = total + mix[:, j].unsqueeze(2) * x[:, j : j + 1]
    return total.to(streams.dtype)


@op(tolerance=2**-8)
def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Last collapse, before the final norm. fn: [h, h*dim], base: [h], scale: [1], fp32.

    Returns [n, dim] in the dtype of streams.
    """
    m = _mixing_logits(streams, fn, norm_eps)
    return _collapse(streams, sigmoid(m * scale + base) + hc_eps)
