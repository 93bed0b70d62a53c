"""The chunk attention kernel in emulation, against its reference."""

from __future__ import annotations

import shutil

import pytest
import torch

from moet.kernels.attention import WindowKeys, window_attention
from moet.kernels.cache import Fp8Rows
from moet.kernels.device_attention import HEADS, ROPE, WIDTH, attend_chunk
from moet.kernels.rope import rope_cos_sin
from tests.kernels import emulation
from tests.kernels.accelerated.world import filled, make_rows, paged, ringed
from tests.kernels.emulation import Emulator

# One key, and an old window with entries of several pages.
PIECES = [(0, 1), (700, 702)]


@pytest.fixture(scope="module")
def launcher() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("chunk_attention",), 90, num_sms=2)


@pytest.mark.parametrize("kind", ["every", "chosen"])
def test_a_chunk_attends_as_its_reference_does(kind: str, launcher: Emulator) -> None:
    torch.manual_seed(3)
    pieces = PIECES if kind == "chosen" else [(70, 71)]
    rows = make_rows(pieces, short=False, device=torch.device("cpu"))
    num, ratio = len(rows.positions), {"every": 8, "chosen": 4}[kind]
    ring = ringed(Fp8Rows(WIDTH - ROPE, ROPE, 102), rows)
    chunk = filled(Fp8Rows(WIDTH - ROPE, ROPE, num), 1, torch.device("cpu"))
    entries = paged(Fp8Rows(WIDTH - ROPE, ROPE, 256 // ratio), rows)
    selected = None
    if kind == "chosen":
        selected = torch.full((num, 128), -1, dtype=torch.int32)
        for row, visible in enumerate(rows.visible(ratio).tolist()):
            some = torch.randperm(visible)[:128].sort().values
            selected[row, : len(some)] = some.int()
    args = (
        torch.randn(num, HEADS, WIDTH).bfloat16(),
        torch.randn(HEADS),
        WindowKeys(rows, ring, chunk, entries, selected, 100, ratio),
        *rope_cos_sin(rows.positions, torch.rand(ROPE // 2)),
    )
    want = window_attention(*args, scale=WIDTH**-0.5)
    got = attend_chunk(launcher, *args, scale=WIDTH**-0.5)
    error = (got.float() - want.float()).abs().max()
    assert error <= window_attention.tolerance * want.float().abs().max(), float(error)
