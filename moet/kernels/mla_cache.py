"""KV rows of multi-head latent attention, and the index keys beside them, as bytes.

A row is one token's normalised latent followed by its rotated rope key. A format says how many
bytes a page of rows takes and turns rows into those bytes and back. Knows nothing of attention,
of layers, or of who owns the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moet.config import KVDtype
from moet.errors import ConfigError
from moet.kernels.nvfp4 import BLOCK, E4M3_MAX, nvfp4_dequantize, nvfp4_quantize

FP8_TILE = 128  # latent values per fp32 scale
MIN_FP8_SCALE = 1e-4
MIN_INDEX_AMAX = 1e-4


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x. x: fp32, positive, normal. Exact."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, nearest even, saturating at 448. Returns the bytes, uint8, same shape."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(data: Tensor) -> Tensor:
    """e4m3 bytes, uint8, to fp32."""
    return data.contiguous().view(torch.float8_e4m3fn).float()


class RowFormat(Protocol):
    """One encoding of MLA rows; rows of a page lie one after the other."""

    @property
    def name(self) -> str: ...
    @property
    def row_bytes(self) -> int: ...

    def encode(self, rows: Tensor) -> Tensor:
        """rows: [n, kv_lora_rank + qk_rope_head_dim] float. Returns uint8 [n, row_bytes]."""
        ...

    def decode(self, data: Tensor) -> Tensor:
        """data: uint8 [n, row_bytes]. Returns [n, kv_lora_rank + qk_rope_head_dim] fp32."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Rows as they are, in one float type: 2 or 4 bytes a value."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return data.contiguous().view(self.dtype).float()


