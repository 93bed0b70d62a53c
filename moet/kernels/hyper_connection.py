"""Manifold-constrained hyper-connections: the residual is several streams, collapsed before a
sublayer and mixed after it by a doubly stochastic matrix. All arithmetic is fp32."""

from __future__ import annotations

import functools
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

Matrix: TypeAlias = "Tensor | MixMatrix"  # fn of a site, [rows, h * dim] fp32; placed on a GPU


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
def hc_enter(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor | Activations, Tensor, Tensor]:
    """hc_pre, then the sublayer's norm. weight: [dim] fp32. Rounds after each.

    On a GPU that holds fn as a MixMatrix, x comes with its e4m3 codes if there are few rows.
    """
    x, post, mix = hc_pre(
        streams, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, num_iters=num_iters
    )
    return rms_norm(x, weight, eps=norm_eps), post, mix


@op(tolerance=2**-7)
def hc_pass(
    y: Tensor | Mixture,
    streams: Tensor,
    post: Tensor,
    mix: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor | Activations, Tensor, Tensor]:
    """From one sublayer's output to the next one's input: hc_post, then hc_enter on its result.

    y, streams, post, mix: as in hc_post; y may be a mixture, not summed. The others: of the next
    site. Returns the new streams, the normed input x [n, dim], and the next site's post and mix.
    """
    streams = hc_post(added(y), streams, post, mix)
    x, post, mix = hc_enter(
        streams, fn, base, scale, weight, norm_eps=norm_eps, hc_eps=hc_eps, num_iters=num_iters
    )
    return streams, x, post, mix


@op(tolerance=2**-7)
def hc_head_norm(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> Tensor:
    """hc_head, then the final norm. weight: [dim] fp32. Returns [n, dim], rounded after each."""
    x = hc_head(streams, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps)
    return rms_norm(x, weight, eps=norm_eps)


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


@hc_enter.impl("cuda", supports=_placed_fit)
def _hc_enter_placed(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor | Activations, Tensor, Tensor]:
    from moet.kernels.device_streams import MixMatrix, Site, collapse

    assert isinstance(fn, MixMatrix)
    site = Site(fn, base, scale, weight, norm_eps, hc_eps, num_iters)
    return collapse(streams, site)[1:]


@hc_pass.impl("cuda", supports=_placed_fit)
def _hc_pass_placed(
    y: Tensor | Mixture,
    streams: Tensor,
    post: Tensor,
    mix: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor | Activations, Tensor, Tensor]:
    from moet.kernels.device_streams import MixMatrix, Pending, Site, collapse

    assert isinstance(fn, MixMatrix)
    site = Site(fn, base, scale, weight, norm_eps, hc_eps, num_iters)
    return collapse(streams, site, Pending(y, post, mix))


@hc_head_norm.impl("cuda", supports=_placed_fit)
def _hc_head_norm_placed(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> Tensor:
    from moet.kernels.device_streams import MixMatrix, Site, collapse

    assert isinstance(fn, MixMatrix)
    site = Site(fn, base, scale, weight, norm_eps, hc_eps, 0)
    return collapse(streams, site)[1].plain()


hc_post.impl_in("moet.kernels.triton_hyper_connection", "triton", supports=_post_fits)


@hc_enter.impl("triton", supports=_streams_fit)
def _hc_enter(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor | Activations, Tensor, Tensor]:
    from moet.kernels import triton_hyper_connection

    assert isinstance(fn, Tensor)
    return triton_hyper_connection.hc_enter(
        streams,
        fn,
        base,
        scale,
        weight,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        num_iters=num_iters,
    )


@hc_pass.impl("triton", supports=_streams_fit)
def _hc_pass(
    y: Tensor | Mixture,
    streams: Tensor,
    post: Tensor,
    mix: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor | Activations, Tensor, Tensor]:
    from moet.kernels import triton_hyper_connection

    assert isinstance(fn, Tensor)
    return triton_hyper_connection.hc_pass(
        added(y),
        streams,
        post,
        mix,
        fn,
        base,
        scale,
        weight,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        num_iters=num_iters,
    )


@hc_head_norm.impl("triton", supports=_streams_fit)
def _hc_head_norm(
    streams: Tensor,
    fn: Matrix,
    base: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> Tensor:
    from moet.kernels import triton_hyper_connection

    assert isinstance(fn, Tensor)
    return triton_hyper_connection.hc_head_norm(
        streams,
        fn,
        base,
        scale,
        weight,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
    )
