"""Rows come from disk over host memory into slots, whole or not at all, at any sizes."""

from __future__ import annotations

import random
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import CapacityError, ConfigError, ExpertReadError
from moet.runtime.experts import host as host_module
from moet.runtime.experts import tiered as tiered_module
from moet.runtime.experts.host import Arena
from tests.runtime.experts.rig import EXPERTS, LAYERS, NUM_EXPERTS, ROW_BYTES, Rig, one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_slots=st.integers(6, EXPERTS.num_rows),
    num_places=st.integers(1, EXPERTS.num_rows),
    num_static=st.integers(0, 3),
)
def test_what_is_asked_for_is_there_at_any_sizes(
    folder: Path, seed: int, num_slots: int, num_places: int, num_static: int
) -> None:
    rig, draw = Rig(folder), random.Random(seed)
    static = draw.sample(range(EXPERTS.num_rows), num_static)
    store = rig.store(num_slots + num_static, num_places, static_rows=static)
    for _ in range(12):
        for layer_idx in LAYERS:
            ids = torch.randint(-1, NUM_EXPERTS, (2, 3))
            rig.verify(store.resolve(layer_idx, ids), layer_idx, ids)
    rig.verify_slots(store)
    store.check()
    stats = store.stats()
    assert stats.total("num_bytes") == stats.total("num_misses") * ROW_BYTES
    store.close()


def test_counts_and_the_arena_as_victim_cache(rig: Rig) -> None:
    store = rig.store(num_slots=2, num_places=4)
    store.resolve(1, one(0, 1))
    store.resolve(1, one(0, 1))
    store.resolve(1, one(2, 3))  # 0 and 1 leave the pool; their bytes are still in memory
    assert store.stats().num_disk_reads == 4
    store.resolve(1, one(0, 1))
    stats = store.stats()
    assert stats.num_disk_reads == 4
    assert stats.num_host_hits == 2
    assert [(x.num_hits, x.num_misses) for x in stats.layers] == [(2, 6), (0, 0), (0, 0)]
    store.close()


def test_static_rows_take_part_in_nothing(rig: Rig) -> None:
    static = [EXPERTS.row(1, 7), EXPERTS.row(5, 0)]
    store = rig.store(4, 8, static_rows=static)
    for expert_id in range(0, 14, 2):
        store.resolve(2, one(expert_id, expert_id + 1))
    reads = len(rig.disk.order)
    table = store.resolve(1, one(7))
    rig.verify(table, 1, one(7))
    assert len(rig.disk.order) == reads
    with pytest.raises(CapacityError):
        store.resolve(2, one(0, 1, 2))
    store.check()
    store.close()


