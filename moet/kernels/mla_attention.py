"""Multi-head latent attention in absorbed form: one key head, whose leading part is the value.

Four steps of a layer as ops on the rows of a step: what is stored of a token, what its heads ask
for, and what they get from the positions that were chosen. Knows nothing of layers and weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels.attention import sparse_attention
from moet.kernels.cache import Cache, EntryFormat
from moet.kernels.gemm import grouped_linear
from moet.kernels.mla_cache import (
    Fp8IndexKeys,
    Fp8LatentRows,
    Nvfp4LatentRows,
    latent_rows_fit,
)
from moet.kernels.norm import layer_norm, rms_norm
from moet.kernels.quant import Activations
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher

INDEX_NORM_EPS = 1e-6  # of the index keys' LayerNorm, whatever the other norms have


BLOCK = 64  # outputs and inputs of a head's matrix that share a scale


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A matrix a head. values: [H, N, K], fp32 for the reference, bf16 or e4m3 on a GPU.

    scales: what e4m3 values are times, [H, N / 64, K / 64] fp32.
    """

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Where a layer that chooses positions keeps its keys. norm_weight, norm_bias: [dim] fp32."""

    norm_weight: Tensor
    norm_bias: Tensor
    cache: Cache


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[1] values of each vector; attention heads turn their last."""
    rope_dim = 2 * cos.shape[1]
    turned = rope(x[..., :rope_dim].contiguous(), cos, sin)
    return torch.cat((turned, x[..., rope_dim:]), dim=-1)


@op(tolerance=2**-3)  # one step of e4m3: a last-bit difference may round the other way
def latent_inputs(
    q_kv: Tensor,
    projected: Tensor | None,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latents: Cache,
    index: IndexKeys | None,
    slots: Tensor,
    *,
    eps: float,
) -> Activations:
    """Norm both latents and store what attention and its indexer read of a token.

    q_kv: [T, q rank + kv rank + rope], fp32 or bf16. projected: [T, index dim + ...] fp32, whose
    first columns are the index key, which is normed in the dtype of q_kv; None without an index.
    cos, sin: [T, rope / 2] fp32. slots: [T] int64, -1 is skipped, others distinct.
    Returns the normed query latent [T, q rank]; on a GPU steps of few rows have codes, too.
    """
    rank, latent_dim = len(q_norm_weight), len(kv_norm_weight)
    q_latent, latent, key = torch.split(
        q_kv, [rank, latent_dim, q_kv.shape[1] - rank - latent_dim], dim=1
    )
    row = rms_norm(latent.contiguous(), kv_norm_weight, eps=eps), rope(key.contiguous(), cos, sin)
    latents.write(slots, torch.cat(row, dim=-1).float())
    if index is not None:
        assert projected is not None
        dim = len(index.norm_weight)
        own = projected[:, :dim].to(q_kv.dtype).contiguous()
        own = layer_norm(own, index.norm_weight, index.norm_bias, eps=INDEX_NORM_EPS)
        index.cache.write(slots, rotate_first(own, cos, sin).float())
    return Activations(rms_norm(q_latent.contiguous(), q_norm_weight, eps=eps))


@op(tolerance=2**-4)  # one step of e4m3, of index queries
def latent_queries(
    q: Tensor,
    w_uk: HeadMatrices,
    cos: Tensor,
    sin: Tensor,
    *,
    index_heads: int,
    index_dim: int,
    index_form: EntryFormat | None,
) -> tuple[Tensor, Tensor | None]:
    """What each head asks of a stored row: its part without rotation goes through W_UK.

    q: [T, H * (nope + rope) + index_heads * index_dim] fp32 or bf16. w_uk: [H, latent, nope].
    index_form: the encoding that index queries are rounded to, if any. Returns
    [T, H, latent + rope] in the dtype of q, and index queries [T, index_heads, index_dim] fp32 (on
    a GPU bf16, which holds them exactly), or None if index_heads is 0.
    """
    num_heads, _, nope = w_uk.values.shape
    width = q.shape[1] - index_heads * index_dim
    heads = rope(torch.unflatten(q[:, :width], 1, (num_heads, -1)), cos, sin)
    absorbed = grouped_linear(heads[..., :nope], w_uk.values)
    query = torch.cat((absorbed, heads[..., nope:]), dim=-1)
    if not index_heads:
        return query, None
    index = torch.unflatten(q[:, width:], 1, (index_heads, index_dim))
    index = rotate_first(index, cos, sin).float()
    return query, index if index_form is None else index_form.round(index)


