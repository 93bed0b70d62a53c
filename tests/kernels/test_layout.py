"""Planes hold exactly what was packed, where the kernels look for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.kernels import layout
from moet.kernels.layout import ExpertRows, Mxfp4Rows, Quantised, W2Rows

FORMATS: list[type[ExpertRows]] = [W2Rows, Mxfp4Rows]


def quantised(format: ExpertRows, n: int, k: int, seed: int) -> Quantised:
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8, generator=rng)
    return codes, torch.randint(0, 255, (n, k // 32), dtype=torch.uint8, generator=rng)


def expert(format: ExpertRows, seed: int = 0) -> tuple[Quantised, Quantised, Quantised]:
    d, i = format.hidden_size, format.moe_intermediate_size
    return (
        quantised(format, i, d, seed),
        quantised(format, i, d, seed + 1),
        quantised(format, d, i, seed + 2),
    )


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=12, deadline=None)
@given(d=st.integers(1, 12), i=st.integers(1, 12), seed=st.integers(0, 1 << 20))
def test_rows_return_what_they_were_given(
    kind: type[ExpertRows], d: int, i: int, seed: int
) -> None:
    format = kind(32 * d, 32 * i)
    matrices = expert(format, seed)
    row = format.pack(*matrices)
    assert row.shape == (format.row_bytes,)
    for (codes, scales), (found_codes, found_scales) in zip(
        matrices, format.unpack_codes(row), strict=True
    ):
        assert torch.equal(codes, found_codes)
        assert torch.equal(scales, found_scales)


@pytest.mark.parametrize("kind", FORMATS)
def test_sub_rows_are_self_contained(kind: type[ExpertRows]) -> None:
    format = kind(64, 2048)
    assert format.num_sub_rows == 4
    w1, w3, w2 = expert(format)
    row = format.pack(w1, w3, w2).view(4, -1)
    quarter = kind(64, 512)
    for s in range(4):
        part, blocks = slice(512 * s, 512 * (s + 1)), slice(16 * s, 16 * (s + 1))
        alone = quarter.pack(
            (w1[0][part], w1[1][part]),
            (w3[0][part], w3[1][part]),
            (w2[0][:, part], w2[1][:, blocks]),
        )
        assert torch.equal(row[s], alone)


def test_strides_of_the_released_models() -> None:
    assert W2Rows(4096, 2048).sub_row_bytes == 1.6875 * 2**20
    assert W2Rows(6144, 2048).sub_row_bytes == 2.53125 * 2**20
    assert Mxfp4Rows(4096, 2048).row_bytes == 4 * (3 * 2**20 + 3 * 2**16)
    for format in (W2Rows(4096, 2048), Mxfp4Rows(96, 64)):
        assert all(size % 4096 == 0 for size in format.part_bytes)


@pytest.mark.parametrize("kind", FORMATS)
def test_unpack_is_level_times_scale(kind: type[ExpertRows]) -> None:
    format = kind(128, 64)
    matrices = expert(format, 7)
    for _, scales in matrices:
        scales.clamp_(max=251)  # 6 * 2^124 is the largest that fp32 holds
    for (codes, scales), found in zip(matrices, format.unpack(format.pack(*matrices)), strict=True):
        exponents = scales.long().repeat_interleave(32, 1) - 127
        levels = torch.tensor(format.levels).double()[codes.long()]
        expected = torch.ldexp(levels, exponents)
        assert torch.equal(found.double(), expected)


def test_words_hold_a_code_where_the_decode_looks() -> None:
    """Set one code; only its two bits in its lane's word may change."""
    codes = torch.zeros(64, 256, dtype=torch.uint8)
    codes[16 + 8 + 5, 128 + 32 * 3 + 8 * 2 + 4 + 1] = 3  # tile 1, half 1, g 5; j 3, t 2, h 1, b 1
    words = layout.pack_w2_plane(codes).view(torch.int32).view(4, 2, 32, 4)
    r, b = 2 * 1 + 1, 1
    assert int(words[1, 1, 4 * 5 + 2, 3]) == 1 << (8 * b + 7 - r) | 1 << (8 * b + 3 - r)
    assert torch.count_nonzero(words) == 1
    codes[codes > 0] = 13  # -(3.0): sign, magnitude 5
    nibbles = layout.pack_e2m1_plane(codes).view(torch.int32).view(4, 2, 2, 32, 2, 2)
    assert int(nibbles[1, 1, 1, 4 * 5 + 2, 1, 1]) == 5 << (16 + 4 * b) | 1 << (8 * b + 3)
    assert torch.count_nonzero(nibbles) == 1


def test_scale_words_are_mma_scale_registers() -> None:
    scales = torch.zeros(16, 16, dtype=torch.uint8)
    scales[8 + 3, 8 + 4 * 1 + 2] = 200
    plane = layout.pack_scale_plane(scales).view(2, 32, 4)
    assert plane[1, 4 * 3 + 2 * 1 + 1, 2] == 200
    assert torch.count_nonzero(plane) == 1


@pytest.mark.parametrize(("n", "k"), [(64, 128), (24, 96), (130, 200), (1, 1)])
def test_dense_planes_return_what_they_were_given(n: int, k: int) -> None:
    rng = torch.Generator().manual_seed(n)
    fp8 = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=rng)
    assert torch.equal(layout.unpack_fp8_plane(layout.pack_fp8_plane(fp8), n, k), fp8)
    bf16 = torch.randn(n, k, generator=rng).bfloat16()
    assert torch.equal(layout.unpack_bf16_plane(layout.pack_bf16_plane(bf16), n, k), bf16)


@pytest.mark.parametrize("kind", FORMATS)
def test_row_base_leaves_the_span_below_the_largest_scale(kind: type[ExpertRows]) -> None:
    format = kind(64, 2048)
    w1, w3, w2 = expert(format, 3)
    w1[1][0] = 5  # below the span: the base stays a byte
    bases = format.row_base(format.pack(w1, w3, w2))
    assert bases.shape == (4, 512 + 512 + 64)
    assert bases[0, 0] == 0
    assert bases[1, 0] == w1[1][512].max() - format.exponent_span
    assert bases[3, 1024 + 9] == w2[1][9, 48:].max() - format.exponent_span


def test_scale_values_cover_every_byte() -> None:
    values = layout.scale_values(torch.arange(256).to(torch.uint8)).double()
    assert torch.equal(values[:255], 2.0 ** (torch.arange(255).double() - 127))
    assert values[255].isnan()


def test_pack_names_what_does_not_fit() -> None:
    format = W2Rows(128, 64)
    w1, w3, w2 = expert(format)
    with pytest.raises(ValueError, match=r"w3: codes .* do not fit \[64, 128\]"):
        format.pack(w1, w2, w2)
    with pytest.raises(ValueError, match="w2: code 4 >= 4"):
        format.pack(w1, w3, (w2[0].clamp(min=4), w2[1]))
    with pytest.raises(ValueError, match="uint8"):
        format.pack(w1, w3, (w2[0], w2[1].float()))
    with pytest.raises(ValueError, match="multiples of 32"):
        W2Rows(100, 64)
