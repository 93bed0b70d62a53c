"""Routed experts: router scores, and the mixture over experts read through a slot table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ExpertFormat(Protocol):
    """How one expert's three matrices are laid out in a row of bytes."""

    name: str
    row_bytes: int

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """row: [row_bytes] uint8. Returns w1 and w3 [I, D] and w2 [D, I], fp32, exact."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Where the experts of one layer are.

    rows: [num_slots, row_bytes] uint8, one expert a slot. slot_of: [num_experts] int64, -1 where an
    expert is not resident. All rows of a table have one format.
    """

    format: ExpertFormat
    rows: Tensor
    slot_of: Tensor
