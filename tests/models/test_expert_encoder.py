from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.models.expert_encoder import check_row_range, encode_expert, row_formats
from moet.models.expert_map import ExpertMap
from moet.models.formats import (
    decode_e8m0,
    dequantize_fp8_block,
    dequantize_mxfp4,
    pack_nibbles,
    quantize_fp8_block,
    quantize_mxfp4,
)
from moet.models.w2 import quantize_w2

HIDDEN, INTER = 128, 64
SHAPES = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
FORMATS = row_formats(HIDDEN, INTER)
NAMES = ("w1", "w3", "w2")


def mxfp4_expert(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, cols) in SHAPES.items():
        nibbles = torch.randint(0, 16, (rows, cols), generator=generator, dtype=torch.uint8)
        scale = torch.randint(110, 130, (rows, cols // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}.weight"] = pack_nibbles(nibbles)
        tensors[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
    return tensors


def fp8_expert(float32_scales: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in SHAPES.items():
        weight, scale = quantize_fp8_block(torch.randn(shape, generator=generator))
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.scale"] = (
            decode_e8m0(scale) if float32_scales else scale.view(torch.float8_e8m0fnu)
        )
    return tensors


def test_fp4_rows_are_exact_for_fp4_sources() -> None:
    tensors = mxfp4_expert()
    encoded = encode_expert(tensors.__getitem__, NAMES, FORMATS, "mse")
    matrices = FORMATS["fp4"].unpack(encoded.rows["fp4"])
    for name, matrix in zip(NAMES, matrices, strict=True):
        exact = dequantize_mxfp4(tensors[f"{name}.weight"], tensors[f"{name}.scale"])
        assert torch.equal(matrix, exact)
        assert encoded.reports[name].fp4_rel_rms == 0


def test_inherited_w2_rows_decode_to_the_published_pipeline() -> None:
    tensors = mxfp4_expert()
    encoded = encode_expert(tensors.__getitem__, NAMES, FORMATS, "inherit")
    for name, matrix in zip(NAMES, FORMATS["w2"].unpack(encoded.rows["w2"]), strict=True):
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
        source = dequantize_mxfp4(weight, scale, torch.float64)
        unit = decode_e8m0(scale, torch.float64).repeat_interleave(32, 1)
        level = torch.where(source.abs() > 2.5 * unit, 4.0, 1.0) * unit
        expected = torch.where(source.signbit(), -level, level)
        assert torch.equal(matrix.double(), expected)


@pytest.mark.parametrize("float32_scales", [True, False])
def test_fp8_sources_become_mxfp4_once(float32_scales: bool) -> None:
    tensors = fp8_expert(float32_scales)
    encoded = encode_expert(tensors.__getitem__, NAMES, FORMATS, "inherit")
    fp4 = FORMATS["fp4"].unpack(encoded.rows["fp4"])
    w2 = FORMATS["w2"].unpack(encoded.rows["w2"])
    for place, name in enumerate(NAMES):
        source = dequantize_fp8_block(tensors[f"{name}.weight"], tensors[f"{name}.scale"])
        packed, scale = quantize_mxfp4(source)
        assert torch.equal(fp4[place], dequantize_mxfp4(packed, scale))
        codes = quantize_w2(packed, scale, "inherit")
        expected = FORMATS["w2"].values(codes.codes, codes.scale)
        nonzero = source != 0  # signs of zeros are balanced over the source's own zeros
        assert torch.equal(w2[place][nonzero], expected[nonzero])
        assert 0.05 < encoded.reports[name].fp4_rel_rms < 0.2
        assert encoded.reports[name].w2.rel_rms < 0.45


def test_both_scale_dtypes_give_the_same_rows() -> None:
    rows = [
        encode_expert(fp8_expert(kind).__getitem__, NAMES, FORMATS, "mse").rows["w2"]
        for kind in (True, False)
    ]
    assert torch.equal(*rows)


def with_nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors["w3.scale"].view(torch.uint8)[5, 1] = 255


def with_int32_weight(tensors: dict[str, Tensor]) -> None:
    tensors["w3.weight"] = torch.zeros(INTER, HIDDEN, dtype=torch.int32)


def with_one_sign(tensors: dict[str, Tensor]) -> None:
    tensors["w3.weight"] = torch.full((INTER, HIDDEN // 2), 0x55, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (with_nan_scale, "row 5, block 1 is NaN"),
        (with_int32_weight, "int32"),
        (with_one_sign, "signed bias"),
    ],
)
def test_what_does_not_suit_is_named(
    damage: Callable[[dict[str, Tensor]], None], fault: str
) -> None:
    tensors = mxfp4_expert()
    damage(tensors)
    with pytest.raises(CheckpointError, match=rf"^w3: .*{fault}") as caught:
        encode_expert(tensors.__getitem__, NAMES, FORMATS, "inherit")
    assert str(caught.value).count("w3") == 1


def test_nan_weights_of_fp8_sources_are_refused() -> None:
    tensors = fp8_expert(float32_scales=True)
    tensors["w1.weight"].view(torch.uint8)[3, 3] = 0x7F
    with pytest.raises(CheckpointError, match=r"w1: .*NaN"):
        encode_expert(tensors.__getitem__, NAMES, FORMATS, "mse")


def test_a_wide_row_is_refused_only_if_the_dropped_block_matters() -> None:
    form = FORMATS["fp4"]
    codes = torch.full((2, 64), 7, dtype=torch.uint8)
    scale = torch.tensor([[127, 127], [200, 100]], dtype=torch.uint8)
    check_row_range("x", form, codes, scale)  # the small block is far below the large one
    codes[1, :32] = 0  # now the large exponent belongs to zeros and the small block is the row
    with pytest.raises(CheckpointError, match="x, row 1: "):
        check_row_range("x", form, codes, scale)


def test_expert_numbers_run_over_layers_and_names_follow() -> None:
    experts = ExpertMap(64, 32, 4, (3, 5), ("layers.3.e.", "layers.5.e."), ("gate", "up", "down"))
    assert experts.num_rows == 8
    assert [experts.row(3, 0), experts.row(5, 3)] == [0, 7]
    assert experts.matrices(5) == ("layers.5.e.1.gate", "layers.5.e.1.up", "layers.5.e.1.down")
    assert experts.is_expert("layers.3.e.0.up.weight")
    assert not experts.is_expert("layers.3.shared.up.weight")
    for layer_idx, expert_id in ((3, 4), (3, -1)):
        with pytest.raises(IndexError):
            experts.row(layer_idx, expert_id)


def pipeline_in_float64(nibbles: Tensor, scale: Tensor) -> Tensor:
    """The published recipe, written out: zeros alternate if nearly all of them have one sign."""
    magnitude, negative = nibbles & 7, nibbles >= 8
    zero = magnitude == 0
    share = (zero & negative).sum() / zero.sum().clamp(min=1)
    if share > 0.95 or share < 0.05:
        odd = (torch.arange(nibbles.shape[1]) % 2 == 1).expand_as(nibbles)
        negative = torch.where(zero, odd, negative)
    level = torch.where(magnitude >= 5, 4.0, 1.0).double() * torch.where(negative, -1.0, 1.0)
    return level * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("zeros", ["positive", "negative", "mixed"])
def test_rows_of_extreme_contents_decode_to_the_pipeline(zeros: str) -> None:
    generator = torch.Generator().manual_seed(6)
    tensors, expected = {}, []
    for name, (rows, cols) in SHAPES.items():
        nibbles = torch.randint(0, 16, (rows, cols), generator=generator, dtype=torch.uint8)
        nibbles[: rows // 2, :16] = torch.arange(16, dtype=torch.uint8)
        nibbles[rows // 2 :, :32] = 0  # all-zero blocks
        if zeros != "mixed":
            sign = 0 if zeros == "positive" else 8
            nibbles = torch.where((nibbles & 7) == 0, sign, nibbles)
        exponents = torch.tensor([0, 1, 2, 127, 251, 252], dtype=torch.uint8)
        scale = exponents[torch.arange(rows) % 6, None].expand(rows, cols // 32).contiguous()
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = pack_nibbles(nibbles), scale
        expected.append((pipeline_in_float64(nibbles, scale), nibbles, scale))
    encoded = encode_expert(tensors.__getitem__, NAMES, FORMATS, "inherit")
    w2 = FORMATS["w2"].unpack(encoded.rows["w2"])
    fp4 = FORMATS["fp4"].unpack(encoded.rows["fp4"])
    by_name = dict(zip(SHAPES, expected, strict=True))
    for place, name in enumerate(NAMES):
        levels, nibbles, scale = by_name[name]
        assert torch.equal(w2[place].double(), levels)
        exact = dequantize_mxfp4(pack_nibbles(nibbles), scale, torch.float64)
        assert torch.equal(fp4[place].double(), exact)
        assert torch.equal(fp4[place].signbit(), exact.signbit())
