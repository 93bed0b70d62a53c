"""The attention kernels on a GPU: the bits of their Triton forms at the released shapes."""

from dataclasses import replace

import pytest
import torch

from moet.kernels import device_latents, row_attention, triton_attention, triton_mla_attention
from moet.kernels.attention import WindowKeys
from moet.kernels.cache import Fp8Rows
from moet.kernels.cubin import device_arch
from moet.kernels.device_attention import TILE_ROWS, attend_chunk
from moet.kernels.device_gemm import Device
from moet.kernels.mla_cache import Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.prefill_gemm import make_tiles
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows
from moet.kernels.stream_experts import quantise
from moet.kernels.window_arguments import HEADS, ROPE, WIDTH
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.world import filled, make_rows, paged, ringed

GROUPS = 8  # of heads, whose outputs a grouped product takes
pytestmark = pytest.mark.skipif(INTERPRETED, reason="emulation tests it on a CPU")


def choices(rows: Rows, ratio: int, most: int) -> torch.Tensor:
    """[rows, most] int32: entries that each row sees, at random and ascending, then -1."""
    device = rows.positions.device
    chosen = torch.full((len(rows.positions), most), -1, dtype=torch.int32, device=device)
    for row, visible in enumerate(rows.visible(ratio).tolist()):
        some = torch.randperm(visible, device=device)[:most].sort().values
        chosen[row, : len(some)] = some.int()
    return chosen