def test_short_reads_are_read_on(rig: Rig) -> None:
    rig.disk.short = 4096
    store = rig.store(4, 8)
    rig.verify(store.resolve(2, one(1, 9)), 2, one(1, 9))
    store.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("bad", "Input/output error"),
        ("cut", "ends after 4096 of 8192 bytes"),
        ("slow", "not read after 0.1 s"),
        ("damaged", "its checksum is not the pack's"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_costs_nothing_else(
    rig: Rig, fault: str, words: str
) -> None:
    store = rig.store(6, 8)
    bad = EXPERTS.row(2, 9)
    getattr(rig.disk, fault).add(bad)
    rig.disk.slow_s = 1.0
    store.resolve(2, one(1, 2, 8))
    store.host.read_timeout_s = 0.1 if fault == "slow" else 10.0
    with pytest.raises(ExpertReadError, match=rf"experts.w2, row {bad} \(expert 9\): .*{words}"):
        store.resolve(2, one(1, 8, 9, 10))
    store.device.check()
    rig.verify_slots(store)
    assert store.device.slot_of(bad) < 0
    rig.verify(store.resolve(2, one(1, 2)), 2, one(1, 2))
    tries = rig.disk.order.count(bad)
    with pytest.raises(ExpertReadError, match=words):  # at once, without another try
        store.resolve(2, one(9))
    assert rig.disk.order.count(bad) == tries
    getattr(rig.disk, fault).clear()
    store.host.read_timeout_s = 10.0
    store.host._failures.clear()  # time passes
    rig.verify(store.resolve(2, one(8, 9, 10)), 2, one(8, 9, 10))
    store.check()
    assert store.stats().num_disk_errors == 1
    store.close()


def test_prompts_pass_by_the_pool(rig: Rig) -> None:
    store = rig.store(6, 8, scan_from_rows=5, num_staging=3)
    hot = one(1, 2, 3)
    store.resolve(1, hot)
    slots, uses = store.device.tables.slot_of.clone(), store.device.tables.uses.clone()
    kept = store.host.rows()
    rig.disk.order.clear()
    ids = torch.tensor([[9, 2], [4, 9], [11, 12], [1, 0], [14, 13]])
    table = store.resolve(1, ids)
    for expert_id in dict.fromkeys(ids.flatten().tolist()):  # as the mixture goes over them
        row = EXPERTS.row(1, expert_id)
        assert torch.equal(table.matrices(expert_id)[0], rig.rows[row])
    assert rig.disk.order == [9, 4, 11, 12, 0, 14, 13]
    assert store.staging.most_at_once <= 3
    assert torch.equal(store.device.tables.slot_of, slots)
    assert torch.equal(store.device.tables.uses, uses)
    assert all(store.host.holds(row) for row in kept)
    assert (store.stats().layers[0].num_streamed, store.stats().layers[0].num_hits) == (7, 2)
    store.check()
    store.close()


def test_a_prompt_whose_row_fails_holds_nothing(rig: Rig) -> None:
    store = rig.store(6, 8, scan_from_rows=2)
    rig.disk.bad.add(EXPERTS.row(1, 5))
    table = store.resolve(1, torch.tensor([[4, 5], [6, 7]]))
    table.matrices(4)
    with pytest.raises(ExpertReadError, match="row 5"):
        table.matrices(5)
    store.resolve(2, one(0))
    store.check()
    store.close()


def test_resize_keeps_what_is_used(rig: Rig) -> None:
    store = rig.store(8, 8, static_rows=[EXPERTS.row(5, 3)])
    for _ in range(3):
        store.resolve(1, one(0, 1, 2))
    store.resolve(1, one(8, 9))
    store.resize(4)
    reads = len(rig.disk.order)
    rig.verify(store.resolve(1, one(0, 1, 2)), 1, one(0, 1, 2))
    rig.verify(store.resolve(5, one(3)), 5, one(3))
    assert len(rig.disk.order) == reads
    store.resize(20)
    rig.verify_slots(store)
    rig.verify(store.resolve(1, one(0, 1, 2)), 1, one(0, 1, 2))
    with pytest.raises(CapacityError, match="no room beside 1 static"):
        store.resize(1)
    store.check()
    store.close()


def test_heat_begins_where_the_last_run_ended(rig: Rig) -> None:
    store = rig.store(4, 8)
    for expert_id in (3, 3, 5, 5, 5, 9, 12):
        store.resolve(2, one(expert_id))
    heat = store.heat()
    store.close()
    assert set(heat) == {EXPERTS.row(2, e) for e in (3, 5, 9, 12)}
    again = rig.store(2, 8)
    assert again.preheat(heat) == 2
    reads = len(rig.disk.order)
    again.resolve(2, one(5, 3))
    again.resolve(2, one(9, 12))
    assert len(rig.disk.order) == reads, "memory was not warm"
    assert again.stats().total("num_hits") == 2
    again.check()
    again.close()


def test_a_pool_that_is_too_small_is_told_with_the_knob(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiered_module, "WATCHED", 20)
    store = rig.store(2, 8)
    for expert_id in range(9):
        store.resolve(1, one(expert_id, expert_id + 1))
    assert not caplog.records
    store.resolve(1, one(9, 10))
    [record] = caplog.records
    assert "45 % of the last 20 were in the pool of 2 slots of 48 rows; --expert-pool" in (
        record.getMessage()
    )
    store.close()


def test_memory_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def refuse(num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        if len(taken) == 2:
            raise OSError(12, "Cannot allocate memory")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host_module, "page_aligned", refuse)
    with pytest.raises(ConfigError, match=r"32768 bytes.*after 16384; lower --host-experts"):
        Arena(4, ROW_BYTES, chunk_bytes=2 * ROW_BYTES)
    taken.clear()
    with pytest.raises(ConfigError, match=r"32768 bytes.*after 16384"):
        Arena(4, ROW_BYTES, chunk_bytes=2 * ROW_BYTES, least=3)


def test_an_arena_is_taken_in_chunks_and_says_how_far_it_is() -> None:
    seen: list[tuple[int, int]] = []
    arena = Arena(
        5,
        ROW_BYTES,
        chunk_bytes=2 * ROW_BYTES,
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert [len(chunk) for chunk in arena.chunks] == [2, 2, 1]
    assert seen == [(n * ROW_BYTES, 5 * ROW_BYTES) for n in (2, 4, 5)]
    arena.place(4).fill_(7)
    assert int(arena.chunks[2][0, 0]) == 7
    assert arena.place(3).data_ptr() % 4096 == 0


def test_storm(rig: Rig) -> None:
    """600 rounds of steps, prompts, faults, resizes and a reader of statistics beside them."""
    draw, generator = random.Random(11), torch.Generator().manual_seed(11)
    store = rig.store(10, 12, static_rows=[40, 41], scan_from_rows=8, timeout_s=0.1)
    rig.disk.slow_s = 0.2
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            store.stats()
            store.heat()

    watcher = threading.Thread(target=watch)
    watcher.start()
    failed = 0
    try:
        for round_number in range(600):
            if round_number % 20 == 0:
                rows = range(EXPERTS.num_rows)
                rig.disk.bad = set(draw.sample(rows, draw.choice([0, 0, 3])))
                rig.disk.cut = set(draw.sample(rows, draw.choice([0, 2])))
                rig.disk.slow = set(draw.sample(rows, draw.choice([0, 0, 1])))
                store.host._failures.clear()
            if round_number % 50 == 49:
                store.resize(draw.randint(8, 16))
            layer_idx, num_tokens = draw.choice(LAYERS), draw.choice([1, 1, 2, 9])
            ids = torch.randint(0, NUM_EXPERTS, (num_tokens, 2), generator=generator)
            try:
                table = store.resolve(layer_idx, ids)
                for expert_id in dict.fromkeys(ids.flatten().tolist()):
                    row = EXPERTS.row(layer_idx, expert_id)
                    assert torch.equal(table.matrices(expert_id)[0], rig.rows[row])
            except ExpertReadError:
                failed += 1
            if round_number % 10 == 0:
                rig.verify_slots(store)
                store.device.check()
                store.host.check()
    finally:
        stop.set()
        watcher.join()
    assert 20 < failed < 500
    rig.disk.bad, rig.disk.cut, rig.disk.slow = set(), set(), set()
    places = store.host._places
    wait([place.reading for place in places if place.reading is not None])
    store.host._failures.clear()
    for layer_idx in LAYERS:
        for expert_id in range(NUM_EXPERTS):
            rig.verify(store.resolve(layer_idx, one(expert_id)), layer_idx, one(expert_id))
    rig.verify_slots(store)
    store.check()
    store.close()
