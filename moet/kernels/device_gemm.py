"""Matrices of a model on a GPU, and their products: which kernel, which tile, in how many slices.

Joins the streaming GEMM (few rows) with the prefill GEMM (many); both give a row the same bits, so
the number of rows decides about time alone. Knows tensors and a Launcher; no model and no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from moet.errors import KernelError, UnsupportedError
from moet.kernels import layout, prefill_gemm, short_stream
from moet.kernels.quant import Activations, as_activations
from moet.kernels.stream_experts import Work, quantise
from moet.kernels.stream_gemm import (
    Instance,
    Launcher,
    Output,
    StreamArgs,
    StreamLinear,
    Workspace,
    choose,
    num_stages,
    pointer,
    rows_at_once,
    run,
)

STREAM_ROWS = 256  # up to here weights can be streamed; beyond, tiles of tokens share them
PAIRED_ROWS = 8  # up to here a layer's experts are fastest beside its shared one
TILE_ROWS = 128  # from here on tiles of matrices with many outputs are faster, if there are values
TILED_OUTPUTS = 4096
WIDE_OUTPUTS = 1 << 15  # of a head, which is read once in tiles and per 8 rows in streams
NUM_COUNTERS = 1 << 16  # items of one launch whose columns are summed in slices
BLOCK = 128  # weight rows that share a scale


@dataclass(frozen=True, slots=True)
class Beside:
    """Where launches run beside those of the current stream.

    stream: None on a CPU, where they run in turn. counters: as a Device's, for what runs there.
    """

    stream: torch.cuda.Stream | None
    counters: Tensor

    @classmethod
    def open(cls, torch_device: torch.device) -> Beside:
        stream = None
        if torch_device.type == "cuda":
            stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(False):
            counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=torch_device)
        return cls(stream, counters)

    def forked(self) -> AbstractContextManager[object]:
        """Within, launches go to the other stream, behind all that this one has been given."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """What the current stream is given from here on comes behind the other's."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the kernels of this package see it.

    error: [1] int32, bits that a kernel sets when it met what must not be (`stream_gemm.cuh`,
    ErrorBit); whoever runs a step reads it. counters: int32, zero between launches. paired_rows: up
    to how many rows the routed experts of a layer run beside the shared one (`paired_experts.py`).
    chunk_attention: whether chunks attend by a kernel of their own (`device_attention.py`).
    latent_chunks: the same of latent attention (`device_latents.py`). beside: for the shared expert
    of more rows than that; None: it runs before the routed ones.
    """

    arch: str
    torch_device: torch.device
    launcher: Launcher
    error: Tensor
    counters: Tensor
    paired_rows: int = 0
    chunk_attention: bool = True
    latent_chunks: bool = True
    beside: Beside | None = None
    _group_work: dict[tuple[int, int, int], Work] = field(default_factory=dict)
    _long_group_work: dict[tuple[int, int, int], Work] = field(default_factory=dict)

    @classmethod
    def open(cls, arch: str, torch_device: torch.device | str = "cuda") -> Device:
        """Find the cubins of a CUDA device. Raises KernelError if it is no `arch`."""
        from moet.kernels.cubin import Kernels

        torch_device = torch.device(torch_device)
        kernels = Kernels(torch_device)
        if kernels.arch != arch:
            raise KernelError(
                f"{torch.cuda.get_device_name(torch_device)} is {kernels.arch}, not {arch}"
            )
        device = cls.around(kernels, arch, torch_device, paired_rows=PAIRED_ROWS)
        return replace(device, beside=Beside.open(torch_device))

    @classmethod
    def around(
        cls,
        launcher: Launcher,
        arch: str,
        torch_device: torch.device | str,
        *,
        paired_rows: int = 0,
    ) -> Device:
        """A device whose kernels another launcher runs."""
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            error = torch.zeros(1, dtype=torch.int32, device=torch_device)
            counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=torch_device)
        return cls(arch, torch.device(torch_device), launcher, error, counters, paired_rows)

    def workspace(self, slices: int, floats: int) -> Workspace | None:
        """Room for partial sums of one launch; None if it makes none."""
        if slices == 1:
            return None
        partial = torch.empty(slices * floats, dtype=torch.float32, device=self.torch_device)
        return Workspace(partial, self.counters)

    def has_group_work(self, num_groups: int, num_tokens: int, rows: int) -> bool:
        """Whether group_work has these at hand, written by a launch that is over."""
        return (num_groups, num_tokens, rows) in self._group_work

    def group_work(self, num_groups: int, num_tokens: int, rows: int) -> Work:
        """Every group with all tokens, `rows` to an entry. Few tokens: made once and kept. Many:
        kept for the layers of a step, until there are others."""
        key = num_groups, num_tokens, rows
        kept = self._group_work if num_tokens <= STREAM_ROWS else self._long_group_work
        work = kept.get(key)
        if work is None:
            work = _group_work(num_groups, num_tokens, rows, self.torch_device)
            if kept is self._long_group_work:
                kept.clear()
            kept[key] = work
        return work


def _group_work(num_groups: int, num_tokens: int, rows: int, device: torch.device) -> Work:
    """Group g's place t is row t * num_groups + g of the flattened [tokens, groups]."""
    with torch.inference_mode(False):
        per_group = -(-num_tokens // rows)
        entry = torch.arange(num_groups * per_group, dtype=torch.int32, device=device)
        group, first = entry // per_group, entry % per_group * rows
        count = (num_tokens - first).clamp(max=rows)
        entries = torch.stack([group, group, group * num_tokens + first, count], dim=1)
        place = torch.arange(num_groups * num_tokens, dtype=torch.int32, device=device)
        pairs = place % num_tokens * num_groups + place // num_tokens
        num_entries = torch.full((1,), len(entries), dtype=torch.int32, device=device)
    return Work(entries.contiguous(), num_entries, pairs)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [num_out, num_in] in plane order, on the device that multiplies with it."""

    stored: StreamLinear
    device: Device

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.out_features, self.stored.in_features

    @property
    def quantised(self) -> bool:
        """Whether its activations are rounded to e4m3."""
        return self.stored.codec == "fp8"

    @classmethod
    def pack(cls, weight: Tensor, scale: Tensor | None, device: Device) -> PackedMatrix:
        """weight: [N, K] bf16, or e4m3 with scale, fp32 [ceil(N/128), ceil(K/128)]."""
        weight = weight.to(device.torch_device)
        if scale is not None:
            return cls(StreamLinear.fp8(weight, scale.to(device.torch_device)), device)
        return cls(StreamLinear.bf16(weight), device)

    @classmethod
    def joined(cls, parts: Sequence[PackedMatrix]) -> PackedMatrix:
        """Matrices of one input as one, their outputs side by side.

        Raises UnsupportedError if a part but the last does not end on a block of rows.
        """
        first = parts[0].stored
        border = BLOCK if first.codec == "fp8" else layout.ROW_TILE
        for part in parts[:-1]:
            if part.shape[0] % border:
                raise UnsupportedError(
                    f"a matrix of {part.shape[0]} rows has others behind it; on a GPU that takes "
                    f"a multiple of {border} rows"
                )
        scales = [part.stored.scale for part in parts if part.stored.scale is not None]
        stored = StreamLinear(
            first.codec,
            torch.cat([part.stored.plane for part in parts]),
            torch.cat(scales) if scales else None,
            sum(part.shape[0] for part in parts),
            first.in_features,
        )
        return cls(stored, parts[0].device)


def multiply(
    x: Tensor | Activations, weight: PackedMatrix, *, output: Literal["f32", "bf16"] = "bf16"
) -> Tensor:
    """x @ weight.T. x: [T, K] bf16, T may be 0. Returns [T, N] in the dtype of `output`."""
    device, stored, x = weight.device, weight.stored, as_activations(x)
    num_rows = x.num_rows
    if _tiled(x, stored, output):
        few = prefill_gemm.rows_of(device.launcher, stored, num_rows, output)
        tiles = prefill_gemm.make_tiles(device.launcher, x.plain(), fp8=weight.quantised, rows=few)
        return prefill_gemm.linear(
            device.launcher, stored, tiles, num_rows, error=device.error, output=output
        )
    slices = stored.slices(device.launcher)
    stages = num_stages(stored.codec, stored.chunks, 1, slices)
    rows = rows_at_once(device.launcher, stored.codec, output, num_rows, stages)
    given = rows > 8 or output == "f32"
    operand, scale = _e4m3(x, device, given=given) if weight.quantised else (x.plain(), None)
    if weight.quantised and output == "bf16":
        out = short_stream.multiply(device.launcher, stored, operand, scale, error=device.error)
        if out is not None:
            return out
    space = device.workspace(slices, num_rows * stored.out_features)
    return stored(
        device.launcher,
        operand,
        scale,
        error=device.error,
        workspace=space,
        output=output,
        rows=rows,
    )


def _tiled(x: Activations, weight: StreamLinear, output: Output) -> bool:
    """Whether tiles are faster than streams; a row has the same bits in both."""
    if x.num_rows > STREAM_ROWS:
        return True
    if x.values is None:
        return False
    head = x.num_rows > 8 and output == "f32" and weight.out_features >= WIDE_OUTPUTS
    return head or (x.num_rows > TILE_ROWS and weight.out_features >= TILED_OUTPUTS)


def _e4m3(x: Activations, device: Device, *, given: bool) -> tuple[Tensor, Tensor | None]:
    """Codes and scales, or bf16 values that the kernel quantises itself unless they must be given:
    it does so for few rows and bf16 results only."""
    if x.codes is not None:
        return x.codes, x.scale
    if given:
        return quantise(device.launcher, x.plain().contiguous())
    return x.plain(), None


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """One fp8 matrix [N, K] per group of inputs. planes: uint8 [G, N64, K128]; scales: fp32
    [G, ceil(N/128), ceil(K/128)]."""

    planes: Tensor
    scales: Tensor
    out_features: int
    in_features: int
    device: Device

    @classmethod
    def pack(cls, weight: Tensor, scale: Tensor, device: Device) -> PackedGroups:
        """weight: [G, N, K] e4m3; scale: fp32 [G, N/128, ceil(K/128)]."""
        _, n, k = weight.shape
        parts = [
            layout.pack_fp8_plane(matrix).to(device.torch_device)
            for matrix in weight.to(device.torch_device).unbind(0)
        ]
        scales = scale.float().to(device.torch_device).contiguous()
        return cls(torch.stack(parts), scales, n, k, device)

    def slices(self) -> int:
        """Over how many CTAs the columns are split: a function of shape and chip alone."""
        launcher = self.device.launcher
        tiles = self.planes.shape[0] * self.planes.shape[1] // layout.ROW_TILE
        stages = num_stages("fp8", self.chunks, 1, 1)
        smallest = Instance("fp8", 16, "bf16", False, 2, 2)
        slices = 1
        while stages % (2 * slices) == 0 and stages // slices >= 4:
            fits = smallest.shared_bytes(stages // slices) <= launcher.max_shared_bytes
            if fits and tiles * slices >= launcher.num_sms:
                break
            slices *= 2
        return slices

    @property
    def chunks(self) -> int:
        return self.planes.shape[2] // layout.K_CHUNK

    def fill(self, args: StreamArgs, work: Work, num_rows: int) -> None:
        """Set what depends on the matrices and the rows alone."""
        args.weights, args.bases = self.planes.data_ptr(), self.scales.data_ptr()
        args.entries, args.num_entries = work.entries.data_ptr(), work.num_entries.data_ptr()
        args.pairs, args.error = work.pairs.data_ptr(), self.device.error.data_ptr()
        args.row_stride = self.planes.stride(0)
        args.base_stride = self.scales.stride(0) * self.scales.element_size()
        args.num_slots, args.num_rows = self.planes.shape[0], num_rows
        args.segments, args.chunks, args.slices = 1, self.chunks, self.slices()
        args.padded_rows, args.columns = self.planes.shape[1], self.out_features


def multiply_groups(x: Tensor | Activations, weight: PackedGroups) -> Tensor:
    """Each group's inputs through its matrix. x: [T, G, K] bf16, or activations [T * G, K].

    Returns [T, G, N] bf16.
    """
    num_groups = weight.planes.shape[0]
    if isinstance(x, Tensor):
        x = Activations(x.reshape(-1, weight.in_features))
    num_rows = x.num_rows
    num_tokens, device = num_rows // num_groups, weight.device
    out = torch.empty(
        num_rows, weight.out_features, dtype=torch.bfloat16, device=device.torch_device
    )
    if num_rows:
        tiled = num_tokens > STREAM_ROWS
        if tiled:
            rows = prefill_gemm.tile_rows(device.launcher)
        else:
            stages = num_stages("fp8", weight.chunks, 1, weight.slices())
            rows = rows_at_once(device.launcher, "fp8", "bf16", num_tokens, stages)
        known = device.has_group_work(num_groups, num_tokens, rows)
        work = device.group_work(num_groups, num_tokens, rows)
        args = StreamArgs(x_divisor=1, early=known)  # weights may come before the step ahead ends
        weight.fill(args, work, num_rows)
        args.out, args.ld_out = out.data_ptr(), out.stride(0)
        if tiled:
            _prefill_groups(args, x, weight, work)
        else:
            _stream_groups(args, x, weight, work, rows)
    return out.view(num_tokens, num_groups, weight.out_features)


def _stream_groups(
    args: StreamArgs, x: Activations, weight: PackedGroups, work: Work, rows: int
) -> None:
    device, slices = weight.device, args.slices
    operand, scale = _e4m3(x, device, given=rows > 8)
    args.x, args.x_scale, args.k = operand.data_ptr(), pointer(scale), weight.in_features
    args.ld_x = operand.stride(0)
    if scale is not None:
        args.ld_x_scale, args.x_group_stride = scale.stride()
    args.tiles = args.tiles_per_segment = weight.planes.shape[1] // layout.ROW_TILE
    num_groups = weight.planes.shape[0]
    if scale is not None and short_stream.run_groups(device.launcher, args, num_groups):
        return
    instance = choose(
        "fp8",
        rows,
        "bf16",
        quantise=scale is None,
        wide=True,
        stages=num_stages("fp8", weight.chunks, 1, slices),
        max_shared_bytes=device.launcher.max_shared_bytes,
    )
    space = device.workspace(slices, args.num_rows * weight.out_features)
    if space is not None:
        counters = len(work.entries) * args.tiles
        space.fill(args, slices * args.num_rows * weight.out_features, counters)
    run(device.launcher, instance, args, items=len(work.entries) * args.tiles * slices)


def _prefill_groups(args: StreamArgs, x: Activations, weight: PackedGroups, work: Work) -> None:
    launcher = weight.device.launcher
    tiles = x.tiles or prefill_gemm.make_tiles(launcher, x.plain(), work=work)
    prefill_gemm.run_groups(launcher, args, tiles)
