"""A device's pool over an arena over a file that fails now and then, and many rounds of it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from moet.kernels.expert_cache_device import ERROR_READ
from moet.kernels.layout import W2Rows
from moet.kernels.stream_gemm import Launcher
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.feeder import RowFeeder
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import Arena, mapped_numbers

LAYERS, NUM_EXPERTS, NUM_SLOTS = (1, 2, 5), 16, 20
NUM_ROWS = len(LAYERS) * NUM_EXPERTS
FORM = W2Rows(64, 32)


class FlakyFile:
    """Stands in for preadv: rows in `bad` fail with EIO, and `failed` has those that ever did."""

    def __init__(self, row_bytes: int = FORM.row_bytes) -> None:
        self.row_bytes = row_bytes
        self.bad: set[int] = set()
        self.failed: set[int] = set()

    def preadv(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        row = offset // self.row_bytes
        if row in self.bad:
            self.failed.add(row)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, buffers, offset)


def storm(launcher: Launcher, device: torch.device, folder: Path, rounds: int) -> dict[str, int]:
    """Rounds of a layer each: what it asks for is there byte for byte, or has no slot and had a
    fault. Slots are emptied at random. Returns what happened how often."""
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    content = torch.randint(
        0, 256, (NUM_ROWS, FORM.row_bytes), dtype=torch.uint8, generator=generator
    )
    (folder / "rows").write_bytes(content.numpy().tobytes())
    pin, flaky = device.type == "cuda", FlakyFile()
    arena = Arena(2 * NUM_EXPERTS, FORM.row_bytes, pin=pin, chunk_bytes=7 * FORM.row_bytes)
    place_of = mapped_numbers(NUM_ROWS, -1, pin=pin)
    requests = mapped_numbers(1 + 64, 0, pin=pin)
    file = RowFile(folder / "rows", FORM.row_bytes, preadv=flaky.preadv)
    feeder = RowFeeder(
        arena,
        file,
        place_of,
        requests,
        file_rows=range(NUM_ROWS),
        in_flight=NUM_EXPERTS,
        retry_after_s=0.005,
    )
    host = HostSide(arena=arena, place_of=place_of, requests=requests, feeder=feeder)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    bases = torch.zeros(NUM_ROWS, 1, dtype=torch.uint8, device=device)
    cached = CachedExperts(launcher, FORM, host, bases, LAYERS, NUM_SLOTS, error=error, timeout_s=5)
    on_device = content.to(device)
    feeder.start()
    happened = {"lost": 0, "emptied": 0}
    for _ in range(rounds):
        place = draw.randrange(len(LAYERS))
        flaky.bad = set(draw.sample(range(NUM_ROWS), 6)) if draw.random() < 0.3 else set()
        if draw.random() < 0.2:
            slot = draw.randrange(NUM_SLOTS)
            row = int(cached.tables.row_of[slot])
            if row >= 0:
                cached.tables.slot_of[row], cached.tables.row_of[slot] = -1, -1
                happened["emptied"] += 1
        ids = torch.tensor([draw.sample(range(NUM_EXPERTS), draw.randint(1, NUM_EXPERTS))])
        table = cached.resolve(LAYERS[place], ids.to(device))
        slots, bits = table.slot_of[ids[0].to(device)].tolist(), int(error)
        error.zero_()
        rows = [place * NUM_EXPERTS + expert for expert in ids[0].tolist()]
        lost = {row for row, slot in zip(rows, slots, strict=True) if slot < 0}
        assert bits == (ERROR_READ if lost else 0)
        assert lost <= flaky.failed
        kept = [(row, slot) for row, slot in zip(rows, slots, strict=True) if slot >= 0]
        if kept:
            there, where = (torch.tensor(part, device=device) for part in zip(*kept, strict=True))
            assert torch.equal(table.rows[where], on_device[there])
        cached.tables.check()
        happened["lost"] += len(lost)
    cached.check()
    stats = cached.stats()
    assert stats.total("num_misses") >= stats.num_disk_reads > NUM_ROWS
    assert (stats.num_disk_errors > 0) == (happened["lost"] > 0)
    cached.close()
    feeder.check()
    return happened | {"reads": stats.num_disk_reads, "errors": stats.num_disk_errors}
