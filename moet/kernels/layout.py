"""Where the weights of a streaming GEMM lie in memory: exact torch packing and unpacking.

A plane holds a matrix W [N, K] in the order in which the matrix units read it: 16 x 32 blocks, one
lane of a warp after the other, so that a kernel streams it with 16-byte loads and no shuffles.
Knows nothing of models, files or devices; `csrc/` reads what is written here.

Inside a block lane 4*g + t holds rows g and g + 8 and the columns 8*t .. 8*t + 7. Its four
registers are r = 2*h + half: row g + 8*half, columns 8*t + 4*h + b for bytes b = 0..3.
N is padded to 64 rows and K to 128 columns; padded scales are 0 (2^-127) and a kernel meets them
with activations that are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moet.kernels.nvfp4 import E2M1_VALUES

LAYOUT_VERSION = 1
ALIGNMENT_BYTES = 4096  # of every part of an expert row, so that any part can be read from disk
ROW_TILE = 64  # rows that one warpgroup works on
K_CHUNK = 128  # columns that one activation scale covers
SUB_ROW_COLUMNS = 512  # of the intermediate size, the smallest share of a tensor-parallel rank

Quantised = tuple[Tensor, Tensor]
"""Codes [N, K] uint8, one a byte, and their e8m0 bytes [N, K // 32] uint8."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below value."""
    return -(-value // multiple) * multiple


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0])) if x.numel() else x


