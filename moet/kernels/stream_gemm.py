"""Launching the streaming GEMM: shapes and tensors -> kernel name, grid, shared memory, arguments.

Knows the argument block of `csrc/stream_gemm.cuh` and nothing of how a kernel is launched: a
`Launcher` does that, on a GPU (`cubin.py`) or in emulation (the tests).
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels import layout

THREADS = 256
WAVES, MANY_ITEMS = 2, 4  # of CTAs that fit at once; items of each for which that is faster
Codec = Literal["w2", "mxfp4", "nvfp4", "fp8", "bf16"]
Output = Literal["f32", "bf16", "swiglu"]
CHUNKS_PER_STAGE: dict[str, int] = {"w2": 4, "mxfp4": 2, "nvfp4": 2, "fp8": 2, "bf16": 2}
CHUNK_BYTES: dict[str, int] = {"w2": 512, "mxfp4": 1024, "nvfp4": 1024, "fp8": 2048, "bf16": 2048}
CHUNK_COLUMNS: dict[str, int] = {"w2": 128, "mxfp4": 128, "nvfp4": 128, "fp8": 128, "bf16": 64}
# Of a lane in a stage.
SCALE_WORDS: dict[str, int] = {"w2": 3, "mxfp4": 2, "nvfp4": 2, "fp8": 2, "bf16": 0}


class Part(ctypes.Structure):
    """Byte offsets of one matrix's planes in a weight segment."""

    _fields_: ClassVar = [(name, ctypes.c_uint32) for name in ("codes", "scales", "bases")]


class Inverses(ctypes.Structure):
    """Factors by which a kernel divides, field for field `struct Inverses` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint32) for name in ("slices", "tiles", "tiles_per_segment")),
        *((name, ctypes.c_uint32) for name in ("segment_stages", "x_divisor", "ctas")),
    ]


class StreamArgs(ctypes.Structure):
    """The kernel's only parameter, field for field `struct StreamArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weights", "bases", "x", "x_scale", "out")),
        *((name, ctypes.c_void_p) for name in ("partial", "counters", "entries", "num_entries")),
        *((name, ctypes.c_void_p) for name in ("pairs", "pair_weight", "error")),
        ("row_stride", ctypes.c_uint64),
        ("base_stride", ctypes.c_uint64),
        ("segment_stride", ctypes.c_uint32),
        ("base_segment_stride", ctypes.c_uint32),
        ("parts", Part * 2),
        *((name, ctypes.c_int32) for name in ("num_slots", "num_rows", "k", "x_divisor")),
        *((name, ctypes.c_int32) for name in ("ld_x", "ld_x_scale", "ld_out")),
        *((name, ctypes.c_int32) for name in ("x_group_stride", "padded_rows", "segments")),
        *((name, ctypes.c_int32) for name in ("chunks", "tiles", "tiles_per_segment", "columns")),
        *((name, ctypes.c_int32) for name in ("slices", "first_half_stages", "early")),
        ("swiglu_limit", ctypes.c_float),
        ("mask_high", ctypes.c_uint32),
        ("mask_w2_base", ctypes.c_uint32),
        ("inverse", Inverses),
    ]


