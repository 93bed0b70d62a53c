"""A pool of expert slots where the model computes: bytes, and the tables of who has which slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.kernels.expert_cache import STATIC_USES, CacheTables, Fetch, resolve


class DeviceTier:
    """num_slots rows; the first num_static slots never change owners once they are filled.

    rows: [num_slots, row_bytes] uint8.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        row_bytes: int,
        *,
        num_static: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        assert num_static < num_slots
        self.num_static = num_static
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            self.rows = torch.empty(num_slots, row_bytes, dtype=torch.uint8, device=device)
        self.tables = CacheTables.empty(num_rows, num_slots, device)

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def slot_of(self, row: int) -> int:
        """The slot of a row, or -1."""
        return int(self.tables.slot_of[row])

    def resolve(self, expert_ids: Tensor, first_row: int, num_experts: int) -> Fetch:
        """As kernels.expert_cache.resolve; the caller fills the slots, or drops them."""
        return resolve(self.tables, expert_ids, first_row, num_experts)

    def fill_static(self, rows: Sequence[int]) -> list[int]:
        """Give rows, as many as there are static slots, one each for good. Returns the slots."""
        assert len(rows) == self.num_static
        slots = list(range(self.num_static))
        for slot, row in zip(slots, rows, strict=True):
            self._own(slot, row)
            self.tables.uses[slot] = STATIC_USES
        return slots

    def fill_free(self, rows: Sequence[int]) -> dict[int, int]:
        """Give rows that have none a slot each while empty ones last: row -> slot."""
        free = (self.tables.row_of < 0).nonzero()[:, 0].tolist()
        absent = [row for row in rows if self.slot_of(row) < 0]
        given = dict(zip(absent, free, strict=False))
        for row, slot in given.items():
            self._own(slot, row)
        return given

    def drop(self, slots: Sequence[int]) -> None:
        """Empty slots whose bytes did not come."""
        for slot in slots:
            row = int(self.tables.row_of[slot])
            self.tables.slot_of[row] = -1
            self.tables.row_of[slot] = -1
            self.tables.uses[slot] = 0

    def resident_rows(self) -> list[int]:
        """Rows that have a slot, those of the most uses first."""
        slots = (self.tables.row_of >= 0).nonzero()[:, 0]
        order = self.tables.uses[slots].sort(descending=True, stable=True).indices
        return self.tables.row_of[slots[order]].tolist()

    def check(self) -> None:
        """Raise AssertionError unless slots and rows name each other."""
        self.tables.check()
        static = self.tables.uses == STATIC_USES
        assert int(static.sum()) in (0, self.num_static)

    def _own(self, slot: int, row: int) -> None:
        self.tables.slot_of[row] = slot
        self.tables.row_of[slot] = row
