"""Who holds what: sequence slots, pages, host blocks and snapshots of every sequence.

Carries out the scheduler's decisions in the books and collects the copies they need as commands for
the next batch. Knows no rows, budgets or ranks. Copies happen in step order, so whatever is freed
here can be given away at once: its last use is already on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from moet.errors import CapacityError
from moet.models.base import KVCacheSpec
from moet.runtime.batch import Admit, Command, Release, Restore, Row, SetPages, SwapIn, SwapOut
from moet.runtime.kv_cache import resume_bytes
from moet.runtime.metrics import Counters
from moet.runtime.page_pool import PagePool
from moet.runtime.prefix_cache import Hit, PrefixCache
from moet.runtime.sequence import Sequence


class SequenceMemory:
    """Places sequences, grows them, moves them out, frees them; `commands` is the work that makes.

    ring_blocks: host blocks that one sequence's rings take. snapshot_interval: tokens between
    resume snapshots of a long prompt, rounded up to whole pages.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        num_seq_slots: int,
        num_host_blocks: int,
        num_snapshots: int,
        ring_blocks: int,
        snapshot_interval: int,
        prefix_cache: Literal["on", "exact", "off"],
        counters: Counters,
    ) -> None:
        self.page_size = spec.page_size
        self.num_seq_slots = num_seq_slots
        self.ring_blocks = ring_blocks
        self.snapshot_interval = -(-snapshot_interval // spec.page_size) * spec.page_size
        self.exact = prefix_cache == "exact"
        self.host = PagePool(num_host_blocks)
        self.cache = PrefixCache(
            PagePool(num_pages),
            num_snapshots=num_snapshots,
            needs_snapshot=resume_bytes(spec) > 0,
            enabled=prefix_cache != "off",
        )
        self.commands: list[Command] = []
        self.num_releases = 0  # grows whenever room may have been made
        self._free_slots = list(range(num_seq_slots - 1, -1, -1))
        self._counters = counters

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def take_commands(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def place(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a waiting sequence a slot and pages for num_tokens, with what it can reuse.

        Its state comes back from host blocks, or starts at the longest prefix hit. False, changing
        nothing, if a slot or pages are missing.
        """
        if not self._free_slots:
            return False
        on_host = seq.is_on_host
        hit = Hit([], None) if on_host else self._match(seq)
        try:
            pages = hit.pages + self.cache.allocate(self.num_pages_for(num_tokens) - len(hit.pages))
        except CapacityError:
            self.cache.release(hit.pages)
            return False
        seq.slot = slot = self._free_slots.pop()
        seq.pages = pages
        self.commands.append(SetPages(slot, 0, list(pages)))
        self.commands.append(Admit(seq, slot, len(seq.token_ids)))
        if on_host:
            front = pages[: len(seq.host_pages)]
            self.commands.append(SwapIn(seq, slot, front, seq.host_pages, seq.host_rings))
            self._free_host(seq)
        else:
            self._start_at(seq, hit)
        return True

    def has_room(self, seq: Sequence, num_tokens: int, leaving: list[Sequence]) -> bool:
        """Whether `place` would succeed once the sequences in `leaving` have left the device."""
        if not self._free_slots and not leaving:
            return False
        hit = Hit([], None) if seq.is_on_host else self._match(seq)
        held = Counter(page for other in leaving for page in other.pages)
        pool = self.cache.pool
        num_freed = sum(pool.ref_count(p) - self.cache.owns(p) == n for p, n in held.items())
        needed = self.num_pages_for(num_tokens) - len(hit.pages)
        enough = needed <= self.cache.num_available + num_freed
        self.cache.release(hit.pages)
        return enough

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Make sure that a placed sequence has pages for num_tokens.

        Raises CapacityError, changing nothing.
        """
        have = len(seq.pages)
        if num_tokens <= have * self.page_size:
            return
        pages = self.cache.allocate(self.num_pages_for(num_tokens) - have)
        seq.pages += pages
        self.commands.append(SetPages(seq.slot, have, pages))

    def move_out(self, seq: Sequence) -> bool:
        """Take a sequence off the device. False if its state is lost since the host is full."""
        pages = seq.pages[: self.num_pages_for(seq.num_computed)]
        kept = self.host.num_free >= len(pages) + self.ring_blocks or not pages
        if kept and pages:
            seq.host_pages = self.host.allocate(len(pages))
            seq.host_rings = self.host.allocate(self.ring_blocks)
            self.commands.append(SwapOut(seq, seq.slot, pages, seq.host_pages, seq.host_rings))
        else:
            seq.num_computed = 0
        seq.epoch += 1
        self._free_device(seq)
        return kept

    def free(self, seq: Sequence) -> None:
        """Drop everything that a sequence holds, wherever it is."""
        if seq.slot >= 0:
            self._free_device(seq)
        self._free_host(seq)

    def register(self, row: Row) -> None:
        """After a step: offer the pages that this row filled, and its snapshot, to the cache."""
        seq = row.seq
        if row.epoch != seq.epoch:  # moved since: the pages are others now
            self.drop_snapshot(row)
            return
        filled = min(row.end, seq.prompt_len) if self.exact else row.end
        num_pages = filled // self.page_size
        if num_pages > seq.num_registered:
            keys = seq.page_keys(num_pages, self.page_size)
            for i in range(seq.num_registered, num_pages):
                self.cache.register(keys[i], seq.pages[i])
            seq.num_registered = num_pages
        if row.snapshot is not None:
            key = seq.page_keys(row.end // self.page_size, self.page_size)[-1]
            if self.cache.attach_snapshot(key, row.snapshot) and self._is_passing(seq, row.end):
                if seq.turn_snapshot is not None:
                    self.cache.detach_snapshot(*seq.turn_snapshot)
                seq.turn_snapshot = (key, row.snapshot)

    def drop_snapshot(self, row: Row) -> None:
        """The row's result is not wanted: neither is its snapshot."""
        if row.snapshot is not None:
            self.cache.return_snapshot_id(row.snapshot)

    def forget(self, seq: Sequence) -> None:
        """Let no other sequence use the pages of this one: their content is in doubt."""
        self.cache.forget(seq.keys[: seq.num_registered])

    def prompt_border(self, seq: Sequence) -> int:
        """The last page border that a request for the same prompt could start from."""
        return (seq.prompt_len - 1) // self.page_size * self.page_size

    def next_stop(self, seq: Sequence) -> int:
        """Where a chunk that starts at seq.num_computed must end at the latest, in tokens."""
        start, stop = seq.num_computed, seq.num_scheduled
        borders = [seq.prompt_len]  # generated tokens are replayed apart from the prompt
        if self.cache.enabled and self.cache.needs_snapshot:
            borders.append(self.prompt_border(seq))
            borders.append((start // self.snapshot_interval + 1) * self.snapshot_interval)
        return min([border for border in borders if start < border < stop], default=stop)

    def snapshot_at(self, seq: Sequence, end: int) -> int | None:
        """An id to save the rings under after a row that ends at `end`, if they are worth it."""
        if end % self.page_size or not (self.cache.enabled and self.cache.needs_snapshot):
            return None
        if end < seq.prompt_len and self._is_passing(seq, end):
            return None
        if self.exact and end > seq.prompt_len:
            return None
        return self.cache.take_snapshot_id()

    def check(self, sequences: Iterable[Sequence], num_snapshots_in_flight: int) -> None:
        """Raise AssertionError unless every page, block, slot and snapshot has its owners."""
        self.cache.check()
        self.host.check()
        held: dict[int, int] = {}
        slots, num_host = list(self._free_slots), 0
        for seq in sequences:
            for page in seq.pages:
                held[page] = held.get(page, 0) + 1
            num_host += len(seq.host_pages) + len(seq.host_rings)
            slots += [seq.slot] if seq.slot >= 0 else []
        pool = self.cache.pool
        for page in range(pool.num_pages):
            expected = held.get(page, 0) + self.cache.owns(page)
            assert pool.ref_count(page) == expected, f"page {page} should have {expected} refs"
        assert sorted(slots) == list(range(self.num_seq_slots)), "a sequence slot is lost"
        assert self.host.num_used == num_host, "host blocks and preempted sequences differ"
        self._check_snapshots(num_snapshots_in_flight)

    def check_idle(self) -> None:
        """The same in O(1), when there are no sequences and no steps in flight."""
        assert self.cache.pool.num_used == self.cache.num_cached == self.cache.num_evictable
        assert self.host.num_used == 0
        assert len(self._free_slots) == self.num_seq_slots
        self._check_snapshots(0)

    def _check_snapshots(self, num_in_flight: int) -> None:
        used = self.cache.snapshots.num_used
        assert used == self.cache.num_attached + num_in_flight, "a snapshot is lost"

    def _match(self, seq: Sequence) -> Hit:
        if not self.cache.enabled:
            return Hit([], None)
        # At least one token is computed; logits of prompt rows cannot come from the cache.
        usable = 0 if seq.wants_prompt_logprobs else (len(seq.token_ids) - 1) // self.page_size
        return self.cache.match(seq.page_keys(usable, self.page_size))

    def _start_at(self, seq: Sequence, hit: Hit) -> None:
        seq.num_registered = len(hit.pages)
        seq.num_computed = len(hit.pages) * self.page_size
        if hit.snapshot is not None:
            self.commands.append(Restore(seq, seq.slot, hit.snapshot))
        if seq.epoch == 0:
            seq.num_cached_tokens = seq.num_computed
            self._counters.cached_tokens += seq.num_computed
        if self.cache.enabled:
            self._counters.prefix_queries += len(seq.token_ids)
            self._counters.prefix_hits += seq.num_computed

    def _is_passing(self, seq: Sequence, end: int) -> bool:
        """Whether a border is neither on the interval nor the prompt's own."""
        return bool(end % self.snapshot_interval) and end != self.prompt_border(seq)

    def _free_device(self, seq: Sequence) -> None:
        self.commands.append(Release(seq.slot))
        self._free_slots.append(seq.slot)
        self.cache.release(seq.pages)
        seq.slot, seq.pages = -1, []
        self.num_releases += 1

    def _free_host(self, seq: Sequence) -> None:
        self.host.release(seq.host_pages + seq.host_rings)
        seq.host_pages, seq.host_rings = [], []
