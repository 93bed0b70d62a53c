"""The books of a pass over prompts that steps carry part by part: what is left, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from moet.runtime.batch import Row
from moet.runtime.sequence import Status


@dataclass(slots=True)
class PartsLeft:
    """Rows of a pass of which num_parts are to be carried out. arrivals: of its sequences."""

    rows: list[Row]
    num_parts: int
    num_rows: int = field(init=False)
    arrivals: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = sum(row.num_tokens for row in self.rows)
        self.arrivals = frozenset(row.seq.arrival for row in self.rows)

    def take(self, wanted: int) -> tuple[int, bool]:
        """So many parts, if there are; and whether the pass ends with them.

        All if a sequence has lost its place, as its state moves behind them; none if all sequences
        have ended, as nobody wants the pass any more.
        """
        if all(row.seq.status is Status.FINISHED for row in self.rows):
            return 0, True
        taken = self.num_parts if self._has_gone() else min(wanted, self.num_parts)
        self.num_parts -= taken
        return taken, self.num_parts == 0

    def _has_gone(self) -> bool:
        """Whether a sequence has ended or gone."""
        seqs = [(row.seq, row.epoch) for row in self.rows]
        return any(seq.status is not Status.RUNNING or epoch != seq.epoch for seq, epoch in seqs)
