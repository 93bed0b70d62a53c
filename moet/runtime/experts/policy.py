"""Which expert slots are given up: policies over small integers, and what they score on a trace.

A policy chooses among slots by what it was told of their use. Nothing here knows tensors or bytes.
The engine runs the clock of kernels/expert_cache.py; the others are here to be compared with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moet.errors import CapacityError
from moet.kernels.expert_cache import MAX_USES, clock_victims

Call = tuple[int, Sequence[int]]
"""One layer's turn: its number and the experts that its router asks for."""


class Policy(Protocol):
    """Order of leaving. Slots are numbered from 0; all start empty."""

    def touch(self, slots: Iterable[int]) -> None:
        """These are asked for and resident."""
        ...

    def take(self, num_wanted: int, protected: set[int]) -> list[int]:
        """Slots to give up, none of the protected ones. The caller knows that there are enough."""
        ...

    def admit(self, slot: int, row: int) -> None:
        """The slot now holds a row that is asked for."""
        ...


class Clock:
    """The engine's own: a hand, and a use count per slot up to max_uses."""

    def __init__(self, num_slots: int, max_uses: int = MAX_USES, first_uses: int = 0) -> None:
        self.uses = [0] * num_slots
        self.hand = 0
        self.max_uses = max_uses
        self.first_uses = first_uses

    def touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.uses[slot] = min(self.uses[slot] + 1, self.max_uses)

    def take(self, num_wanted: int, protected: set[int]) -> list[int]:
        chosen, self.hand = clock_victims(self.uses, protected, self.hand, num_wanted)
        return chosen

    def admit(self, slot: int, row: int) -> None:
        self.uses[slot] = self.first_uses


class Lru:
    """The slot that was not asked for the longest."""

    def __init__(self, num_slots: int) -> None:
        self.order: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    def touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.order.move_to_end(slot)

    def take(self, num_wanted: int, protected: set[int]) -> list[int]:
        chosen: list[int] = []
        for slot in self.order:
            if len(chosen) == num_wanted:
                break
            if slot not in protected:
                chosen.append(slot)
        return chosen

    def admit(self, slot: int, row: int) -> None:
        self.order.move_to_end(slot)


class DecayedLfu:
    """The row that was asked for least often, a use counting half after half_life calls.

    Counts outlive residency: a row that comes back has its old ones. Exact, and O(slots) a miss.
    """

    def __init__(self, num_slots: int, half_life: int = 43 * 128) -> None:
        self.row_of = [-1] * num_slots
        self.score: dict[int, float] = {-1: -1.0}
        self.step = 2.0 ** (1.0 / half_life)
        self.weight = 1.0  # of a use now; growing it decays all that were before

    def touch(self, slots: Iterable[int]) -> None:
        self._advance()
        for slot in slots:
            row = self.row_of[slot]
            self.score[row] = self.score.get(row, 0.0) + self.weight

    def take(self, num_wanted: int, protected: set[int]) -> list[int]:
        free = [slot for slot in range(len(self.row_of)) if slot not in protected]
        free.sort(key=lambda slot: self.score[self.row_of[slot]])
        return free[:num_wanted]

    def admit(self, slot: int, row: int) -> None:
        self.row_of[slot] = row
        self.score[row] = self.score.get(row, 0.0) + self.weight

    def _advance(self) -> None:
        self.weight *= self.step
        if self.weight > 1e200:
            self.score = {row: s / self.weight for row, s in self.score.items() if row >= 0}
            self.score[-1], self.weight = -1.0, 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy made of a trace. calls_hit: calls without a miss."""

    hits: int
    misses: int
    calls_hit: int
    calls: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


def simulate(
    trace: Iterable[Call],
    make: Callable[[int], Policy],
    num_slots: int,
    *,
    num_experts: int,
    static: Iterable[int] = (),
    warm_up: int = 0,
) -> Score:
    """Run a trace through a pool of num_slots, all layers together.

    static: rows (layer * num_experts + expert) that hold a slot each and never leave. warm_up:
    calls that are not counted. Raises CapacityError if a call asks for more than fits.
    """
    fixed = set(static)
    policy = make(num_slots - len(fixed))
    slot_of: dict[int, int] = {}
    row_of = [-1] * (num_slots - len(fixed))
    hits = misses = calls = calls_hit = 0
    for number, (layer, experts) in enumerate(trace):
        rows = sorted({layer * num_experts + expert for expert in experts} - fixed)
        held = {slot_of[row] for row in rows if row in slot_of}
        absent = [row for row in rows if row not in slot_of]
        if len(rows) > len(row_of):
            raise CapacityError(f"a call asks for {len(rows)} experts; {len(row_of)} slots exist")
        policy.touch(sorted(held))
        if absent:
            for row, slot in zip(absent, policy.take(len(absent), held), strict=True):
                slot_of.pop(row_of[slot], None)
                row_of[slot], slot_of[row] = row, slot
                policy.admit(slot, row)
        if number >= warm_up:
            asked = len(set(experts))
            hits, misses = hits + asked - len(absent), misses + len(absent)
            calls, calls_hit = calls + 1, calls_hit + (not absent)
    return Score(hits, misses, calls_hit, calls)


def hottest(counts: Mapping[int, float], num_rows: int) -> list[int]:
    """The rows that were asked for most, best first; of equals the lowest number."""
    return sorted(counts, key=lambda row: (-counts[row], row))[:num_rows]


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "clock": Clock,
    "clock, 1 use": lambda n: Clock(n, max_uses=1),
    "clock, 7 uses": lambda n: Clock(n, max_uses=7),
    "lru": Lru,
    "decayed lfu": DecayedLfu,
}
