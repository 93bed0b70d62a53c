"""The kernel that joins tiles of latent attention, in emulation."""

from __future__ import annotations

import shutil

import pytest
import torch

from moet.kernels import join_latents
from tests.kernels import emulation


def test_tiles_are_joined_in_order() -> None:
    """Rows that see two tiles, all of them, and none."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launcher = emulation.build(("join_latents",), 90, num_sms=3)
    heads, tiles, top_k, width = 2, 4, 256, join_latents.WIDTH
    positions = torch.tensor([99, 999, -1])
    acc = torch.randn(3, tiles, heads, width)
    sums = torch.rand(3, tiles, heads, 2) * 3 + 0.5
    out = torch.empty(3, heads, width, dtype=torch.bfloat16)
    acc[0, 2:], sums[0, 2:] = torch.nan, torch.nan  # nobody has written those
    assert join_latents.fits(out, tiles)
    join_latents.run(launcher, positions, acc, sums, tiles, top_k, out)
    for row, seen in enumerate((2, 4)):
        tops, totals = sums[row, :seen].unbind(-1)
        share = torch.exp2(tops - tops.amax(0))
        want = (share[..., None] * acc[row, :seen]).sum(0) / (share * totals).sum(0)[:, None]
        assert torch.allclose(out[row].float(), want, rtol=2**-7, atol=1e-5)
    assert (out[2] == 0).all()
