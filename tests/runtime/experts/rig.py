"""A file of random rows, stores of any size over it, and a disk that can be made to fail."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moet.kernels.moe import ExpertTable
from moet.models.expert_map import ExpertMap
from moet.runtime.experts.device import DeviceTier
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.host import Arena, HostTier
from moet.runtime.experts.tiered import StoreSettings, TieredExpertStore

ROW_BYTES = 8192
LAYERS = (1, 2, 5)
NUM_EXPERTS = 16
EXPERTS = ExpertMap(32, 32, NUM_EXPERTS, LAYERS, tuple(f"layers.{i}." for i in LAYERS))


class PlainRows:
    """A format whose matrices are the row's own bytes."""

    name = "plain"
    row_bytes = ROW_BYTES

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return row.clone(), row[:1].clone(), row[1:2].clone()


class Disk:
    """Stands in for preadv. Rows in `bad` fail with EIO, rows in `cut` end early, rows in `slow`
    take slow_s, rows in `damaged` have a wrong byte; `short` gives at most so many bytes a call."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.cut: set[int] = set()
        self.slow: set[int] = set()
        self.damaged: set[int] = set()
        self.slow_s = 0.05
        self.short: int | None = None
        self.order: list[int] = []
        self._lock = threading.Lock()

    def preadv(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        row = offset // ROW_BYTES
        with self._lock:
            self.order.append(row)
        if row in self.slow:
            time.sleep(self.slow_s)
        if row in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if row in self.cut:
            return 0 if offset % ROW_BYTES else os.preadv(file, [buffers[0][:4096]], offset)
        count = os.preadv(file, [buffers[0][: self.short]], offset)
        if row in self.damaged:
            buffers[0][count // 2] ^= 1
        return count


class Rig:
    """Rows in a file, their bytes and checksums, and a disk to break."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "experts.w2"
        generator = torch.Generator().manual_seed(3)
        shape = (EXPERTS.num_rows, ROW_BYTES)
        self.rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.path.write_bytes(self.rows.numpy().tobytes())
        self.checksums = [hashlib.sha256(row.numpy().data).digest() for row in self.rows]
        self.disk = Disk()

    def host(self, num_places: int, *, timeout_s: float = 10.0, num_readers: int = 2) -> HostTier:
        file = RowFile(
            self.path,
            ROW_BYTES,
            name_of=lambda row: f"expert {row % NUM_EXPERTS}",
            num_readers=num_readers,
            preadv=self.disk.preadv,
            digests=[digest.hex() for digest in self.checksums],
        )
        return HostTier(Arena(num_places, ROW_BYTES), file, read_timeout_s=timeout_s)

    def store(
        self,
        num_slots: int,
        num_places: int,
        *,
        static_rows: Sequence[int] = (),
        scan_from_rows: int = 1 << 30,
        num_staging: int = 4,
        timeout_s: float = 10.0,
    ) -> TieredExpertStore:
        device = DeviceTier(EXPERTS.num_rows, num_slots, ROW_BYTES, num_static=len(static_rows))
        settings = StoreSettings(
            scan_from_rows=scan_from_rows,
            num_staging=num_staging,
            static_rows=tuple(static_rows),
        )
        host = self.host(num_places, timeout_s=timeout_s)
        return TieredExpertStore(PlainRows(), EXPERTS, device, host, settings)

    def verify(self, table: ExpertTable, layer_idx: int, expert_ids: Tensor) -> None:
        """Every expert that was asked for has its own bytes in the table."""
        for expert_id in set(expert_ids.flatten().tolist()) - {-1}:
            row = EXPERTS.row(layer_idx, expert_id)
            assert torch.equal(table.matrices(expert_id)[0], self.rows[row])

    def verify_slots(self, store: TieredExpertStore) -> None:
        """Every slot that claims a row has the checksum of that row."""
        for slot, row in enumerate(store.device.tables.row_of.tolist()):
            if row >= 0:
                digest = hashlib.sha256(store.device.rows[slot].numpy().data).digest()
                assert digest == self.checksums[row], f"slot {slot} does not hold row {row}"


def one(*expert_ids: int) -> Tensor:
    """The ids of a step of one token."""
    return torch.tensor([expert_ids])