class Launcher(Protocol):
    """Runs a kernel by name on tensors whose addresses are in args."""

    @property
    def num_sms(self) -> int: ...

    @property
    def max_shared_bytes(self) -> int: ...

    def launch(
        self,
        name: str,
        *,
        grid: int | tuple[int, int],
        threads: int,
        shared_bytes: int,
        args: ctypes.Structure,
        cluster: int = 1,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of the kernel, as `csrc/stream_gemm.cu` lists them."""

    codec: Codec
    rows: int  # at most, of an entry: 4, 8, 16 or 32
    output: Output
    quantise: bool  # bf16 activations become e4m3 on their way in
    stages: int  # of the ring
    ctas_per_sm: int

    @property
    def name(self) -> str:
        quant = "_quant" if self.quantise else ""
        wide = "_wide" if self.ctas_per_sm == 2 else ""
        return f"stream_{self.codec}_n{self.rows}{quant}_{self.output}{wide}"

    @property
    def split(self) -> str:
        """The one whose clusters sum the slices of the columns, if it is among SPLITS."""
        return self.name.removesuffix("_wide") + "_split"

    def shared_bytes(self, slice_stages: int) -> int:
        """Activations of a slice, their scales, two reduction buffers and the ring."""
        chunks = slice_stages * CHUNKS_PER_STAGE[self.codec]
        groups = -(-self.rows // 8)
        scales = 0 if self.codec == "bf16" else chunks * groups * 32
        lane = CHUNKS_PER_STAGE[self.codec] * CHUNK_BYTES[self.codec] // 32
        ring = self.stages * THREADS * (lane + 4 * SCALE_WORDS[self.codec])
        return groups * (chunks * 1024 + 4096) + scales + ring

    def resident(self, slice_stages: int, max_shared_bytes: int) -> int:
        """CTAs that an SM holds at once; an SM has 1 KiB more than a CTA may take, which each
        CTA also takes for itself."""
        by_memory = (max_shared_bytes + 1024) // (self.shared_bytes(slice_stages) + 1024)
        return min(self.ctas_per_sm, by_memory)


INSTANCES = (
    Instance("w2", 8, "swiglu", False, 2, 3),
    Instance("w2", 8, "swiglu", False, 3, 2),
    Instance("w2", 16, "swiglu", False, 2, 2),
    Instance("w2", 8, "bf16", True, 2, 3),
    Instance("w2", 8, "bf16", True, 3, 2),
    Instance("mxfp4", 8, "swiglu", False, 2, 3),
    Instance("mxfp4", 8, "swiglu", False, 2, 2),
    Instance("mxfp4", 8, "bf16", True, 2, 2),
    Instance("nvfp4", 4, "swiglu", False, 2, 2),
    Instance("nvfp4", 4, "bf16", True, 2, 3),
    Instance("nvfp4", 4, "bf16", True, 2, 2),
    Instance("nvfp4", 8, "swiglu", False, 2, 2),
    Instance("nvfp4", 8, "bf16", True, 2, 2),
    Instance("fp8", 8, "bf16", False, 2, 2),
    Instance("fp8", 16, "bf16", False, 2, 2),
    Instance("fp8", 32, "bf16", False, 2, 2),
    Instance("fp8", 8, "f32", False, 2, 2),
    Instance("fp8", 8, "bf16", True, 2, 2),
    Instance("fp8", 8, "swiglu", False, 1, 3),  # where shared memory is small
    Instance("fp8", 8, "swiglu", False, 2, 2),
    Instance("fp8", 32, "swiglu", False, 2, 2),
    Instance("bf16", 8, "f32", False, 2, 2),
    Instance("bf16", 16, "f32", False, 2, 2),
    Instance("bf16", 32, "f32", False, 2, 2),
    Instance("bf16", 8, "bf16", False, 2, 2),
    Instance("bf16", 16, "bf16", False, 2, 2),
)


SPLIT_SLICES = 8  # clusters are faster than the last to arrive for so many slices, not for fewer
SPLITS = (
    "stream_fp8_n8_bf16_split",
    "stream_fp8_n16_bf16_split",
    "stream_fp8_n32_bf16_split",
    "stream_fp8_n8_quant_bf16_split",
)


# Kernels that have a form with the work list in shared memory, and what that holds.
LISTED = ("pair_w2", "stream_w2_n8_quant_bf16")
LIST_ROWS, LIST_BYTES = 64, 1536


def choose(
    codec: Codec,
    rows: int,
    output: Output,
    *,
    quantise: bool,
    wide: bool,
    stages: int,
    max_shared_bytes: int,
) -> Instance:
    """The instance to launch: the wide one if wanted, or if the other loses its third CTA.

    All instances of a kind give the same bits. Raises UnsupportedError if none fits.
    """
    kind = [
        i
        for i in INSTANCES
        if (i.codec, i.rows, i.output, i.quantise) == (codec, rows, output, quantise)
    ]
    fitting = [i for i in kind if i.shared_bytes(stages) <= max_shared_bytes]
    if not fitting:
        needed = min((i.shared_bytes(stages) for i in kind), default=None)
        raise UnsupportedError(
            f"no streaming GEMM for {codec} weights, {rows} rows, {output} output, "
            f"quantise={quantise}: the least that one needs is {needed} bytes of shared memory, "
            f"the device has {max_shared_bytes}"
        )
    narrow = [i for i in fitting if i.resident(stages, max_shared_bytes) == 3]
    wide_ones = [i for i in fitting if i.ctas_per_sm == 2]
    return (wide_ones or fitting)[0] if wide or not narrow else narrow[0]


def rows_at_once(
    launcher: Launcher, codec: Codec, output: Output, num_rows: int, slice_stages: int
) -> int:
    """How many rows a pass over the weights serves: as few passes as shared memory allows."""
    for rows in (32, 16):
        kind = (codec, rows, output, False)
        fits = any(
            i.shared_bytes(slice_stages) <= launcher.max_shared_bytes
            for i in INSTANCES
            if (i.codec, i.rows, i.output, i.quantise) == kind
        )
        if num_rows > rows // 2 and fits:
            return rows
    return 8


def num_stages(codec: str, chunks: int, segments: int, slices: int) -> int:
    """Stages of the ring that one slice of the columns passes through."""
    return -(-chunks // CHUNKS_PER_STAGE[codec]) * segments // slices


def inverse(divisor: int) -> int:
    """The factor for `divide` of the source, exact for numbers below 2^32 / divisor."""
    return -(-(1 << 32) // divisor) & 0xFFFFFFFF


def complete(args: StreamArgs, codec: str, half_stages: int = 0) -> int:
    """Set what follows from the rest of args, but for the CTAs. Returns the stages of a slice."""
    args.mask_high, args.mask_w2_base = 0x88888888, 0x44444444
    stages = num_stages(codec, args.chunks, args.segments, args.slices)
    args.first_half_stages = min(stages, half_stages or -(-stages // 2))
    segment_stages = num_stages(codec, args.chunks, 1, 1)
    divisors = args.slices, args.tiles, args.tiles_per_segment, segment_stages, args.x_divisor
    args.inverse = Inverses(*(inverse(divisor) for divisor in divisors))
    return stages


def share_among(args: StreamArgs, ctas: int, items: int) -> None:
    """Tell a launch how many CTAs divide its items, of which there are at most `items`."""
    assert items * max(args.tiles, ctas) < 1 << 32, "divisions would be inexact"
    args.inverse.ctas = inverse(ctas)


def run(
    launcher: Launcher,
    instance: Instance,
    args: StreamArgs,
    *,
    items: int,
    half_stages: int = 0,
    listed: bool = False,
) -> None:
    """Launch on at most `items` items. half_stages: where the sum is halved; 0: in the middle.

    CTAs of a large dense weight are more than fit at once: whose SM is fast takes more of them.
    listed: the work list has room for all rows, so that a kernel may read all of it at once.
    """
    stages = complete(args, instance.codec, half_stages)
    resident = launcher.num_sms * instance.resident(stages, launcher.max_shared_bytes)
    split = args.slices == SPLIT_SLICES and items <= resident and instance.split in SPLITS
    waves = WAVES if args.entries is None and items >= MANY_ITEMS * resident else 1
    grid = max(1, min(items, waves * resident))
    share_among(args, grid, items)
    name, shared_bytes = instance.split if split else instance.name, instance.shared_bytes(stages)
    if listed and name in LISTED and args.num_rows <= LIST_ROWS:
        name, shared_bytes = f"{name}_listed", shared_bytes + LIST_BYTES
    launcher.launch(
        name,
        grid=grid,
        threads=THREADS,
        shared_bytes=shared_bytes,
        args=args,
        cluster=args.slices if split else 1,
    )


def pointer(x: Tensor | None) -> int | None:
    """Address of a tensor's data."""
    return None if x is None else x.data_ptr()


@dataclass(frozen=True, slots=True)
class StreamLinear:
    """A dense weight in plane order. `scale`: [ceil(N/128), ceil(K/128)] fp32 for fp8."""

    codec: Codec
    plane: Tensor
    scale: Tensor | None
    out_features: int
    in_features: int
    fixed_slices: int | None = None  # of the columns; None: `slices` decides

    @classmethod
    def fp8(cls, weight: Tensor, scale: Tensor) -> StreamLinear:
        """weight: [N, K] e4m3 (any one-byte dtype); scale: fp32, one per 128 x 128 block."""
        n, k = weight.shape
        return cls("fp8", layout.pack_fp8_plane(weight), scale.float().contiguous(), n, k)

    @classmethod
    def bf16(cls, weight: Tensor) -> StreamLinear:
        """weight: [N, K] bf16."""
        n, k = weight.shape
        return cls("bf16", layout.pack_bf16_plane(weight), None, n, k)

    def to(self, device: torch.device | str) -> StreamLinear:
        scale = None if self.scale is None else self.scale.to(device)
        return dataclasses.replace(self, plane=self.plane.to(device), scale=scale)

    def slices(self, launcher: Launcher) -> int:
        """Over how many CTAs the columns are split: a function of the shape and chip alone."""
        if self.fixed_slices is not None:
            return self.fixed_slices
        tiles = self.plane.shape[0] // 64
        stages = num_stages(self.codec, self.chunks, 1, 1)
        smallest = Instance(self.codec, 16, "bf16", False, 2, 2)
        slices = 1
        while stages % (2 * slices) == 0 and stages // slices >= 4:
            fits = smallest.shared_bytes(stages // slices) <= launcher.max_shared_bytes
            if fits and tiles * slices >= launcher.num_sms:
                break
            slices *= 2
        return slices

    @property
    def chunks(self) -> int:
        """Chunks of columns, padding included."""
        return -(-self.plane.shape[1] // CHUNK_COLUMNS[self.codec])

    def __call__(
        self,
        launcher: Launcher,
        x: Tensor,
        x_scale: Tensor | None,
        *,
        error: Tensor,
        workspace: Workspace | None = None,
        output: Literal["f32", "bf16"] = "bf16",
        rows: int = 8,
    ) -> Tensor:
        """x: [T, K] bf16; with x_scale [T, ceil(K/128)] fp32, e4m3 bytes in MMA order.

        Returns [T, N] in the dtype of `output`. fp8 weights with bf16 x quantise x on the way in.
        """
        dtype = torch.float32 if output == "f32" else torch.bfloat16
        out = torch.empty(x.shape[0], self.out_features, dtype=dtype, device=x.device)
        if x.shape[0] == 0:
            return out
        slices = self.slices(launcher)
        instance = choose(
            self.codec,
            rows,
            output,
            quantise=self.codec == "fp8" and x_scale is None,
            wide=True,
            stages=num_stages(self.codec, self.chunks, 1, slices),
            max_shared_bytes=launcher.max_shared_bytes,
        )
        args = self.arguments(x, x_scale, out, slices=slices, error=error)
        entries = -(-x.shape[0] // rows)
        if slices > 1:
            if workspace is None:
                raise ValueError(f"{slices} slices of the columns need a workspace")
            workspace.fill(args, slices * x.shape[0] * self.out_features, entries * args.tiles)
        run(launcher, instance, args, items=entries * args.tiles * slices)
        return out

    def arguments(
        self, x: Tensor, x_scale: Tensor | None, out: Tensor, *, slices: int, error: Tensor
    ) -> StreamArgs:
        """What a launch needs to know of this matrix, its operands and its result."""
        args = StreamArgs(x_divisor=1, num_slots=1, segments=1, num_rows=x.shape[0])
        args.weights, args.bases = self.plane.data_ptr(), pointer(self.scale)
        args.x, args.x_scale, args.out = x.data_ptr(), pointer(x_scale), out.data_ptr()
        args.error = error.data_ptr()
        args.k = self.in_features
        args.ld_x, args.ld_out = x.stride(0), out.stride(0)
        if x_scale is not None:
            args.ld_x_scale, args.x_group_stride = x_scale.stride(0), x_scale.stride(1)
        args.chunks, args.slices = self.chunks, slices
        args.tiles = args.tiles_per_segment = self.plane.shape[0] // 64
        args.columns = self.out_features
        return args


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial sums of sliced columns. `counters` must be zero before the first launch."""

    partial: Tensor  # fp32
    counters: Tensor  # int32

    @classmethod
    def allocate(cls, device: torch.device | str, floats: int, counters: int) -> Workspace:
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    def fill(self, args: StreamArgs, floats: int, counters: int) -> None:
        if floats > self.partial.numel() or counters > self.counters.numel():
            raise ValueError(
                f"workspace of {self.partial.numel()} floats and {self.counters.numel()} counters "
                f"is too small for {floats} and {counters}"
            )
        args.partial, args.counters = self.partial.data_ptr(), self.counters.data_ptr()
