"""Rows of experts in a file: what a start from it takes, and what steps take while rows that host
memory has no place for are read. For bench.experts."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.experts_rig import GIB, CapturedStep, Rig, compare
from moet.models.pack import digest_of
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.feeder import ON_DISK, RowFeeder
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import Arena, mapped_numbers, page_aligned
from moet.runtime.experts.open_gpu import least_places
from moet.runtime.experts.staged import START_READERS, read_rows
from moet.runtime.experts.store import DeviceExperts

ARENA_SHARE = 0.27
WRITERS = 4
WARM_ROWS = 8  # tokens of a step that warms up
BOTH_STEPS = 60  # more, that both pools see
WARM_S = 20.0


@dataclass(frozen=True, slots=True)
class DiskCase:
    """skew: of the routing. Steps that warm up, and that are timed. direct: past the page cache."""

    skew: float
    warm_steps: int
    num_steps: int
    direct: bool = True


# With the first eight layers and a pool of 19.3 %, hits of 99.5 %, and of 98.7 % as published.
CASES = (
    DiskCase(2.531, 2500, 1500),
    DiskCase(2.2, 800, 800),
    DiskCase(2.2, 0, 800, direct=False),
)

Results = dict[str, Any]


class Watched(RowFeeder):
    """A feeder that remembers what it was asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[int] = []

    def _asked(self) -> list[int]:
        rows = super()._asked()
        self.asked += rows
        return rows


def write_rows(arena: Arena, path: Path, num_rows: int) -> float:
    """The first rows into a file; the seconds that it took."""
    begin = perf_counter()
    with path.open("wb", buffering=0) as out, ThreadPoolExecutor(WRITERS) as writers:

        def write(row: int) -> None:
            content = arena.place(row).numpy().data
            os.pwrite(out.fileno(), content, row * len(content))

        list(writers.map(write, range(num_rows)))
        os.fsync(out.fileno())
    return perf_counter() - begin


