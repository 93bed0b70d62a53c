"""Manifold-constrained hyper-connections: the residual is several streams, collapsed before a
sublayer and mixed after it by a doubly stochastic matrix. All arithmetic is fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.kernels.comm import added
from moet.kernels.gemm import matmul
from moet.kernels.mixture import Mixture
from moet.kernels.norm import rms_norm
from moet.kernels.quant import Activations
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.scalars import scalar

if TYPE_CHECKING:
    from moet.kernels.device_streams import MixMatrix

Matrix: TypeAlias = "Tensor | MixMatrix"  # fn of a site; placed on a GPU


@dataclass(frozen=True, slots=True)
class Site:
    """One place where streams are collapsed, and the norm behind it. All tensors are fp32.

    fn: [2h + h*h, h*dim], base: [2h + h*h], scale: [3]; of the head [h, h*dim], [h] and [1].
    weight: [dim], of the norm. num_iters: 0 for the head, which has no gates but the first.
    """

    fn: Matrix
    base: Tensor
    scale: Tensor
    weight: Tensor
    norm_eps: float
    hc_eps: float
    num_iters: int = 0


@dataclass(frozen=True, slots=True)
class Logits:
    """Of a mix [n, h, h] fp32, whose sinkhorn is left to the pass that mixes by it.

    balance: makes the mix, for those who cannot."""

    values: Tensor
    balance: Callable[[], Tensor]


def balanced(mix: Tensor | Logits) -> Tensor:
    """The mix, [n, h, h] fp32."""
    return mix.balance() if isinstance(mix, Logits) else mix


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). The library's own form differs between whole vectors and remainders."""
    one = scalar(1.0)
    return one / (one + torch.exp(-x))


def _mixing_logits(streams: Tensor, fn: Matrix, norm_eps: float) -> Tensor:
    """[n, h, dim] streams -> [n, rows of fn]: fn on the normalised, flattened streams."""
    assert isinstance(fn, Tensor)
    flat = streams.float().flatten(1)
    return matmul(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + scalar(norm_eps))


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams, in ascending order, rounded once."""
    weighted = (streams.float() * pre.unsqueeze(2)).unbind(1)
    return functools.reduce(torch.add, weighted).to(streams.dtype)


def sinkhorn(logits: Tensor, *, num_iters: int, eps: float) -> Tensor:
    """Row softmax, then alternate normalisation towards a doubly stochastic matrix.

    logits: [n, h, h] fp32. Starts and ends with columns: num_iters column steps and one row step
    fewer. Returns [n, h, h] fp32.
    """
    mix = torch.exp(logits - logits.amax(-1, keepdim=True))
    mix = (mix / mix.sum(-1, keepdim=True) + scalar(eps)).cpu()
    _balance(mix.numpy(), num_iters, np.array(eps, np.float32))
    return mix.to(logits.device)


def _balance(mix: NDArray[np.float32], num_iters: int, eps: NDArray[np.float32]) -> None:
    """The steps of sinkhorn, in place: numpy takes a third of torch's time for so small ones.

    Sums run in ascending order, each matrix by itself.
    """
    n, h, _ = mix.shape
    columns, rows = np.empty((n, 1, h), np.float32), np.empty((n, h, 1), np.float32)
    for step in range(2 * num_iters - 1):
        axis, sums = (-1, rows) if step % 2 else (-2, columns)
        np.add.reduce(mix, axis=axis, out=sums, keepdims=True)
        np.add(sums, eps, out=sums)
        np.divide(mix, sums, out=mix)


@functools.cache
def _spread(h: int, device: torch.device) -> Tensor:
    """Which of the three scales each mixing logit takes."""
    with torch.inference_mode(False):
        return torch.tensor([0] * h + [1] * h + [2] * (h * h), device=device)


@op(tolerance=2**-8)
def hc_pre(
    streams: Tensor,
    fn: Matrix,
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
    scaled = m * scale[_spread(h, m.device)] + base
    gates = sigmoid(scaled[:, : 2 * h])
    mix = sinkhorn(scaled[:, 2 * h :].view(-1, h, h), num_iters=num_iters, eps=hc_eps)
    pre, post = gates[:, :h] + scalar(hc_eps), scalar(2.0) * gates[:, h:]
    return _collapse(streams, pre), post, mix


@op(tolerance=2**-8)
def hc_post(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New streams: stream k is post[k] * y plus the old streams j weighted by mix[j, k].

    y: [n, dim]. streams: [n, h, dim]. post: [n, h], mix: [n, h, h] fp32. Returns [n, h, dim] in
    the dtype of streams, summed in ascending j and rounded once.
    """
    total = y.float().unsqueeze(1) * post.unsqueeze(2)
    for x, weights in zip(streams.float().unbind(1), mix.unsqueeze(3).unbind(1), strict=True):
        total = total + weights * x.unsqueeze(1)
    return total.to(streams.dtype)


