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
from moet.runtime.batch import (
    Admit,
    BringPages,
    BringSnapshot,
    Command,
    Keep,
    Release,
    Restore,
    Row,
    SetPages,
    SwapIn,
    SwapOut,
)
from moet.runtime.kv_cache import resume_bytes
from moet.runtime.kv_tiers import KVTiers, Reuse
from moet.runtime.metrics import Counters
from moet.runtime.page_pool import PagePool
from moet.runtime.prefix_cache import PrefixCache
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
        tiers: KVTiers | None = None,
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
        self.tiers = tiers
        if tiers is not None:
            self.cache.on_evict = tiers.evicted
            tiers.copy = lambda keep: self.commands.append(keep)
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

    @property
    def has_work(self) -> bool:
        """Whether copies are to be made, with or without a sequence that waits for them."""
        return bool(self.commands or (self.tiers is not None and self.tiers.has_work))

    def close(self) -> None:
        """Finish what is being written to disk."""
        if self.tiers is not None:
            self.tiers.close(self.cache)

    def pump(self) -> None:
        """Go on with what happens beside the steps."""
        if self.tiers is not None:
            self.tiers.pump(self.cache)

    def wait(self, timeout_s: float) -> None:
        """Return when something that happens beside the steps has ended, or in time."""
        if self.tiers is not None:
            self.tiers.wait(timeout_s)

    def committed(self, commands: list[Command]) -> None:
        """These have been carried out."""
        if self.tiers is not None:
            for command in commands:
                if isinstance(command, Keep):
                    self.tiers.kept(command)
                elif isinstance(command, BringPages | BringSnapshot):
                    self.tiers.copied(command.blocks)

    def place(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a waiting sequence a slot and pages for num_tokens, with what it can reuse.

        Its state comes back from host blocks, or starts at the longest prefix hit. False, changing
        nothing, if a slot or pages are missing.
        """
        if not self._free_slots:
            return False
        on_host = seq.is_on_host
        reuse = self._match(seq)
        on_device = [page for page in reuse.pages if page is not None]
        try:
            new = self.cache.allocate(self.num_pages_for(num_tokens) - len(on_device))
        except CapacityError:
            self._let_go(reuse)
            return False
        seq.slot = slot = self._free_slots.pop()
        unused = iter(new)
        seq.pages = pages = [next(unused) if p is None else p for p in reuse.pages]
        pages += unused
        self.commands.append(SetPages(slot, 0, list(pages)))
        self.commands.append(Admit(seq, slot, len(seq.token_ids)))
        if on_host:
            front = pages[: len(seq.host_pages)]
            self.commands.append(SwapIn(seq, slot, front, seq.host_pages, seq.host_rings))
            self._free_host(seq)
        else:
            self._start_at(seq, reuse)
        return True

    def has_room(self, seq: Sequence, num_tokens: int, leaving: list[Sequence]) -> bool:
        """Whether `place` would succeed once the sequences in `leaving` have left the device."""
        if not self._free_slots and not leaving:
            return False
        reuse = self._match(seq)
        held = Counter(page for other in leaving for page in other.pages)
        pool = self.cache.pool
        num_freed = sum(pool.ref_count(p) - self.cache.owns(p) == n for p, n in held.items())
        needed = self.num_pages_for(num_tokens) - sum(page is not None for page in reuse.pages)
        enough = needed <= self.cache.num_available + num_freed
        self._let_go(reuse)
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
        """Drop everything that a sequence holds, wherever it is; its cached pages may be saved."""
        if self.tiers is not None:
            self.tiers.end_load(seq.arrival)
            self.tiers.save(seq.keys[: seq.num_registered])
        if seq.slot >= 0:
            self._free_device(seq)
        self._free_host(seq)

    def register(self, row: Row) -> None:
        """After a step: offer the pages that this row filled, and its snapshot, to the cache."""
        seq = row.seq
        if row.epoch != seq.epoch:  # moved since: the pages are others now
            self.drop_snapshot(row)
            return
        prompt_only = self.exact or not seq.shares_generated
        filled = min(row.end, seq.prompt_len) if prompt_only else row.end
        num_pages = filled // self.page_size
        if num_pages > seq.num_registered:
            keys = seq.page_keys(num_pages, self.page_size)
            for i in range(seq.num_registered, num_pages):
                self.cache.register(keys[i], seq.pages[i])
            seq.num_registered = num_pages
        if row.snapshot is not None:
            border = row.end // self.page_size * self.page_size  # rings hold a few rows past it
            if border <= row.start:  # the drafts that reach it did not hold
                self.drop_snapshot(row)
                return
            key = seq.page_keys(border // self.page_size, self.page_size)[-1]
            if self.cache.attach_snapshot(key, row.snapshot) and self._is_passing(seq, border):
                if seq.turn_snapshot is not None:
                    self.cache.detach_snapshot(*seq.turn_snapshot)
                seq.turn_snapshot = (key, row.snapshot)

    def drop_snapshot(self, row: Row) -> None:
        """The row's result is not wanted: neither is its snapshot."""
        if row.snapshot is not None:
            self.cache.return_snapshot_id(row.snapshot)

    def forget(self, seq: Sequence) -> None:
        """Let no other sequence use the pages of this one: their content is in doubt."""
        keys = seq.keys[: seq.num_registered]
        self.cache.forget(keys)
        if self.tiers is not None:
            self.tiers.forget(keys)

    def clear_cache(self) -> None:
        """Forget every page that no sequence holds, and find none of the others again."""
        self.cache.clear()
        if self.tiers is not None:
            self.tiers.clear()

    def fetch(self, seq: Sequence) -> bool:
        """Begin to read from disk what a waiting sequence could start with; `is_fetched` tells when
        that is over. False if there is nothing to read, or others must be done first.
        """
        if seq.was_fetched or self.tiers is None or self.tiers.disk is None:
            seq.was_fetched = True
            return False
        begun = self.tiers.load(seq.arrival, self._usable_keys(seq), self.cache)
        seq.was_fetched = begun is not None
        return bool(begun)

    def is_fetched(self, seq: Sequence) -> bool:
        """Whether a waiting sequence has tried the disk and nothing more will come of it."""
        return seq.was_fetched and (self.tiers is None or self.tiers.loaded(seq.arrival))

    def prompt_border(self, seq: Sequence) -> int:
        """The last page border that a request for the same prompt could start from."""
        return (seq.prompt_len - 1) // self.page_size * self.page_size

    def next_stop(self, seq: Sequence) -> int:
        """Where a chunk that starts at seq.num_computed must end at the latest, in tokens."""
        start, stop = seq.num_computed, seq.num_scheduled
        borders = [seq.prompt_len]  # generated tokens are replayed apart from the prompt
        if seq.proposals:
            borders.append(len(seq.token_ids) - 1)  # and the newest with its drafts, as before
        if self.cache.enabled and self.cache.needs_snapshot:
            borders.append(self.prompt_border(seq))
            borders.append((start // self.snapshot_interval + 1) * self.snapshot_interval)
        return min([border for border in borders if start < border < stop], default=stop)

    def snapshot_at(self, seq: Sequence, end: int) -> int | None:
        """An id to save the rings under after rows up to `end`, if that is worth it."""
        if end % self.page_size or not (self.cache.enabled and self.cache.needs_snapshot):
            return None
        if end < seq.prompt_len and self._is_passing(seq, end):
            return None
        if (self.exact or not seq.shares_generated) and end > seq.prompt_len:
            return None
        return self.cache.take_snapshot_id()

    def check(self, sequences: Iterable[Sequence], num_snapshots_in_flight: int) -> None:
        """Raise AssertionError unless every page, block, slot and snapshot has its owners."""
        self.cache.check()
        self.host.check()
        if self.tiers is not None:
            self.tiers.check()
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

    def _usable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages that a sequence that is not on the host could start with."""
        if seq.is_on_host or not self.cache.enabled:
            return []
        # At least one token is computed; logits of prompt rows cannot come from the cache.
        usable = 0 if seq.wants_prompt_logprobs else (len(seq.token_ids) - 1) // self.page_size
        return seq.page_keys(usable, self.page_size)

    def _match(self, seq: Sequence) -> Reuse:
        keys = self._usable_keys(seq)
        if self.tiers is not None:
            return self.tiers.match(keys, self.cache)
        hit = self.cache.match(keys)
        return Reuse(list(hit.pages), hit.snapshot)

    def _let_go(self, reuse: Reuse) -> None:
        self.cache.release([page for page in reuse.pages if page is not None])
        if self.tiers is not None:
            self.tiers.host.release(reuse.blocks + reuse.ring_blocks)

    def _start_at(self, seq: Sequence, reuse: Reuse) -> None:
        num_pages = len(reuse.pages)
        seq.num_registered = num_pages
        seq.num_computed = num_pages * self.page_size
        snapshot = reuse.snapshot
        if self.tiers is not None:
            snapshot = self._bring(seq, reuse)
            self.tiers.touch(seq.keys[:num_pages])
            self.tiers.end_load(seq.arrival)
        if snapshot is not None:
            self.commands.append(Restore(seq, seq.slot, snapshot))
        if seq.epoch == 0:
            seq.num_cached_tokens = seq.num_computed
            self._counters.cached_tokens += seq.num_computed
        if self.cache.enabled:
            self._counters.prefix_queries += len(seq.token_ids)
            self._counters.prefix_hits += seq.num_computed

    def _bring(self, seq: Sequence, reuse: Reuse) -> int | None:
        """Bring from the host what is not on the device; returns the snapshot to start at."""
        assert self.tiers is not None
        absent = [i for i, page in enumerate(reuse.pages) if page is None]
        pages = [seq.pages[i] for i in absent]
        for i, page in zip(absent, pages, strict=True):
            self.cache.register(seq.keys[i], page)
        if pages:
            self.commands.append(BringPages(seq, pages, reuse.blocks))
            self.tiers.hold_for_copy(reuse.blocks)
            self._counters.num_host_hits += len(pages)
        snapshot = reuse.snapshot
        if reuse.ring_blocks:
            snapshot = self.cache.take_snapshot_id()  # may keep another first
            assert snapshot is not None
            self.tiers.hold_for_copy(reuse.ring_blocks)
            self.commands.append(BringSnapshot(seq, snapshot, reuse.ring_blocks))
            attached = self.cache.attach_snapshot(seq.keys[len(reuse.pages) - 1], snapshot)
            assert attached
        return snapshot

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
