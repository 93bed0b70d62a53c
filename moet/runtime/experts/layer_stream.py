"""Experts for prompts on a GPU: whole layers streamed from host memory ahead of the compute.

A long prompt asks for nearly every expert, once a chunk. Its rows pass through buffers of a layer's
size on the copy engine and leave the pool as decoding has warmed it up. Knows rows and layers;
knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.models.base import ResidentProvider

Copy = Callable[[int, Tensor], None]
"""Brings rows first..first+n into a tensor [n, row_bytes] on the device, on the current stream."""

NUM_BUFFERS = 2  # one is read while the next one is written: either the link or the compute waits


class LayerStream:
    """A ResidentProvider that has a layer when it is asked for, and the next ones on their way.

    bases: [num_rows, ...] uint8, on the device. layers: their numbers, in the order of the rows.
    """

    def __init__(self, form: ExpertRows, bases: Tensor, layers: Sequence[int], copy: Copy) -> None:
        self._form, self._bases, self._copy = form, bases, copy
        self._number = {layer_idx: n for n, layer_idx in enumerate(layers)}
        self._num_experts = len(bases) // len(layers)
        shape = (NUM_BUFFERS, self._num_experts, form.row_bytes)
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            self._buffers = torch.empty(shape, dtype=torch.uint8, device=bases.device)
        self._slots = torch.arange(self._num_experts, device=bases.device)
        self._stream: torch.cuda.Stream | None = None  # a CPU copies in turn
        if bases.device.type == "cuda":
            self._stream = torch.cuda.Stream(bases.device)  # type: ignore[no-untyped-call]
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        self._last = -1  # that was asked for
        self.num_rows = 0  # copied so far

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """The table of a layer, for work enqueued on the current stream before the next call."""
        number, device = self._number[layer_idx], self._bases.device
        if self._stream is not None:  # what reads the buffer that is written next
            self._stream.wait_stream(torch.cuda.current_stream(device))
        if number != self._last + 1 or number == 0:
            self._arrived.clear()  # another pass
        for ahead in range(number, min(number + len(self._buffers), len(self._number))):
            if ahead not in self._arrived:
                self._fetch(ahead)
        arrived = self._arrived.pop(number)
        if arrived is not None:
            torch.cuda.current_stream(device).wait_event(arrived)
        self._last = number
        first = number * self._num_experts
        bases = self._bases[first : first + self._num_experts]
        buffer = self._buffers[number % len(self._buffers)]
        return ExpertTable(self._form, buffer, self._slots, bases)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As `resident`: every expert of the layer is there."""
        return self.resident(layer_idx)

    def _fetch(self, number: int) -> None:
        self._arrived[number] = None
        with torch.cuda.stream(self._stream):
            self._copy(number * self._num_experts, self._buffers[number % len(self._buffers)])
            if self._stream is not None:
                event = self._arrived[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        self.num_rows += self._num_experts


class ByLength:
    """A ResidentProvider that takes layers from a pool for steps of few rows, and from a stream
    from so many rows on."""

    def __init__(
        self, pool: ResidentProvider, stream: ResidentProvider, stream_from_rows: int
    ) -> None:
        self.pool, self.stream, self.stream_from_rows = pool, stream, stream_from_rows

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """The table of a layer for a step of so many rows."""
        chosen = self.stream if num_rows >= self.stream_from_rows else self.pool
        return chosen.resident(layer_idx, num_rows)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The same, its rows prepared."""
        table = self.resident(layer_idx, len(expert_ids))
        table.prepare(expert_ids.contiguous())
        table.join()
        return table


def stream_from(num_experts: int, top_k: int, num_slots: int, decode_rows: int) -> int:
    """From how many rows on a step's experts are streamed: where these may ask for more than the
    slots there are, or surely ask for most of a layer and are more than decoding has at most."""
    enough = max(-(-2 * num_experts // top_k), decode_rows + 1)
    return enough if num_slots >= num_experts else min(enough, num_slots // top_k + 1)
