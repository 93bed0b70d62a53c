# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Hyper-connection kernels: mix, project, collapse and norm in two launches. A row's sums have one
order whatever the number of rows: partial sums per block of channels, added in ascending order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.comm import added
from moet.kernels.hyper_connection import Site
from moet.kernels.mixture import Mixture
from moet.kernels.triton_common import kernel

BLOCK = 128  # channels of each stream that one program multiplies


@kernel(do_not_specialize=["num_rows", "rows_each"])
def mix_and_project(
    y,
    old,
    post,
    mix,
    new,
    fn,
    partial,
    num_rows,
    rows_each,
    fn_stride_out,
    fn_stride_in,
    DIM: tl.constexpr,
    H: tl.constexpr,
    OUT: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    PROJECT: tl.constexpr,
):
    """MIX: new streams from the old and y. PROJECT: this block's part of fn @ streams, and of the
    sum of their squares in the last column."""
    block = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * rows_each
    d = block * BLOCK + tl.arange(0, BLOCK)
    in_dim = d < DIM
    out = tl.arange(0, PAD)
    for i in range(tl.minimum(num_rows - first, rows_each)):
        row = first + i
        at = row * H * DIM
        acc = tl.zeros([PAD, BLOCK], tl.float32)
        square = tl.zeros([BLOCK], tl.float32)
        if MIX:
            sublayer = tl.load(y + row * DIM + d, mask=in_dim, other=0.0)
            sublayer = sublayer.to(tl.float32)
        for k in tl.static_range(H):
            if MIX:
                stream = sublayer * tl.load(post + row * H + k)
                for j in tl.static_range(H):
                    x = tl.load(old + at + j * DIM + d, mask=in_dim, other=0.0).to(tl.float32)
                    stream += x * tl.load(mix + row * H * H + j * H + k)
                rounded = stream.to(new.dtype.element_ty)
                tl.store(new + at + k * DIM + d, rounded, mask=in_dim)
                stream = rounded.to(tl.float32)
            else:
                stream = tl.load(old + at + k * DIM + d, mask=in_dim, other=0.0).to(tl.float32)
            if PROJECT:
                weight = fn + out[:, None] * fn_stride_out + (k * DIM + d)[None, :] * fn_stride_in
                inside = (out < OUT)[:, None] & in_dim[None, :]
                acc += tl.load(weight, mask=inside, other=0.0) * stream[None, :]
                square += stream * stream
        if PROJECT:
            sums = tl.where(out == PAD - 1, tl.sum(square, 0), tl.sum(acc, 1))
            tl.store(partial + (row * tl.num_programs(0) + block) * PAD + out, sums)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def column(partial, at, col, PAD: tl.constexpr, SPLITS: tl.constexpr):
    """The whole of one output, from its parts."""
    return tl.sum(tl.load(partial + at + tl.arange(0, SPLITS) * PAD + col), 0)


@kernel
def collapse_and_norm(
    streams,
    partial,
    base,
    scale,
    weight,
    x_out,
    post_out,
    mix_out,
    norm_eps,
    hc_eps,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    H: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """One row: gates, mixing matrix (unless HEAD), collapsed and normed input."""
    row = tl.program_id(0)
    at = row * SPLITS * PAD
    factor = tl.rsqrt(column(partial, at, PAD - 1, PAD, SPLITS) / (H * DIM) + norm_eps)
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    x = tl.zeros([DIM_PAD], tl.float32)
    for j in tl.static_range(H):
        logit = column(partial, at, j, PAD, SPLITS) * factor
        pre = sigmoid(logit * tl.load(scale) + tl.load(base + j)) + hc_eps
        stream = tl.load(streams + (row.to(tl.int64) * H + j) * DIM + d, mask=in_dim, other=0.0)
        x += stream.to(tl.float32) * pre
    x = x.to(x_out.dtype.element_ty).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + norm_eps)
    x = x * tl.load(weight + d, mask=in_dim, other=0.0)
    tl.store(x_out + row.to(tl.int64) * DIM + d, x.to(x_out.dtype.element_ty), mask=in_dim)
    if not HEAD:
        for j in tl.static_range(H):
            logit = column(partial, at, H + j, PAD, SPLITS) * factor
            gate = sigmoid(logit * tl.load(scale + 1) + tl.load(base + H + j))
            tl.store(post_out + row * H + j, 2.0 * gate)
        cell = tl.arange(0, H)[:, None] * H + tl.arange(0, H)[None, :]
        split = tl.arange(0, SPLITS)[:, None, None] * PAD
        parts = tl.load(partial + at + split + (2 * H + cell)[None, :, :])
        logits = tl.sum(parts, 0) * factor * tl.load(scale + 2) + tl.load(base + 2 * H + cell)
        mix = tl.exp(logits - tl.max(logits, 1)[:, None])
        mix = mix / tl.sum(mix, 1)[:, None] + hc_eps
        mix = mix / (tl.sum(mix, 0) + hc_eps)[None, :]
        for _ in range(ITERS - 1):
            mix = mix / (tl.sum(mix, 1) + hc_eps)[:, None]
            mix = mix / (tl.sum(mix, 0) + hc_eps)[None, :]
        tl.store(mix_out + row * H * H + cell, mix)


