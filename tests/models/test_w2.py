import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moet.errors import CheckpointError
from moet.models.formats import (
    dequantize_mxfp4,
    pack_nibbles,
    quantize_mxfp4,
    unpack_nibbles,
)
from moet.models.w2 import QuantReport, ScaleRule, W2Matrix, quantize_w2, quantize_w2_values

RULES: tuple[ScaleRule, ...] = ("inherit", "mse")
LEVELS = torch.tensor([1.0, 4.0, -1.0, -4.0], dtype=torch.float64)


def decode(matrix: W2Matrix) -> Tensor:
    unit = torch.pow(2.0, matrix.scale.double() - 127).repeat_interleave(32, 1)
    return LEVELS[matrix.codes.long()] * unit


def random_mxfp4(seed: int, rows: int = 8, blocks: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, (rows, 32 * blocks), generator=generator, dtype=torch.uint8)
    quiet = torch.randint(0, 8, (rows, blocks), generator=generator, dtype=torch.uint8)
    cap = quiet.repeat_interleave(32, 1)  # blocks of every largest magnitude, zeros included
    nibbles = torch.minimum(nibbles & 7, cap) | (nibbles & 8)
    scale = torch.randint(0, 255, (rows, blocks), generator=generator, dtype=torch.uint8)
    return pack_nibbles(nibbles), scale


def published_pipeline(nibble: int, byte: int) -> float:
    """What the published recipe decodes to for one source weight: sign, class by magnitude."""
    level = 4.0 if nibble & 7 >= 5 else 1.0
    return (-level if nibble & 8 else level) * 2.0 ** (byte - 127)


@pytest.mark.parametrize("byte", [0, 1, 127, 253, 254])
def test_inherit_is_the_published_pipeline_for_all_nibbles_and_exponents(byte: int) -> None:
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(2)[None]
    matrix = quantize_w2(
        pack_nibbles(nibbles), torch.tensor([[byte]], dtype=torch.uint8), "inherit"
    )
    expected = [published_pipeline(nibble, byte) for nibble in nibbles[0].tolist()]
    assert decode(matrix)[0].tolist() == expected


def test_inherit_from_numbers_takes_the_pipelines_exponent() -> None:
    weight = torch.randn(16, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    packed, scale = quantize_mxfp4(weight)
    from_numbers = quantize_w2_values(weight, "inherit")
    from_nibbles = quantize_w2(packed, scale, "inherit")
    assert torch.equal(from_numbers.scale, scale)
    assert torch.equal(from_numbers.codes, from_nibbles.codes)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), rule=st.sampled_from(RULES))
def test_integer_path_equals_float64(seed: int, rule: ScaleRule) -> None:
    packed, scale = random_mxfp4(seed)
    exact = quantize_w2(packed, scale, rule)
    values = dequantize_mxfp4(packed, scale, torch.float64)
    reference = quantize_w2_values(values, rule, scale)
    assert torch.equal(exact.codes, reference.codes)
    assert torch.equal(exact.scale, reference.scale)
    assert exact.report.rel_rms == pytest.approx(reference.report.rel_rms, rel=1e-9)
    assert exact.report.bias == pytest.approx(reference.report.bias, rel=1e-6, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mse_is_never_worse_than_inherit_in_any_block(seed: int) -> None:
    packed, scale = random_mxfp4(seed)
    values = dequantize_mxfp4(packed, scale, torch.float64)

    def error(rule: ScaleRule) -> Tensor:
        squared = (decode(quantize_w2(packed, scale, rule)) - values).square()
        return torch.unflatten(squared, -1, (-1, 32)).sum(-1)

    assert (error("mse") <= error("inherit")).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), rule=st.sampled_from(RULES))
def test_negated_weights_give_negated_levels(seed: int, rule: ScaleRule) -> None:
    packed, scale = random_mxfp4(seed)
    negated = pack_nibbles(unpack_nibbles(packed) ^ 8)
    one, other = quantize_w2(packed, scale, rule), quantize_w2(negated, scale, rule)
    assert torch.equal(decode(one), -decode(other))
    assert one.report.bias == pytest.approx(-other.report.bias)


