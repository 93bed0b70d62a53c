"""A layer whose experts are fetched when they are asked for, in emulation: the bits of one whose
experts are all there, however it is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from moet.kernels import device_gemm
from moet.kernels.device_gemm import Device
from moet.kernels.expert_cache import CacheTables
from moet.kernels.expert_cache_device import CachedTable, DeviceCache, FetchList, HostRows
from moet.kernels.moe import ExpertTable
from moet.kernels.split_experts import SplitTable
from tests.kernels import emulation
from tests.kernels.emulation import Emulator
from tests.kernels.test_device_gemm import rows
from tests.kernels.test_device_moe import DIM, EXPERTS, STREAM_ROWS, VOCAB, Layer, paired


@pytest.fixture
def device(launcher: Emulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(device_gemm, "STREAM_ROWS", STREAM_ROWS)
    more = emulation.build(("expert_cache",), launcher.sm, num_sms=3)
    both = replace(launcher, libraries=(*launcher.libraries, *more.libraries))
    return Device.around(both, f"sm{launcher.sm}a", "cpu")


def cached(layer: Layer, device: Device, num_slots: int) -> tuple[CachedTable, torch.Tensor]:
    """The layer's table as a pool of so many slots over its rows in host memory, by expert."""
    host = layer.table.rows[layer.table.slot_of].contiguous()
    pool = torch.zeros(num_slots, host.shape[1], dtype=torch.uint8)
    tables = CacheTables.empty(EXPERTS, num_slots)
    cache = DeviceCache(
        device.launcher,
        pool,
        tables,
        HostRows(
            torch.tensor([host.data_ptr()]),
            EXPERTS,
            torch.arange(EXPERTS, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        ),
        FetchList.on("cpu", EXPERTS, 1),
        device.error,
        num_ctas=2,
    )
    table = CachedTable(
        layer.table.format, pool, tables.slot_of, layer.table.bases, cache=cache, first_row=0
    )
    return table, host


@pytest.mark.parametrize("quick", [False, True])
def test_fetched_experts_make_the_bits_of_resident_ones(device: Device, quick: bool) -> None:
    layer = Layer(device, hashed=True)
    if quick:
        layer, device = paired(layer, device)
    x, positions = rows(STREAM_ROWS + 2, DIM), torch.arange(STREAM_ROWS + 2)
    resident = layer.table
    table, _host = cached(layer, device, num_slots=4)
    for first in range(4):
        ids = (positions[:1] + 7 * first) % VOCAB
        layer.table = resident
        expected = layer.on(device, x[first : first + 1], ids, positions[:1])
        layer.table = table
        assert torch.equal(layer.on(device, x[first : first + 1], ids, positions[:1]), expected)
    hits, misses, _ = cast(DeviceCache, table.cache).wanted.counters[0].tolist()
    assert hits + misses == 8
    assert misses >= 4
    layer.table = resident
    many, _host = cached(layer, device, num_slots=EXPERTS)
    ids = positions * 5 % VOCAB
    expected = layer.on(device, x, ids, positions)
    layer.table = many
    assert torch.equal(layer.on(device, x, ids, positions), expected)
    assert int(device.error) == 0


def test_experts_of_two_tables_make_the_bits_of_one(device: Device) -> None:
    layer = Layer(device, hashed=True)
    x, positions = rows(STREAM_ROWS + 2, DIM), torch.arange(STREAM_ROWS + 2)
    ids = positions * 5 % VOCAB
    expected = layer.on(device, x, ids, positions)
    hot_ids, whole = torch.tensor([0, 3, 4]), layer.table
    slot_of = torch.full((EXPERTS,), -1)
    slot_of[hot_ids] = torch.arange(3)
    hot = ExpertTable(whole.format, whole.rows[whole.slot_of[hot_ids]], slot_of, whole.bases)
    base, host = cached(layer, device, num_slots=EXPERTS - 3)
    host[hot_ids] = 0
    layer.table = SplitTable.over(base, hot)
    assert torch.equal(layer.on(device, x[:3], ids[:3], positions[:3]), expected[:3])
    assert torch.equal(layer.on(device, x, ids, positions), expected)
    assert int(device.error) == 0
    assert int(base.slot_of[hot_ids].max()) == -1, "what is hot was fetched"
