"""Weights, draws and verified drafts in Triton: what their references give, but where a sum rounded
another way turns a draw at the border of two tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.kernels.sampling import (
    Purpose,
    SamplingOps,
    draw_weights,
    rank_weights,
    verify_weights,
    weigh,
)

SHAPES = [(1, 50), (3, 4100)]


def weights_of(num_rows: int, num: int) -> Tensor:
    """Rows of many zeros and a few large values."""
    rows = torch.rand(num_rows, num) ** 8
    return torch.where(torch.rand(num_rows, num) < 0.5, 0.0, rows) + torch.eye(num_rows, num) / 4


@pytest.mark.parametrize(("num_rows", "num"), SHAPES)
def test_weights(device: torch.device, num_rows: int, num: int) -> None:
    scores = (4 * torch.randn(num_rows, num + 7))[:, :num]
    scores[:, 3] = scores[:, num - 2] = scores.amax(-1)  # the first of equals
    temperature = torch.tensor([0.7, 0.0, 1.0])[:num_rows]
    min_p = torch.tensor([0.0, 0.2, 0.05])[:num_rows]
    wanted, best, _ = weigh(scores, temperature, min_p)
    found = weigh.bind(arch="sm90a")(scores.to(device), temperature.to(device), min_p.to(device))
    got = found[0].cpu()
    share, want = got / got.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True)
    assert torch.equal(got > 0, wanted > 0)
    assert torch.allclose(share, want, rtol=weigh.tolerance * 4, atol=1e-9)
    assert torch.equal(found[1].cpu(), best)
    assert not found[2].any()
    scores[0, 5] = torch.nan
    found = weigh.bind(arch="sm90a")(scores.to(device), temperature.to(device), min_p.to(device))
    assert found[2].tolist() == [True] + [False] * (num_rows - 1)


@pytest.mark.parametrize(("num_rows", "num"), SHAPES)
def test_ranked_weights(device: torch.device, num_rows: int, num: int) -> None:
    weights = torch.rand(num_rows, num) ** 8
    weights[:, 5] = weights[:, num - 3]
    ids = weights.sort(dim=-1, descending=True, stable=True).indices
    min_p = torch.tensor([0.0, 0.3, 0.001])[:num_rows]
    for top_k, top_p in ((num, 0.9), (7, 1.0), (30, 0.5), (num, 1.0)):
        k, p = torch.full((num_rows,), top_k), torch.full((num_rows,), top_p, dtype=torch.float64)
        needed = (k < num) | (p < 1.0)
        given = (weights, ids, k, p, min_p, needed)
        found = rank_weights.bind(arch="sm90a")(*(each.to(device) for each in given))  # type: ignore[arg-type]
        assert torch.equal(found.cpu(), rank_weights(*given))


@pytest.mark.parametrize(("num_rows", "num"), SHAPES)
def test_draws(device: torch.device, num_rows: int, num: int) -> None:
    weights = weights_of(num_rows, num)
    bound = draw_weights.bind(arch="sm90a")
    for purpose in (Purpose.DRAW, Purpose.DRAFT):
        for seed in (-3, 2**62 + 11):
            seeds, positions = seed + torch.arange(num_rows), 70 + torch.arange(num_rows)
            want = draw_weights(weights, seeds, positions, purpose=purpose)
            tensors = [each.to(device) for each in (weights, seeds, positions)]
            assert torch.equal(bound(*tensors, purpose=purpose).cpu(), want)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_rows", "num"), SHAPES)
def test_verified_drafts(device: torch.device, num_rows: int, num: int) -> None:
    weights, probs = weights_of(num_rows, num), 3 * weights_of(num_rows + 2, num)
    probs[0] = weights[0]  # a draft that always holds
    places = torch.arange(num_rows)
    there = torch.arange(num_rows) != 1
    bound = verify_weights.bind(arch="sm90a")
    kinds = set()
    for seed in range(3 if device.type == "cpu" else 16):
        seeds, positions = 1000 * seed + torch.arange(num_rows), torch.full((num_rows,), 5)
        drafts = draw_weights(probs[places], seeds, positions, purpose=Purpose.DRAFT)
        given = (weights, probs, places, drafts, there, seeds, positions)
        want = verify_weights(*given)
        assert torch.equal(bound(*(each.to(device) for each in given)).cpu(), want)  # type: ignore[arg-type]
        assert want[0] == drafts[0]
        kinds |= set((want == drafts)[there].tolist())
    assert len(kinds) == 2 or num_rows == 1 or device.type == "cpu"


def test_draws_are_distributed_as_their_weights(device: torch.device) -> None:
    """Of drafts that were drawn from something else, too."""
    if device.type == "cpu":
        pytest.skip("the interpreter takes minutes; there tokens equal the reference's")
    num_rows, num = 4000, 6
    p = torch.tensor([0.4, 0.0, 0.3, 0.1, 0.15, 0.05]).expand(num_rows, -1).contiguous()
    q = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.1, 0.3]).expand(num_rows, -1).contiguous()
    seeds, positions = torch.arange(num_rows), torch.full((num_rows,), 9)
    tensors = [each.to(device) for each in (p, q, torch.arange(num_rows), seeds, positions)]
    weights, probs, places, on_seeds, on_positions = tensors
    ops = SamplingOps.bind("sm90a")
    drafts = ops.draw_weights(probs, on_seeds, on_positions, purpose=Purpose.DRAFT)
    there = (seeds % 2 == 0).to(device)
    tokens = ops.verify_weights(weights, probs, places, drafts, there, on_seeds, on_positions)
    counts = torch.bincount(tokens.cpu(), minlength=num).double()
    assert counts[1] == 0
    expected = num_rows * p[0].double()
    possible = expected > 0
    assert float(((counts - expected)[possible] ** 2 / expected[possible]).sum()) < 23.5
