"""Latent attention of many rows by csrc/latent_attention.cu: at most 64 heads, bit for bit what
triton_mla_attention.py makes of them. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moet.kernels.cache import Cache
from moet.kernels.mla_cache import Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher

HEADS, LATENT, ROPE, KEYS = 64, 512, 64, 64
THREADS = 384
LOG2E = 1.4426950408889634
SMALL = 256.0  # how much smaller keys are in shared memory
MANY_ROWS = 128  # of so many rows each has a CTA of its own; fewer are cut by tiles
MAX_CHOSEN = 2048  # positions of a row, which wait in shared memory
FEW_HEADS = 32  # up to so many are columns of the matrix instructions instead of rows


def shared_bytes(num_heads: int) -> int:
    """Barriers, queries, two tiles of keys and what was chosen; of few heads weights, logits and
    sums of two tiles."""
    keys = 2 * KEYS * 2 * (LATENT + ROPE) + 4 * MAX_CHOSEN
    if num_heads > FEW_HEADS:
        return 1024 + HEADS * 2 * (LATENT + ROPE) + keys
    weights = 2 * FEW_HEADS * (2 * KEYS + 4 * (KEYS + 4) + 2 * 4)
    return 1024 + FEW_HEADS * 2 * (LATENT + ROPE) + keys + weights


class LatentArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "pages", "selected", "positions")),
        *((name, ctypes.c_void_p) for name in ("page_rows", "page_table", "out")),
        *((name, ctypes.c_int64) for name in ("table_stride", "page_bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "heads", "per_page", "top_k")),
    ]


def attend_chosen(
    launcher: Launcher, query: Tensor, latents: Cache, selected: Tensor, rows: Rows, *, scale: float
) -> Tensor:
    """`latent_attention` of at most 64 heads, released widths and at most MAX_CHOSEN positions, a
    multiple of 64. query: [T, H, 576] bf16."""
    num_rows, num_heads, width = query.shape
    out = torch.empty((num_rows, num_heads, LATENT), dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    form, top_k = latents.form, selected.shape[1]
    assert isinstance(form, Fp8LatentRows | Nvfp4LatentRows)
    assert (width, form.latent_dim, form.rope_dim) == (LATENT + ROPE, LATENT, ROPE)
    assert num_heads <= HEADS
    assert top_k <= MAX_CHOSEN
    assert top_k % KEYS == 0
    assert form.page_bytes % 16 == 0
    assert query.is_contiguous()
    assert selected.is_contiguous()
    args = LatentArgs(
        q=query.data_ptr(),
        pages=latents.pages.data_ptr(),
        selected=selected.data_ptr(),
        positions=rows.positions.data_ptr(),
        page_rows=rows.page_rows.data_ptr(),
        page_table=rows.page_table.data_ptr(),
        out=out.data_ptr(),
        table_stride=rows.page_table.stride(0),
        page_bytes=form.page_bytes,
        scale=ctypes.c_float(scale * LOG2E).value * SMALL,
        rows=num_rows,
        heads=num_heads,
        per_page=form.entries_per_page,
        top_k=top_k,
    )
    kind = "chosen" if num_heads > FEW_HEADS else "few"
    coding = "nvfp4" if isinstance(form, Nvfp4LatentRows) else "fp8"
    launcher.launch(
        f"attend_{kind}_{coding}",
        grid=min(num_rows, launcher.num_sms),
        threads=THREADS,
        shared_bytes=shared_bytes(num_heads),
        args=args,
    )
    return out


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
    from moet.kernels import triton_mla_attention  # which needs Triton; a CPU may have none

    assert launcher is not None  # by the predicate
    if len(query) >= MANY_ROWS:
        return attend_chosen(launcher, query, latents, selected, rows, scale=scale)
    return triton_mla_attention.attend_selected(
        query,
        latents,
        selected,
        rows,
        scale=scale,
        latent_dim=latent_dim,
        least_heads=HEADS,
        launcher=launcher,
    )
