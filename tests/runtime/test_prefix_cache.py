"""PrefixCache: keys, hits, eviction, snapshots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.errors import CapacityError
from moet.runtime.page_pool import PagePool
from moet.runtime.prefix_cache import Hit, PrefixCache, page_key, root_key


def _cache(num_pages: int = 8, *, num_snapshots: int = 0, enabled: bool = True) -> PrefixCache:
    return PrefixCache(
        PagePool(num_pages),
        num_snapshots=num_snapshots,
        needs_snapshot=num_snapshots > 0,
        enabled=enabled,
    )


def _keys(*pages: int, salt: str = "") -> list[bytes]:
    keys = [root_key(salt, "w2")]
    for token in pages:
        keys.append(page_key(keys[-1], [token] * 4))
    return keys[1:]


def _fill(cache: PrefixCache, keys: list[bytes]) -> list[int]:
    pages = cache.allocate(len(keys))
    for key, page in zip(keys, pages, strict=True):
        cache.register(key, page)
    return pages


def test_keys_stand_for_all_tokens_before_them() -> None:
    assert _keys(1, 2)[0] == _keys(1, 3)[0]
    assert _keys(1, 2)[1] != _keys(3, 2)[1]
    assert page_key(b"", [1, 2]) != page_key(b"", [258])
    assert root_key("a", "w2") != root_key("b", "w2") != root_key("b", "fp4")
    assert root_key("a:w2", "") != root_key("a", "w2:")
    assert root_key("\ud83d", "w2") != root_key("", "w2")


def test_longest_run_of_known_pages_is_shared() -> None:
    cache = _cache()
    pages = _fill(cache, _keys(1, 2, 3))
    assert cache.match(_keys(1, 2, 9)) == Hit(pages[:2], None)
    assert cache.match(_keys(1, 2, 3, salt="other")) == Hit([], None)
    assert cache.pool.ref_count(pages[0]) == 3  # the first holder, the cache, the hit
    cache.release(pages)
    cache.release(pages[:2])
    cache.check()
    assert cache.num_evictable == cache.num_cached == 3


def test_pages_in_use_are_never_evicted_and_tails_go_first() -> None:
    cache = _cache(5)
    old, used = _fill(cache, _keys(1, 2, 3)), _fill(cache, _keys(4))
    cache.release(old)
    assert cache.num_available == 4
    with pytest.raises(CapacityError, match="5 pages wanted, 4 of 5"):
        cache.allocate(5)
    assert cache.num_cached == 4  # nothing was evicted for it
    assert set(cache.allocate(2)) == {4, old[2]}
    assert cache.match(_keys(1, 2, 3)).pages == old[:2]
    assert cache.match(_keys(4)).pages == used
    cache.check()


def test_the_least_recently_used_chain_goes_first() -> None:
    cache = _cache(4)
    for token in (1, 2, 3, 4):
        cache.release(_fill(cache, _keys(token)))
    cache.release(cache.match(_keys(1)).pages)
    cache.allocate(2)
    assert [bool(cache.match(_keys(token)).pages) for token in (1, 2, 3, 4)] == [
        True,
        False,
        False,
        True,
    ]


def test_equal_content_keeps_its_first_page() -> None:
    cache = _cache()
    first, second = _fill(cache, _keys(1)), cache.allocate(1)
    cache.register(_keys(1)[0], second[0])
    assert cache.match(_keys(1)).pages == first
    cache.release(second)
    assert cache.pool.ref_count(second[0]) == 0
    cache.check()


def test_forgotten_pages_stay_with_their_holders() -> None:
    cache = _cache()
    pages = _fill(cache, _keys(1, 2))
    cache.forget(_keys(1, 2, 3))
    assert cache.match(_keys(1)).pages == []
    assert [cache.pool.ref_count(page) for page in pages] == [1, 1]
    cache.check()
    cache.release(pages)
    assert cache.pool.num_used == 0


def test_off_finds_and_keeps_nothing() -> None:
    cache = _cache(enabled=False)
    pages = _fill(cache, _keys(1))
    assert cache.match(_keys(1)).pages == []
    cache.release(pages)
    assert cache.pool.num_used == 0


def test_a_hit_ends_at_a_snapshot() -> None:
    cache = _cache(num_snapshots=2)
    pages = _fill(cache, _keys(1, 2, 3))
    assert cache.match(_keys(1, 2, 3)).pages == []
    snapshot = cache.take_snapshot_id()
    assert snapshot is not None
    assert cache.attach_snapshot(_keys(1, 2)[1], snapshot)
    assert cache.match(_keys(1, 2, 3)) == Hit(pages[:2], snapshot)
    assert cache.match(_keys(1)) == Hit([], None)
    cache.check()


def test_snapshots_go_with_their_page_or_for_a_newer_one() -> None:
    cache = _cache(3, num_snapshots=2)
    keys = [_keys(token)[0] for token in (1, 2, 3)]
    for key in keys:
        cache.release(_fill_one(cache, key))
        snapshot = cache.take_snapshot_id()
        assert snapshot is not None
        assert cache.attach_snapshot(key, snapshot)
    assert cache.match(keys[:1]).pages == []  # the oldest gave its snapshot up
    cache.release(cache.match(keys[1:2]).pages)
    cache.allocate(2)  # evicts pages 1 and 3
    assert cache.num_attached == 1
    cache.check()


def _fill_one(cache: PrefixCache, key: bytes) -> list[int]:
    pages = cache.allocate(1)
    cache.register(key, pages[0])
    return pages


def test_unwanted_snapshots_return() -> None:
    cache = _cache(num_snapshots=3)
    (key,) = _keys(1)
    first, second, third = (cache.take_snapshot_id() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert cache.take_snapshot_id() is None  # all are on their way
    assert not cache.attach_snapshot(key, first)  # no such page
    _fill(cache, [key])
    assert cache.attach_snapshot(key, second)
    assert not cache.attach_snapshot(key, third)  # it has one
    assert cache.snapshots.num_used == 1
    cache.detach_snapshot(key, third)
    assert cache.num_attached == 1
    cache.detach_snapshot(key, second)
    cache.detach_snapshot(key, second)
    assert cache.snapshots.num_used == cache.num_attached == 0
    cache.check()


@given(st.lists(st.tuples(st.sampled_from("fmrsc"), st.integers(0, 5)), max_size=60))
def test_books_balance_after_any_calls(calls: list[tuple[str, int]]) -> None:
    cache = _cache(6, num_snapshots=2)
    held: list[list[int]] = []
    for name, n in calls:
        keys = _keys(*[n // 2, n, n][: 1 + n % 3])
        if name == "f" and cache.num_available >= len(keys):
            held.append(_fill(cache, keys))
        elif name == "m":
            held.append(cache.match(keys).pages)
        elif name == "r" and held:
            cache.release(held.pop(n % len(held)))
        elif name == "s" and (snapshot := cache.take_snapshot_id()) is not None:
            cache.attach_snapshot(keys[-1], snapshot)
        elif name == "c":
            cache.forget(keys)
        cache.check()
    for pages in held:
        cache.release(pages)
    assert cache.pool.num_used == cache.num_evictable
    assert len(cache.allocate(6)) == 6
    assert cache.num_attached == 0
