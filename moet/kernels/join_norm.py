"""Residual and norm on a GPU, by csrc/join_norm.cu: a cluster of CTAs takes a row of few, one CTA a
row of many. A row has the same bits either way. What joins may be a rank's part, a mixture's parts,
or both: one launch adds them. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.comm import PeerArgs, RankPart, added
from moet.kernels.device_gemm import Device
from moet.kernels.mixture import MAX_CHOICES, Mixture
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import pointer

GROUP, THREADS, WARPS = 128, 256, 8
MAX_GROUPS = 64
CODED_ROWS = 256  # steps of more rows are multiplied in tiles that round their inputs themselves
FEW_ROWS = 32  # up to here a cluster has a row
SHARED_BYTES = 16 + 4 * MAX_GROUPS

POINTERS = "x y parts part_weights shared expert_ids weight total values codes scales"


class JoinArgs(ctypes.Structure):
    """Field for field `struct JoinArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        ("peers", PeerArgs),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("dim", "top_k", "slices")),
    ]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """weight: [dim] fp32, contiguous, and the device that norms with it."""

    weight: Tensor
    device: Device


def add_rms_norm(
    x: Tensor, y: Tensor | RankPart | Mixture | None, weight: Tensor | NormWeight, *, eps: float
) -> tuple[Tensor, Activations]:
    """As norm.add_rms_norm. x: [n, dim] bf16, contiguous."""
    num_rows, dim = x.shape
    assert isinstance(weight, NormWeight)
    assert x.is_contiguous()
    launcher, few = weight.device.launcher, num_rows <= FEW_ROWS
    links = None
    if not few:
        y = None if y is None else added(y)
    if isinstance(y, RankPart):
        links, y = y.links, y.part
    if isinstance(y, Mixture) and y.top_k > MAX_CHOICES:
        y = y.add()
    total = x if y is None else torch.empty_like(x)
    values, codes, scale = torch.empty_like(x), None, None
    if num_rows <= CODED_ROWS:
        codes = torch.empty(num_rows, dim, dtype=torch.uint8, device=x.device)
        scale = torch.empty(num_rows, dim // GROUP, dtype=torch.float32, device=x.device)
    made = Activations(values, codes, scale)
    if num_rows == 0:
        return total, made
    args = JoinArgs(
        x=x.data_ptr(),
        weight=weight.weight.data_ptr(),
        total=total.data_ptr(),
        values=values.data_ptr(),
        codes=pointer(codes),
        scales=pointer(scale),
        eps=eps,
        dim=dim,
        slices=-(-dim // (GROUP * WARPS)) if few else 1,
    )
    name = "join_norm"
    if isinstance(y, Mixture):
        name += "_mixed"
        args.parts, args.part_weights = y.parts.data_ptr(), pointer(y.weights)
        args.shared, args.expert_ids = y.shared.data_ptr(), y.expert_ids.data_ptr()
        args.top_k = y.top_k
    elif y is not None:
        y = y.contiguous()
        args.y = y.data_ptr()
    if links is not None:
        args.peers = links.arguments()
        if args.peers.ranks > 1:
            name += f"_ranks_{args.peers.ranks}"
    launcher.launch(
        name if few else "join_norm_many",
        grid=num_rows * args.slices,
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        args=args,
        cluster=args.slices,
    )
    return total, made
