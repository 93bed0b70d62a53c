"""PagePool: every page is free or referenced, and never both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.errors import CapacityError
from moet.runtime.page_pool import PagePool


def test_pages_are_distinct_and_return() -> None:
    pool = PagePool(5)
    pages = pool.allocate(5)
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.release(pages)
    assert (pool.num_free, pool.num_used) == (5, 0)


def test_too_many_changes_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="2 pages wanted, 1 of 3"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_a_page_lives_while_it_has_references() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.ref_count(page) == 1
    assert pool.num_free == 0
    pool.release([page])
    assert pool.num_free == 1


def test_free_pages_cannot_be_released_or_retained() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        pool.retain([1])


def test_check_notices_a_lost_page() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    pool._ref_counts = [0, 0]
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9))))
def test_books_balance_after_any_calls(calls: list[tuple[str, int]]) -> None:
    pool = PagePool(10)
    held: list[int] = []
    for name, n in calls:
        if name == "allocate" and n <= pool.num_free:
            held += pool.allocate(n)
        elif name == "retain" and held:
            held.append(held[n % len(held)])
            pool.retain(held[-1:])
        elif name == "release" and held:
            pool.release([held.pop(n % len(held))])
        pool.check()
        assert pool.num_used == len(set(held))
    pool.release(held)
    assert pool.num_free == 10
