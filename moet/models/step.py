"""Where the rows of a step keep their state, by sequence and by group. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat, PlanedFormat
from moet.kernels.rows import Rows
from moet.models.base import ForwardInput, KVTensors


class LayerCache:
    """One kind of state of one layer: the encoding and, given the step's tensors, the bytes."""

    def __init__(self, group: str, idx: int, form: EntryFormat) -> None:
        self.group = group
        self.idx = idx
        self.form = form

    def write(self, kv: KVTensors, slots: Tensor, rows: Tensor) -> None:
        """rows: [n, width] fp32 to slots [n] int64; -1 is skipped."""
        self.form.write(kv[self.group][self.idx], slots, rows)

    def read(self, kv: KVTensors, slots: Tensor) -> Tensor:
        """Returns [n, width] fp32."""
        return self.form.read(kv[self.group][self.idx], slots)


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of state of one layer, before the step's tensors are known."""

    group: str
    idx: int
    form: PlanedFormat

    def cache(self, kv: KVTensors) -> Cache:
        return Cache(kv[self.group][self.idx], self.form)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step: rows first:last hold positions start..end-1.

    pages: [max_pages] int64, the pages of the sequence, of page_size tokens each.
    """

    first: int
    last: int
    start: int
    end: int
    seq_slot: int
    pages: Tensor
    page_size: int

    def ring_slots(self, lo: int, hi: int, num_entries: int) -> Tensor:
        """Slots of positions lo..hi-1 in a ring group."""
        return self.seq_slot * num_entries + torch.arange(lo, hi) % num_entries

    def entry_slots(self, lo: int, hi: int, ratio: int) -> Tensor:
        """Slots of entries lo..hi-1 in a paged group that keeps one per `ratio` tokens."""
        return self.slots_of(torch.arange(lo, hi), ratio)

    def slots_of(self, entries: Tensor, ratio: int) -> Tensor:
        """Slots of the given entries, [n] int64."""
        per_page = self.page_size // ratio
        return self.pages[entries // per_page] * per_page + entries % per_page


def sequences(inputs: ForwardInput, page_size: int) -> list[SequenceRows]:
    """The step by sequence; those without rows are left out."""
    bounds, slots, found = inputs.cu_seqlens_q, inputs.seq_slots.tolist(), []
    for i, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        end, pages = inputs.seq_lens[i], inputs.page_table[i]
        needed = pages[: -(-end // page_size)].tolist()
        enough = len(needed) * page_size >= end and min(needed) >= 0
        assert enough, f"sequence {i} of the step has {end} tokens but the pages {needed}"
        start = end - (last - first)
        found.append(SequenceRows(first, last, start, end, slots[i], pages, page_size))
    return found


def step_rows(
    inputs: ForwardInput, page_size: int, *, max_short: int, device: torch.device | None = None
) -> Rows:
    """The rows of a step as tensors of the device (None: where the inputs are).

    max_short: rows of one sequence that its rings hold beside what these rows need. Inputs in host
    memory are cheapest: they are checked here.
    """
    sequences(inputs, page_size)  # refuses a row without a page
    device = device or inputs.positions.device
    lengths = [last - first for first, last in pairwise(inputs.cu_seqlens_q)]
    starts = [end - length for end, length in zip(inputs.seq_lens, lengths, strict=True)]
    repeats = torch.tensor(lengths)

    def per_row(values: Tensor) -> Tensor:
        rows = values.cpu().repeat_interleave(repeats, output_size=len(inputs.positions))
        return rows.to(device)

    return Rows(
        positions=inputs.positions.to(device),
        starts=per_row(torch.tensor(starts)),
        ends=per_row(torch.tensor(inputs.seq_lens)),
        seq_slots=per_row(inputs.seq_slots),
        page_rows=per_row(torch.arange(len(lengths))),
        page_table=inputs.page_table.to(device),
        page_size=page_size,
        short=max(lengths, default=0) <= max_short,
    )
