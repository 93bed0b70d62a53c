"""Joins the tiles of latent attention by csrc/join_latents.cu, bit for bit as the Triton kernel of
that name does. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.stream_gemm import Launcher

THREADS, WIDTH, MAX_TILES = 128, 512, 32


class JoinLatentsArgs(ctypes.Structure):
    """Field for field `struct JoinLatentsArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("positions", "part_acc", "part_sum", "out")),
        *((name, ctypes.c_int) for name in ("tiles", "heads", "top_k")),
    ]


def fits(out: Tensor, num_tiles: int) -> bool:
    """Whether the kernel takes these shapes. out: [rows, heads, latent]."""
    return out.dtype == torch.bfloat16 and out.shape[2] == WIDTH and num_tiles <= MAX_TILES


def run(
    launcher: Launcher,
    positions: Tensor,
    part_acc: Tensor,
    part_sum: Tensor,
    num_tiles: int,
    top_k: int,
    out: Tensor,
) -> None:
    """Write out, [rows, heads, WIDTH] bf16, from each tile's sums and largest logits, fp32."""
    num_rows, num_heads, _ = out.shape
    args = JoinLatentsArgs(
        positions.data_ptr(),
        part_acc.data_ptr(),
        part_sum.data_ptr(),
        out.data_ptr(),
        num_tiles,
        num_heads,
        top_k,
    )
    launcher.launch(
        "join_latents",
        grid=num_rows * num_heads,
        threads=THREADS,
        shared_bytes=num_tiles * (4 * WIDTH + 8),
        args=args,
    )
