"""Where the rows of a step keep their state, as device tensors of fixed shape, so that a captured
step needs no host decision. Knows positions, pages and slots; nothing of what an entry holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step; those of one sequence are adjacent and their positions ascend by one.

    positions: [T] int64; -1 marks a row that is only there to fill a bucket: nothing is written
    for it, and what an op returns for it means nothing.
    starts, ends: [T] int64, positions of the first row that its sequence has in this step, and one
    past the last. seq_slots: [T] int64, place in the ring groups. page_rows: [T] int64, row of
    page_table, which is [num_seqs, max_pages] int64; pages hold page_size tokens.
    short: no sequence has more rows than its rings have places beside what the rows need, so rows
    can be written before any is read.
    """

    positions: Tensor
    starts: Tensor
    ends: Tensor
    seq_slots: Tensor
    page_rows: Tensor
    page_table: Tensor
    page_size: int
    short: bool

    @property
    def row_ids(self) -> Tensor:
        return torch.arange(len(self.positions), device=self.positions.device)

    def max_entries(self, ratio: int) -> int:
        """Entries that the page table has room for, one per `ratio` tokens."""
        return self.page_table.shape[1] * (self.page_size // ratio)

    def visible(self, ratio: int) -> Tensor:
        """[T] int64: entries that a row sees, its own token's included."""
        return (self.positions + 1) // ratio

    def ring_slots(self, num_entries: int) -> Tensor:
        """[T] int64: place of each row in a ring; -1 for rows that a later one overwrites."""
        slots = self.seq_slots * num_entries + self.positions % num_entries
        stays = (self.positions >= 0) & (self.positions >= self.ends - num_entries)
        return torch.where(stays, slots, -1)

    def closed_slots(self, ratio: int) -> Tensor:
        """[T] int64: place of the entry that a row closes in its paged group; -1 if it closes
        none."""
        closes = (self.positions >= 0) & ((self.positions + 1) % ratio == 0)
        entries = torch.where(closes, self.positions // ratio, 0)
        return torch.where(closes, self.entry_slots(self.page_rows, entries, ratio), -1)

    def entry_slots(self, page_rows: Tensor, entries: Tensor, ratio: int) -> Tensor:
        """Places of entries ([...] int64) of the sequences in page_rows (shape that broadcasts)."""
        per_page = self.page_size // ratio
        return self.page_table[page_rows, entries // per_page] * per_page + entries % per_page

    def sequences(self) -> list[tuple[int, int]]:
        """Row ranges of the sequences, on the host; fill rows are left out. References only."""
        found, first = [], 0
        ends, positions = self.ends.tolist(), self.positions.tolist()
        for row, position in enumerate(positions):
            if position >= 0 and position + 1 == ends[row]:
                found.append((first, row + 1))
            if position < 0 or position + 1 == ends[row]:
                first = row + 1
        return found
