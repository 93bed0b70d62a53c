"""The cache that a device keeps by itself, its kernels in emulation."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from moet.kernels.device_gemm import Device
from moet.kernels.expert_cache import CacheTables, resolve
from moet.kernels.layout import W2Rows
from moet.kernels.moe import ExpertTable
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.synthetic import write_checkpoint
from moet.runtime.experts import host, open_gpu
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import Arena, page_aligned
from moet.runtime.experts.open_gpu import open_cached
from moet.runtime.experts.sizes import TierSizes
from tests.kernels import emulation
from tests.kernels.emulation import Emulator

LAYERS, NUM_EXPERTS = (0, 3), 8
FORM = W2Rows(64, 32)


@pytest.fixture(scope="module")
def kernels() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("expert_cache",), 90, num_sms=2)


def chosen(table: ExpertTable, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of the experts as the choice of a step makes it, and its length."""
    experts = ids.unique()
    made = torch.full((ids.numel() + 1, 4), 99, dtype=torch.int32)
    made[: len(experts), 0] = table.slot_of[experts].int()
    made[: len(experts), 1] = experts.int()
    return made, torch.tensor([len(experts)], dtype=torch.int32)


@pytest.mark.parametrize("listed", [False, True])
def test_every_table_has_its_rows_when_it_is_prepared(kernels: Emulator, listed: bool) -> None:
    num_rows = len(LAYERS) * NUM_EXPERTS
    arena = Arena(num_rows, FORM.row_bytes, chunk_bytes=5 * FORM.row_bytes)
    generator = torch.Generator().manual_seed(2)
    for row in range(num_rows):
        arena.place(row).random_(0, 256, generator=generator)
    bases = torch.zeros(num_rows, 1, dtype=torch.uint8)
    error = torch.zeros(1, dtype=torch.int32)
    host = HostSide(arena=arena)
    experts = CachedExperts(
        *(kernels, FORM, host, bases, LAYERS, 6), error=error, overlap=False, num_ctas=2
    )
    expected = CacheTables.empty(num_rows, 6)
    draw, hits, misses = random.Random(1), 0, 0
    for step in range(3 if listed else 8):
        for n, layer_idx in enumerate(LAYERS):
            num_likely = NUM_EXPERTS if step % 3 == 0 else 3
            ids = torch.tensor([draw.sample(range(num_likely), 3) for _ in range(1 + step % 2)])
            table = experts.resident(layer_idx)
            lists = [chosen(table, ids)] if listed else []
            table.prepare(ids, *lists)
            table.join()
            for entries, length in lists:
                there = entries[: int(length)]
                assert torch.equal(there[:, 0].long(), table.slot_of[there[:, 1].long()])
            found = resolve(expected, ids, n * NUM_EXPERTS, NUM_EXPERTS)
            hits, misses = hits + found.num_hits, misses + len(found.rows)
            for expert_id in set(ids.flatten().tolist()):
                slot = int(table.slot_of[expert_id])
                row = n * NUM_EXPERTS + expert_id
                assert slot == int(expected.slot_of[row])
                assert torch.equal(table.rows[slot], arena.place(row))
    assert experts.counts() == (hits, misses)
    assert hits > 5
    assert int(error) == 0
    assert torch.equal(experts.tables.uses, expected.uses)
    held = set(experts.heat())
    experts.resize(9)
    assert set(experts.heat()) == held
    experts.resize(4)
    assert len(set(experts.heat()) & held) == 4
    experts.check()


def test_a_pack_opens_with_its_rows_in_host_memory_or_as_many_as_it_holds(
    kernels: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_checkpoint(tmp_path / "checkpoint", size="tiny")
    options = ConvertOptions(num_workers=1)
    pack = convert(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "pack", options)
    error, counters = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    device = Device("sm90a", torch.device("cpu"), kernels, error, counters)
    layers = pack.experts.layers[1:4]
    seen: list[tuple[int, int]] = []
    sizes = TierSizes(num_slots=5, num_static=0, num_places=48, num_staging=2, num_rows=48)
    chunk_bytes = 9 * pack.format("w2").row_bytes
    monkeypatch.setattr(open_gpu, "Arena", partial(Arena, chunk_bytes=chunk_bytes))
    num_chunks = 0

    def refuse(num_bytes: int) -> torch.Tensor:
        nonlocal num_chunks
        num_chunks += num_bytes == chunk_bytes
        if num_chunks == 5 and num_bytes == chunk_bytes:
            raise OSError(12, "Cannot allocate memory")
        return page_aligned(num_bytes)

    def opened(*tried: int) -> CachedExperts:
        experts = open_cached(
            *(pack, "w2", layers, device, sizes),
            progress=lambda done, total: seen.append((done, total)),
        )
        for layer_idx in tried:
            ids = torch.tensor([[3, 0, 7], [3, 15, 7]])
            table = experts.resolve(layer_idx, ids)
            assert table.bases is not None
            for expert_id in (0, 3, 7, 15):
                row = table.rows[table.slot_of[expert_id]]
                assert torch.equal(row, pack.expert_row("w2", layer_idx, expert_id))
                base = pack.row_base("w2", layer_idx, expert_id)
                assert torch.equal(table.bases[expert_id], base)
        assert int(error) == 0
        experts.close()
        return experts

    assert opened(*layers[:2]).stats().num_host_places == 48
    assert len(seen) == 6
    assert not caplog.records
    monkeypatch.setattr(host, "page_aligned", refuse)
    fewer = opened(layers[2]).stats()
    assert (fewer.num_host_places, fewer.num_disk_reads) == (36, 2)
    [record] = caplog.records
    assert "other rows are read from disk" in record.getMessage()