def start(rig: Rig, path: Path, num_rows: int) -> Results:
    """Rows from a file into pinned memory, each compared with its checksum, against pinning alone,
    in the same run."""
    row_bytes = rig.form.row_bytes
    rows = rig.resident.rows[:num_rows].cpu()
    with ThreadPoolExecutor(START_READERS) as threads:
        digests = list(threads.map(digest_of, rows))
    begin = perf_counter()
    Arena(num_rows, row_bytes, pin=True).close()
    pinned_s, begin = perf_counter() - begin, perf_counter()
    file = RowFile(path, row_bytes, num_readers=START_READERS, direct=False, digests=digests)
    arena = Arena(
        num_rows,
        row_bytes,
        pin=True,
        fill=lambda first, chunk: read_rows(file, range(first, first + len(chunk)), chunk),
    )
    seconds = perf_counter() - begin
    file.close()
    arena.close()
    begin = perf_counter()
    Arena(num_rows, row_bytes, pin=True).close()
    again_s = perf_counter() - begin
    same = torch.equal(arena.place(num_rows // 2), rows[num_rows // 2])
    size = num_rows * row_bytes / GIB
    return {
        "GiB": round(size, 2),
        "pin alone GiB/s": round(size / pinned_s, 2),
        "pin alone, again, GiB/s": round(size / again_s, 2),
        "start GiB/s": round(size / seconds, 2),
        "of pinning": round(seconds / pinned_s, 2),
        "of pinning again": round(seconds / again_s, 2),
        "same bytes": same,
    }


def one_read(path: Path, row_bytes: int, num_rows: int) -> Results:
    """Milliseconds of a row that nothing else is read beside, by how it is read, and of what could
    check one."""
    buffer, draw, found = page_aligned(row_bytes), Random(1), {}
    for how, direct in (("past the page cache", True), ("from the page cache", False)):
        for num_pieces in (1, 4):
            size = row_bytes // num_pieces
            file, times = RowFile(path, size, direct=direct), []
            for _ in range(15):
                row, begin = draw.randrange(num_rows) * num_pieces, perf_counter()
                pieces = buffer[: size * num_pieces].view(num_pieces, size)
                for reading in [file.read(row + n, piece) for n, piece in enumerate(pieces)]:
                    reading.result()
                times.append(1e3 * (perf_counter() - begin))
            file.close()
            name = how if num_pieces == 1 else f"{how}, in {num_pieces} pieces"
            found[name] = round(median(times), 3)
            found[f"{name}, on average"] = round(mean(times), 3)
    begin = perf_counter()
    hashlib.sha256(buffer.numpy().data).digest()
    found["sha256 of it"] = round(1e3 * (perf_counter() - begin), 3)
    return found


def ideal_reads(asked: list[int], num_places: int, since: int) -> int:
    """Reads after the first `since` requests, if what leaves were always asked for last."""
    turns: defaultdict[int, deque[int]] = defaultdict(deque)
    for turn, row in enumerate(asked):
        turns[row].append(turn)
    here: dict[int, int] = {}
    reads = 0
    for turn, row in enumerate(asked):
        turns[row].popleft()
        if row not in here:
            reads += turn >= since
            if len(here) == num_places:
                del here[max(here, key=lambda other: here[other])]
        here[row] = turns[row][0] if turns[row] else len(asked)
    return reads


def first_layers(rig: Rig, num_layers: int) -> Rig:
    """A model of a rig's first layers, with its rows."""
    small, num_rows = Rig(rig.device, num_layers), num_layers * (len(rig.bases) // len(rig.layers))
    small.resident = DeviceExperts(
        rig.form, rig.resident.rows[:num_rows], rig.bases[:num_rows], small.layers
    )
    return small


def over_a_file(small: Rig, pinned: HostSide, path: Path, pool_share: float) -> Results:
    """Steps with a pool over an arena of a part of the rows, and in turn with them the same ones
    over an arena of all.

    The arena begins with the first rows, as a server's does that knows nothing of earlier runs; a
    case begins with what the last one left.
    """
    num_rows, row_bytes = len(small.bases), small.form.row_bytes
    num_experts = num_rows // len(small.layers)
    num_places = max(int(ARENA_SHARE * num_rows), least_places(num_experts))
    place_of = mapped_numbers(num_rows, ON_DISK, pin=True)
    place_of[:num_places] = torch.arange(num_places, dtype=torch.int32)
    requests = mapped_numbers(1 + 1024, 0, pin=True)

    def fill(first: int, chunk: Tensor) -> None:
        for n, row in enumerate(chunk):
            row.copy_(pinned.arena.place(first + n))

    arena = Arena(num_places, row_bytes, pin=True, fill=fill)
    feeder = Watched(
        arena,
        RowFile(path, row_bytes),
        place_of,
        requests,
        file_rows=range(num_rows),
        in_flight=num_experts,
    )
    host = HostSide(arena=arena, place_of=place_of, requests=requests, feeder=feeder)
    feeder.start()
    found: Results = {}
    try:
        pools = [small.pool(side, int(pool_share * num_rows)) for side in (pinned, host)]
        steps = Steps(small, pools, feeder)
        for case in CASES:
            small.set_skew(case.skew)
            if not case.direct:
                torch.cuda.synchronize()
                feeder.file.close()
                feeder.file = RowFile(path, row_bytes, direct=False)
            made = {
                "layers": len(small.layers),
                "places": num_places,
                "skew": case.skew,
                **steps.warmed(case.warm_steps),
                **steps.timed(case.num_steps),
            }
            where = "a disk" if case.direct else "a file in the page cache"
            name = f"arena of {100 * num_places / num_rows:.0f} % of the rows over {where}, warm"
            name = f"{name}, {made['hits %']:.1f} % hits"
            found[name] = made
            print(name, made, flush=True)
        return found
    finally:
        torch.cuda.synchronize()
        host.close()


class Steps:
    """Steps of a model over two pools, of which the second waits for a feeder."""

    def __init__(self, rig: Rig, pools: Sequence[CachedExperts], feeder: Watched) -> None:
        self.rig, self.pools, self.feeder = rig, pools, feeder
        self.one, self.many = (
            [CapturedStep(rig, pool, num_rows) for pool in pools] for num_rows in (1, WARM_ROWS)
        )
        self.resident = CapturedStep(rig, rig.resident, 1)
        self.num_tokens = 0  # that the second pool has seen

    def warmed(self, num_steps: int) -> Results:
        """Steps of WARM_ROWS tokens with the second pool, or as many as WARM_S seconds take; then
        some with both."""
        begin, before = perf_counter(), self.feeder.counts.num_reads
        for _ in range(num_steps):
            if perf_counter() - begin > WARM_S:
                break
            self.many[1](self.rig.tokens(WARM_ROWS))
            self.num_tokens += WARM_ROWS
        for both, count in ((self.many, WARM_ROWS), (self.one, 1)):
            for _ in range(BOTH_STEPS):
                tokens = self.rig.tokens(count)
                for step in both:
                    step(tokens)
                self.num_tokens += count
        return {
            "tokens before": self.num_tokens,
            "reads while warming up": self.feeder.counts.num_reads - before,
            "s of warming up": round(perf_counter() - begin, 1),
        }

    def timed(self, num_steps: int) -> Results:
        """What a step takes with either pool."""
        counts, asked = self.feeder.counts, len(self.feeder.asked)
        reads, waited_s = counts.num_reads, counts.wait_s
        before = [pool.counts() for pool in self.pools]
        totals, base_ms = [0.0, 0.0], 0.0
        for n in range(num_steps):
            tokens = self.rig.tokens(1)
            for at in (0, 1) if n % 2 else (1, 0):
                totals[at] += self.one[at](tokens)
            if n < BOTH_STEPS:
                base_ms += self.resident(tokens) / BOTH_STEPS
        self.num_tokens += num_steps
        hits = [
            100 * (now[0] - then[0]) / max(1, sum(now) - sum(then))
            for now, then in zip([pool.counts() for pool in self.pools], before, strict=True)
        ]
        reads, waited_s = counts.num_reads - reads, counts.wait_s - waited_s
        ideal = ideal_reads(self.feeder.asked, self.feeder.arena.num_places, asked)
        pinned_ms, disk_ms = (total / num_steps for total in totals)
        return {
            "hits %": round(hits[1], 2),
            "hits over pinned rows %": round(hits[0], 2),
            "resident ms": round(base_ms, 3),
            "pinned ms": round(pinned_ms, 3),
            "disk ms": round(disk_ms, 3),
            "of the pinned rate": round(pinned_ms / disk_ms, 3),
            "steps": num_steps,
            "reads a step": round(reads / num_steps, 4),
            "of these an ideal choice would do": round(ideal / num_steps, 4),
            "ms a read": round(1e3 * waited_s / max(1, reads), 3),
            "ms lost a read": round((disk_ms - pinned_ms) * num_steps / max(1, reads), 3),
            "same bits": compare(self.rig, self.one[1], self.resident, 3).same,
            "error word": int(self.rig.device.error),
        }
