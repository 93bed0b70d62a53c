"""KV rows of multi-head latent attention, and the index keys beside them, as pages of bytes.

A row is one token's normalised latent followed by its rotated rope key. Knows nothing of
attention, of layers, or of who owns the pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from moet.config import KVDtype
from moet.errors import ConfigError
from moet.kernels.cache import EntryFormat, PlainRows, PlanedFormat, Planes
from moet.kernels.nvfp4 import BLOCK, E4M3_MAX, nvfp4_dequantize, nvfp4_quantize
from moet.kernels.quant import e8m0_round_up, e8m0_value, fp8_decode, fp8_encode

FP8_TILE = 128  # latent values per fp32 scale
MIN_FP8_SCALE = 1e-4


class _LatentRows(ABC):
    """Rows that lie one after the other in a page; a subclass says what the bytes of one are."""

    def __init__(self, latent_dim: int, rope_dim: int, entries_per_page: int) -> None:
        self.latent_dim = latent_dim
        self.rope_dim = rope_dim
        self.width = latent_dim + rope_dim
        self.entries_per_page = entries_per_page
        self._planes = Planes(entries_per_page, self.row_bytes)

    @property
    @abstractmethod
    def row_bytes(self) -> int: ...

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """rows: [n, width] fp32. Returns uint8 [n, row_bytes]."""

    @abstractmethod
    def decode(self, data: Tensor) -> Tensor:
        """data: uint8 [n, row_bytes]. Returns [n, width] fp32."""

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        self._planes.scatter(pages, slots, self.encode(rows))

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        (data,) = self._planes.gather(pages, slots)
        return self.decode(data)

    def round(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.width)
        return self.decode(self.encode(flat)).view(rows.shape)

    def planes(self) -> Planes:
        return self._planes

    def with_entries(self, entries_per_page: int) -> Self:
        return type(self)(self.latent_dim, self.rope_dim, entries_per_page)


class Fp8LatentRows(_LatentRows):
    """fp8_ds_mla: e4m3 latent, an fp32 scale per 128 of it, bf16 rope key. 656 bytes for 512 + 64.

    scale = max(amax / 448, 1e-4) rounded up to a power of two; a value is e4m3 * scale. A latent
    that is no multiple of 128 has a narrower last tile.
    """

    @property
    def num_tiles(self) -> int:
        return -(-self.latent_dim // FP8_TILE)

    @property
    def row_bytes(self) -> int:
        return self.latent_dim + 4 * self.num_tiles + 2 * self.rope_dim

    def _spread(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(FP8_TILE, dim=-1)[:, : self.latent_dim]

    def encode(self, rows: Tensor) -> Tensor:
        latent, rope = torch.split(rows, [self.latent_dim, self.rope_dim], dim=-1)
        pad = self.num_tiles * FP8_TILE - self.latent_dim
        tiles = torch.unflatten(F.pad(latent, (0, pad)), -1, (self.num_tiles, FP8_TILE))
        wanted = (tiles.abs().amax(-1) / E4M3_MAX).clamp_min(MIN_FP8_SCALE)
        scales = e8m0_value(e8m0_round_up(wanted))
        values = _to_e4m3(latent / self._spread(scales))
        rope_bytes = rope.bfloat16().contiguous().view(torch.uint8)
        return torch.cat((values, scales.view(torch.uint8), rope_bytes), dim=-1)

    def decode(self, data: Tensor) -> Tensor:
        parts = [self.latent_dim, 4 * self.num_tiles, 2 * self.rope_dim]
        values, scales, rope = torch.split(data, parts, dim=-1)
        latent = _from_e4m3(values) * self._spread(scales.contiguous().view(torch.float32))
        return torch.cat((latent, rope.contiguous().view(torch.bfloat16).float()), dim=-1)


class Nvfp4LatentRows(_LatentRows):
    """nvfp4_ds_mla: e2m1 latent, unscaled e4m3 rope key, e4m3 scales. 352 bytes for 512 + 64.

    Scales come last and transposed: block s of n is byte (n / 4) * (s mod 4) + s div 4 of them.
    The rope key has no scale, so it is clamped to +-448.
    """

    def __init__(self, latent_dim: int, rope_dim: int, entries_per_page: int) -> None:
        if latent_dim % (4 * BLOCK):
            raise ConfigError(
                f"kv_lora_rank is {latent_dim}; nvfp4 KV rows need a multiple of {4 * BLOCK} "
                "(use --kv-cache-dtype fp8 or bf16)"
            )
        super().__init__(latent_dim, rope_dim, entries_per_page)

    @property
    def row_bytes(self) -> int:
        return self.latent_dim // 2 + self.rope_dim + self.latent_dim // BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        latent, rope = torch.split(rows, [self.latent_dim, self.rope_dim], dim=-1)
        packed, scales = nvfp4_quantize(latent)
        transposed = torch.unflatten(scales, -1, (-1, 4)).transpose(-1, -2).flatten(-2)
        return torch.cat((packed, _to_e4m3(rope), transposed), dim=-1)

    def decode(self, data: Tensor) -> Tensor:
        parts = [self.latent_dim // 2, self.rope_dim, self.latent_dim // BLOCK]
        packed, rope, transposed = torch.split(data, parts, dim=-1)
        scales = torch.unflatten(transposed, -1, (4, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((nvfp4_dequantize(packed, scales), _from_e4m3(rope)), dim=-1)


class Fp8IndexKeys:
    """Index keys: e4m3 with one fp32 power-of-two scale each. 132 bytes for 128 values.

    Blocked by page, not by token: a page of P entries holds P keys, then P scales.
    scale = 2^ceil(log2(max(amax, 1e-4) / 448)).
    """

    def __init__(self, width: int, entries_per_page: int) -> None:
        self.width = width
        self.entries_per_page = entries_per_page
        self._planes = Planes(entries_per_page, width, 4)

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scale = fp8_encode(rows, block=self.width)
        self._planes.scatter(pages, slots, codes, e8m0_value(scale))

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        codes, scale = self._planes.gather(pages, slots)
        return _from_e4m3(codes) * scale.view(torch.float32)

    def round(self, rows: Tensor) -> Tensor:
        codes, scale = fp8_encode(rows, block=self.width)
        return fp8_decode(codes, scale, block=self.width)

    def planes(self) -> Planes:
        return self._planes

    def with_entries(self, entries_per_page: int) -> Self:
        return type(self)(self.width, entries_per_page)


def latent_rows(
    kv_dtype: KVDtype, *, latent_dim: int, rope_dim: int, entries_per_page: int
) -> PlanedFormat:
    """The format of KV rows that `kv_dtype` names."""
    if kv_dtype == "fp8":
        return Fp8LatentRows(latent_dim, rope_dim, entries_per_page)
    if kv_dtype == "nvfp4":
        return Nvfp4LatentRows(latent_dim, rope_dim, entries_per_page)
    dtype = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    return PlainRows(latent_dim + rope_dim, entries_per_page, dtype)


def _to_e4m3(x: Tensor) -> Tensor:
    """Bytes of x rounded to e4m3, nearest even, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).float()


def latent_rows_fit(form: EntryFormat) -> bool:
    """Whether the kernels take these rows: fp8 or NVFP4, as wide as the matrix units like."""
    if not isinstance(form, Fp8LatentRows | Nvfp4LatentRows):
        return False
    latent, rope = form.latent_dim, form.rope_dim
    even = latent & (latent - 1) == 0 and rope & (rope - 1) == 0
    return even and latent % FP8_TILE == 0 and latent <= 4 * FP8_TILE and rope >= BLOCK
