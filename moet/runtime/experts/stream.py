"""A layer's experts passed through a few staging places in the order in which they are read.

For chunks of a prompt, which ask for nearly every expert once: the pool and what the decoding
sequences have warmed up in it stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moet.errors import CapacityError
from moet.kernels.moe import ExpertFormat, ExpertTable
from moet.runtime.experts.host import HostTier, Lease


class Staging:
    """Reads rows ahead of their use, at most num_places of them at a time, in order."""

    def __init__(self, host: HostTier, num_places: int) -> None:
        self.host = host
        self.num_places = num_places
        self.most_at_once = 0
        self.num_rows = 0
        self._coming: deque[int] = deque()
        self._leases: dict[int, Lease] = {}

    def begin(self, rows: Sequence[int]) -> None:
        """Rows that will be asked for, in this order. What was left of the last ones is dropped."""
        self.end()
        self._coming = deque(rows)
        self._read_ahead()

    def take(self, row: int) -> Lease:
        """The next row, its bytes in place until `done`. Raises ExpertReadError."""
        lease = self._leases.get(row)
        while lease is None:
            lease = self._next(row)
        self.host.wait(lease)
        return lease

    def done(self, lease: Lease) -> None:
        """The row was used; its place goes to the next one."""
        self.num_rows += 1
        self._drop(lease.row)
        self._read_ahead()

    def end(self) -> None:
        """Give back what is held."""
        self._coming.clear()
        for row in list(self._leases):
            self._drop(row)

    def _next(self, row: int) -> Lease:
        assert row in self._coming, f"row {row} is asked for out of turn"
        next_row = self._coming.popleft()
        lease = self.host.lease(next_row, scan=True)
        self._leases[next_row] = lease
        self.most_at_once = max(self.most_at_once, len(self._leases))
        return self._leases[row] if row in self._leases else self._next(row)

    def _read_ahead(self) -> None:
        while self._coming and len(self._leases) < self.num_places:
            try:
                lease = self.host.lease(self._coming[0], scan=True)
            except CapacityError:
                return  # `take` asks again when others have given back
            self._leases[self._coming.popleft()] = lease
            self.most_at_once = max(self.most_at_once, len(self._leases))

    def _drop(self, row: int) -> None:
        self.host.give_back(self._leases.pop(row))


@dataclass(frozen=True, slots=True)
class StreamedTable(ExpertTable):
    """A table whose experts without a slot come through staging, each once, in the order given.

    order: expert ids that were announced to the staging area; first_row: of the layer.
    """

    staging: Staging | None = None
    first_row: int = 0

    def matrices(self, expert_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ExpertTable.matrices; waits for the row."""
        if self.slot_of[expert_id] >= 0:
            return ExpertTable.matrices(self, expert_id)
        assert self.staging is not None
        lease = self.staging.take(self.first_row + expert_id)
        try:
            return self.format.unpack(lease.bytes)
        finally:
            self.staging.done(lease)


def streamed(
    staging: Staging,
    form: ExpertFormat,
    rows: Tensor,
    slot_of: Tensor,
    *,
    first_row: int,
    expert_ids: Tensor,
) -> ExpertTable:
    """The table of a layer for a chunk: what is resident where it is, the rest through staging.

    slot_of: [num_experts], of the pool `rows`.
    """
    order = dict.fromkeys(e for e in expert_ids.flatten().tolist() if e >= 0)  # as first asked for
    slots = slot_of.tolist()
    staging.begin([first_row + e for e in order if slots[e] < 0])
    return StreamedTable(form, rows, slot_of, staging=staging, first_row=first_row)