def _project(
    streams: Tensor, site: Site, mixing: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Streams (mixed if asked) and the parts of fn @ streams."""
    fn = site.fn
    assert isinstance(fn, Tensor)
    num_rows, _, dim = streams.shape
    blocks = triton.cdiv(dim, BLOCK)
    pad = triton.next_power_of_2(len(fn) + 1)
    partial = torch.empty((num_rows, blocks, pad), dtype=torch.float32, device=streams.device)
    new = streams if mixing is None else torch.empty_like(streams)
    _launch(streams, fn, mixing, new, partial, pad, project=True)
    return new, partial


def _launch(
    streams: Tensor,
    fn: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor] | None,
    new: Tensor,
    partial: Tensor,
    pad: int,
    *,
    project: bool,
) -> None:
    num_rows, mult, dim = streams.shape
    if num_rows == 0:
        return
    y, post, mix = mixing or (streams, streams, streams)
    rows_each = min(16, triton.cdiv(num_rows, 8))  # weights of a block are read once for these
    mix_and_project[(triton.cdiv(dim, BLOCK), triton.cdiv(num_rows, rows_each))](
        y,
        streams,
        post,
        mix,
        new,
        fn,
        partial,
        num_rows,
        rows_each,
        fn.stride(0),
        fn.stride(1),
        DIM=dim,
        H=mult,
        OUT=len(fn) if project else 1,
        PAD=pad,
        BLOCK=BLOCK,
        MIX=mixing is not None,
        PROJECT=project,
        num_warps=4,
    )


def _finish(streams: Tensor, partial: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Of the head, post and mix mean nothing."""
    num_rows, mult, dim = streams.shape
    x = torch.empty((num_rows, dim), dtype=streams.dtype, device=streams.device)
    post = torch.empty((num_rows, mult), dtype=torch.float32, device=streams.device)
    mix = torch.empty((num_rows, mult, mult), dtype=torch.float32, device=streams.device)
    if num_rows:
        collapse_and_norm[(num_rows,)](
            streams,
            partial,
            site.base,
            site.scale,
            site.weight,
            x,
            post,
            mix,
            site.norm_eps,
            site.hc_eps,
            DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            H=mult,
            PAD=partial.shape[2],
            SPLITS=partial.shape[1],
            ITERS=site.num_iters,
            HEAD=site.num_iters == 0,
            num_warps=8,
        )
    return x, post, mix


def hc_post(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    new = torch.empty_like(streams)
    nothing = streams.view(-1, 1)
    _launch(streams, nothing, (y, post, mix), new, nothing, 32, project=False)
    return new


def hc_enter(streams: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    _, partial = _project(streams, site, None)
    return _finish(streams, partial, site)


def hc_pass(
    y: Tensor | Mixture, streams: Tensor, post: Tensor, mix: Tensor, site: Site
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams, partial = _project(streams, site, (added(y), post, mix))
    x, post, mix = _finish(streams, partial, site)
    return streams, x, post, mix


def hc_head_norm(streams: Tensor, site: Site) -> Tensor:
    _, partial = _project(streams, site, None)
    return _finish(streams, partial, site)[0]