@pytest.mark.parametrize("kind", ["window", "every", "few", "chosen"])
def test_chunks_have_the_bits_of_tiles(kind: str, device: torch.device) -> None:
    if device_arch(device) != "sm90a":
        pytest.skip("the kernel is sm_90a's")
    pieces = [(0, 200), (300, 301), (467, 768), (60, 70)]  # tiles of the output are full
    rows = make_rows(pieces, short=False, device=device)
    num, ratio = len(rows.positions), {"window": 0, "few": 128, "every": 4, "chosen": 4}[kind]
    ring = ringed(Fp8Rows(WIDTH - ROPE, ROPE, 130), rows)
    chunk = filled(Fp8Rows(WIDTH - ROPE, ROPE, num), 1, device)
    entries = None if ratio == 0 else paged(Fp8Rows(WIDTH - ROPE, ROPE, 256 // ratio), rows)
    selected = None
    if kind == "chosen":
        selected = choices(rows, ratio, 128)
    args = (
        4 * torch.randn(num, HEADS, WIDTH, device=device).bfloat16(),
        torch.randn(HEADS, device=device),
        WindowKeys(rows, ring, chunk, entries, selected, 128, ratio),
        *rope_cos_sin(rows.positions, torch.rand(ROPE // 2, device=device)),
    )
    wanted = triton_attention.window_attention(*args, scale=WIDTH**-0.5)
    assert wanted.isfinite().all()
    wanted = wanted.view(num * GROUPS, -1)
    gpu = Device.open("sm90a", device)
    facts = {"scale": WIDTH**-0.5, "num_groups": GROUPS}
    for _ in range(2):
        found = attend_chunk(gpu.launcher, *args, **facts, tiled=False)
        codes, scale = quantise(gpu.launcher, wanted)
        off = ((found.codes != codes).any(1) | (found.scale != scale).any(1)).view(num, -1).any(1)
        assert not off.any(), f"{int(off.sum())} of {num} rows differ"
        found = attend_chunk(gpu.launcher, *args, **facts, tiled=True)
        laid = make_tiles(gpu.launcher, wanted, work=gpu.group_work(GROUPS, num, TILE_ROWS))
        assert found.tiles is not None
        assert torch.equal(found.tiles.data, laid.data)


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (16, 256), (64, 512)])
def test_tiles_join_to_the_bits_of_whole_rows(
    heads: int, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows enough that a sum in another order shows, of models of every size."""
    rows = make_rows([(0, 200), (300, 301), (500, 700)], short=False, device=device)
    num = len(rows.positions)
    keys = WindowKeys(
        rows,
        ringed(Fp8Rows(dim - ROPE, ROPE, 130), rows),
        filled(Fp8Rows(dim - ROPE, ROPE, num), 1, device),
        paged(Fp8Rows(dim - ROPE, ROPE, 64), rows),
        None,
        128,
        4,
    )
    angles = rope_cos_sin(rows.positions, torch.rand(ROPE // 2, device=device))
    q = 4 * torch.randn(num, heads, dim, device=device).bfloat16()
    given = q, torch.randn(heads, device=device), keys, *angles
    found = []
    for most in (0, 1 << 20):
        monkeypatch.setattr(triton_attention, "MAX_PARTS", most)
        found.append(triton_attention.window_attention(*given, scale=dim**-0.5))
    assert found[0].isfinite().all()
    off = (found[0] != found[1]).flatten(1).any(1)
    assert not off.any(), f"{int(off.sum())} of {num} rows differ"


@pytest.mark.parametrize("kind", ["window", "every", "chosen"])
def test_few_rows_have_the_bits_of_tiles(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tiles in all, whose values are divided, and many."""
    if device_arch(device) != "sm90a":
        pytest.skip("the kernel is sm_90a's")
    monkeypatch.setattr(row_attention, "FILLING_TILES", 8)
    launcher = Device.open("sm90a", device).launcher
    for pieces in ([(0, 1)], [(700, 703)], [(p, p + 1) for p in (3, 60, 64, 127, 300, 511, 700)]):
        rows = make_rows(pieces, short=True, device=device, fill=len(pieces) // 7)
        num, ratio = len(rows.positions), {"window": 0, "every": 128, "chosen": 4}[kind]
        ring = ringed(Fp8Rows(WIDTH - ROPE, ROPE, 130), rows)
        entries = None if ratio == 0 else paged(Fp8Rows(WIDTH - ROPE, ROPE, 256 // ratio), rows)
        selected = None
        if kind == "chosen":
            selected = choices(rows, ratio, 128)
        q, sink = 4 * torch.randn(num, HEADS, WIDTH, device=device).bfloat16(), torch.randn(HEADS)
        keys = WindowKeys(rows, ring, None, entries, selected, 128, ratio)
        angles = rope_cos_sin(rows.positions, torch.rand(ROPE // 2, device=device))
        assert row_attention.fits(keys)
        torch.cuda.synchronize()  # what keys are read ahead of the kernel before
        given, facts = (q, sink.to(device), keys, *angles), {"scale": WIDTH**-0.5, "num_groups": 8}
        wanted = triton_attention.window_attention_q(*given, **facts).decoded()
        found = row_attention.attend(launcher, *given, **facts)
        assert torch.equal(found.decoded(), wanted)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("form", [Fp8LatentRows(512, 64, 64), Nvfp4LatentRows(512, 64, 64)])
def test_latents_have_the_bits_of_tiles(
    form: Fp8LatentRows | Nvfp4LatentRows, heads: int, device: torch.device
) -> None:
    if device_arch(device) != "sm90a":
        pytest.skip("the kernel is sm_90a's")
    pieces = [(0, 200), (300, 301), (500, 760), (60, 70)]
    rows = make_rows(pieces, short=True, device=device, page_size=64, fill=3)
    nowhere = torch.full_like(rows.page_table[:1], -1)
    rows.page_rows[-3:] = len(rows.page_table)
    rows = replace(rows, page_table=torch.cat((rows.page_table, nowhere)))
    num = len(rows.positions)
    selected = choices(rows, 1, 512)
    query = 4 * torch.randn(num, heads, 576, device=device).bfloat16()
    args = query, paged(form, rows), selected, rows
    wanted = triton_mla_attention.attend_selected(
        *args, scale=1 / 16, latent_dim=512, least_heads=64
    )
    launcher = Device.open("sm90a", device).launcher
    assert wanted.isfinite().all()
    for _ in range(2):
        found = device_latents.attend_chosen(launcher, *args, scale=1 / 16)
        off = (found != wanted).flatten(1).any(1)
        gap = (found.float() - wanted.float()).abs().max()
        assert not off.any(), f"{int(off.sum())} of {num} rows differ, by {float(gap)}"