@dataclass(frozen=True)
class Fp8Rows:
    """fp8_ds_mla: e4m3 latent, an fp32 scale per 128 of it, bf16 rope key. 656 bytes for 512 + 64.

    scale = max(amax / 448, 1e-4) rounded up to a power of two; a value is e4m3 * scale. A latent
    that is no multiple of 128 has a narrower last tile.
    """

    latent_dim: int
    rope_dim: int
    name: str = "fp8"

    @property
    def num_tiles(self) -> int:
        return -(-self.latent_dim // FP8_TILE)

    @property
    def row_bytes(self) -> int:
        return self.latent_dim + 4 * self.num_tiles + 2 * self.rope_dim

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(FP8_TILE, dim=-1)[:, : self.latent_dim]

    def encode(self, rows: Tensor) -> Tensor:
        latent, rope = torch.split(rows.float(), [self.latent_dim, self.rope_dim], dim=-1)
        pad = self.num_tiles * FP8_TILE - self.latent_dim
        tiles = torch.unflatten(F.pad(latent, (0, pad)), -1, (self.num_tiles, FP8_TILE))
        amax = tiles.abs().amax(-1)
        scales = ceil_power_of_two((amax / E4M3_MAX).clamp_min(MIN_FP8_SCALE))
        values = to_e4m3(latent / self._spread(scales))
        rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat((values, scales.contiguous().view(torch.uint8), rope_bytes), dim=-1)

    def decode(self, data: Tensor) -> Tensor:
        parts = [self.latent_dim, 4 * self.num_tiles, 2 * self.rope_dim]
        values, scales, rope = torch.split(data, parts, dim=-1)
        latent = from_e4m3(values) * self._spread(scales.contiguous().view(torch.float32))
        return torch.cat((latent, rope.contiguous().view(torch.bfloat16).float()), dim=-1)


@dataclass(frozen=True)
class Nvfp4Rows:
    """nvfp4_ds_mla: e2m1 latent, unscaled e4m3 rope key, e4m3 scales. 352 bytes for 512 + 64.

    Scales come last and transposed: block s of n is byte (n / 4) * (s mod 4) + s div 4 of them.
    The rope key has no scale, so it is clamped to +-448.
    """

    latent_dim: int
    rope_dim: int
    name: str = "nvfp4"

    def __post_init__(self) -> None:
        if self.latent_dim % (4 * BLOCK):
            raise ConfigError(
                f"kv_lora_rank is {self.latent_dim}; nvfp4 KV rows need a multiple of {4 * BLOCK}. "
                "Choose --kv-cache-dtype fp8 or bf16."
            )

    @property
    def row_bytes(self) -> int:
        return self.latent_dim // 2 + self.rope_dim + self.latent_dim // BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        latent, rope = torch.split(rows.float(), [self.latent_dim, self.rope_dim], dim=-1)
        packed, scales = nvfp4_quantize(latent)
        transposed = torch.unflatten(scales, -1, (-1, 4)).transpose(-1, -2).flatten(-2)
        return torch.cat((packed, to_e4m3(rope), transposed), dim=-1)

    def decode(self, data: Tensor) -> Tensor:
        parts = [self.latent_dim // 2, self.rope_dim, self.latent_dim // BLOCK]
        packed, rope, transposed = torch.split(data, parts, dim=-1)
        scales = torch.unflatten(transposed, -1, (4, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((nvfp4_dequantize(packed, scales), from_e4m3(rope)), dim=-1)


def row_format(kv_dtype: KVDtype, *, latent_dim: int, rope_dim: int) -> RowFormat:
    """The row format that `kv_dtype` names."""
    width = latent_dim + rope_dim
    if kv_dtype == "fp8":
        return Fp8Rows(latent_dim, rope_dim)
    if kv_dtype == "nvfp4":
        return Nvfp4Rows(latent_dim, rope_dim)
    dtype = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    return PlainRows(kv_dtype, width, dtype)


@dataclass(frozen=True)
class RowPages:
    """Pages of token-contiguous rows: entry e of a page is its bytes e*row_bytes onwards."""

    format: RowFormat

    def page_bytes(self, num_entries: int) -> int:
        return num_entries * self.format.row_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Encode rows into their places.

        pages: uint8 [num_pages, page_bytes], contiguous. slots: [n] int64, page * entries + offset,
        -1 to skip. rows: [n, width] float.
        """
        kept = slots >= 0
        pages.view(-1, self.format.row_bytes)[slots[kept]] = self.format.encode(rows[kept])

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        """slots: [n] int64, all >= 0. Returns [n, width] fp32."""
        return self.format.decode(pages.view(-1, self.format.row_bytes)[slots])


@dataclass(frozen=True)
class IndexKeyPages:
    """Index keys: e4m3 with one fp32 power-of-two scale each. 132 bytes for 128 values.

    Blocked by page, not by token: a page of P entries holds P keys, then P scales.
    scale = 2^ceil(log2(max(amax, 1e-4) / 448)).
    """

    dim: int
    entries_per_page: int

    def page_bytes(self, num_entries: int) -> int:
        return num_entries * (self.dim + 4)

    def _planes(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        border = self.entries_per_page * self.dim
        keys = torch.unflatten(pages[:, :border], 1, (self.entries_per_page, self.dim))
        return keys, torch.unflatten(pages[:, border:], 1, (self.entries_per_page, 4))

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        """As RowPages.write; rows: [n, dim] float."""
        kept = slots >= 0
        values, scales = quantize_index(rows[kept])
        page, entry = slots[kept] // self.entries_per_page, slots[kept] % self.entries_per_page
        keys, key_scales = self._planes(pages)
        keys[page, entry] = values
        key_scales[page, entry] = scales.unsqueeze(-1).contiguous().view(torch.uint8)

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        """slots: [n] int64, all >= 0. Returns [n, dim] fp32."""
        page, entry = slots // self.entries_per_page, slots % self.entries_per_page
        keys, key_scales = self._planes(pages)
        return from_e4m3(keys[page, entry]) * key_scales[page, entry].view(torch.float32)


def quantize_index(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round index queries or keys to e4m3 under one power-of-two scale per vector.

    rows: [..., dim] float. Returns e4m3 bytes uint8 [..., dim] and scales fp32 [...].
    """
    amax = rows.float().abs().amax(-1).clamp_min(MIN_INDEX_AMAX)
    scales = ceil_power_of_two(amax / E4M3_MAX)
    return to_e4m3(rows.float() / scales.unsqueeze(-1)), scales
