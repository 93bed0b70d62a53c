"""Encodings of KV entries in pages of raw bytes. A format knows how the entries of a page are laid
out; which page belongs to whom is the runtime's affair, what an entry means the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.norm import rms_norm
from moet.kernels.quant import (
    MXFP4_BLOCK,
    fp4_qdq,
    fp8_decode,
    fp8_encode,
    fp8_qdq,
    mxfp4_decode,
    mxfp4_encode,
)
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope

FP8_KV_BLOCK = 64  # values that share a scale in an fp8 KV row


class EntryFormat(Protocol):
    """Pages of `entries_per_page` entries of `width` values each.

    A slot is page * entries_per_page + offset. Entries are given and returned as fp32.
    """

    width: int
    entries_per_page: int

    @property
    def page_bytes(self) -> int: ...

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Encode rows [n, width] fp32 into pages [num_pages, page_bytes] uint8 at slots [n] int64.

        Slot -1 is skipped. Slots other than -1 must be distinct.
        """
        ...

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Decode the entries at slots [n] int64, none negative. Returns [n, width] fp32."""
        ...

    def round(self, rows: Tensor) -> Tensor:
        """rows [..., width] fp32 as they would be read back."""
        ...


class PlanedFormat(EntryFormat, Protocol):
    """A format whose entries lie in planes, so that their bytes can be moved as they are."""

    def planes(self) -> Planes:
        """Where the bytes of an entry are in a page."""
        ...

    def with_entries(self, entries_per_page: int) -> Self:
        """The same encoding in pages of another size."""
        ...


@dataclass(frozen=True, slots=True)
class Cache:
    """State of one kind and layer. pages: [num_pages or num_seq_slots, page_bytes] uint8."""

    pages: Tensor
    form: PlanedFormat

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """rows: [n, width] fp32 to slots [n] int64; -1 is skipped."""
        self.form.write(self.pages, slots, rows)

    def read(self, slots: Tensor) -> Tensor:
        """Returns [n, width] fp32."""
        return self.form.read(self.pages, slots)

    def scratch(self, num_entries: int) -> Cache:
        """Room for num_entries (at least one) entries of the same encoding, in one page."""
        form = self.form.with_entries(max(1, num_entries))
        return Cache(self.pages.new_empty(1, form.page_bytes), form)


class Planes:
    """A page as consecutive planes, each with a fixed number of bytes per entry."""

    def __init__(self, entries_per_page: int, *bytes_per_entry: int, align: int = 1) -> None:
        self.entries_per_page = entries_per_page
        self.bytes_per_entry = bytes_per_entry
        used = entries_per_page * sum(bytes_per_entry)
        self.page_bytes = -(-used // align) * align

    def views(self, pages: Tensor) -> list[Tensor]:
        """[num_pages, entries_per_page, bytes] of each plane, sharing memory with pages."""
        assert pages.dtype == torch.uint8, pages.dtype
        assert pages.shape[1] == self.page_bytes, (pages.shape, self.page_bytes)
        planes, start = [], 0
        for size in self.bytes_per_entry:
            end = start + self.entries_per_page * size
            planes.append(torch.unflatten(pages[:, start:end], 1, (self.entries_per_page, size)))
            start = end
        return planes

    def scatter(self, pages: Tensor, slots: Tensor, *rows: Tensor) -> None:
        """Store the bytes of each plane, skipping slots of -1."""
        kept = slots >= 0
        if not bool(kept.all()):
            slots, rows = slots[kept], tuple(row[kept] for row in rows)
        page, offset = slots // self.entries_per_page, slots % self.entries_per_page
        for plane, row in zip(self.views(pages), rows, strict=True):
            plane[page, offset] = row.view(torch.uint8)

    def gather(self, pages: Tensor, slots: Tensor) -> list[Tensor]:
        """The bytes of each plane, [n, bytes]."""
        page, offset = slots // self.entries_per_page, slots % self.entries_per_page
        return [plane[page, offset] for plane in self.views(pages)]


class PlainRows:
    """Entries as they are, in one dtype: fp32 (also compressor state) or bf16."""

    def __init__(self, width: int, entries_per_page: int, dtype: torch.dtype) -> None:
        self.width = width
        self.entries_per_page = entries_per_page
        self.dtype = dtype
        self._planes = Planes(entries_per_page, width * dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        self._planes.scatter(pages, slots, rows.to(self.dtype).contiguous())

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        (data,) = self._planes.gather(pages, slots)
        return data.view(self.dtype).float()

    def round(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).float()

    def planes(self) -> Planes:
        return self._planes

    def with_entries(self, entries_per_page: int) -> Self:
        return type(self)(self.width, entries_per_page, self.dtype)


class Fp8Rows:
    """The fp8_ds_mla layout: leading values e4m3 with a power-of-two scale per 64, rope as bf16.

    A page holds the data of all its entries (nope + 2 * rope bytes each), then their scale bytes
    (one per 64 values, filled up to a multiple of 8 with zeros), and ends on a multiple of the
    data bytes of an entry. With 448 + 64 values an entry takes 584 bytes.
    """

    def __init__(self, nope_dim: int, rope_dim: int, entries_per_page: int) -> None:
        if nope_dim % FP8_KV_BLOCK or nope_dim == 0:
            raise ConfigError(
                f"fp8 KV rows need an unrotated part that is a multiple of {FP8_KV_BLOCK}; "
                f"this model's is {nope_dim} (use --kv-cache-dtype bf16 or fp32)"
            )
        self.nope_dim = nope_dim
        self.width = nope_dim + rope_dim
        self.entries_per_page = entries_per_page
        self._num_scales = nope_dim // FP8_KV_BLOCK
        self._scale_bytes = -(-self._num_scales // 8) * 8
        data_bytes = nope_dim + 2 * rope_dim
        self._planes = Planes(entries_per_page, data_bytes, self._scale_bytes, align=data_bytes)

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        codes, scale = fp8_encode(rows[:, : self.nope_dim], block=FP8_KV_BLOCK)
        rope = rows[:, self.nope_dim :].bfloat16().contiguous()
        data = torch.cat([codes.view(torch.uint8), rope.view(torch.uint8)], 1)
        padded = scale.new_zeros(len(rows), self._scale_bytes)
        padded[:, : self._num_scales] = scale
        self._planes.scatter(pages, slots, data, padded)

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        data, scale = self._planes.gather(pages, slots)
        codes = data[:, : self.nope_dim].view(torch.float8_e4m3fn)
        rope = data[:, self.nope_dim :].contiguous().view(torch.bfloat16)
        nope = fp8_decode(codes, scale[:, : self._num_scales], block=FP8_KV_BLOCK)
        return torch.cat([nope, rope.float()], 1)

    def round(self, rows: Tensor) -> Tensor:
        nope = fp8_qdq(rows[..., : self.nope_dim], block=FP8_KV_BLOCK)
        return torch.cat([nope, rows[..., self.nope_dim :].bfloat16().float()], -1)

    def planes(self) -> Planes:
        return self._planes

    def with_entries(self, entries_per_page: int) -> Self:
        return type(self)(self.nope_dim, self.width - self.nope_dim, entries_per_page)


class Mxfp4Rows:
    """Index keys as MXFP4: the nibbles of all entries of a page, then their e8m0 bytes.

    With 128 values an entry takes 68 bytes.
    """

    def __init__(self, width: int, entries_per_page: int) -> None:
        if width % MXFP4_BLOCK:
            raise ConfigError(
                f"MXFP4 index keys need a multiple of {MXFP4_BLOCK} values; this model's have "
                f"{width} (use --kv-cache-dtype bf16 or fp32)"
            )
        self.width = width
        self.entries_per_page = entries_per_page
        self._planes = Planes(entries_per_page, width // 2, width // MXFP4_BLOCK)

    @property
    def page_bytes(self) -> int:
        return self._planes.page_bytes

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
        self._planes.scatter(pages, slots, *mxfp4_encode(rows))

    def read(self, pages: Tensor, slots: Tensor) -> Tensor:
        packed, scale = self._planes.gather(pages, slots)
        return mxfp4_decode(packed, scale)

    def round(self, rows: Tensor) -> Tensor:
        return fp4_qdq(rows)

    def planes(self) -> Planes:
        return self._planes

    def with_entries(self, entries_per_page: int) -> Self:
        return type(self)(self.width, entries_per_page)


@op(tolerance=2**-3)  # one step of e4m3: a last-bit difference may round the other way
def write_kv(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Cache,
    slots: Tensor,
    *,
    eps: float,
) -> None:
    """Norm each row, rotate its end by its position, and store it.

    kv: [T, dim] fp32 or bf16, rows may be strided. weight: [dim] fp32. cos, sin: [T, rope_dim / 2]
    fp32. slots: [T] int64, -1 is skipped, others distinct. The norm and the rotation each round to
    the dtype of kv.
    """
    row = rope(rms_norm(kv, weight, eps=eps), cos, sin)
    cache.write(slots, row.float())


@op(tolerance=0.0)
def copy_entries(source: Cache, target: Cache, slots: Tensor) -> None:
    """Entry i of source, which has one page, to place slots[i] of target; -1 is skipped.

    Both have one encoding, and bytes move as they are. slots: [T] int64, others than -1 distinct.
    """
    places = torch.arange(len(slots), device=slots.device)
    data = source.form.planes().gather(source.pages, places)
    target.form.planes().scatter(target.pages, slots, *data)


def fp8_rows_fit(form: EntryFormat) -> bool:
    """Whether the kernels take these rows: fp8, as wide as a power of two, 64 of it rotated."""
    if not isinstance(form, Fp8Rows):
        return False
    return form.width & (form.width - 1) == 0 and form.width - form.nope_dim == FP8_KV_BLOCK


def _fp8_on_gpu(*, arch: str, form: EntryFormat) -> bool:
    return arch in GPU_ARCHS and fp8_rows_fit(form)


write_kv.impl_in("moet.kernels.triton_rows", "triton_fp8", supports=_fp8_on_gpu)


copy_entries.impl_in("moet.kernels.triton_rows", "triton_fp8", supports=_fp8_on_gpu)
