"""NVFP4 expert rows: bytes in, bytes out, and each matrix with its own global scale."""

import pytest
import torch

from moet.kernels.layout import ExpertRows, Mxfp4Rows, Quantised, W2Rows
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


def constant(rows: ExpertRows, value: float, n: int, k: int) -> Quantised:
    """Codes and scales of a matrix that holds one value everywhere."""
    code = rows.levels.index(value)
    one = 0x38 if isinstance(rows, Nvfp4Rows) else 127  # 1.0 in e4m3, in e8m0
    scales = torch.full((n, k // rows.scale_block), one, dtype=torch.uint8)
    return torch.full((n, k), code, dtype=torch.uint8), scales


@pytest.mark.bug("S13")
@pytest.mark.parametrize("rows", [W2Rows(64, 32), Mxfp4Rows(64, 32), Nvfp4Rows(64, 32)])
def test_s13_the_gate_half_goes_through_the_silu(rows: ExpertRows) -> None:
    gate, up, down = (
        constant(rows, value, n, k)
        for value, n, k in ((-1.0, 32, 64), (1.0, 32, 64), (1.0, 64, 32))
    )
    packed = (
        rows.pack_scaled(gate, up, down, torch.ones(3))
        if isinstance(rows, Nvfp4Rows)
        else rows.pack(gate, up, down)
    )
    table = ExpertTable(rows, packed.unsqueeze(0), torch.zeros(1, dtype=torch.int64))
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    out = expert_mixture(
        torch.ones(1, 64), ids, weights, table, limit=None, round_activations=False
    )
    assert out.abs().max() < 1e-20  # silu(-64) * 64; halves swapped would give -64 * 64 * 32


@pytest.mark.bug("S13")
def test_s13_a_gate_of_zeros_gives_zero() -> None:
    rows = Nvfp4Rows(64, 32)
    gate, up, down = (
        constant(rows, 0.0, 32, 64),
        constant(rows, 2.0, 32, 64),
        constant(rows, 1.0, 64, 32),
    )
    w1, w3, _ = rows.unpack(rows.pack_scaled(gate, up, down, torch.ones(3)))
    assert w1.eq(0).all()
    assert w3.eq(2).all()


def test_wrong_global_scales_are_refused() -> None:
    rows = Nvfp4Rows(64, 32)
    _, parts = packed_row(rows, (1.0, 1.0, 1.0))
    gate, up, down = ((unpack_nibbles(codes), scale) for codes, scale in parts)
    with pytest.raises(ValueError, match="three fp32"):
        rows.pack_scaled(gate, up, down, torch.ones(2))
