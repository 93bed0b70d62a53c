"""Rounding with power-of-two block scales: exact values, borders, and freedom from neighbours."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.kernels.quant import (
    e8m0_encode,
    e8m0_value,
    fp4_qdq,
    fp8_decode,
    fp8_encode,
    fp8_qdq,
    hadamard,
    mxfp4_decode,
    mxfp4_encode,
    round_up_to_power_of_two,
)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_power_of_two_rounds_up(value: float) -> None:
    expected = 2.0 ** math.ceil(math.log2(value))
    if expected / 2 >= value:  # log2 itself may round up to a whole number
        expected /= 2
    if expected < value:
        expected *= 2
    assert float(round_up_to_power_of_two(torch.tensor([value]))) == expected


def test_e8m0_bytes_are_exponents() -> None:
    scales = torch.tensor([2.0**-126, 2.0**-7, 1.0, 2.0, 2.0**127])
    assert e8m0_encode(scales).tolist() == [1, 120, 127, 128, 254]
    assert torch.equal(e8m0_value(e8m0_encode(scales)), scales)


def test_fp8_scale_is_a_power_of_two_rounded_up() -> None:
    for amax, exponent in ((448.0, 0), (448.5, 1), (224.0, -1), (1.0, -8), (0.0, -22)):
        x = torch.zeros(1, 128)
        x[0, 5] = amax
        _, scale = fp8_encode(x, block=128)
        assert scale.item() - 127 == exponent, amax


def test_fp8_rounds_to_nearest_even() -> None:
    x = torch.zeros(1, 128)
    x[0, :5] = torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10])
    # Steps of 2 between 16 and 32: ties go to 16, 20 and -16; half of the least step goes to 0.
    assert fp8_qdq(x, block=128)[0, :5].tolist() == [448, 16, 20, -16, 0]


@pytest.mark.parametrize("width", [1, 63, 64, 128, 200])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_fp8_qdq_keeps_shape_and_error_bound(num_rows: int, width: int) -> None:
    x = torch.randn(num_rows, width)
    y = fp8_qdq(x, block=128)
    assert y.shape == x.shape
    # Half a step of a 3-bit mantissa, or of the least scaled value.
    if num_rows:
        bound = x.abs() / 16 + x.abs().amax(1, keepdim=True) / 448 * 2**-9
        assert ((y - x).abs() <= bound).all()


def test_qdq_equals_encode_then_decode_and_is_idempotent() -> None:
    x = torch.randn(7, 256) * torch.logspace(-6, 4, 7).unsqueeze(1)
    codes, scale = fp8_encode(x, block=64)
    y = fp8_qdq(x, block=64)
    assert torch.equal(fp8_decode(codes, scale, block=64), y)
    assert torch.equal(fp8_qdq(y, block=64), y)
    z = fp4_qdq(x)
    assert torch.equal(mxfp4_decode(*mxfp4_encode(x)), z)
    assert torch.equal(fp4_qdq(z), z)


def test_results_fit_bf16() -> None:
    x = torch.randn(5, 128).bfloat16()
    assert torch.equal(fp8_qdq(x, block=128).float(), fp8_qdq(x.float(), block=128))
    assert torch.equal(fp4_qdq(x).float(), fp4_qdq(x.float()))


def test_fp4_levels_ties_and_saturation() -> None:
    x = torch.zeros(1, 32)
    x[0, :11] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.01, -0.3, 4.9])
    expected = [6, 0, 1, 1, 2, 2, 4, 4, -6, -0.5, 4]
    assert fp4_qdq(x)[0, :11].tolist() == expected
    packed, scale = mxfp4_encode(x)
    assert scale.item() == 127
    assert packed[0, 0].item() == 7  # low nibble first: 6.0, then 0.25 as zero
    assert fp4_qdq(torch.full((1, 32), 6.5))[0, 0] == 6.0  # scale 2: 3.25 is nearest to 3


@pytest.mark.parametrize("op", [lambda x: fp8_qdq(x, block=128), fp4_qdq, hadamard])
def test_rows_do_not_depend_on_each_other(op: object) -> None:
    assert callable(op)
    x = torch.randn(17, 128)
    one_by_one = torch.cat([op(row[None]) for row in x])
    assert torch.equal(op(x), one_by_one)
    assert op(x[:0]).shape == (0, 128)


@pytest.mark.parametrize("width", [1, 2, 64, 128])
def test_hadamard_is_the_orthogonal_sylvester_matrix(width: int) -> None:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x, y = torch.randn(3, width), torch.randn(3, width)
    torch.testing.assert_close(hadamard(x), x @ matrix.t() * width**-0.5)
    dots = (hadamard(x) * hadamard(y)).sum(-1)
    torch.testing.assert_close(dots, (x * y).sum(-1), atol=1e-5, rtol=1e-5)
