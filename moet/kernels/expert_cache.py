"""The slot table of a device's expert cache: who is resident, who leaves, what is to be fetched.

`resolve` turns the ids of a layer's router into hits and a fetch list and updates the tables;
`fetch` copies the listed rows. This is the reference; expert_cache_device.py has the kernels, which
give the same tables bit for bit. Knows rows by number alone: no model, no file, no tier.

The policy is a clock with a use count per slot. A hit raises the count up to MAX_USES. A hand goes
over the slots: it passes those that the call itself needs, takes a slot whose count is 0 and lowers
the others by one. It is an order of n victims among s slots in O(s) at worst and O(n) mostly, needs
no list and no time stamps, and reads the same serially and a thousand slots at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.errors import CapacityError

MAX_USES = 3  # of the use count; more would only keep yesterday's rows
STATIC_USES = 255  # of a slot that is never taken


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Tables of a pool of slots over rows (experts of all layers), all on the pool's device.

    slot_of: [num_rows] int64, -1 where a row is not resident. row_of: [num_slots] int32, -1 where a
    slot is empty. uses: [num_slots] int32, 0..MAX_USES or STATIC_USES. hand: [1] int32.
    """

    slot_of: Tensor
    row_of: Tensor
    uses: Tensor
    hand: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, num_slots: int, device: torch.device | str = "cpu"
    ) -> CacheTables:
        """Tables of a pool that holds nothing."""
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            return cls(
                torch.full((num_rows,), -1, dtype=torch.int64, device=device),
                torch.full((num_slots,), -1, dtype=torch.int32, device=device),
                torch.zeros(num_slots, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            )

    def check(self) -> None:
        """Raise AssertionError unless slots and rows name each other."""
        taken = (self.row_of >= 0).nonzero()[:, 0]
        assert torch.equal(self.slot_of[self.row_of[taken].long()], taken)
        assert int((self.slot_of >= 0).sum()) == len(taken), "a row names a slot of another"
        assert 0 <= int(self.hand) < max(1, len(self.row_of))
        counts = self.uses[self.uses != STATIC_USES]
        assert bool(((counts >= 0) & (counts <= MAX_USES)).all())


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a call of resolve asks for: rows and their slots, by ascending row."""

    rows: list[int]
    slots: list[int]
    evicted: list[int]  # rows that had to leave; as many as slots, -1 for a slot that was empty
    num_hits: int


def resolve(tables: CacheTables, expert_ids: Tensor, first_row: int, num_experts: int) -> Fetch:
    """Give every expert that is asked for a slot, and say which rows are to be copied there.

    expert_ids: any shape, int64; ids below 0 are of rows that do not count. Expert e of the layer
    is row first_row + e. Raises CapacityError, changing nothing, if the slots that may be taken are
    too few.
    """
    wanted = sorted({i for i in expert_ids.flatten().tolist() if 0 <= i < num_experts})
    slot_of, uses = tables.slot_of, tables.uses.tolist()
    slots = slot_of[first_row : first_row + num_experts].tolist()
    misses = [first_row + e for e in wanted if slots[e] < 0]
    protected = {slots[e] for e in wanted if slots[e] >= 0}
    free = sum(u != STATIC_USES for u in uses) - sum(uses[s] != STATIC_USES for s in protected)
    if len(misses) > free:
        raise CapacityError(
            f"{len(wanted)} experts of a layer are asked for at once and {len(protected)} of them "
            f"are resident; {free} slots are left for the others"
        )
    for slot in protected:
        if uses[slot] < MAX_USES:
            uses[slot] += 1
    chosen, hand = clock_victims(uses, protected, int(tables.hand), len(misses))
    row_of = tables.row_of.tolist() if misses else []
    evicted = [row_of[slot] for slot in chosen]
    for row, slot in zip(evicted, chosen, strict=True):
        if row >= 0:
            slot_of[row] = -1
        uses[slot] = 0
    if misses:
        at = torch.tensor(chosen)
        slot_of[torch.tensor(misses)] = at
        tables.row_of[at] = torch.tensor(misses, dtype=torch.int32)
    tables.uses.copy_(torch.tensor(uses, dtype=torch.int32))
    tables.hand.fill_(hand)
    return Fetch(misses, chosen, evicted, len(protected))


def clock_victims(
    uses: list[int], protected: set[int], hand: int, num_wanted: int
) -> tuple[list[int], int]:
    """Slots that the hand takes, in order, and where it stops.

    uses: by slot; lowered in place where the hand passes. protected: slots that it must not take.
    There must be num_wanted others that are not static.
    """
    chosen: list[int] = []
    taken = set(protected)
    while len(chosen) < num_wanted:
        if hand not in taken and uses[hand] != STATIC_USES:
            if uses[hand] == 0:
                chosen.append(hand)
                taken.add(hand)
            else:
                uses[hand] -= 1
        hand = (hand + 1) % len(uses)
    return chosen, hand


def fetch(pool: Tensor, source: Tensor, places: list[int], slots: list[int]) -> None:
    """Copy rows: pool[slots[i]] = source[places[i]]. Both [n, row_bytes] uint8."""
    for place, slot in zip(places, slots, strict=True):
        pool[slot].copy_(source[place])
