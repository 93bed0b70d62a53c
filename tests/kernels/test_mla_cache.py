"""KV rows of MLA, byte for byte against codecs that go value by value."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.config import KVDtype
from moet.errors import ConfigError
from moet.kernels.cache import EntryFormat
from moet.kernels.mla_cache import (
    Fp8IndexKeys,
    Fp8LatentRows,
    Nvfp4LatentRows,
    latent_rows,
)

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()


def nearest(value: float, levels: list[float]) -> int:
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - value), code % 2))


def scalar_e4m3(value: float) -> int:
    return nearest(min(abs(value), 448.0), E4M3) + (128 if math.copysign(1, value) < 0 else 0)


def scalar_e2m1(value: float) -> int:
    return nearest(min(abs(value), 6.0), LEVELS) + (8 if math.copysign(1, value) < 0 else 0)


def fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def scalar_fp8_row(row: list[float], latent_dim: int) -> bytes:
    """656 bytes for a row of 512 + 64: e4m3 latent, fp32 scales, bf16 rope."""
    values, scales = bytearray(), b""
    for start in range(0, latent_dim, 128):
        tile = row[start : min(start + 128, latent_dim)]
        wanted = max(fp32(max(abs(v) for v in tile) / 448.0), 1e-4)
        scale = 2.0 ** math.ceil(math.log2(wanted))
        values += bytes(scalar_e4m3(v / scale) for v in tile)
        scales += struct.pack("<f", scale)
    rope = torch.tensor(row[latent_dim:]).to(torch.bfloat16).view(torch.int16).tolist()
    return bytes(values) + scales + b"".join(struct.pack("<h", v) for v in rope)


def scalar_nvfp4_row(row: list[float], latent_dim: int) -> bytes:
    """352 bytes for a row of 512 + 64: nibbles, e4m3 rope, transposed e4m3 scales."""
    num_blocks = latent_dim // 16
    codes, scales = [], bytearray(num_blocks)
    for block in range(num_blocks):
        values = row[16 * block : 16 * block + 16]
        wanted = fp32(max(abs(v) for v in values) / 6.0)
        scale = nearest(min(max(wanted, 2.0**-9), 448.0), E4M3)
        scales[num_blocks // 4 * (block % 4) + block // 4] = scale
        codes += [scalar_e2m1(fp32(v / E4M3[scale])) for v in values]
    nibbles = bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))
    return nibbles + bytes(scalar_e4m3(v) for v in row[latent_dim:]) + bytes(scales)


def rows_of(n: int, width: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g) * torch.exp2(spread * torch.randn(width, generator=g))


def as_bytes(data: torch.Tensor) -> bytes:
    return bytes(data.flatten().tolist())


def glm_rows(kind: KVDtype, entries_per_page: int = 64) -> EntryFormat:
    return latent_rows(kind, latent_dim=512, rope_dim=64, entries_per_page=entries_per_page)


KINDS: tuple[KVDtype, ...] = ("fp32", "bf16", "fp8", "nvfp4")


def test_rows_have_the_published_sizes() -> None:
    sizes = {kind: glm_rows(kind).page_bytes // 64 for kind in KINDS}
    assert sizes == {"fp32": 2304, "bf16": 1152, "fp8": 656, "nvfp4": 352}
    assert Fp8IndexKeys(128, 64).page_bytes == 8448


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**31))
def test_fp8_rows_match_the_scalar_codec(seed: int) -> None:
    rows = rows_of(1, 576, seed)
    got = Fp8LatentRows(512, 64, 64).encode(rows)
    assert as_bytes(got) == scalar_fp8_row(rows[0].tolist(), 512)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**31))
def test_nvfp4_rows_match_the_scalar_codec(seed: int) -> None:
    rows = rows_of(1, 576, seed)
    got = Nvfp4LatentRows(512, 64, 64).encode(rows)
    assert as_bytes(got) == scalar_nvfp4_row(rows[0].tolist(), 512)


@pytest.mark.parametrize("latent_dim", [64, 192, 320])
def test_other_latent_widths(latent_dim: int) -> None:
    rows = rows_of(2, latent_dim + 16, 5)
    fp8 = Fp8LatentRows(latent_dim, 16, 64).encode(rows)
    nvfp4 = Nvfp4LatentRows(latent_dim, 16, 64).encode(rows)
    for index in range(2):
        row = rows[index].tolist()
        assert as_bytes(fp8[index]) == scalar_fp8_row(row, latent_dim)
        assert as_bytes(nvfp4[index]) == scalar_nvfp4_row(row, latent_dim)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_a_rounded_row_changes_nothing(kind: KVDtype) -> None:
    coding = glm_rows(kind)
    once = coding.round(rows_of(5, 576, 1))
    assert torch.equal(coding.round(once), once)


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 0.002), ("fp8", 0.03), ("nvfp4", 0.1)])
def test_latent_error_is_what_the_bits_allow(kind: KVDtype, bound: float) -> None:
    rows = rows_of(4096, 576, 2, spread=0.5)
    error = (glm_rows(kind).round(rows) - rows)[:, :512].square().mean().sqrt()
    assert bound / 4 < error / rows[:, :512].square().mean().sqrt() < bound


def test_zeros_and_large_values_are_kept_or_clamped() -> None:
    rows = torch.zeros(3, 576)
    rows[1, 0], rows[1, 575] = 1e4, 1e4
    rows[2, 512] = -1e4
    fp8, nvfp4 = glm_rows("fp8").round(rows), glm_rows("nvfp4").round(rows)
    for got in (fp8, nvfp4):
        assert not got.isnan().any()
        assert torch.equal(got[0], rows[0])
    assert nvfp4[1, 0] == 448 * 6
    assert nvfp4[1, 575] == 448
    assert nvfp4[2, 512] == -448


@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_rows_by_slot_and_skip_minus_one(kind: KVDtype) -> None:
    coding = latent_rows(kind, latent_dim=64, rope_dim=16, entries_per_page=8)
    pages = torch.full((4, coding.page_bytes), 7, dtype=torch.uint8)
    rows = rows_of(4, 80, 3)
    slots = torch.tensor([31, -1, 8, 15])
    coding.write(pages, slots, rows)
    kept = [0, 2, 3]
    assert torch.equal(coding.read(pages, slots[kept]), coding.round(rows[kept]))
    assert pages[0].eq(7).all()
    assert pages[2].eq(7).all()


def test_index_keys_are_blocked_by_page() -> None:
    coding = Fp8IndexKeys(128, 64)
    pages = torch.zeros(3, coding.page_bytes, dtype=torch.uint8)
    rows = rows_of(3, 128, 4)
    rows[2] = 0
    coding.write(pages, torch.tensor([64 + 5, -1, 128 + 63]), rows)
    for row, page, entry in ((0, 1, 5), (2, 2, 63)):
        amax = max(float(rows[row].abs().max()), 1e-4)
        scale = 2.0 ** math.ceil(math.log2(amax / 448))
        key = bytes(scalar_e4m3(v / scale) for v in rows[row].tolist())
        assert as_bytes(pages[page, 128 * entry : 128 * entry + 128]) == key
        at = 64 * 128 + 4 * entry
        assert as_bytes(pages[page, at : at + 4]) == struct.pack("<f", scale)
    expected = coding.round(rows[[0, 2]])
    assert torch.equal(coding.read(pages, torch.tensor([69, 191])), expected)


def test_latent_must_fill_the_scale_transpose() -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank is 80"):
        Nvfp4LatentRows(80, 16, 64)
