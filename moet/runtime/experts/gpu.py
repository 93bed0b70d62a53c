"""Experts of a GPU whose rows are in pinned host memory, and on disk: a pool that the device keeps
by itself. A ResidentProvider: no step asks the host for anything, so steps can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet.errors import CapacityError
from moet.kernels.expert_cache import STATIC_USES, CacheTables
from moet.kernels.expert_cache_device import (
    FETCH_CTAS,
    CachedTable,
    DeviceCache,
    FetchList,
    HostRows,
)
from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.kernels.stream_gemm import Launcher
from moet.runtime.experts.feeder import RowFeeder
from moet.runtime.experts.host import Arena, unpin
from moet.runtime.experts.staged import StagedRows
from moet.runtime.metrics import LayerTier, TierStats

FETCH_TIMEOUT_S = 30.0  # after which a fetch gives up on rows from disk


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSide:
    """Rows behind a pool. place_of: [num_rows] int32, a row's place in the arena, below 0 without
    one; None: every row has the place of its number. requests: as HostRows has it, with a feeder
    that serves it; both tensors must be mapped. staged: where whole layers come from then."""

    arena: Arena
    place_of: Tensor | None = None
    requests: Tensor | None = None
    feeder: RowFeeder | None = None
    staged: StagedRows | None = None

    def on(self, device: torch.device, num_rows: int) -> HostRows:
        """As the kernels take it."""
        arena, place_of = self.arena, self.place_of
        if place_of is None:
            place_of = torch.arange(num_rows, dtype=torch.int32, device=device)
        elif self.requests is None:
            place_of = place_of.to(device)
        return HostRows(
            torch.tensor([chunk.data_ptr() for chunk in arena.chunks], device=device),
            arena.rows_per_chunk,
            place_of,
            torch.zeros(1, dtype=torch.int32, device=device),
            self.requests,
        )

    def close(self) -> None:
        """End the feeder and let go of the memory; no fetch may be under way."""
        if self.feeder is not None:
            self.feeder.close()
        if self.staged is not None:
            self.staged.close()
        if self.arena.is_pinned:
            for mapped in (self.place_of, self.requests):
                if mapped is not None:
                    unpin(mapped)
        self.arena.close()


class CachedExperts:
    """A pool of num_slots rows on a GPU over rows in host memory.

    bases: [num_rows, ...] uint8, on the device. layers: their numbers, in the order of the rows.
    error: [1] int32 on the device, whose bits whoever runs a step reads. A pool must hold what one
    step asks for in a layer, or ERROR_CAPACITY is set.
    """

    def __init__(
        self,
        launcher: Launcher,
        form: ExpertRows,
        host: HostSide,
        bases: Tensor,
        layers: Sequence[int],
        num_slots: int,
        *,
        error: Tensor,
        overlap: bool = True,
        num_ctas: int = FETCH_CTAS,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        """overlap: copy rows on a stream of their own while the shared expert runs."""
        device, num_rows = bases.device, len(bases)
        self.form, self.host, self.layers = form, host, tuple(layers)
        self.num_experts, self.bases = num_rows // len(layers), bases
        self._static: dict[int, int] = {}  # row -> slot
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            pool = torch.empty(num_slots, form.row_bytes, dtype=torch.uint8, device=device)
        self.cache = DeviceCache(
            launcher,
            pool,
            CacheTables.empty(num_rows, num_slots, device),
            host.on(device, num_rows),
            FetchList.on(device, self.num_experts, len(layers)),
            error,
            side=torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if overlap and device.type == "cuda"
            else None,
            num_ctas=num_ctas,
            timeout_s=timeout_s,
        )
        self._tables = self._made_tables()

    @property
    def tables(self) -> CacheTables:
        return self.cache.tables

    @property
    def num_static(self) -> int:
        """Slots of rows that never leave."""
        return len(self._static)

    def resize(self, num_slots: int) -> None:
        """Another number of slots, for whoever captures steps anew. Not while steps run.

        Static rows stay, and of the others those of the most uses where all rows are in memory.
        Raises CapacityError if the device has no room; the pool is empty then but for static rows,
        with as many slots as before.
        """
        old, device = len(self.cache.pool), self.bases.device
        static = {row: self.cache.pool[slot].cpu() for row, slot in self._static.items()}
        warm = [] if self.host.feeder is not None else [r for r in self.heat() if r not in static]
        empty = torch.empty(0, self.form.row_bytes, dtype=torch.uint8, device=device)
        self._tables, self.cache = {}, replace(self.cache, pool=empty)
        failed = None
        for size in (num_slots, old):
            if device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                with torch.inference_mode(False):
                    pool = torch.empty(size, self.form.row_bytes, dtype=torch.uint8, device=device)
                break
            except torch.OutOfMemoryError as error:
                failed = error
        tables = CacheTables.empty(len(self.bases), len(pool), device)
        self.cache = replace(self.cache, pool=pool, tables=tables)
        self._tables, self._static = self._made_tables(), {}
        self.fill(list(static), list(static.values()), static=True)
        if failed is not None:
            raise CapacityError(
                f"the device has no room for {num_slots} slots of {self.form.row_bytes} bytes"
            ) from failed
        warm = warm[: num_slots - len(static)]
        self.fill(warm, [self._run(row, 1)[0] for row in warm])

    def _made_tables(self) -> dict[int, ExpertTable]:
        made: dict[int, ExpertTable] = {}
        for n, layer_idx in enumerate(self.layers):
            rows = slice(n * self.num_experts, (n + 1) * self.num_experts)
            made[layer_idx] = CachedTable(
                *(self.form, self.cache.pool, self.tables.slot_of[rows], self.bases[rows]),
                cache=self.cache,
                first_row=rows.start,
            )
        return made

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """The table of a layer; its rows come when they are prepared."""
        return self._tables[layer_idx]

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The same, prepared and joined."""
        table = self._tables[layer_idx]
        table.prepare(expert_ids.contiguous())
        table.join()
        return table

    def fill(self, rows: Sequence[int], content: Sequence[Tensor], *, static: bool = False) -> None:
        """Give rows the first slots that are empty, for good if static. Not while steps run.

        content: their bytes.
        """
        free = (self.tables.row_of < 0).nonzero()[:, 0].tolist()
        for row, slot, of_row in zip(rows, free, content, strict=False):
            self.cache.pool[slot].copy_(of_row, non_blocking=True)
            self.tables.slot_of[row], self.tables.row_of[slot] = slot, row
            if static:
                self.tables.uses[slot] = STATIC_USES
                self._static[row] = slot

    def copy_rows(self, first: int, out: Tensor) -> None:
        """Bring rows first..first+n into out [n, row_bytes] on the device, on the current stream,
        with the copy engine. Every row must be in host memory or static, or there are staged ones.
        Raises ExpertReadError."""
        if self.host.staged is not None:
            self.host.staged.copy(first, out)
            return
        done = 0
        while done < len(out):
            source = self._run(first + done, len(out) - done)
            out[done : done + len(source)].copy_(source, non_blocking=True)
            done += len(source)

    def _run(self, first: int, most: int) -> Tensor:
        """The bytes of a row and of those behind it that follow it in memory."""
        arena, places = self.host.arena, self.host.place_of
        if places is not None and int(places[first]) < 0:
            slot = self._static[first]
            return self.cache.pool[slot : slot + 1]
        place = first if places is None else int(places[first])
        chunk, row = divmod(place, arena.rows_per_chunk)
        count = min(most, len(arena.chunks[chunk]) - row)
        if places is not None:
            following = places[first : first + count]
            count = int((following == torch.arange(place, place + count)).cumprod(0).sum())
        return arena.chunks[chunk][row : row + count]

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far; waits for the device."""
        hits, misses, _ = self.cache.wanted.counters.sum(0).tolist()
        return hits, misses

    def heat(self) -> list[int]:
        """Rows of the pool, then those of an arena over a disk, each those of the most uses first;
        waits for the device."""
        slots = (self.tables.row_of >= 0).nonzero()[:, 0]
        order = self.tables.uses[slots].sort(descending=True, stable=True).indices
        rows: list[int] = self.tables.row_of[slots[order]].tolist()
        feeder = self.host.feeder
        return rows if feeder is None else list(dict.fromkeys([*rows, *feeder.rows()]))

    def stats(self) -> TierStats:
        """The books; waits for the device. A layer's stall is the time that its copies took, of
        which the shared expert hides a part."""
        row_bytes, feeder = self.form.row_bytes, self.host.feeder
        counters = self.cache.wanted.counters.tolist()
        counts = None if feeder is None else feeder.counts
        return TierStats(
            format=self.form.name,
            row_bytes=row_bytes,
            num_rows=len(self.bases),
            num_slots=len(self.tables.row_of),
            num_static=len(self._static),
            num_resident=int((self.tables.row_of >= 0).sum()),
            num_host_places=self.host.arena.num_places,
            num_host_rows=self.host.arena.num_places if feeder is None else feeder.num_rows,
            num_host_hits=0 if counts is None else counts.num_hits,
            num_disk_reads=0 if counts is None else counts.num_reads,
            num_disk_errors=0 if counts is None else counts.num_errors,
            disk_wait_s=0.0 if counts is None else counts.wait_s,
            layers=[
                LayerTier(
                    layer=layer,
                    num_hits=hits,
                    num_misses=misses,
                    num_streamed=0,
                    num_bytes=misses * row_bytes,
                    stall_s=ns / 1e9,
                )
                for layer, (hits, misses, ns) in zip(self.layers, counters, strict=True)
            ],
        )

    def explain(self) -> str | None:
        """Which rows could not be read lately, and why."""
        return None if self.host.feeder is None else self.host.feeder.message()

    def check(self) -> None:
        """Raise AssertionError unless slots and rows name each other and every resident row has the
        bytes of its place, where it has one. Not while steps run; a feeder may go on with reads of
        the last ones and give away the place of a row that is looked at."""
        self.tables.check()
        place_of = self.cache.host.place_of
        places = place_of.tolist()
        for slot, row in enumerate(self.tables.row_of.tolist()):
            if row >= 0 and places[row] >= 0:
                expected = self.host.arena.place(places[row])
                held = torch.equal(self.cache.pool[slot].cpu(), expected)
                moved = int(place_of[row]) != places[row]
                assert held or moved, f"slot {slot} does not hold row {row}"

    def close(self) -> None:
        """Let go of files and host memory."""
        self.host.close()
