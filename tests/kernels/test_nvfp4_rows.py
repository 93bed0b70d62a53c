"""NVFP4 expert rows: bytes in, bytes out, and each matrix with its own global scale."""

import pytest
import torch

from moet.kernels.moe import ExpertTable, expert_mixture
from moet.kernels.nvfp4 import nvfp4_dequantize, nvfp4_quantize, unpack_nibbles
from moet.kernels.nvfp4_rows import Nvfp4Rows

SHAPES = [(128, 64), (96, 32), (160, 96)]


def quantised(n: int, k: int, seed: int, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return nvfp4_quantize(weight, global_scale=global_scale)


def packed_row(
    rows: Nvfp4Rows, scales: tuple[float, float, float]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A row of random matrices, and their packed codes and e4m3 bytes."""
    d, i = rows.hidden_size, rows.moe_intermediate_size
    sizes = ((i, d), (i, d), (d, i))
    parts = [quantised(n, k, 3 + m, scales[m]) for m, (n, k) in enumerate(sizes)]
    gate, up, down = ((unpack_nibbles(codes), scale) for codes, scale in parts)
    return rows.pack_scaled(gate, up, down, torch.tensor(scales)), parts


@pytest.mark.parametrize(("hidden_size", "inter"), SHAPES)
def test_bytes_survive(hidden_size: int, inter: int) -> None:
    rows = Nvfp4Rows(hidden_size, inter)
    row, parts = packed_row(rows, (0.01, 0.02, 0.03))
    assert row.shape == (rows.row_bytes,)
    assert rows.row_bytes % 4096 == 0
    assert rows.global_scales(row).tolist() == torch.tensor([0.01, 0.02, 0.03]).tolist()
    for (codes, scales), (packed, source) in zip(rows.unpack_codes(row), parts, strict=True):
        assert torch.equal(codes, unpack_nibbles(packed))
        assert torch.equal(scales, source)


def test_glm_rows_have_four_sub_rows_and_little_padding() -> None:
    rows = Nvfp4Rows(6144, 2048)
    assert rows.num_sub_rows == 4
    assert 21_233_664 < rows.row_bytes < 21_233_664 + 4 * 4096 + 1


@pytest.mark.bug("P24")
def test_p24_gate_and_up_keep_their_own_global_scale() -> None:
    rows = Nvfp4Rows(128, 64)
    scales = (1.0, 0.25, 0.5)
    row, parts = packed_row(rows, scales)
    for got, (packed, block_scales), scale in zip(rows.unpack(row), parts, scales, strict=True):
        exact = nvfp4_dequantize(packed, block_scales, global_scale=scale, dtype=torch.float64)
        assert torch.equal(got.double(), exact)
    gate, up, _ = rows.unpack(row)
    assert up.abs().max() < 6.0
    assert 0.5 < gate.std() < 2.0


@pytest.mark.bug("S13")
@pytest.mark.parametrize(("gate_code", "up_code"), [(0, 2), (10, 2)])
def test_s13_the_gate_half_goes_through_the_silu(gate_code: int, up_code: int) -> None:
    rows = Nvfp4Rows(64, 32)
    one = 0x38  # 1.0 in e4m3

    def constant(code: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.full((n, k // 16), one, dtype=torch.uint8)
        return torch.full((n, k), code, dtype=torch.uint8), scales

    gate, up, down = constant(gate_code, 32, 64), constant(up_code, 32, 64), constant(2, 64, 32)
    row = rows.pack_scaled(gate, up, down, torch.ones(3))
    table = ExpertTable(rows, row.unsqueeze(0), torch.zeros(1, dtype=torch.int64))
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    out = expert_mixture(
        torch.ones(1, 64), ids, weights, table, limit=None, round_activations=False
    )
    assert out.abs().max() < 1e-20  # silu(-64) * 64; halves swapped would give -64 * 64 * 32


def test_wrong_global_scales_are_refused() -> None:
    rows = Nvfp4Rows(64, 32)
    _, parts = packed_row(rows, (1.0, 1.0, 1.0))
    gate, up, down = ((unpack_nibbles(codes), scale) for codes, scale in parts)
    with pytest.raises(ValueError, match="three fp32"):
        rows.pack_scaled(gate, up, down, torch.ones(2))
