"""Two products of one input in one launch: fp8 weights into bf16 beside bf16 weights into fp32.

The bits are those of the separate launches (`stream_gemm.py`); what it saves is that each of them
alone is too short to fill the machine. Knows tensors and a Launcher.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels import short_stream
from moet.kernels.device_gemm import PackedMatrix, multiply
from moet.kernels.quant import Activations, as_activations
from moet.kernels.stream_experts import coded
from moet.kernels.stream_gemm import (
    CHUNK_BYTES,
    THREADS,
    Instance,
    Launcher,
    Output,
    StreamArgs,
    StreamLinear,
    Workspace,
    complete,
    num_stages,
    share_among,
)

MAX_ROWS = 16  # of a launch
CTAS_PER_SM = 2


class TwoProducts(ctypes.Structure):
    """The kernel's only parameter, field for field `struct TwoProducts` of the source."""

    _fields_: ClassVar = [
        ("quantised", StreamArgs),
        ("plain", StreamArgs),
        ("quantised_ctas", ctypes.c_int32),
    ]


def multiply_both(
    x: Tensor | Activations, quantised: PackedMatrix, plain: PackedMatrix
) -> tuple[Tensor, Tensor]:
    """x [T, K] bf16 through both. Returns [T, N] bf16 and [T, M] fp32."""
    x, device = as_activations(x), plain.device
    outputs: tuple[Output, Output] = ("bf16", "f32")
    needed = max(
        _shared_bytes(weight.stored, output, device.launcher)
        for weight, output in zip((quantised, plain), outputs, strict=True)
    )
    if not 0 < x.num_rows <= MAX_ROWS or needed > device.launcher.max_shared_bytes:
        return multiply(x, quantised), multiply(x, plain, output="f32")
    codes, scale = coded(device.launcher, x)
    first, items, counters = _arguments(quantised, codes, scale, torch.bfloat16, 0)
    second, others, _ = _arguments(plain, x.plain(), None, torch.float32, counters)
    if short_stream.run_pair(device.launcher, first.args, second.args):
        return first.out, second.out
    args = TwoProducts(first.args, second.args)
    complete(args.quantised, "fp8")
    complete(args.plain, "bf16")
    per_sm = min(CTAS_PER_SM, (device.launcher.max_shared_bytes + 1024) // (needed + 1024))
    resident = per_sm * device.launcher.num_sms
    own_bytes, other_bytes = _bytes(quantised.stored), _bytes(plain.stored)
    share = max(1, min(items, round(resident * own_bytes / (own_bytes + other_bytes))))
    rest = max(1, min(others, resident - share))
    args.quantised_ctas = own = min(items, resident - rest)  # all that the other leaves
    share_among(args.quantised, own, items)
    share_among(args.plain, rest, others)
    device.launcher.launch(
        "project_n16",
        grid=own + rest,
        threads=THREADS,
        shared_bytes=needed,
        args=args,
    )
    return first.out, second.out


class _Product:
    """What one of the two is told, and what keeps its memory alive until it is launched."""

    def __init__(self, args: StreamArgs, out: Tensor, space: Workspace | None) -> None:
        self.args, self.out, self.space = args, out, space


def _arguments(
    weight: PackedMatrix, x: Tensor, scale: Tensor | None, dtype: torch.dtype, first_counter: int
) -> tuple[_Product, int, int]:
    """One product's arguments, its items, and the first counter that it leaves alone."""
    stored, device, num_rows = weight.stored, weight.device, x.shape[0]
    slices = stored.slices(device.launcher)
    out = torch.empty(num_rows, stored.out_features, dtype=dtype, device=x.device)
    args = stored.arguments(x, scale, out, slices=slices, error=device.error)
    space = device.workspace(slices, num_rows * stored.out_features)
    if space is not None:
        space = Workspace(space.partial, space.counters[first_counter:])
        space.fill(args, slices * num_rows * stored.out_features, args.tiles)
    return _Product(args, out, space), args.tiles * slices, first_counter + args.tiles


def _shared_bytes(weight: StreamLinear, output: Output, launcher: Launcher) -> int:
    stages = num_stages(weight.codec, weight.chunks, 1, weight.slices(launcher))
    return Instance(weight.codec, MAX_ROWS, output, False, 2, CTAS_PER_SM).shared_bytes(stages)


def _bytes(weight: StreamLinear) -> int:
    return weight.plane.shape[0] * weight.chunks * CHUNK_BYTES[weight.codec]
