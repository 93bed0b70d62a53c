"""Experts of one format in three tiers: a pool of slots on the device over host memory over disk.

An ExpertProvider. What a layer asks for is in the pool when it is read, whatever was there before,
so that answers do not depend on sizes or history. Knows rows and tiers; knows no precision policy.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from moet.errors import CapacityError
from moet.kernels.expert_cache import Fetch
from moet.kernels.moe import ExpertFormat, ExpertTable
from moet.models.expert_map import ExpertMap
from moet.runtime.experts.device import DeviceTier
from moet.runtime.experts.host import HostTier, Lease
from moet.runtime.experts.stream import Staging, streamed
from moet.runtime.metrics import LayerTier, TierStats

logger = logging.getLogger(__name__)

WATCHED = 1 << 15  # experts asked for between two looks at the hit rate
LOW_HIT_RATE = 0.8


@dataclass(slots=True)
class LayerCounts:
    """What one layer has asked for so far. bytes: copied into slots or through staging."""

    num_hits: int = 0
    num_misses: int = 0
    num_streamed: int = 0
    num_bytes: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """scan_from_rows: a call of so many rows or more holds part of a prompt, and goes through
    staging rather than through the pool. num_staging: rows in flight there at the most."""

    scan_from_rows: int = 1 << 30
    num_staging: int = 8
    static_rows: tuple[int, ...] = field(default=())


class TieredExpertStore:
    """The experts of a pack's tier behind a slot table that changes from call to call."""

    def __init__(
        self,
        form: ExpertFormat,
        experts: ExpertMap,
        device: DeviceTier,
        host: HostTier,
        settings: StoreSettings,
    ) -> None:
        self.form = form
        self.experts = experts
        self.device = device
        self.host = host
        self.settings = settings
        self.counts = {layer_idx: LayerCounts() for layer_idx in experts.layers}
        self.staging = Staging(host, settings.num_staging)
        self._first_row = {layer: experts.row(layer, 0) for layer in experts.layers}
        self._num_asked = self._num_hits = 0  # since the hit rate was looked at
        self._lock = threading.Lock()  # of all state, between the steps' thread and others
        if settings.static_rows:
            slots = device.fill_static(settings.static_rows)
            self._copy(list(settings.static_rows), slots)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As ExpertProvider.resolve. Raises ExpertReadError naming file and row where a row cannot
        be read; the experts that the call found stay."""
        with self._lock:
            first_row, num_experts = self._first_row[layer_idx], self.experts.num_experts
            slot_of = self.device.tables.slot_of[first_row : first_row + num_experts]
            if expert_ids.shape[0] >= self.settings.scan_from_rows:
                return self._stream(layer_idx, expert_ids, slot_of)
            self.staging.end()  # the last table is not read any more
            found = self.device.resolve(expert_ids, first_row, num_experts)
            counts = self.counts[layer_idx]
            counts.num_hits += found.num_hits
            counts.num_misses += len(found.rows)
            if found.rows:
                self._fetch(found, counts)
            self._watch(found)
            return ExpertTable(self.form, self.device.rows, slot_of)

    def preheat(self, rows: Sequence[int]) -> int:
        """Fill empty slots and places with rows, the first ones first; returns how many rows."""
        with self._lock:
            given = self.device.fill_free(rows)
            self._copy(list(given), list(given.values()))
            self._into_memory(rows)
            return len(given)

    def resize(self, num_slots: int) -> None:
        """Another pool in place of this one, with the rows that were used most; between steps.

        Raises CapacityError, changing nothing, if a layer's routed set would not be sure to fit or
        the memory is not to be had.
        """
        with self._lock:
            old = self.device
            if num_slots <= old.num_static:
                raise CapacityError(
                    f"a pool of {num_slots} slots has no room beside {old.num_static} static ones"
                )
            try:
                new = DeviceTier(
                    self.experts.num_rows,
                    num_slots,
                    old.rows.shape[1],
                    num_static=old.num_static,
                    device=old.rows.device,
                )
            except (MemoryError, RuntimeError) as error:
                raise CapacityError(
                    f"{num_slots} expert slots are not to be had: {error}"
                ) from None
            if old.num_static:
                new.fill_static(old.tables.row_of[: old.num_static].tolist())
            given = new.fill_free(old.resident_rows())
            for row in [*old.tables.row_of[: old.num_static].tolist(), *given]:
                new.rows[new.slot_of(row)] = old.rows[old.slot_of(row)]
            self.device = new

    def heat(self) -> list[int]:
        """Rows worth having at the next start, the best first."""
        with self._lock:
            resident = self.device.resident_rows()
            known = set(resident)
            return resident + [row for row in reversed(self.host.rows()) if row not in known]

    def stats(self) -> TierStats:
        """The books so far."""
        with self._lock:
            taken = self.device.tables.row_of
            return TierStats(
                format=self.form.name,
                row_bytes=self.form.row_bytes,
                num_rows=self.experts.num_rows,
                num_slots=self.device.num_slots,
                num_static=self.device.num_static,
                num_resident=int((taken >= 0).sum()),
                num_host_places=self.host.arena.num_places,
                num_host_rows=self.host.arena.num_places - self.host.num_free,
                num_host_hits=self.host.counts.num_hits,
                num_disk_reads=self.host.counts.num_reads,
                num_disk_errors=self.host.counts.num_errors,
                disk_wait_s=self.host.counts.wait_s,
                layers=[
                    LayerTier(
                        layer=layer_idx,
                        num_hits=one.num_hits,
                        num_misses=one.num_misses,
                        num_streamed=one.num_streamed,
                        num_bytes=one.num_bytes,
                        stall_s=one.stall_s,
                    )
                    for layer_idx, one in self.counts.items()
                ],
            )

    def check(self) -> None:
        """Raise AssertionError unless every table balances and nothing is held."""
        with self._lock:
            self.device.check()
            self.staging.end()
            self.host.check_idle()

    def close(self) -> None:
        """Wait for reads and let go of file and pinned memory."""
        with self._lock:
            self.staging.end()
            self.host.close()

    def _into_memory(self, rows: Sequence[int]) -> None:
        """Rows without a slot into empty places, as many reads at a time as there are rows."""
        leases: list[Lease] = []
        try:
            for row in rows:
                if not self.host.num_free:
                    break
                if self.device.slot_of(row) < 0 and not self.host.holds(row):
                    leases.append(self.host.lease(row))
            for lease in leases:
                self.host.wait(lease)
        finally:
            for lease in leases:
                self.host.give_back(lease)

    def _stream(self, layer_idx: int, expert_ids: Tensor, slot_of: Tensor) -> ExpertTable:
        counts = self.counts[layer_idx]
        asked = torch.unique(expert_ids[expert_ids >= 0])
        num_missing = int((slot_of[asked] < 0).sum())
        counts.num_hits += len(asked) - num_missing
        counts.num_streamed += num_missing
        counts.num_bytes += num_missing * self.form.row_bytes
        return streamed(
            self.staging,
            self.form,
            self.device.rows,
            slot_of,
            first_row=self._first_row[layer_idx],
            expert_ids=expert_ids,
        )

    def _watch(self, found: Fetch) -> None:
        """Say now and then if the pool is too small for what is asked for."""
        self._num_hits += found.num_hits
        self._num_asked += found.num_hits + len(found.rows)
        if self._num_asked < WATCHED:
            return
        rate = self._num_hits / self._num_asked
        self._num_hits = self._num_asked = 0
        if rate < LOW_HIT_RATE and self.device.num_slots < self.experts.num_rows:
            logger.warning(
                "%s experts: %.0f %% of the last %d were in the pool of %d slots of %d rows; "
                "--expert-pool holds more, --max-num-seqs asks for fewer",
                self.form.name,
                100 * rate,
                WATCHED,
                self.device.num_slots,
                self.experts.num_rows,
            )

    def _fetch(self, found: Fetch, counts: LayerCounts) -> None:
        """Bring the rows of a fetch list; if one cannot be had, its slot and all others that are
        still without bytes are empty again."""
        self.host.touch(row for row in found.evicted if row >= 0)
        started = perf_counter()
        try:
            self._copy(found.rows, found.slots)
        finally:
            counts.stall_s += perf_counter() - started
        counts.num_bytes += len(found.rows) * self.form.row_bytes

    def _copy(self, rows: list[int], slots: list[int]) -> None:
        """Rows into slots, reading as many ahead as there are places."""
        coming = deque(zip(rows, slots, strict=True))
        under_way: deque[tuple[Lease, int]] = deque()
        try:
            while coming or under_way:
                while coming and self._lease(coming[0], under_way, must=not under_way):
                    coming.popleft()
                lease, slot = under_way[0]
                self.host.wait(lease)
                self.device.rows[slot].copy_(lease.bytes)
                under_way.popleft()
                self.host.give_back(lease)
        except BaseException:
            self.device.drop([slot for _, slot in under_way] + [slot for _, slot in coming])
            raise
        finally:
            for lease, _ in under_way:
                self.host.give_back(lease)

    def _lease(
        self, wanted: tuple[int, int], under_way: deque[tuple[Lease, int]], *, must: bool
    ) -> bool:
        row, slot = wanted
        try:
            under_way.append((self.host.lease(row), slot))
        except CapacityError:
            if must:
                raise
            return False
        return True
