"""Where rows of a step keep their state."""

import torch

from moet.kernels.rows import Rows


def rows_of(*pieces: tuple[int, int, int], max_pages: int = 4, fill: int = 0) -> Rows:
    """Rows of sequences given as (start, end, seq_slot), then fill rows; pages count down."""
    positions, starts, ends, slots, page_rows = [], [], [], [], []
    for i, (start, end, slot) in enumerate(pieces):
        positions += range(start, end)
        starts += [start] * (end - start)
        ends += [end] * (end - start)
        slots += [slot] * (end - start)
        page_rows += [i] * (end - start)
    zeros = [0] * fill
    return Rows(
        positions=torch.tensor(positions + [-1] * fill),
        starts=torch.tensor(starts + zeros),
        ends=torch.tensor(ends + zeros),
        seq_slots=torch.tensor(slots + zeros),
        page_rows=torch.tensor(page_rows + zeros),
        page_table=torch.arange(len(pieces) * max_pages).flip(0).view(-1, max_pages),
        page_size=256,
        short=False,
    )


def test_ring_keeps_the_last_rows_of_each_sequence() -> None:
    rows = rows_of((5, 10, 2), (3, 4, 0), fill=1)
    assert rows.ring_slots(3).tolist() == [-1, -1, 2 * 3 + 1, 2 * 3 + 2, 2 * 3, 0, -1]


def test_closed_entries_lie_in_the_page_of_their_last_token() -> None:
    rows = rows_of((254, 258, 0), (3, 5, 1), fill=1)
    assert rows.closed_slots(4).tolist() == [-1, 7 * 64 + 63, -1, -1, 3 * 64, -1, -1]
    assert rows.visible(4).tolist() == [63, 64, 64, 64, 1, 1, 0]
    assert rows.max_entries(128) == 8


def test_sequences_are_found_and_fill_rows_are_not() -> None:
    assert rows_of((5, 10, 2), (0, 1, 0), (7, 9, 1), fill=2).sequences() == [(0, 5), (5, 6), (6, 8)]
    assert rows_of(fill=2, max_pages=1).sequences() == []
