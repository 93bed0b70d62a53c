"""Experts of a GPU whose rows are in pinned host memory: a cache that the device keeps by itself
for decode steps, and whole layers streamed ahead of the compute for long prompts.

Both are ResidentProviders: no step asks the host for anything, so steps can be captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels.device_gemm import Device
from moet.kernels.expert_cache import CachedTable, CacheTables, DeviceCache, FetchList, HostRows
from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.kernels.stream_gemm import Launcher
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.host import Arena


class CachedExperts:
    """A pool of num_slots rows on a GPU over an arena that holds all rows, in order.

    bases: [num_rows, ...] uint8, on the device. layers: their numbers, in the order of the rows.
    error: [1] int32 on the device, whose bits whoever runs a step reads. A pool must hold what one
    step asks for in a layer, or ERROR_CAPACITY is set.
    """

    def __init__(
        self,
        launcher: Launcher,
        form: ExpertRows,
        arena: Arena,
        bases: Tensor,
        layers: Sequence[int],
        num_slots: int,
        *,
        error: Tensor,
        overlap: bool = True,
        num_ctas: int = 8,
    ) -> None:
        """overlap: copy rows on a stream of their own while the shared expert runs."""
        device, num_rows = bases.device, len(bases)
        num_experts = num_rows // len(layers)
        self.arena = arena
        self.tables = CacheTables.empty(num_rows, num_slots, device)
        pool = torch.empty(num_slots, form.row_bytes, dtype=torch.uint8, device=device)
        self.cache = DeviceCache(
            launcher,
            pool,
            self.tables,
            HostRows(
                torch.tensor([chunk.data_ptr() for chunk in arena.chunks], device=device),
                arena.rows_per_chunk,
                torch.arange(num_rows, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            ),
            FetchList.on(device, num_experts),
            error,
            side=_stream(device) if overlap and device.type == "cuda" else None,
            num_ctas=num_ctas,
        )
        self._tables: dict[int, ExpertTable] = {}
        for n, layer_idx in enumerate(layers):
            first = n * num_experts
            self._tables[layer_idx] = CachedTable(
                form,
                pool,
                self.tables.slot_of[first : first + num_experts],
                bases[first : first + num_experts],
                cache=self.cache,
                first_row=first,
            )

    def resident(self, layer_idx: int) -> ExpertTable:
        """The table of a layer; its rows come when they are prepared."""
        return self._tables[layer_idx]

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The same, prepared and joined."""
        table = self._tables[layer_idx]
        table.prepare(expert_ids.contiguous())
        table.join()
        return table

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far; waits for the device."""
        hits, misses = self.cache.wanted.counters.tolist()
        return hits, misses


def open_cached(
    pack: Pack,
    tier: Tier,
    layers: Sequence[int],
    gpu: Device,
    num_slots: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CachedExperts:
    """A pack's rows in pinned host memory behind num_slots on the GPU.

    progress: bytes done and in all, first of pinning and then of reading. Raises ConfigError if
    memory is not to be had, CheckpointError if the pack has no such tier or no row bases, and
    ExpertReadError.
    """
    form, experts = pack.format(tier), pack.experts
    rows = [
        experts.row(layer_idx, 0) + e for layer_idx in layers for e in range(experts.num_experts)
    ]
    bases = [
        pack.row_base(tier, layer_idx, expert_id)
        for layer_idx in layers
        for expert_id in range(experts.num_experts)
    ]
    if bases[0].numel() == 0:
        raise CheckpointError(f"{pack.folder} has no row bases of its {tier} experts for a GPU")
    on_gpu = gpu.torch_device.type == "cuda"
    arena = Arena(len(rows), form.row_bytes, pin=on_gpu, progress=progress)
    read_all(pack, tier, rows, arena, progress)
    return CachedExperts(
        gpu.launcher,
        form,
        arena,
        torch.stack(bases).to(gpu.torch_device),
        layers,
        num_slots,
        error=gpu.error,
    )


def read_all(
    pack: Pack,
    tier: Tier,
    rows: Sequence[int],
    arena: Arena,
    progress: Callable[[int, int], None],
    *,
    in_flight: int = 16,
) -> None:
    """Read rows of a pack into the places of an arena, in order. Raises ExpertReadError."""
    path, _ = pack.row_place(tier, pack.experts.layers[0], 0)
    file = RowFile(path, pack.format(tier).row_bytes)
    under_way: deque[Future[None]] = deque()
    try:
        for place, row in enumerate(rows):
            if len(under_way) == in_flight:
                under_way.popleft().result()
                progress(place * file.row_bytes, len(rows) * file.row_bytes)
            under_way.append(file.read(row, arena.place(place)))
        for reading in under_way:
            reading.result()
    finally:
        file.close()


class StreamedExperts:
    """Whole layers through a ring of buffers on a GPU, copied while those before them compute.

    copy: brings rows first..first+n of host memory into a tensor on the device, on the current
    stream. Layers must be asked for in the order of `layers`; asking for the first one again begins
    another pass.
    """

    def __init__(
        self,
        form: ExpertRows,
        bases: Tensor,
        layers: Sequence[int],
        copy: Callable[[int, Tensor], None],
        *,
        num_buffers: int = 3,
    ) -> None:
        """num_buffers: of a layer's size each; with three the link need never wait."""
        self._form, self._bases, self._copy = form, bases, copy
        self._number = {layer_idx: n for n, layer_idx in enumerate(layers)}
        self._num_experts = len(bases) // len(layers)
        shape = (num_buffers, self._num_experts, form.row_bytes)
        self._buffers = torch.empty(shape, dtype=torch.uint8, device=bases.device)
        self._slots = torch.arange(self._num_experts, device=bases.device)
        self._stream = _stream(bases.device)
        self._arrived: dict[int, torch.cuda.Event] = {}

    def resident(self, layer_idx: int) -> ExpertTable:
        """The table of a layer. The current stream waits for its rows. The layer before it must be
        enqueued: its buffer is written again when that is over."""
        number = self._number[layer_idx]
        current = torch.cuda.current_stream(self._bases.device)
        if number == 0:
            self._arrived.clear()
        elif number not in self._arrived:
            raise AssertionError(f"layer {layer_idx} is asked for out of turn")
        last = min(number + len(self._buffers) - 1, len(self._number) - 1)
        self._stream.wait_stream(current)
        for ahead in range(number, last + 1):
            if ahead not in self._arrived:
                self._fetch(ahead)
        current.wait_event(self._arrived[number])
        first = number * self._num_experts
        bases = self._bases[first : first + self._num_experts]
        buffer = self._buffers[number % len(self._buffers)]
        return ExpertTable(self._form, buffer, self._slots, bases)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As `resident`: every expert of the layer is there."""
        return self.resident(layer_idx)

    def _fetch(self, number: int) -> None:
        with torch.cuda.stream(self._stream):
            self._copy(number * self._num_experts, self._buffers[number % len(self._buffers)])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._arrived[number] = event


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def copy_from(arena: Arena) -> Callable[[int, Tensor], None]:
    """Copies runs of an arena's places, chunk by chunk, with the copy engine."""

    def copy(first: int, out: Tensor) -> None:
        done = 0
        while done < len(out):
            chunk, row = divmod(first + done, arena.rows_per_chunk)
            count = min(len(out) - done, len(arena.chunks[chunk]) - row)
            out[done : done + count].copy_(
                arena.chunks[chunk][row : row + count], non_blocking=True
            )
            done += count

    return copy