@op(tolerance=2**-4)  # one step of e4m3
def head_products(x: Tensor, weight: HeadMatrices, *, quantised: bool) -> Activations:
    """Each head's row through its own matrix, rounded once. x: [T, H, K] fp32 or bf16.

    quantised: whether what reads it rounds to e4m3; on a GPU steps of few rows then have codes and
    no values. Returns [T, H * N] in the dtype of x.
    """
    return Activations(grouped_linear(x, weight.values).flatten(1))


@op(tolerance=2**-7)
def latent_attention(
    query: Tensor,
    latents: Cache,
    selected: Tensor,
    rows: Rows,
    *,
    scale: float,
    latent_dim: int,
    launcher: Launcher | None = None,
) -> Tensor:
    """Each row's heads over the latents of its chosen positions.

    query: [T, H, latent_dim + rope] fp32 or bf16. latents: one entry per token, the step's own
    stored. selected: [T, k] int32, ascending positions filled up with -1. launcher: of kernels
    beside Triton's. Returns [T, H, latent_dim] in the dtype of query.
    """
    out = torch.zeros(*query.shape[:2], latent_dim, dtype=query.dtype, device=query.device)
    no_sink = torch.full((query.shape[1],), -torch.inf, device=query.device)
    every = torch.arange(rows.max_entries(1), device=query.device)
    for first, last in rows.sequences():
        chosen = [row[row >= 0].long() for row in selected[first:last]]
        if last - first == 1:  # read no more than is used
            places, chosen = chosen[0], [every[: len(chosen[0])]]
        else:
            places = every[: int(rows.positions[last - 1]) + 1]
        entries = latents.read(rows.entry_slots(rows.page_rows[first], places, 1))
        mixed = sparse_attention(
            query[first:last],
            entries[:0],  # no window beside the selection
            [(0, 0)] * len(chosen),
            entries,
            chosen,
            no_sink,
            scale=scale,
        )
        out[first:last] = mixed[..., :latent_dim]
    return out


def _inputs_fit(*, arch: str, rank: int, form: EntryFormat, index: EntryFormat | None) -> bool:
    keys = index is None or isinstance(index, Fp8IndexKeys)
    return arch in GPU_ARCHS and latent_rows_fit(form) and rank % 128 == 0 and keys


def _queries_fit(*, arch: str, index: EntryFormat | None, nope_dim: int) -> bool:
    keys = index is None or isinstance(index, Fp8IndexKeys)
    return arch in GPU_ARCHS and keys and nope_dim % 64 == 0


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


def _rows_fit(*, arch: str, form: EntryFormat, placed: bool = False) -> bool:
    return arch in GPU_ARCHS and latent_rows_fit(form) and not placed


def latent_chunks_fit(*, arch: str, form: EntryFormat, num_heads: int, top_k: int) -> bool:
    """Whether chunks have a kernel of their own: released rows and a rank's heads, on sm_90a."""
    if arch != "sm90a" or not isinstance(form, Fp8LatentRows | Nvfp4LatentRows):
        return False
    released = (form.latent_dim, form.rope_dim) == (512, 64)
    return released and num_heads in (16, 32, 64) and top_k % 64 == 0 and top_k <= 2048


def _placed_fits(*, arch: str, form: EntryFormat, placed: bool = False) -> bool:
    """placed: a launcher comes with each call, after latent_chunks_fit."""
    return placed and arch == "sm90a" and latent_rows_fit(form)


latent_inputs.impl_in("moet.kernels.triton_mla_inputs", "triton", supports=_inputs_fit)
latent_queries.impl_in("moet.kernels.triton_mla", "triton", supports=_queries_fit)
head_products.impl_in("moet.kernels.triton_mla", "triton", supports=_on_gpu)
latent_attention.impl_in("moet.kernels.device_latents", "cuda_chunks", supports=_placed_fits)
latent_attention.impl_in("moet.kernels.triton_mla_attention", "triton", supports=_rows_fit)
