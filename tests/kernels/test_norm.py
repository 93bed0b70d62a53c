"""Root-mean-square norm: values, rounding, rows that ignore each other."""

import pytest
import torch

from moet.kernels.norm import rms_norm


@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
@pytest.mark.parametrize("dim", [1, 24, 384, 4096])
def test_rows_have_unit_root_mean_square(num_rows: int, dim: int) -> None:
    x = torch.randn(num_rows, dim) * 100
    y = rms_norm(x, None, eps=1e-6)
    rms = y.double().square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-4, rtol=0)


def test_weight_scales_after_the_norm() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-6), rms_norm(x, None, eps=1e-6) * weight)


def test_bf16_computes_in_fp32_and_rounds_once() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64)
    expected = rms_norm(x.float(), weight, eps=1e-6).bfloat16()
    assert torch.equal(rms_norm(x, weight, eps=1e-6), expected)


def test_zero_rows_stay_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), None, eps=1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dim", [24, 384, 16384])
def test_rows_do_not_depend_on_each_other(dim: int) -> None:
    x = torch.randn(17, dim)
    one_by_one = torch.cat([rms_norm(row[None], None, eps=1e-6) for row in x])
    assert torch.equal(rms_norm(x, None, eps=1e-6), one_by_one)
