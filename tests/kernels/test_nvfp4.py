"""NVFP4 against a codec that goes value by value in Python floats."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.kernels.nvfp4 import (
    decode_e2m1,
    encode_e2m1,
    nvfp4_dequantize,
    nvfp4_quantize,
    pack_nibbles,
    unpack_nibbles,
)

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()


def nearest(value: float, levels: list[float]) -> int:
    """The code of the nearest level, ties to the even code, saturating."""
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - value), code % 2))


def scalar_e2m1(value: float) -> int:
    return nearest(min(abs(value), 6.0), LEVELS) + (8 if math.copysign(1, value) < 0 else 0)


def test_every_code_survives_a_round_trip() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)
    assert decode_e2m1(codes).tolist()[:8] == LEVELS


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code(sign: float) -> None:
    ties = [(a + b) / 2 for a, b in itertools.pairwise(LEVELS)]
    near = [math.nextafter(t, d) for t in ties for d in (-math.inf, math.inf)]
    values = torch.tensor([sign * v for v in (*ties, *near, 7.0, 1e30)], dtype=torch.float64)
    assert encode_e2m1(values).tolist() == [scalar_e2m1(v) for v in values.tolist()]


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40))
def test_rounding_is_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    assert encode_e2m1(x).tolist() == [scalar_e2m1(v) for v in values]


def test_low_nibble_is_the_even_index() -> None:
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0xF3]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(-12, 8), st.sampled_from([1.0, 0.0117, 3.5]))
def test_blocks_match_the_scalar_codec(seed: int, exponent: int, global_scale: float) -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scales = nvfp4_quantize(x, global_scale=global_scale)
    codes = unpack_nibbles(packed)
    for row in range(3):
        for block in range(2):
            values = x[row, 16 * block : 16 * block + 16]
            wanted = float(values.abs().max() / 6.0 / global_scale)
            scale = nearest(min(max(wanted, 2.0**-9), 448.0), E4M3)
            assert int(scales[row, block]) == scale
            step = torch.tensor(E4M3[scale]) * global_scale
            expected = [scalar_e2m1(float(v / step)) for v in values]
            assert codes[row, 16 * block : 16 * block + 16].tolist() == expected


def test_dequantise_is_the_product() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scales = torch.arange(1, 33, dtype=torch.uint8).reshape(8, 4)
    got = nvfp4_dequantize(packed, scales, global_scale=0.3, dtype=torch.float64)
    codes = unpack_nibbles(packed)
    for row in range(8):
        for k in range(64):
            code = int(codes[row, k])
            value = LEVELS[code % 8] * (-1 if code >= 8 else 1)
            assert got[row, k].item() == value * E4M3[int(scales[row, k // 16])] * 0.3


def test_a_block_of_zeros_stays_zero_and_empty_input_is_empty() -> None:
    packed, scales = nvfp4_quantize(torch.zeros(1, 16))
    assert torch.equal(nvfp4_dequantize(packed, scales), torch.zeros(1, 16))
    packed, scales = nvfp4_quantize(torch.zeros(0, 32))
    assert nvfp4_dequantize(packed, scales).shape == (0, 32)
