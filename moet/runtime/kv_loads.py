"""Cached KV on its way from disk to the host, for sequences that wait to be placed.

Decides how much of a prompt is worth reading and has it read into host blocks. What a sequence will
start from is held for it until it is placed or gone; what arrives for one that is gone stays as any
other host object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moet.runtime.kv_disk import Buffers, DiskStore
from moet.runtime.kv_host import HostTier, ObjectSizes, object_names, page_name, rings_name
from moet.runtime.metrics import Counters
from moet.runtime.prefix_cache import PrefixCache

MAX_LOADS = 2  # sequences that are being read for at a time


@dataclass(slots=True, eq=False)
class Load:
    """Objects that are read for one sequence, and what it holds in the host."""

    names: list[str]
    blocks: list[list[int]]
    held: list[int]
    whole: list[bool] = field(default_factory=list)  # by name, once all are read
    revoked: set[str] = field(default_factory=set)  # names whose content is not wanted any more
    finished: bool = False  # and in the host's books
    unwanted: bool = False


class DiskLoads:
    """All loads. `tell` is called from another thread when a load is to be given to `take`."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskStore,
        sizes: ObjectSizes,
        buffers: Callable[[Sequence[int], int], Buffers],
        tell: Callable[[Load], None],
        counters: Counters,
    ) -> None:
        self._host = host
        self._disk = disk
        self._sizes = sizes
        self._buffers = buffers
        self._tell = tell
        self._counters = counters
        self._loads: dict[int, Load] = {}  # by the sequence's arrival
        self._abandoned: list[Load] = []  # unfinished ones whose sequence is gone

    @property
    def num_unfinished(self) -> int:
        """Loads that `take` has not had."""
        return len(self._abandoned) + sum(not load.finished for load in self._loads.values())

    def begin(
        self, arrival: int, keys: Sequence[bytes], cache: PrefixCache, *, others_end: bool
    ) -> bool | None:
        """Begin to read what a sequence could start from, as much as the host has room for.

        False if the disk has nothing to add; None if more fits once others are done: loads, or what
        `others_end` stands for.
        """
        ends = self._ends(keys, cache)
        if not ends:
            return False
        if self.num_unfinished >= MAX_LOADS:
            return None
        here = [name for name in object_names(keys[: ends[-1]]) if name in self._host]
        held = [block for name in here for block in self._host.hold(name)]
        end, names = self._affordable(keys, cache, ends, self._host.num_available)
        wanted = self._affordable(keys, cache, ends, self._host.pool.num_pages)[0]
        if end < wanted and (others_end or self.num_unfinished):
            self._host.release(held)
            return None
        if not names:
            self._host.release(held)
            return False
        load = Load(names, [], held)
        for name in names:
            blocks = self._host.take(self._sizes.num_blocks(name))
            assert blocks is not None
            load.blocks.append(blocks)
        self._loads[arrival] = load
        self._read(load)
        return True

    def take(self, load: Load) -> None:
        """Put what has been read into the host's books."""
        load.finished = True
        if load.unwanted:
            self._abandoned.remove(load)
        for name, blocks, whole in zip(load.names, load.blocks, load.whole, strict=True):
            if not whole or name in load.revoked or name in self._host:
                self._host.release(blocks)
                continue
            self._counters.num_disk_hits += 1
            self._host.put(name, blocks)
            if not load.unwanted:
                load.held += self._host.hold(name)

    def is_over(self, arrival: int) -> bool:
        """Whether nothing is being read for a sequence."""
        load = self._loads.get(arrival)
        return load is None or load.finished

    def let_go(self, arrival: int) -> None:
        """The sequence needs what it holds no more."""
        load = self._loads.pop(arrival, None)
        if load is None:
            return
        self._host.release(load.held)
        load.held = []
        load.unwanted = True
        if not load.finished:
            self._abandoned.append(load)

    def revoke(self, names: Sequence[str] | None) -> None:
        """Do not take these (None: any) from loads under way."""
        for load in [*self._loads.values(), *self._abandoned]:
            load.revoked.update(load.names if names is None else names)

    def users(self) -> list[list[int]]:
        """Blocks that loads hold, once for each time."""
        users = []
        for load in [*self._loads.values(), *self._abandoned]:
            users += [load.held] if load.finished else [load.held, *load.blocks]
        return users

    def _ends(self, keys: Sequence[bytes], cache: PrefixCache) -> list[int]:
        """Numbers of pages after which a sequence could start, only those that need the disk."""
        ends, from_disk = [], False
        for i, key in enumerate(keys):
            page, snapshot = cache.find(key)
            if page is None and page_name(key) not in self._host:
                if page_name(key) not in self._disk:
                    break
                from_disk = True
            if not cache.needs_snapshot:
                ends += [i + 1] if from_disk else []
            elif snapshot is not None or rings_name(key) in self._host:
                ends = [*ends, i + 1] if from_disk else []  # what is here already needs no disk
            elif rings_name(key) in self._disk:
                ends.append(i + 1)
        return ends

    def _affordable(
        self, keys: Sequence[bytes], cache: PrefixCache, ends: list[int], room: int
    ) -> tuple[int, list[str]]:
        """The last of the ends for which `room` blocks are enough (or 0), and what to read."""
        found: tuple[int, list[str]] = (0, [])
        pages: list[str] = []
        wanted = set(ends)
        for i, key in enumerate(keys[: ends[-1]]):
            if cache.find(key)[0] is None and page_name(key) not in self._host:
                pages.append(page_name(key))
            if i + 1 not in wanted:
                continue
            rings = rings_name(key)
            here = not cache.needs_snapshot or cache.find(key)[1] is not None
            names = [] if here or rings in self._host else [rings]
            if len(pages) + sum(map(self._sizes.num_blocks, names)) <= room:
                found = i + 1, [*pages, *names]
        return found

    def _read(self, load: Load) -> None:
        left = len(load.names)
        lock = threading.Lock()

        def one_done(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                load.whole = [not future.exception() and future.result() for future in futures]
                self._tell(load)

        futures = [
            self._disk.read(name, self._buffers(blocks, self._sizes.num_bytes(name)))
            for name, blocks in zip(load.names, load.blocks, strict=True)
        ]
        for future in futures:
            future.add_done_callback(one_done)
