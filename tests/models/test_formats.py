import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moet.errors import CheckpointError
from moet.kernels.nvfp4 import E2M1_VALUES
from moet.models import formats


def e4m3_by_definition(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


ALL_BYTES = torch.arange(256, dtype=torch.int64).to(torch.uint8)
E4M3 = [e4m3_by_definition(byte) for byte in range(256)]


def test_e4m3_decodes_every_byte() -> None:
    expected = torch.tensor(E4M3)
    assert torch.equal(formats.decode_e4m3(ALL_BYTES).nan_to_num(-1e9), expected.nan_to_num(-1e9))
    as_float8 = ALL_BYTES.view(torch.float8_e4m3fn)
    assert formats.decode_e4m3(as_float8).isnan().nonzero().flatten().tolist() == [127, 255]


def test_e4m3_encodes_every_value_back_to_its_byte() -> None:
    finite = ~formats.decode_e4m3(ALL_BYTES).isnan()
    codes = formats.encode_e4m3(formats.decode_e4m3(ALL_BYTES))
    assert torch.equal(codes.view(torch.uint8)[finite], ALL_BYTES[finite])
    assert codes.float()[~finite].isnan().all()


def test_e4m3_ties_go_to_the_even_code_and_neighbours_to_the_nearest() -> None:
    for low in range(126):  # 126 is 448, the largest finite code
        middle = torch.tensor([(E4M3[low] + E4M3[low + 1]) / 2], dtype=torch.float32)
        up, down = (torch.nextafter(middle, torch.tensor(x)) for x in (math.inf, -math.inf))
        even = low if low % 2 == 0 else low + 1
        codes = formats.encode_e4m3(torch.cat([down, middle, up])).view(torch.uint8)
        assert codes.tolist() == [low, even, low + 1]


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = torch.tensor([449.0, 464.0, 1e30, math.inf, -500.0, -math.inf, math.nan])
    assert formats.encode_e4m3(x).float()[:6].tolist() == [448.0] * 4 + [-448.0] * 2
    assert formats.encode_e4m3(x).float()[6].isnan()


def test_e2m1_round_trips_all_sixteen_codes_with_the_sign_of_zero() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.decode_e2m1(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(values.signbit(), codes >= 8)
    assert torch.equal(formats.encode_e2m1(values), codes)


def test_e2m1_ties_saturation_and_nan() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 7.0, math.inf, -0.25, -1e9])
    expected = [0, 1, 1, 2, 2, 4, 4, 6, 6, 6, -0.0, -6]
    assert formats.decode_e2m1(formats.encode_e2m1(x)).tolist() == expected
    with pytest.raises(CheckpointError, match="NaN"):
        formats.encode_e2m1(torch.tensor([math.nan]))


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_e2m1_is_the_nearest_value(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    got = formats.decode_e2m1(formats.encode_e2m1(x), torch.float64)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    best = (x[:, None].clamp(-6, 6) - grid).abs().amin(1)
    assert torch.equal((x.clamp(-6, 6) - got).abs(), best)


def test_nibbles_of_every_byte_low_first() -> None:
    nibbles = formats.unpack_nibbles(ALL_BYTES.view(torch.int8))
    assert nibbles.view(256, 2)[0x4E].tolist() == [0xE, 0x4]
    assert torch.equal(formats.pack_nibbles(nibbles), ALL_BYTES.view(torch.int8))
    assert formats.pack_nibbles(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0, 2)


def test_e8m0_is_an_exponent_and_never_a_number() -> None:
    scale = ALL_BYTES.view(torch.float8_e8m0fnu)
    assert torch.equal(formats.e8m0_bytes(scale), ALL_BYTES)
    values = formats.decode_e8m0(scale)
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()
    assert formats.e8m0_bytes(torch.tensor([2.0**-7]).to(torch.float8_e8m0fnu)).item() == 120
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        with pytest.raises(CheckpointError, match="e8m0"):
            formats.e8m0_bytes(torch.ones(3, dtype=dtype))


def test_e8m0_agrees_with_torch() -> None:
    scale = ALL_BYTES[:255].view(torch.float8_e8m0fnu)
    assert torch.equal(formats.decode_e8m0(scale), scale.to(torch.float32))


def test_mxfp4_decodes_by_block() -> None:
    packed = torch.full((1, 32), 0x2A, dtype=torch.int8)  # low nibble -1, high nibble +1
    scale = torch.tensor([[126, 130]], dtype=torch.uint8)
    w = formats.dequantize_mxfp4(packed, scale)
    assert w[0, :4].tolist() == [-0.5, 0.5, -0.5, 0.5]
    assert w[0, 32:36].tolist() == [-8, 8, -8, 8]


def test_mxfp4_requantises_its_own_values_exactly_when_blocks_reach_a_top_magnitude() -> None:
    generator = torch.Generator().manual_seed(1)
    nibbles = torch.randint(0, 16, (64, 256), generator=generator, dtype=torch.uint8)
    nibbles[:, ::32] = 7
    scale = torch.randint(1, 254, (64, 8), generator=generator, dtype=torch.uint8)
    packed = formats.pack_nibbles(nibbles)
    w = formats.dequantize_mxfp4(packed, scale, torch.float64)
    got_packed, got_scale = formats.quantize_mxfp4(w)
    # Tiny exponents are not reached: the pipeline adds 1e-30 before the logarithm.
    normal = scale.repeat_interleave(16, 1) > 64
    assert torch.equal(got_packed[normal], packed[normal])
    assert torch.equal(got_scale[scale > 64], scale[scale > 64])


def test_mxfp4_of_zeros_takes_the_least_exponent_and_keeps_signs() -> None:
    w = torch.zeros(2, 32)
    w[1] = -0.0
    packed, scale = formats.quantize_mxfp4(w)
    assert scale.flatten().tolist() == [0, 0]
    assert packed.view(torch.uint8).unique(dim=1).flatten().tolist() == [0, 0x88]


def test_mxfp4_midpoints_go_down() -> None:
    w = torch.zeros(1, 32)
    w[0, :8] = torch.tensor([6, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0])
    values = formats.dequantize_mxfp4(*formats.quantize_mxfp4(w))
    assert values[0, :8].tolist() == [6, 0, 0.5, 1, -1.5, 2, 3, -4]


@pytest.mark.parametrize("shape", [(1, 1), (127, 130), (128, 128), (129, 256), (0, 128)])
def test_fp8_block_grids_are_ceil_divided(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    codes, scale = formats.quantize_fp8_block(weight)
    assert scale.shape == tuple(-(-n // 128) for n in shape)
    back = formats.dequantize_fp8_block(codes, scale)
    assert (back - weight).abs().le(weight.abs() * 2**-4 + 2**-15).all()
    as_float = formats.dequantize_fp8_block(codes, formats.decode_e8m0(scale))
    assert torch.equal(back, as_float)


def test_fp8_block_uses_the_scale_of_its_own_tile() -> None:
    codes = formats.encode_e4m3(torch.ones(130, 257))
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    w = formats.dequantize_fp8_block(codes, scale)
    corners = [w[0, 0], w[127, 127], w[127, 128], w[0, 256], w[128, 127], w[129, 255], w[129, 256]]
    assert [x.item() for x in corners] == [1, 1, 2, 4, 8, 16, 32]
    with pytest.raises(CheckpointError, match=r"\(2, 3\)"):
        formats.dequantize_fp8_block(codes, scale[:, :2])


def test_fp8_block_scale_is_the_least_power_that_fits() -> None:
    for amax, exponent in ((448.0, 0), (448.5, 1), (224.0, -1), (0.0, 0), (1e-40, -127)):
        _, scale = formats.quantize_fp8_block(torch.full((4, 4), amax))
        assert scale.item() - 127 == exponent
