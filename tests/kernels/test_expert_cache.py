"""The slot table: the reference by its rules, and the kernels against the reference."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moet.errors import CapacityError
from moet.kernels.expert_cache import MAX_USES, STATIC_USES, CacheTables, fetch, resolve
from moet.kernels.expert_cache_device import (
    ERROR_CAPACITY,
    ERROR_READ,
    ERROR_TIMEOUT,
    FetchList,
    HostRows,
    fetch_on_device,
    resolve_on_device,
)
from tests.kernels import emulation
from tests.kernels.emulation import Emulator

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 12, 3
NUM_ROWS = NUM_LAYERS * NUM_EXPERTS


def ids_of(*experts: int) -> Tensor:
    return torch.tensor([experts])


def trace(
    seed: int, num_calls: int, num_experts: int = NUM_EXPERTS
) -> Iterator[tuple[int, Tensor]]:
    """Layers in turn and what their routers ask for: some experts far more often than others."""
    draw = random.Random(seed)
    weights = [1.0 / (1 + e) for e in range(num_experts)]
    for call in range(num_calls):
        num_tokens = draw.choice([1, 1, 3])
        ids = [draw.choices(range(num_experts), weights, k=TOP_K) for _ in range(num_tokens)]
        if draw.random() < 0.2:
            ids.append([-1] * TOP_K)
        yield call % NUM_LAYERS * num_experts, torch.tensor(ids)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), num_slots=st.integers(9, NUM_ROWS), num_static=st.integers(0, 3))
def test_a_call_leaves_what_it_asked_for_resident(
    seed: int, num_slots: int, num_static: int
) -> None:
    tables = CacheTables.empty(NUM_ROWS, num_slots + num_static)
    for slot in range(num_static):
        row = NUM_ROWS - 1 - slot
        tables.slot_of[row], tables.row_of[slot], tables.uses[slot] = slot, row, STATIC_USES
    for first_row, ids in trace(seed, 40):
        before = tables.slot_of.clone()
        found = resolve(tables, ids, first_row, NUM_EXPERTS)
        tables.check()
        wanted = {first_row + e for e in ids.flatten().tolist() if e >= 0}
        assert all(tables.slot_of[row] >= 0 for row in wanted)
        assert found.rows == sorted(row for row in wanted if before[row] < 0)
        assert found.num_hits == len(wanted) - len(found.rows)
        assert not wanted & set(found.evicted), "a row that the call needs has left for another"
        gone = {r for r in range(NUM_ROWS) if before[r] >= 0 and tables.slot_of[r] < 0}
        assert gone == {row for row in found.evicted if row >= 0}
        assert (tables.slot_of[NUM_ROWS - num_static :] >= 0).all()


def test_what_is_used_often_stays() -> None:
    tables = CacheTables.empty(100, 3)
    resolve(tables, ids_of(0, 1, 2), 0, 100)
    for _ in range(MAX_USES + 2):
        resolve(tables, ids_of(1), 0, 100)
    for new in range(10, 10 + MAX_USES):
        resolve(tables, ids_of(new), 0, 100)
        assert tables.slot_of[1] >= 0
    assert int(tables.uses.max()) <= MAX_USES


def test_one_more_than_fits_changes_nothing() -> None:
    tables = CacheTables.empty(NUM_ROWS, 4)
    resolve(tables, ids_of(0, 1, 2, 3), 0, NUM_EXPERTS)
    before = [t.clone() for t in (tables.slot_of, tables.row_of, tables.uses, tables.hand)]
    with pytest.raises(CapacityError, match="5 experts of a layer"):
        resolve(tables, ids_of(0, 1, 2, 3, 4), 0, NUM_EXPERTS)
    after = (tables.slot_of, tables.row_of, tables.uses, tables.hand)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    resolve(tables, ids_of(5, 6, 7, 8), NUM_EXPERTS, NUM_EXPERTS)  # another layer takes all of them
    assert int(tables.slot_of[:NUM_EXPERTS].max()) == -1


def test_fetch_copies_rows() -> None:
    source = torch.arange(5 * 4, dtype=torch.uint8).view(5, 4)
    pool = torch.zeros(3, 4, dtype=torch.uint8)
    fetch(pool, source, [4, 1], [0, 2])
    assert torch.equal(pool, torch.stack([source[4], torch.zeros(4, dtype=torch.uint8), source[1]]))


# The kernels


@pytest.fixture(scope="module")
def kernels() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("expert_cache",), 90, num_sms=3)


def same(a: CacheTables, b: CacheTables) -> bool:
    pairs = ((a.slot_of, b.slot_of), (a.row_of, b.row_of), (a.uses, b.uses), (a.hand, b.hand))
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "num_calls"), [(9, 12, 40), (31, 12, 40), (1500, 700, 12)]
)
def test_resolve_kernel_equals_the_reference(
    kernels: Emulator, num_slots: int, num_experts: int, num_calls: int
) -> None:
    """Windows that wrap, more slots than threads, static slots, duplicate and empty ids."""
    num_rows = NUM_LAYERS * num_experts
    expected, found = (CacheTables.empty(num_rows, num_slots) for _ in range(2))
    for tables in (expected, found):
        tables.slot_of[num_rows - 1], tables.row_of[4], tables.uses[4] = (
            4,
            num_rows - 1,
            STATIC_USES,
        )
    out, error = FetchList.on("cpu", num_experts, NUM_LAYERS), torch.zeros(1, dtype=torch.int32)
    hits = misses = 0
    generator = torch.Generator().manual_seed(5)
    for first_row, ids in trace(7, num_calls, num_experts):
        if num_slots > 1024:  # fill and turn over a large pool in a few calls
            ids = torch.randint(0, num_experts, (400,), generator=generator)
        want = resolve(expected, ids, first_row, num_experts)
        experts = ids.flatten().unique()[-3:].clamp(min=0)
        listed = torch.full((5, 4), 9 << 16, dtype=torch.int32)
        listed[:3, 1] += experts[[0, -1, 0]].int()
        resolve_on_device(
            kernels,
            found,
            ids,
            out,
            first_row=first_row,
            num_experts=num_experts,
            error=error,
            lists=[(listed, torch.tensor([3], dtype=torch.int32))],
        )
        assert same(found, expected)
        slots = expected.slot_of[first_row + experts[[0, -1, 0]]].tolist()
        assert listed[:, 0].tolist() == [*slots, 9 << 16, 9 << 16]
        count = int(out.count)
        assert out.rows[:count].tolist() == want.rows
        assert out.slots[:count].tolist() == want.slots
        hits, misses = hits + want.num_hits, misses + len(want.rows)
        assert out.counters.sum(0).tolist() == [hits, misses, 0]
    assert int(error) == 0
    assert hits > 0


def test_resolve_kernel_says_that_slots_are_too_few(kernels: Emulator) -> None:
    tables = CacheTables.empty(NUM_ROWS, 4)
    out, error = FetchList.on("cpu", NUM_EXPERTS, NUM_LAYERS), torch.zeros(1, dtype=torch.int32)
    resolve_on_device(
        kernels,
        tables,
        torch.arange(6),
        out,
        first_row=0,
        num_experts=NUM_EXPERTS,
        error=error,
    )
    assert int(error) == ERROR_CAPACITY
    assert int(out.count) == 4
    tables.check()


ROW_BYTES = 40_960 + 4096  # two pieces and a part of one


def host_rows(
    num_rows: int, rows_per_chunk: int, requests: Tensor | None = None
) -> tuple[list[Tensor], HostRows]:
    generator = torch.Generator().manual_seed(1)
    num_chunks = -(-num_rows // rows_per_chunk)
    chunks = [
        torch.randint(0, 256, (rows_per_chunk, ROW_BYTES), dtype=torch.uint8, generator=generator)
        for _ in range(num_chunks)
    ]
    host = HostRows(
        torch.tensor([chunk.data_ptr() for chunk in chunks]),
        rows_per_chunk,
        torch.arange(num_rows, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        requests,
    )
    return chunks, host


def wanted_rows(rows: list[int], slots: list[int]) -> FetchList:
    out = FetchList.on("cpu", NUM_EXPERTS, 1)
    out.rows[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    out.slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    out.count.fill_(len(rows))
    return out


def test_fetch_kernel_copies_rows_of_several_chunks(kernels: Emulator) -> None:
    chunks, host = host_rows(10, 4)
    pool, error = torch.zeros(5, ROW_BYTES, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    tables = CacheTables.empty(10, 5)
    for rows, slots in (([9, 0, 5], [4, 0, 1]), ([], [])):
        wanted = wanted_rows(rows, slots)
        fetch_on_device(kernels, pool, tables, host, wanted, layer=0, error=error, num_ctas=3)
    expected = torch.zeros_like(pool)
    expected[4], expected[0], expected[1] = chunks[2][1], chunks[0][0], chunks[1][1]
    assert torch.equal(pool, expected)
    assert int(error) == int(host.ctas_done) == 0


def test_fetch_kernel_waits_for_rows_from_disk(kernels: Emulator) -> None:
    """A thread plays the disk reader: it hears of a row, writes it, then says where it is."""
    requests = torch.zeros(1 + 8, dtype=torch.int32)
    chunks, host = host_rows(4, 4, requests)
    content = chunks[0][2].clone()
    chunks[0][2] = 0
    host.place_of[2] = -1
    tables = CacheTables.empty(NUM_ROWS, 5)
    out, error = FetchList.on("cpu", NUM_EXPERTS, NUM_LAYERS), torch.zeros(1, dtype=torch.int32)

    def reader() -> None:
        while int(requests[0]) < 2:
            time.sleep(0.001)
        assert set(requests[1:3].tolist()) == {1, 2}
        time.sleep(0.02)
        chunks[0][2] = content
        host.place_of[2] = 2

    thread = threading.Thread(target=reader)
    thread.start()
    pool = torch.zeros(5, ROW_BYTES, dtype=torch.uint8)
    resolve_on_device(
        kernels,
        tables,
        ids_of(1, 2),
        out,
        first_row=0,
        num_experts=NUM_EXPERTS,
        error=error,
        requests=requests,
    )
    fetch_on_device(
        kernels, pool, tables, host, out, layer=0, error=error, num_ctas=2, timeout_s=20
    )
    thread.join()
    assert torch.equal(pool[tables.slot_of[2]], content)
    assert torch.equal(pool[tables.slot_of[1]], chunks[0][1])
    assert int(out.counters[0, 2]) > 0
    assert int(error) == 0


@pytest.mark.parametrize(("place", "expected"), [(-1, ERROR_TIMEOUT), (-2, ERROR_READ)])
def test_fetch_kernel_gives_up_on_one_row_and_copies_the_rest(
    kernels: Emulator, place: int, expected: int
) -> None:
    chunks, host = host_rows(4, 4, torch.zeros(1 + 8, dtype=torch.int32))
    host.place_of[2] = place
    pool, error = torch.zeros(5, ROW_BYTES, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    tables = CacheTables.empty(4, 2)
    wanted = FetchList.on("cpu", 4, 1)
    resolve_on_device(
        kernels, tables, ids_of(2, 3), wanted, first_row=0, num_experts=4, error=error
    )
    fetch_on_device(
        kernels, pool, tables, host, wanted, layer=0, error=error, num_ctas=2, timeout_s=0.01
    )
    assert int(error) == expected
    assert torch.equal(pool[1], chunks[0][3])
    assert tables.slot_of.tolist() == [-1, -1, -1, 1], "what did not come has no slot"
    tables.check()
    assert int(pool[0].max()) == 0
