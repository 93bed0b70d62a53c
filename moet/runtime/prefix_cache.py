"""Full pages shared between sequences, found by a hash chain over their tokens.

Knows page ids and keys; tensors and scheduling are others' affair. A model with resumable ring
state can go on from a page border only if the rings were saved there: such a *resume snapshot* is
an id here and bytes in KVCache. Copies happen in the order of the steps, so an id may be handed to
a new owner as soon as its last use has been scheduled.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moet.errors import CapacityError
from moet.runtime.page_pool import PagePool


def root_key(salt: str, precision: str) -> bytes:
    """The key that a chain starts from: pages of other salts or precisions never match."""
    text = f"{len(salt)}:{salt}:{precision}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full page: its tokens and everything before them."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Hit:
    """Pages found for a prompt, one reference each, and the snapshot at their end (or None)."""

    pages: list[int]
    snapshot: int | None


@dataclass(slots=True)
class _Entry:
    page: int
    snapshot: int | None = None


class PrefixCache:
    """All allocation of pages goes through here, since unreferenced cached pages count as free.

    The cache holds one reference of each page it knows; a page whose only reference that is can be
    evicted, least recently used first and a chain's tail before its head. `needs_snapshot`: a hit
    must end at a border that has one. `enabled` False never keeps or finds anything. `on_evict` is
    told the key, page and snapshot (or None) of what is given up for lack of room, just before.
    """

    def __init__(
        self, pool: PagePool, *, num_snapshots: int, needs_snapshot: bool, enabled: bool
    ) -> None:
        self.pool = pool
        self.snapshots = PagePool(num_snapshots)
        self.needs_snapshot = needs_snapshot
        self.enabled = enabled
        self._entries: dict[bytes, _Entry] = {}
        self._key_of_page: dict[int, bytes] = {}
        self.on_evict: Callable[[bytes, int | None, int | None], None] = lambda *lost: None
        self._evictable: OrderedDict[int, None] = OrderedDict()  # pages, oldest first
        self._attached: OrderedDict[int, bytes] = OrderedDict()  # snapshot -> key, oldest first

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self.pool.num_free + len(self._evictable)

    @property
    def num_attached(self) -> int:
        """Snapshots that entries have."""
        return len(self._attached)

    def owns(self, page: int) -> bool:
        """Whether the cache holds a reference of this page."""
        return page in self._key_of_page

    def find(self, key: bytes) -> tuple[int | None, int | None]:
        """The page of a key and the snapshot at its end, None for what is not there."""
        entry = self._entries.get(key)
        return (None, None) if entry is None else (entry.page, entry.snapshot)

    def retain(self, pages: Sequence[int], snapshot: int | None) -> None:
        """Add a reference to pages of entries, for a sequence that starts at a snapshot of one."""
        self.pool.retain(pages)
        for page in pages:
            self._evictable.pop(page, None)
        if snapshot is not None:
            self._attached.move_to_end(snapshot)

    def match(self, keys: Sequence[bytes]) -> Hit:
        """Find the longest run of keys from the start that can be resumed; references its pages."""
        entries = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            entries.append(entry)
        if self.needs_snapshot:
            while entries and entries[-1].snapshot is None:
                entries.pop()
        if not entries:
            return Hit([], None)
        pages = [entry.page for entry in entries]
        snapshot = entries[-1].snapshot
        self.retain(pages, snapshot)
        return Hit(pages, snapshot)

    def allocate(self, num_pages: int) -> list[int]:
        """Take num_pages pages with reference count 1, evicting cached ones as needed.

        Raises CapacityError, changing nothing, if free and evictable pages together are fewer.
        """
        if num_pages > self.num_available:
            raise CapacityError(
                f"{num_pages} pages wanted, {self.num_available} of {self.pool.num_pages} are "
                "free or evictable"
            )
        while self.pool.num_free < num_pages:
            key = self._key_of_page[next(iter(self._evictable))]
            self.on_evict(key, *self.find(key))
            self._remove(key)
        return self.pool.allocate(num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page, given in the order of the sequence."""
        self.pool.release(pages)
        for page in reversed(pages):
            if page in self._key_of_page and self.pool.ref_count(page) == 1:
                self._evictable[page] = None

    def register(self, key: bytes, page: int) -> None:
        """Keep a full page that a sequence holds. A key that is known keeps the page it has."""
        if self.enabled and key not in self._entries and page not in self._key_of_page:
            self.pool.retain([page])
            self._entries[key] = _Entry(page)
            self._key_of_page[page] = key

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop entries whose content must not be used again; sequences keep their references."""
        for key in keys:
            if key in self._entries:
                self._remove(key)

    def clear(self) -> None:
        """Drop every entry."""
        self.forget(list(self._entries))

    def take_snapshot_id(self) -> int | None:
        """An id to save rings under, or None if every one is on its way to an entry.

        When none is free, the least recently used attached snapshot gives up its id.
        """
        if self.snapshots.num_free == 0:
            if not self._attached:
                return None
            snapshot, key = next(iter(self._attached.items()))
            self.on_evict(key, None, snapshot)
            self._drop_snapshot(self._entries[key])
        return self.snapshots.allocate(1)[0]

    def return_snapshot_id(self, snapshot: int) -> None:
        """Give back an id that was taken and not attached."""
        self.snapshots.release([snapshot])

    def attach_snapshot(self, key: bytes, snapshot: int) -> bool:
        """Give the entry a snapshot; takes over the id. False (id freed) if it is not wanted."""
        entry = self._entries.get(key)
        if entry is None or entry.snapshot is not None:
            self.snapshots.release([snapshot])
            return False
        entry.snapshot = snapshot
        self._attached[snapshot] = key
        return True

    def detach_snapshot(self, key: bytes, snapshot: int) -> None:
        """Drop this snapshot of this entry, if it still has it."""
        entry = self._entries.get(key)
        if entry is not None and entry.snapshot == snapshot:
            self._drop_snapshot(entry)

    def check(self) -> None:
        """Raise AssertionError if entries, pages and snapshots do not agree."""
        self.pool.check()
        self.snapshots.check()
        assert {e.page: k for k, e in self._entries.items()} == self._key_of_page
        only_ours = {p for p in self._key_of_page if self.pool.ref_count(p) == 1}
        assert set(self._evictable) == only_ours, "evictable pages are not the unreferenced ones"
        attached = {e.snapshot: k for k, e in self._entries.items() if e.snapshot is not None}
        assert attached == dict(self._attached), "snapshots and entries do not agree"

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        if entry.snapshot is not None:
            self._drop_snapshot(entry)
        del self._key_of_page[entry.page]
        self._evictable.pop(entry.page, None)
        self.pool.release([entry.page])

    def _drop_snapshot(self, entry: _Entry) -> None:
        assert entry.snapshot is not None
        del self._attached[entry.snapshot]
        self.snapshots.release([entry.snapshot])
        entry.snapshot = None
