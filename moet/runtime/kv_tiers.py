"""Where cached KV is when it is not on the device: in blocks of host memory, and on disk.

Keeps the books of both and decides what moves; copies on the device's side are asked for through
`copy`, as work of the next batch. An object is a full page or the resume snapshot at its end, by
name. What leaves the device comes to the host; with a disk, a finished turn does so at once, since
every host object is written in the background and may go from the host only then. A hit on disk is
read into host blocks before its sequence is placed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from moet.runtime.batch import Keep
from moet.runtime.kv_disk import Buffers, DiskStats, DiskStore
from moet.runtime.kv_host import HostTier, ObjectSizes, object_names, page_name, rings_name
from moet.runtime.kv_loads import DiskLoads, Load
from moet.runtime.metrics import Counters
from moet.runtime.prefix_cache import PrefixCache

SAVES_PER_STEP = 16  # pages of finished turns that a step copies to the host


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a sequence may start from, held for it until it is placed or lets go.

    pages: of the device, or None where the page's bytes lie in the next one of `blocks`. The rings
    at the end are a snapshot, or lie in ring_blocks, or are not needed.
    """

    pages: list[int | None] = field(default_factory=list)
    snapshot: int | None = None
    blocks: list[int] = field(default_factory=list)
    ring_blocks: list[int] = field(default_factory=list)


