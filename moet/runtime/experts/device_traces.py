"""Traces of routed experts from a GPU: what layers are asked for goes to a ring in mapped memory,
and a thread of the host writes it to a trace file. No step waits for that. Knows no policy."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from moet.kernels.device_gemm import Device
from moet.kernels.moe import ExpertTable
from moet.models.base import ResidentProvider
from moet.runtime.experts.host import mapped_numbers, unpin
from moet.runtime.experts.traces import create_trace

logger = logging.getLogger(__name__)

RING_SLOTS = 1 << 20  # numbers; a step of one row of V4-Flash leaves about 350
MAX_ROWS = 256  # of a step that is recorded; longer prompts would write over what was not read yet
LOOK_EVERY_S = 0.02
RECORD_THREADS = 256


class RecordArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("expert_ids", "num_posted", "ring")),
        *((name, ctypes.c_int32) for name in ("pairs", "layer", "ring_slots")),
    ]


class Ring:
    """Records on their way from a device: a layer's number, how many ids, and they.

    `numbers`: [1 + n] int32 that both map, how many were posted and the last n of them.
    """

    def __init__(self, gpu: Device, num_slots: int = RING_SLOTS) -> None:
        """num_slots: a power of two."""
        device = gpu.torch_device
        self._launcher, self._pinned = gpu.launcher, device.type == "cuda"
        self.numbers = mapped_numbers(1 + num_slots, 0, pin=self._pinned)
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            self._num_posted = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_seen = 0

    def post(self, layer: int, expert_ids: Tensor) -> None:
        """On the device, in the order of the current stream. expert_ids: int64, contiguous."""
        args = RecordArgs(
            *(t.data_ptr() for t in (expert_ids, self._num_posted, self.numbers)),
            *(expert_ids.numel(), layer, len(self.numbers) - 1),
        )
        self._launcher.launch(
            "record_experts", grid=1, threads=RECORD_THREADS, shared_bytes=0, args=args
        )

    def read(self) -> list[tuple[int, list[int]]] | None:
        """The records since the last call, ids below 0 left out; None if some were lost."""
        ring, size = self.numbers.numpy(), len(self.numbers) - 1
        posted = int(ring[0])
        count = (posted - self._num_seen) % (1 << 32)
        first, self._num_seen = self._num_seen, posted
        values = ring[1 + (first + np.arange(min(count, size))) % size].tolist()
        if (int(ring[0]) - first) % (1 << 32) > size:
            return None  # it was written over, before or meanwhile
        records: list[tuple[int, list[int]]] = []
        at = 0
        while at < count:
            layer, pairs = values[at : at + 2]
            records.append((layer, [e for e in values[at + 2 : at + 2 + pairs] if e >= 0]))
            at += 2 + pairs
        return records

    def close(self) -> None:
        """Let go of the memory; nothing may be posted any more."""
        if self._pinned:
            unpin(self.numbers)


@dataclass(frozen=True, slots=True)
class RecordedTable(ExpertTable):
    """A table that tells a ring what it is asked for."""

    inner: ExpertTable | None = None
    ring: Ring | None = None
    layer: int = 0

    def prepare(self, expert_ids: Tensor, *lists: tuple[Tensor, Tensor]) -> None:
        """As ExpertTable.prepare."""
        assert self.inner is not None
        assert self.ring is not None
        self.ring.post(self.layer, expert_ids)
        self.inner.prepare(expert_ids, *lists)

    def join(self) -> None:
        """As ExpertTable.join."""
        assert self.inner is not None
        self.inner.join()


class RecordedOnDevice:
    """A ResidentProvider that passes everything on, and writes what steps of up to MAX_ROWS rows
    ask for to a trace file."""

    def __init__(
        self,
        provider: ResidentProvider,
        path: Path,
        gpu: Device,
        *,
        layers: Sequence[int],
        num_experts: int,
        num_slots: int = RING_SLOTS,
    ) -> None:
        self.provider, self._ring = provider, Ring(gpu, num_slots)
        self._number = {layer_idx: n for n, layer_idx in enumerate(layers)}
        self._file = create_trace(path)
        header = {"num_experts": num_experts, "layers": list(layers)}
        self._file.write(json.dumps(header) + "\n")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="moet-expert-trace", daemon=True)
        self._thread.start()

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """As the provider's."""
        inner = self.provider.resident(layer_idx, num_rows)
        if num_rows > MAX_ROWS:
            return inner
        return RecordedTable(
            *(inner.format, inner.rows, inner.slot_of, inner.bases),
            inner=inner,
            ring=self._ring,
            layer=self._number[layer_idx],
        )

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The same, its rows prepared."""
        table = self.resident(layer_idx, len(expert_ids))
        table.prepare(expert_ids.contiguous())
        table.join()
        return table

    def close(self) -> None:
        """Finish the file; no step may be under way."""
        self._stop.set()
        self._thread.join()
        self._write()
        self._ring.close()
        self._file.close()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._write()

    def _write(self) -> None:
        records = self._ring.read()
        if records is None:
            logger.warning("steps were faster than their trace is written: some are left out")
            return
        self._file.writelines(json.dumps(record) + "\n" for record in records if record[1])
