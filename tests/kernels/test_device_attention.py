"""The attention kernels of a chunk and of few rows in emulation, against their reference."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from moet.kernels import row_attention
from moet.kernels.attention import WindowKeys, window_attention, window_attention_q
from moet.kernels.cache import Fp8Rows
from moet.kernels.device_attention import attend_chunk
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows
from moet.kernels.window_arguments import HEADS, ROPE, WIDTH
from tests.kernels import emulation
from tests.kernels.accelerated.world import filled, make_rows, paged, ringed
from tests.kernels.emulation import Emulator

# One key, and an old window with entries of several pages.
PIECES = [(0, 1), (700, 702)]
GROUPS = 8  # of heads, whose outputs a grouped product takes


@pytest.fixture(scope="module")
def launcher() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("chunk_attention", "row_attention"), 90, num_sms=2)


def chosen_by(rows: Rows, ratio: int) -> Tensor:
    selected = torch.full((len(rows.positions), 128), -1, dtype=torch.int32)
    for row, visible in enumerate(rows.visible(ratio).tolist()):
        some = torch.randperm(visible)[:128].sort().values
        selected[row, : len(some)] = some.int()
    return selected


def rows_of_groups(x: Tensor | None, num: int) -> Tensor:
    assert x is not None
    return x.view(num, GROUPS, -1).transpose(0, 1)


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
        selected = chosen_by(rows, ratio)
    args = (
        torch.randn(num, HEADS, WIDTH).bfloat16(),
        torch.randn(HEADS),
        WindowKeys(rows, ring, chunk, entries, selected, 100, ratio),
        *rope_cos_sin(rows.positions, torch.rand(ROPE // 2)),
    )
    want = window_attention(*args, scale=WIDTH**-0.5).float()
    facts = {"scale": WIDTH**-0.5, "num_groups": GROUPS}
    got = attend_chunk(launcher, *args, **facts, tiled=False)
    error = (got.decoded().view(want.shape) - want).abs().max()
    assert error <= window_attention_q.tolerance * want.abs().max(), float(error)

    tiles = attend_chunk(launcher, *args, **facts, tiled=True).tiles
    assert tiles is not None
    assert tiles.num_rows == num * GROUPS
    for codes, scale, found in zip(
        *(rows_of_groups(x, num) for x in (got.codes, got.scale)), tiles.data, strict=True
    ):
        for chunk in range(len(found)):  # of 128 columns
            scales, pieces = found[chunk, :512].view(torch.float32), found[chunk, 512:]
            pieces = pieces.view(16, 8, 8, 16).transpose(1, 2).reshape(128, 128)
            assert torch.equal(scales[:num], scale[:, chunk])
            assert torch.equal(pieces[:num], codes[:, chunk * 128 : (chunk + 1) * 128])


@pytest.mark.parametrize("kind", ["window", "every", "chosen"])
def test_few_rows_attend_as_their_reference_does(
    kind: str, launcher: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one tile of the window and with two, of which entries have none, one or two."""
    torch.manual_seed(4)
    monkeypatch.setattr(row_attention, "FILLING_TILES", 4)
    pieces = [(3, 4), (700, 702)] if kind == "chosen" else [(70, 71)]
    fill = int(kind == "window")
    rows = make_rows(pieces, short=True, device=torch.device("cpu"), fill=fill)
    ratio = {"window": 0, "every": 8, "chosen": 4}[kind]
    form = Fp8Rows(WIDTH - ROPE, ROPE, 256 // ratio if ratio else 1)
    entries = paged(form, rows) if ratio else None
    keys = WindowKeys(
        rows,
        ringed(Fp8Rows(WIDTH - ROPE, ROPE, 102), rows),
        None,
        entries,
        chosen_by(rows, ratio) if kind == "chosen" else None,
        100,
        ratio,
    )
    q, sink = torch.randn(len(rows.positions), HEADS, WIDTH).bfloat16(), torch.randn(HEADS)
    angles = rope_cos_sin(rows.positions, torch.rand(ROPE // 2))
    assert row_attention.fits(keys)
    given = (q, sink, keys, *angles)
    got = row_attention.attend(launcher, *given, scale=WIDTH**-0.5, num_groups=8).decoded()
    want = window_attention(*given, scale=WIDTH**-0.5).float()
    error = (got.view(want.shape) - want)[rows.positions >= 0].abs().max()
    assert error <= window_attention_q.tolerance * want.abs().max(), float(error)
