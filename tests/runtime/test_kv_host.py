"""HostTier and DiskLoads: blocks are somebody's or free, and what is held stays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moet.runtime.batch import Keep
from moet.runtime.kv_disk import DiskStore, fingerprint
from moet.runtime.kv_host import HostTier, ObjectSizes, page_name
from moet.runtime.kv_tiers import KVTiers
from moet.runtime.metrics import Counters
from moet.runtime.page_pool import PagePool
from moet.runtime.prefix_cache import PrefixCache


def _put(host: HostTier, name: str, num_blocks: int = 1) -> list[int]:
    blocks = host.take(num_blocks)
    assert blocks is not None
    host.put(name, blocks)
    return blocks


def test_the_oldest_goes_unless_it_is_held() -> None:
    host = HostTier(100, 4)
    for name in "abcd":
        assert 100 <= _put(host, name)[0] < 104
    held = host.hold("a")
    host.touch(["b", "c"])  # c is older than b now
    _put(host, "e")
    assert [name in host for name in "abcde"] == [True, True, True, False, True]
    _put(host, "f")
    assert "c" not in host
    assert host.num_available == 3
    assert host.take(4) is None
    host.drop("a")  # still held: the block is nobody else's
    host.check(held)
    host.release(held)
    assert len(host.take(4) or []) == 4
    assert host.num_objects == 0


@given(st.lists(st.tuples(st.sampled_from("phrdt"), st.integers(0, 9), st.integers(1, 3))))
def test_books_balance_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    host = HostTier(7, 8)
    held: list[list[int]] = []
    for what, number, size in steps:
        name = str(number)
        if what == "p" and name not in host and (blocks := host.take(size)) is not None:
            host.put(name, blocks)
        elif what == "h" and name in host:
            held.append(host.hold(name))
        elif what == "r" and held:
            host.release(held.pop(number % len(held)))
        elif what == "d":
            host.drop(name)
        else:
            host.touch([name])
        host.check(block for blocks in held for block in blocks)
    for blocks in held:
        host.release(blocks)
    host.clear()
    assert host.pool.num_free == 8


def test_what_was_forgotten_before_it_was_written_is_never_written(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 10_000, fingerprint(["x"]))
    memory = [bytearray(b"A" * 8), bytearray(b"B" * 8)]
    tiers = KVTiers(
        HostTier(0, 2),
        disk,
        ObjectSizes(8, 0),
        buffers=lambda blocks, size: [memoryview(memory[b])[:size] for b in blocks],
        counters=Counters(),
    )
    asked: list[Keep] = []
    tiers.copy = asked.append
    cache = PrefixCache(PagePool(1), num_snapshots=0, needs_snapshot=False, enabled=True)
    key = b"k" * 16
    assert tiers.keep(key, 0, None)
    tiers.forget([key])
    assert tiers.keep(key, 0, None)  # somebody else has computed it again
    assert [keep.save for keep in asked] == [True, False]
    for keep in asked:
        tiers.kept(keep)
    disk.flush()
    tiers.pump(cache)
    tiers.check()
    assert page_name(key) not in disk
    assert not list(tmp_path.rglob("*.page"))
    assert tiers.keep(key, 0, None)  # written from the host, which has it
    disk.flush()
    tiers.pump(cache)
    tiers.check()
    assert page_name(key) in disk
    assert Counter(keep.name for keep in asked) == {page_name(key): 2}
    tiers.close(cache)