def test_mse_has_a_lower_error_on_normal_weights() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(4))
    packed, scale = quantize_mxfp4(weight)
    reports = {rule: quantize_w2(packed, scale, rule).report for rule in RULES}
    assert reports["mse"].rel_rms < reports["inherit"].rel_rms < 0.40
    assert all(abs(report.bias) < 0.005 for report in reports.values())


@pytest.mark.parametrize("sign_bit", [0, 8])
@pytest.mark.parametrize("rule", RULES)
def test_one_signed_zeros_alternate_and_leave_no_bias(rule: ScaleRule, sign_bit: int) -> None:
    nibbles = torch.full((4, 128), sign_bit, dtype=torch.uint8)
    nibbles[:, ::8] = torch.tensor([6, 14] * 8, dtype=torch.uint8)  # +4 and -4
    scale = torch.full((4, 4), 120, dtype=torch.uint8)
    matrix = quantize_w2(pack_nibbles(nibbles), scale, rule)
    assert matrix.report.zeros_alternated
    assert matrix.report.zeros == 7 / 8
    assert matrix.codes[0, 1:8].tolist() == [2, 0, 2, 0, 2, 0, 2]
    # Of seven zeros between two weights four sit at odd places: the rest cancels.
    assert abs(decode(matrix).mean() / decode(matrix).abs().mean()) < 0.15


def test_zeros_of_both_signs_keep_theirs() -> None:
    nibbles = torch.tensor([0, 0, 8, 5] * 8, dtype=torch.uint8)[None]
    matrix = quantize_w2(pack_nibbles(nibbles), torch.tensor([[127]], dtype=torch.uint8), "inherit")
    assert not matrix.report.zeros_alternated
    assert decode(matrix)[0, :4].tolist() == [1, 1, -1, 4]


def test_blocks_of_zeros() -> None:
    packed, scale = torch.zeros(2, 16, dtype=torch.int8), torch.full((2, 1), 130, dtype=torch.uint8)
    inherit, mse = (quantize_w2(packed, scale, rule) for rule in RULES)
    assert decode(inherit).abs().unique().tolist() == [8.0]  # the published recipe, verbatim
    assert decode(mse).abs().unique().tolist() == [2.0**-127]
    assert mse.report == QuantReport(0.0, 0.0, 1.0, True)


def test_exponents_at_the_ends_stay_in_range() -> None:
    nibbles = torch.full((2, 32), 7, dtype=torch.uint8)
    nibbles[1] = 1
    packed = pack_nibbles(nibbles)
    for byte in (0, 1, 2, 253, 254):
        scale = torch.full((2, 1), byte, dtype=torch.uint8)
        got = quantize_w2(packed, scale, "mse")
        assert (got.scale.int() - byte).abs().max() <= 2
        assert got.scale.max() < 255
        reference = quantize_w2_values(dequantize_mxfp4(packed, scale, torch.float64), "mse", scale)
        assert torch.equal(got.scale, reference.scale)


def test_a_nan_scale_is_refused_with_its_place() -> None:
    packed, scale = random_mxfp4(0)
    scale[3, 2] = 255
    with pytest.raises(CheckpointError, match="row 3, block 2"):
        quantize_w2(packed, scale, "mse")


def test_report_bounds_name_the_tensor() -> None:
    QuantReport(0.004, 0.4, 0.1, False).check("fine", 1 << 20)
    for bad in (QuantReport(0.05, 0.4, 0, False), QuantReport(-0.05, 0.4, 0, False)):
        with pytest.raises(CheckpointError, match=r"layers\.1\.w2: .*bias"):
            bad.check("layers.1.w2", 1 << 20)
        bad.check("a small one", 1 << 10)
    with pytest.raises(CheckpointError, match=r"layers\.1\.w2: .*size"):
        QuantReport(0.0, 0.9, 0, False).check("layers.1.w2", 1 << 20)
    with pytest.raises(CheckpointError):
        QuantReport(math.inf, 0.1, 0, False).check("x", 1)


def test_an_asymmetric_tensor_fails_its_check() -> None:
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(5)) + 3
    report = quantize_w2_values(weight, "inherit").report
    with pytest.raises(CheckpointError, match="bias"):
        report.check("w", weight.numel())
