"""LayerNorm with bias, as the indexer of GLM needs it: not the same as rms_norm."""

import pytest
import torch

from moet.kernels.norm import layer_norm


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
def test_matches_torch(rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 128, generator=g) + 3
    weight, bias = torch.randn(128, generator=g), torch.randn(128, generator=g)
    expected = torch.nn.functional.layer_norm(x.double(), (128,), weight.double(), bias.double())
    got = layer_norm(x, weight, bias, eps=1e-5)
    assert torch.allclose(got.double(), expected, atol=1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    g = torch.Generator().manual_seed(7)
    x, ones = torch.randn(17, 128, generator=g), torch.ones(128)
    whole = layer_norm(x, ones, ones, eps=1e-6)
    for row in range(17):
        assert torch.equal(layer_norm(x[row : row + 1], ones, ones, eps=1e-6)[0], whole[row])


def test_the_bias_is_added_after_the_scale() -> None:
    x, bias = torch.tensor([[1.0, -1.0]]), torch.tensor([10.0, 20.0])
    got = layer_norm(x, torch.full((2,), 2.0), bias, eps=0.0)
    assert got.tolist() == [[12.0, 18.0]]