def _blocks(x: Tensor) -> Tensor:
    """[N, K] -> [N/16, K/128, g 8, t 4, j 4, half 2, h 2, b 4]; j counts the 32 columns blocks."""
    n, k = x.shape
    parts = x.reshape(n // 16, 2, 8, k // 128, 4, 4, 2, 4)  # tile half g chunk j t h b
    return parts.permute(0, 3, 2, 5, 4, 1, 6, 7)


def _unblocks(parts: Tensor) -> Tensor:
    """The inverse of _blocks."""
    tiles, chunks = parts.shape[:2]
    return parts.permute(0, 5, 2, 1, 4, 3, 6, 7).reshape(tiles * 16, chunks * 128)


def pack_w2_plane(codes: Tensor) -> Tensor:
    """codes [N, K] uint8 in 0..3 (2*sign + big; big is magnitude 4, else 1). Returns flat uint8.

    N % 64 == 0, K % 128 == 0. Register r of byte b has its sign in bit 8b+7-r and its size in bit
    8b+3-r of the lane's word, so that `(word << r) & 0x88888888` is a register.
    """
    parts = _blocks(((codes & 2) << 6) | ((codes & 1) << 3))
    out = parts[..., 0, 0, :].clone()
    for half, h in ((1, 0), (0, 1), (1, 1)):
        out |= parts[..., half, h, :] >> (2 * h + half)
    return out.flatten()


def unpack_w2_plane(plane: Tensor, n: int, k: int) -> Tensor:
    """The codes [n, k] of a plane whose N and K are n and k (padded)."""
    words = plane.reshape(n // 16, k // 128, 8, 4, 4, 4)
    regs = torch.stack([words << r & 0x88 for r in range(4)], dim=-2)  # r = 2*h + half
    regs = regs.reshape(*words.shape[:-1], 2, 2, 4).transpose(-3, -2)
    return _unblocks((regs >> 6 & 2) | (regs >> 3 & 1))


def pack_e2m1_plane(codes: Tensor) -> Tensor:
    """codes [N, K] uint8 in 0..15 (sign, 2 exponent bits, 1 mantissa bit). Returns flat uint8.

    N % 64 == 0, K % 128 == 0. Word h of a lane's block holds registers 2h and 2h+1: nibbles 0..3
    the magnitudes of register 2h, nibbles 4..7 those of 2h+1; bit 8b+7 is the sign of byte b of
    register 2h and bit 8b+3 that of 2h+1. So a PRMT with the word as selector decodes 4 codes.
    A lane's sixteen bytes hold two blocks of 32 columns; lanes follow each other.
    """
    parts = _blocks(codes)  # [tile, chunk, g, t, j, half, h, b]
    low, high = parts.transpose(-3, -2).unbind(-2)  # registers 2h, 2h+1: [..., h, b]
    magnitudes = torch.cat([low & 7, high & 7], dim=-1)
    magnitudes = magnitudes.reshape(*low.shape, 2)
    out = magnitudes[..., 0] | magnitudes[..., 1] << 4
    out |= (low & 8) << 4 | (high & 8)  # [tile, chunk, g, t, j, h, byte]
    tiles, chunks = out.shape[:2]
    return out.reshape(tiles, chunks, 32, 2, 16).transpose(2, 3).flatten()


def unpack_e2m1_plane(plane: Tensor, n: int, k: int) -> Tensor:
    """The codes [n, k] of a plane whose N and K are n and k (padded)."""
    words = plane.reshape(n // 16, k // 128, 2, 32, 16).transpose(2, 3)
    words = words.reshape(n // 16, k // 128, 8, 4, 4, 2, 4)  # tile chunk g t j h byte
    nibbles = torch.stack([words & 7, words >> 4 & 7], dim=-1).flatten(-2)
    low = nibbles[..., :4] | (words >> 4 & 8)
    high = nibbles[..., 4:] | (words & 8)
    return _unblocks(torch.stack([low, high], dim=-2).transpose(-3, -2))


def pack_scale_plane(scales: Tensor) -> Tensor:
    """scales [N, blocks] uint8, N % 16 == 0. Returns [N/16, blocks/8 rounded up, 32 lanes, 4] flat.

    Lane 4g + 2a + half, byte b: row g + 8*half, block 4a + b of eight. With 32 columns a block this
    is the scale-A register of eight block-scaled MMAs as it stands.
    """
    n = scales.shape[0]
    scales = _padded(scales, n, round_up(scales.shape[1], 8))
    parts = scales.reshape(n // 16, 2, 8, -1, 2, 4)  # tile half g k256 a b
    return parts.permute(0, 3, 2, 4, 1, 5).flatten()


def unpack_scale_plane(plane: Tensor, n: int, blocks: int) -> Tensor:
    """The scales [n, blocks] of a plane; n is padded, blocks need not be."""
    parts = plane.reshape(n // 16, round_up(blocks, 8) // 8, 8, 2, 2, 4)
    return parts.permute(0, 4, 2, 1, 3, 5).reshape(n, -1)[:, :blocks]


def pack_fp8_plane(weight: Tensor) -> Tensor:
    """weight [N, K], one byte an element. Returns uint8 [N64, K128] in plane order, zero padded.

    Sixteen bytes a lane for each 32 columns: registers 0..3 in turn.
    """
    n, k = weight.shape
    x = _padded(weight.view(torch.uint8), round_up(n, ROW_TILE), round_up(k, K_CHUNK))
    parts = _blocks(x).permute(0, 1, 4, 2, 3, 6, 5, 7)  # tile chunk j g t h half b
    return parts.reshape(x.shape)


def unpack_fp8_plane(plane: Tensor, n: int, k: int) -> Tensor:
    """The bytes [n, k] of a plane [N64, K128]."""
    parts = plane.reshape(plane.shape[0] // 16, plane.shape[1] // 128, 4, 8, 4, 2, 2, 4)
    return _unblocks(parts.permute(0, 1, 3, 4, 2, 6, 5, 7))[:n, :k].contiguous()


def pack_bf16_plane(weight: Tensor) -> Tensor:
    """weight [N, K] bf16. Returns bf16 [N64, K128] in plane order, zero padded.

    Blocks of 16 x 16: lane 4g + t holds columns 4t .. 4t + 3; register 2h + half is row
    g + 8*half, columns 4t + 2h and 4t + 2h + 1.
    """
    n, k = weight.shape
    x = _padded(weight, round_up(n, ROW_TILE), round_up(k, K_CHUNK))
    parts = x.reshape(x.shape[0] // 16, 2, 8, -1, 4, 2, 2)  # tile half g k16 t h b
    return parts.permute(0, 3, 2, 4, 5, 1, 6).reshape(x.shape)


def unpack_bf16_plane(plane: Tensor, n: int, k: int) -> Tensor:
    """The weight [n, k] of a plane [N64, K128]."""
    rows, columns = plane.shape
    parts = plane.reshape(rows // 16, columns // 16, 8, 4, 2, 2, 2)
    return parts.permute(0, 5, 2, 1, 3, 4, 6).reshape(rows, columns)[:n, :k].contiguous()


def scale_values(scales: Tensor) -> Tensor:
    """e8m0 bytes -> fp32 powers of two, exact (byte 0 is the subnormal 2^-127; 255 is NaN)."""
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, 1 << 22, bits)
    return torch.where(scales == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One expert as a row of bytes: sub-rows of gate, up, down and scale parts, each 4 KiB-aligned.

    A sub-row holds `columns` of the intermediate size: those rows of w1 and of w3, those columns of
    w2, and their scales (gate, up, down). There are four when the intermediate size allows
    sub-rows of a multiple of 512, so that 1, 2 or 4 ranks read 4, 2 or 1 of them; else one.
    fixed_sub_rows: how many there are of a rank's share of such a row, in place of that rule.
    """

    hidden_size: int
    moe_intermediate_size: int
    fixed_sub_rows: int | None = None

    name: ClassVar[str]
    code_bits: ClassVar[int]
    scale_block: ClassVar[int] = 32  # consecutive inputs of a scale byte
    exponent_span: ClassVar[int]  # octaves from a row's base to its largest scale
    levels: ClassVar[tuple[float, ...]]  # value of each code

    def __post_init__(self) -> None:
        if self.hidden_size % 32 or self.moe_intermediate_size % 32:
            raise ValueError(
                f"hidden_size {self.hidden_size} and moe_intermediate_size "
                f"{self.moe_intermediate_size} must be multiples of 32, the scale block"
            )

    @property
    def num_sub_rows(self) -> int:
        if self.fixed_sub_rows is not None:
            return self.fixed_sub_rows
        return 1 if self.moe_intermediate_size % (4 * SUB_ROW_COLUMNS) else 4

    @property
    def columns(self) -> int:
        """Share of the intermediate size in a sub-row."""
        return self.moe_intermediate_size // self.num_sub_rows

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Padded N and K of a sub-row's gate, up and down planes."""
        n, k = round_up(self.columns, ROW_TILE), round_up(self.hidden_size, K_CHUNK)
        down = round_up(self.hidden_size, ROW_TILE), round_up(self.columns, K_CHUNK)
        return (n, k), (n, k), down

    @property
    def part_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a sub-row's gate, up, down and scale parts, each a multiple of 4 KiB."""
        gate, up, down = (
            round_up(n * k * self.code_bits // 8, ALIGNMENT_BYTES) for n, k in self.shapes
        )
        return gate, up, down, round_up(sum(self.scale_bytes), ALIGNMENT_BYTES)

    @property
    def scale_bytes(self) -> tuple[int, ...]:
        """Bytes of the gate, up and down scale planes, which follow each other unpadded."""
        return tuple(n * round_up(k // self.scale_block, 8) for n, k in self.shapes)

    @property
    def sub_row_bytes(self) -> int:
        return sum(self.part_bytes)

    @property
    def row_bytes(self) -> int:
        return self.num_sub_rows * self.sub_row_bytes

    def pack(self, w1: Quantised, w3: Quantised, w2: Quantised) -> Tensor:
        """Quantised gate and up [I, D] and down [D, I]. Returns [row_bytes] uint8.

        Raises ValueError naming the matrix whose shape, dtype or codes do not fit.
        """
        d, i = self.hidden_size, self.moe_intermediate_size
        for name, (codes, scales), (n, k) in (
            ("w1", w1, (i, d)),
            ("w3", w3, (i, d)),
            ("w2", w2, (d, i)),
        ):
            blocks = k // self.scale_block
            if codes.shape != (n, k) or scales.shape != (n, blocks):
                raise ValueError(
                    f"{name}: codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not "
                    f"fit [{n}, {k}] and [{n}, {blocks}]"
                )
            if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
                raise ValueError(f"{name}: {codes.dtype} and {scales.dtype} must both be uint8")
            if int(codes.max()) >= len(self.levels):
                raise ValueError(f"{name}: code {int(codes.max())} >= {len(self.levels)}")
        row = torch.zeros(self.row_bytes, dtype=torch.uint8)
        for s, sub_row in enumerate(row.view(self.num_sub_rows, -1)):
            self._pack_sub_row(sub_row, s, w1, w3, w2)
        return row

    def _pack_sub_row(
        self, out: Tensor, s: int, w1: Quantised, w3: Quantised, w2: Quantised
    ) -> None:
        span = slice(s * self.columns, (s + 1) * self.columns)
        blocks = slice(span.start // self.scale_block, span.stop // self.scale_block)
        matrices = [(q[0][span], q[1][span]) for q in (w1, w3)]
        matrices.append((w2[0][:, span], w2[1][:, blocks]))
        parts, scale_parts = self._views(out)
        for (codes, scales), (n, k), part, scale_part in zip(
            matrices, self.shapes, parts, scale_parts, strict=True
        ):
            part.copy_(self._pack_plane(_padded(codes, n, k)))
            scale_part.copy_(pack_scale_plane(_padded(scales, n, k // self.scale_block)))

    def _views(self, sub_row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The three code planes and three scale planes of a sub-row, without their padding."""
        *code_parts, scale_part = torch.split_with_sizes(sub_row, self.part_bytes)
        sizes = [n * k * self.code_bits // 8 for n, k in self.shapes]
        codes = [part[:size] for part, size in zip(code_parts, sizes, strict=True)]
        scale_part = scale_part[: sum(self.scale_bytes)]
        return codes, list(torch.split_with_sizes(scale_part, self.scale_bytes))

    def unpack_codes(self, row: Tensor) -> tuple[Quantised, Quantised, Quantised]:
        """row [row_bytes] uint8. Returns what `pack` was given."""
        true = (self.columns, self.hidden_size), (self.columns, self.hidden_size)
        shapes = (*true, (self.hidden_size, self.columns))
        found: list[list[Quantised]] = [[], [], []]
        for sub_row in row.view(self.num_sub_rows, -1):
            planes, scale_planes = self._views(sub_row)
            for m, ((n, k), (rows, columns)) in enumerate(zip(self.shapes, shapes, strict=True)):
                codes = self._unpack_plane(planes[m], n, k)[:rows, :columns]
                blocks = k // self.scale_block
                scales = unpack_scale_plane(scale_planes[m], n, blocks)
                found[m].append((codes, scales[:rows, : columns // self.scale_block]))
        w1, w3, w2 = (
            (torch.cat([q[0] for q in qs], dim), torch.cat([q[1] for q in qs], dim))
            for qs, dim in zip(found, (0, 0, 1), strict=True)
        )
        return w1, w3, w2

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """row [row_bytes] uint8. Returns w1 and w3 [I, D] and w2 [D, I], fp32, exact."""
        w1, w3, w2 = (self.values(*quantised) for quantised in self.unpack_codes(row))
        return w1, w3, w2

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes [N, K], scales [N, K/32] -> fp32 [N, K], exact."""
        levels = torch.tensor(self.levels, dtype=torch.float32)[codes.long()]
        blocks = levels.reshape(*scales.shape, 32) * scale_values(scales).unsqueeze(-1)
        return blocks.reshape(codes.shape)

    def row_base(self, row: Tensor) -> Tensor:
        """Exponents from which sm_90a counts the scales of each weight row: uint8.

        Returns [num_sub_rows, gate rows + up rows + down rows], padded rows included. A base is
        the row's largest scale byte in that sub-row less `exponent_span`, at least 0. A block
        whose scale is below its base comes out below 2^-24 of its row's largest weight.
        """
        bases = []
        for sub_row in row.view(self.num_sub_rows, -1):
            _, scale_planes = self._views(sub_row)
            for (n, k), plane in zip(self.shapes, scale_planes, strict=True):
                largest = unpack_scale_plane(plane, n, round_up(k // 32, 8)).amax(-1)
                bases.append((largest.to(torch.int16) - self.exponent_span).clamp(min=0))
        return torch.cat(bases).to(torch.uint8).view(self.num_sub_rows, -1)

    def _pack_plane(self, codes: Tensor) -> Tensor:
        raise NotImplementedError

    def _unpack_plane(self, plane: Tensor, n: int, k: int) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class W2Rows(ExpertRows):
    """2-bit experts: code 2*sign + big is +-1 or +-4, times a power of two per 32 inputs."""

    name: ClassVar[str] = "w2"
    code_bits: ClassVar[int] = 2
    exponent_span: ClassVar[int] = 28
    levels: ClassVar[tuple[float, ...]] = (1.0, 4.0, -1.0, -4.0)

    def _pack_plane(self, codes: Tensor) -> Tensor:
        return pack_w2_plane(codes)

    def _unpack_plane(self, plane: Tensor, n: int, k: int) -> Tensor:
        return unpack_w2_plane(plane, n, k)


@dataclass(frozen=True, slots=True)
class Mxfp4Rows(ExpertRows):
    """FP4 experts as shipped: e2m1 codes (sign in bit 3) times a power of two per 32 inputs."""

    name: ClassVar[str] = "mxfp4"
    code_bits: ClassVar[int] = 4
    exponent_span: ClassVar[int] = 27
    levels: ClassVar[tuple[float, ...]] = E2M1_VALUES

    def _pack_plane(self, codes: Tensor) -> Tensor:
        return pack_e2m1_plane(codes)

    def _unpack_plane(self, plane: Tensor, n: int, k: int) -> Tensor:
        return unpack_e2m1_plane(plane, n, k)


def to_mma_order(x: Tensor) -> Tensor:
    """Reorder bytes [..., K], K % 32 == 0, as an activation operand is read.

    In every 32 bytes the 4-byte word 2t + h goes to place 4h + t, so that lane t of a block finds
    its eight consecutive columns in two words 16 bytes apart.
    """
    words = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 4, 2, 4)
    return words.transpose(-3, -2).reshape(x.shape)


def from_mma_order(x: Tensor) -> Tensor:
    """Inverse of to_mma_order."""
    words = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 2, 4, 4)
    return words.transpose(-3, -2).reshape(x.shape)