@op(tolerance=2**-8)
def hc_head(
    streams: Tensor, fn: Matrix, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Last collapse, before the final norm. fn: [h, h*dim], base: [h], scale: [1], fp32.

    Returns [n, dim] in the dtype of streams.
    """
    m = _mixing_logits(streams, fn, norm_eps)
    return _collapse(streams, sigmoid(m * scale + base) + scalar(hc_eps))


@op(tolerance=2**-7)
def hc_enter(streams: Tensor, site: Site) -> tuple[Tensor | Activations, Tensor, Tensor]:
    """hc_pre, then the sublayer's norm. Rounds after each.

    On a GPU that holds fn as a MixMatrix, x comes with its e4m3 codes if there are few rows.
    """
    x, post, mix = hc_pre(
        streams,
        site.fn,
        site.base,
        site.scale,
        norm_eps=site.norm_eps,
        hc_eps=site.hc_eps,
        num_iters=site.num_iters,
    )
    return rms_norm(x, site.weight, eps=site.norm_eps), post, mix


@op(tolerance=2**-7)
def hc_pass(
    y: Tensor | Mixture, streams: Tensor, post: Tensor, mix: Tensor | Logits, site: Site
) -> tuple[Tensor, Tensor | Activations, Tensor, Tensor | Logits]:
    """From one sublayer's output to the next one's input: hc_post, then hc_enter on its result.

    y, streams, post, mix: as in hc_post; y may be a mixture, not summed. site: the next one.
    Returns the new streams, the normed input x [n, dim], and the next site's post and mix.
    """
    streams = hc_post(added(y), streams, post, balanced(mix))
    x, post, mix = hc_enter(streams, site)
    return streams, x, post, mix


@op(tolerance=2**-7)
def hc_head_norm(streams: Tensor, site: Site) -> Tensor:
    """hc_head, then the final norm. Returns [n, dim], rounded after each."""
    norm_eps, hc_eps = site.norm_eps, site.hc_eps
    x = hc_head(streams, site.fn, site.base, site.scale, norm_eps=norm_eps, hc_eps=hc_eps)
    return rms_norm(x, site.weight, eps=norm_eps)


def _streams_fit(*, arch: str, mult: int, dim: int, placed: bool = False) -> bool:
    blocks = dim // 128
    fits = mult in (2, 4) and dim % 128 == 0 and blocks & (blocks - 1) == 0
    return arch in GPU_ARCHS and fits and not placed


def _placed_fit(*, arch: str, mult: int, dim: int, placed: bool = False) -> bool:
    """placed: fn is a MixMatrix."""
    from moet.kernels import device_streams

    fits = mult == device_streams.MULT and dim % device_streams.BLOCK == 0
    return arch in GPU_ARCHS and placed and fits and dim <= device_streams.MAX_DIM


def _post_fits(*, arch: str, mult: int, dim: int, placed: bool = False) -> bool:
    return _streams_fit(arch=arch, mult=mult, dim=dim)


for _op in (hc_enter, hc_pass, hc_head_norm):
    _op.impl_in("moet.kernels.device_streams", "cuda", supports=_placed_fit)
    _op.impl_in("moet.kernels.triton_hyper_connection", "triton", supports=_streams_fit)
hc_post.impl_in("moet.kernels.triton_hyper_connection", "triton", supports=_post_fits)
