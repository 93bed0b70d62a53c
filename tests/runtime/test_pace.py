"""PrefillPace: the share holds for any cost of a chunk, and prefills go on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.runtime.pace import CREDIT, LONGEST_S, MIN_ROWS, PART_S, WORTH, PrefillPace


def _simulate(
    pace: PrefillPace, *, alone_s: float, fixed_s: float, row_s: float, num_steps: int = 600
) -> tuple[float, int]:
    """Time of the steps and rows of prefill done, with a prefill that never ends."""
    total_s, done = 0.0, 0
    for _ in range(num_steps):
        rows = pace.rows(4, 2048)
        seconds = alone_s + (fixed_s + rows * row_s if rows else 0.0)
        pace.observe(4, rows, seconds)
        total_s += seconds
        done += rows
    return total_s, done


@settings(deadline=None)
@given(
    share=st.floats(0.05, 0.95),
    fixed=st.floats(0, 4),
    row=st.floats(1e-5, 1e-2),
)
def test_the_share_holds_and_prefills_go_on(share: float, fixed: float, row: float) -> None:
    total_s, done = _simulate(PrefillPace(share), alone_s=1.0, fixed_s=fixed, row_s=row)
    largest = fixed + 2048 * row  # the last chunk may not be paid for yet
    assert total_s <= 600 / (1 - share) + largest + 1e-6
    spent = total_s - 600
    assert spent >= min(600 * share / (1 - share), 600 * (fixed + MIN_ROWS * row)) * 0.5 - largest
    assert done > 0


def test_chunks_grow_to_what_a_step_may_take() -> None:
    pace = PrefillPace(0.5)
    assert pace.rows(3, 8192) == 0  # measured alone first
    fixed_s, row_s = 0.02, 5e-5
    for _ in range(200):
        rows = pace.rows(3, 8192)
        pace.observe(3, rows, 0.010 + (fixed_s + rows * row_s if rows else 0.0))
    pace.debt_s = 0.0
    assert pace.rows(3, 8192) == pytest.approx((LONGEST_S - 0.010 - fixed_s) / row_s, rel=0.1)
    assert pace.rows(3, 500) == 500
    assert pace.rows(40, 8192) == 0  # of that many nothing is known yet
    pace.observe(3, 500, 0.010 + 0.16)  # a short one that was slow counts
    pace.debt_s = 0.0
    assert pace.rows(3, 8192) == MIN_ROWS


@pytest.mark.parametrize("page_size", [1, 256])
def test_a_chunk_is_not_cut_where_that_saves_little(page_size: int) -> None:
    pace = PrefillPace(0.4)
    fixed_s, row_s = 0.1, 2e-5
    done = []
    for _ in range(1000):
        rows = pace.rows(1, 8192) // page_size * page_size
        pace.observe(1, rows, 0.005 + (fixed_s + rows * row_s if rows else 0.0))
        done += [rows] * (rows > 0)
    longest_s = WORTH * (fixed_s + MIN_ROWS * row_s)
    wanted = (longest_s - fixed_s) / row_s
    assert done[-1] == pytest.approx(wanted, abs=0.1 * wanted + page_size)


def test_a_costly_chunk_is_paid_for_first() -> None:
    pace = PrefillPace(0.5)
    pace.observe(1, 0, 0.010)
    pace.observe(1, 256, 0.060)
    assert pace.debt_s == pytest.approx(0.030)  # what the first step left is taken off
    for _ in range(3):
        assert pace.rows(1, 2048) == 0
        pace.observe(1, 0, 0.010)
    assert pace.rows(1, 2048) >= MIN_ROWS


def test_nobody_to_slow_down_means_no_limit() -> None:
    pace = PrefillPace(0.1)
    assert pace.rows(0, 2048) == 2048
    pace.observe(1, 0, 0.010)
    pace.observe(1, 2048, 5.0)
    assert pace.rows(1, 2048) == 0
    pace.observe(0, 2048, 5.0)  # the decoding ones are gone, and their claim with them
    assert pace.rows(1, 2048) > 0
    free = PrefillPace(1.0)
    free.observe(1, 2048, 5.0)
    assert free.rows(1, 2048) == 2048


@settings(deadline=None, max_examples=40)
@given(share=st.floats(0.1, 0.9), part=st.floats(1e-4, 0.05), late=st.integers(0, 1))
def test_parts_take_the_share_and_no_more(share: float, part: float, late: int) -> None:
    """Even if what a step took is known one step late."""
    pace, alone_s, total_s, num_steps = PrefillPace(share), 0.005, 0.0, 400
    in_flight: list[tuple[int, float]] = []
    longest = 0
    for _ in range(num_steps):
        num_parts = pace.parts(2, 2048)
        in_flight.append((num_parts, alone_s + num_parts * part))
        total_s += in_flight[-1][1]
        longest = max(longest, num_parts)
        if len(in_flight) > late:
            done, seconds = in_flight.pop(0)
            if done:
                pace.observe_parts(2, 2048, done, seconds)
            else:
                pace.observe(2, 0, seconds)
    wanted_s = num_steps * alone_s / (1 - share)
    assert longest * part <= max(PART_S, (1 + CREDIT) * alone_s * share / (1 - share), part) + 1e-9
    assert total_s == pytest.approx(wanted_s, rel=0.05, abs=2 * max(PART_S, part))


def test_who_decodes_without_rows_still_has_a_share() -> None:
    pace = PrefillPace(0.5)
    assert pace.parts(3, 2048) == 0  # nothing is known yet
    pace.observe(3, 0, 0.010)
    assert pace.parts(9, 2048) == 1  # of nine nothing, but of three
    pace.observe_parts(0, 2048, 1, 0.030)  # while results were awaited
    assert pace.parts(3, 2048) == 0
    pace.observe(3, 0, 0.010)
    pace.observe(3, 0, 0.010)
    assert pace.parts(3, 2048) == 1