class KVTiers:
    """Host and disk behind a prefix cache. All calls come from the scheduler's thread.

    buffers: the bytes of host blocks, cut to a size.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskStore | None,
        sizes: ObjectSizes,
        *,
        buffers: Callable[[Sequence[int], int], Buffers],
        counters: Counters,
    ) -> None:
        self.host = host
        self.disk = disk
        self.copy: Callable[[Keep], None] = lambda keep: None  # set by who makes batches
        self._sizes = sizes
        self._buffers = buffers
        self._counters = counters
        self._chains: deque[list[bytes]] = deque()  # keys to be saved, head first
        self._num_saved = 0  # keys of the first chain
        self._num_copies = 0  # ever asked for
        self._saving: dict[str, list[int]] = {}  # held until written
        self._copying: deque[list[int]] = deque()  # held until their commands are carried out
        self._revoked: set[str] = set()  # of these, what is not to be written any more
        self._done: SimpleQueue[str | Load] = SimpleQueue()
        self._wake = threading.Event()
        self.loads = None
        if disk is not None:
            self.loads = DiskLoads(host, disk, sizes, buffers, self._tell, counters)

    @property
    def has_work(self) -> bool:
        """Whether pages on the device wait to be saved."""
        return bool(self._chains)

    @property
    def is_busy(self) -> bool:
        """Whether reads or writes are under way whose end `wait` would tell."""
        return bool(self._saving) or (self.loads is not None and self.loads.num_unfinished > 0)

    def wait(self, timeout_s: float) -> None:
        """Return when something has been read or written, or in time."""
        if self.is_busy:
            self._wake.wait(timeout_s)

    def match(self, keys: Sequence[bytes], cache: PrefixCache) -> Reuse:
        """The longest run of keys from the start that can be resumed from device and host.

        Adds a reference to each page and block, which the caller gives back.
        """
        can_restore = cache.snapshots.num_free > 0 or cache.num_attached > 0
        pages: list[int | None] = []
        end = 0
        for key in keys:
            page, snapshot = cache.find(key)
            if page is None and page_name(key) not in self.host:
                break
            pages.append(page)
            from_host = can_restore and rings_name(key) in self.host
            if not cache.needs_snapshot or snapshot is not None or from_host:
                end = len(pages)
        if end == 0:
            return Reuse()
        del pages[end:]
        snapshot = cache.find(keys[end - 1])[1] if pages[-1] is not None else None
        cache.retain([page for page in pages if page is not None], snapshot)
        missing = [key for key, page in zip(keys, pages, strict=False) if page is None]
        blocks = [block for key in missing for block in self.host.hold(page_name(key))]
        rings: list[int] = []
        if cache.needs_snapshot and snapshot is None:
            rings = self.host.hold(rings_name(keys[end - 1]))
        return Reuse(pages, snapshot, blocks, rings)

    # From the device to the host and on to the disk

    def keep(self, key: bytes, page: int | None, snapshot: int | None) -> bool:
        """Take a page and a snapshot (or either) of the device; False if the host has no room."""
        done = True
        if page is not None:
            done = self._keep(page_name(key), page, None)
        if snapshot is not None:
            done &= self._keep(rings_name(key), None, snapshot)
        return done

    def evicted(self, key: bytes, page: int | None, snapshot: int | None) -> None:
        """Take what is about to leave the device, if there is room."""
        if not self.keep(key, page, snapshot):
            self._counters.num_host_dropped += 1

    def save(self, keys: Sequence[bytes]) -> None:
        """Have a chain of pages written to disk in the steps to come."""
        if self.disk is not None and keys:
            self._chains.append(list(keys))

    def pump(self, cache: PrefixCache) -> None:
        """Take note of what has been read and written, and go on saving."""
        self._wake.clear()
        while not self._done.empty():
            what = self._done.get()
            if isinstance(what, Load):
                assert self.loads is not None
                self.loads.take(what)
            else:
                self.host.release(self._saving.pop(what))
                self._revoked.discard(what)
        limit = self._num_copies + SAVES_PER_STEP
        while self._chains and self._num_copies < limit:
            keys = self._chains[0]
            key = keys[self._num_saved]
            if not self.keep(key, *cache.find(key)) and self._saving:
                return  # until some are written
            self._num_saved += 1
            if self._num_saved == len(keys):
                self.touch(keys)
                self._chains.popleft()
                self._num_saved = 0

    def kept(self, keep: Keep) -> None:
        """The copy has been made: its bytes may be written."""
        if not keep.save:
            self.copied(keep.blocks)
        elif keep.name in self._revoked:
            self._done.put(keep.name)
        else:
            self._write(keep.name, keep.blocks)

    def hold_for_copy(self, blocks: list[int]) -> None:
        """These were given to a command of the next batch; they are held until it is `copied`.

        Steps are in order among themselves, but not with the disk's threads.
        """
        if blocks:
            self._copying.append(blocks)

    def copied(self, blocks: list[int]) -> None:
        """A command over blocks that were held for it has been carried out; they come in order."""
        assert self._copying.popleft() == blocks
        self.host.release(blocks)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the objects of a chain as used, its head last: the tail goes before it."""
        names = object_names(keys)
        self.host.touch(names)
        if self.disk is not None:
            self.disk.touch(names)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop objects whose content must not be used again."""
        names = object_names(keys)
        for name in names:
            self.host.drop(name)
        self._revoked.update(self._saving.keys() & set(names))
        if self.disk is not None and self.loads is not None:
            self.loads.revoke(names)
            self.disk.delete(names)

    def clear(self) -> None:
        """Drop every object."""
        self._chains.clear()
        self._num_saved = 0
        self.host.clear()
        self._revoked.update(self._saving)
        if self.disk is not None and self.loads is not None:
            self.loads.revoke(None)
            self.disk.clear()
            self.disk.delete(list(self._saving))

    # From the disk to the host

    def load(self, arrival: int, keys: Sequence[bytes], cache: PrefixCache) -> bool | None:
        """Begin to read what a sequence could start from; `loaded` tells when that is there.

        False if the disk has nothing to add, None if others must be done first.
        """
        if self.loads is None:
            return False
        return self.loads.begin(arrival, keys, cache, others_end=bool(self._saving))

    def loaded(self, arrival: int) -> bool:
        """Whether nothing is being read for a sequence any more."""
        return self.loads is None or self.loads.is_over(arrival)

    def end_load(self, arrival: int) -> None:
        """The sequence has what it needs, or is gone."""
        if self.loads is not None:
            self.loads.let_go(arrival)

    def disk_stats(self) -> DiskStats:
        """The disk's books; zeros if there is none."""
        return DiskStats() if self.disk is None else self.disk.stats()

    def check(self) -> None:
        """Raise AssertionError unless every host block is an object's or on its way to be one."""
        users = [*self._saving.values(), *self._copying]
        users += [] if self.loads is None else self.loads.users()
        self.host.check(block for blocks in users for block in blocks)

    def close(self, cache: PrefixCache) -> None:
        """Finish what is being read and written."""
        if self.disk is not None:
            self.disk.close()
        self.pump(cache)

    def _keep(self, name: str, page: int | None, snapshot: int | None) -> bool:
        unsaved = self.disk is not None and name not in self._saving and name not in self.disk
        if name in self.host:
            present = self.host.hold(name)
            if unsaved and present not in self._copying:  # the disk has let go of it since
                self._saving[name] = present
                self._write(name, present)
            else:
                self.host.release(present)
            return True
        blocks = self.host.take(self._sizes.num_blocks(name))
        if blocks is None:
            return False
        self.host.put(name, blocks)
        held = self.host.hold(name)
        if unsaved:
            self._saving[name] = held
        else:
            self._copying.append(held)
        self._num_copies += 1
        self.copy(Keep(name, page, snapshot, blocks, unsaved))
        return True

    def _write(self, name: str, blocks: list[int]) -> None:
        assert self.disk is not None
        data = self._buffers(blocks, self._sizes.num_bytes(name))
        self.disk.write(name, data, partial(self._tell, name))

    def _tell(self, what: str | Load) -> None:
        self._done.put(what)
        self._wake.set()
