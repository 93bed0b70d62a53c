"""Which sequences run, and what each step does: waiting and running -> Batch -> TokenEvents.

Every running sequence that decodes has a row in every step; prefills share what is left of the
step's rows, in rank order, and new sequences come last. A sequence is placed with pages for all of
its tokens; while it decodes, pages for two steps are there before a step is made. When pages run
out, the sequence of the highest rank (lowest priority, latest arrival) leaves the device. Since any
one sequence fits the pool alone, the one of the lowest rank always goes on: no deadlock. Sequences
also leave for a waiting one of better priority, which they can never send away in turn: nobody goes
to and fro.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from time import perf_counter

import msgspec

from moet.config import SchedulerConfig
from moet.errors import CapacityError
from moet.runtime.batch import Batch, Row, StepResult
from moet.runtime.metrics import Counters
from moet.runtime.pace import PrefillPace
from moet.runtime.sequence import Sequence, Status
from moet.runtime.sequence_memory import SequenceMemory
from moet.types import FinishReason, TokenEvent, TokenLogprobs

LOOKAHEAD_TOKENS = 1  # rows of a sequence in the step after the one being made


class Scheduler:
    """Owns the life of every sequence from `add` to its last event."""

    def __init__(self, config: SchedulerConfig, memory: SequenceMemory, counters: Counters) -> None:
        self.config = config
        self.memory = memory
        self.counters = counters
        self.pace = PrefillPace(config.prefill_share)
        self.sequences: dict[str, Sequence] = {}  # every unfinished one
        self.running: list[Sequence] = []  # by rank
        self.num_new = 0  # waiting and never placed
        self.num_new_tokens = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap by rank
        self._loading: list[Sequence] = []  # waiting for the disk, and in no line meanwhile
        self._blocked: tuple[int, int] | None = None  # who found no room, after how many releases
        self._stuck: tuple[int, int] | None = None  # for whom nobody's leaving would make room
        self._events: list[TokenEvent] = []
        self._arrivals: deque[Sequence] = deque()  # that may run out of time in the queue

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - len(self.running)

    @property
    def has_work(self) -> bool:
        """Whether a call of schedule or take_events can still lead anywhere."""
        return bool(self.sequences or self._events or self.memory.has_work)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that is known to fit."""
        self.sequences[seq.request.request_id] = seq
        self.num_new += 1
        self.num_new_tokens += seq.prompt_len
        if self.config.queue_timeout_s is not None:
            self._arrivals.append(seq)
        heapq.heappush(self._waiting, (seq.rank, seq))

    def schedule(self) -> Batch | None:
        """Decide the next step; None if there is nothing to do before a step in flight is read."""
        rows: list[Row] = []
        self._expire(perf_counter())
        self.memory.pump()
        if self._waiting or self._loading:
            self._fetch()
        if self._waiting and self.pace.debt_s == 0:
            self._give_way()
        num_preemptions = self.counters.num_preemptions
        for seq in tuple(self.running):
            if seq.is_decoding and seq.status is Status.RUNNING and self._make_room(seq):
                rows.append(self._row(seq, seq.num_computed + 1))
        num_decoding = len(rows)
        budget = self.config.max_num_batched_tokens - num_decoding
        if num_decoding < len(self.running) or self._waiting:
            budget = self.pace.rows(num_decoding, budget)
        may_admit = self.counters.num_preemptions == num_preemptions
        if len(self.running) > num_decoding:
            for seq in tuple(self.running):
                if budget > 0 and seq.is_prefilling:
                    if may_admit:
                        budget = self._admit(budget, rows, num_decoding, seq.request.priority)
                    budget -= self._prefill(seq, budget, rows, num_decoding) if budget > 0 else 0
        if may_admit:
            self._admit(budget, rows, num_decoding, None)
        commands = self.memory.take_commands()
        return Batch(commands, rows, num_decoding) if rows or commands else None

    def commit(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        """Apply what a step made: tokens, finished sequences, pages for the prefix cache.

        Rows of sequences that have ended since are discarded.
        """
        events = self.take_events()
        self.memory.committed(batch.commands)
        if batch.rows and not result.failed:
            num_prefill_rows = batch.num_tokens - batch.num_decoding
            self.pace.observe(batch.num_decoding, num_prefill_rows, result.device_s)
        now = perf_counter()
        page_size = self.memory.page_size
        for i, row in enumerate(batch.rows):
            seq = row.seq
            if row.sample:
                seq.num_pending -= 1
            if seq.status is Status.FINISHED:
                self.memory.drop_snapshot(row)
                continue
            if i in result.errors:
                self.memory.drop_snapshot(row)
                self.memory.forget(seq)
                events.append(self._finish(seq, FinishReason.ERROR, [], error=result.errors[i]))
                continue
            if row.snapshot is not None or row.end >= (seq.num_registered + 1) * page_size:
                self.memory.register(row)
            if i in result.prompt_logprobs:
                seq.prompt_logprobs += result.prompt_logprobs[i]
            if row.sample:
                events.append(self._append(seq, result.tokens[i], result.logprobs.get(i), now))
            elif row.end == seq.max_len:  # no tokens are wanted
                events.append(self._finish(seq, FinishReason.LENGTH, []))
        return events

    def take_events(self) -> list[TokenEvent]:
        """Events that no step has made, such as those of aborts."""
        events, self._events = self._events, []
        return events

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a sequence now, if it is there; its event comes with the next ones."""
        seq = self.sequences.get(request_id)
        if seq is not None:
            self._events.append(self._finish(seq, reason, []))

    def check(self, num_snapshots_in_flight: int) -> None:
        """Raise AssertionError if the lists, the sequences and the memory do not agree."""
        self.memory.check(self.sequences.values(), num_snapshots_in_flight)
        by_status: dict[Status, set[int]] = {status: set() for status in Status}
        for seq in self.sequences.values():
            by_status[seq.status].add(seq.arrival)
            assert seq.prompt_len <= len(seq.token_ids) <= seq.max_len
            assert seq.num_computed <= seq.num_scheduled <= seq.max_len
            assert len(seq.pages) * self.memory.page_size >= seq.num_computed or not seq.pages
        assert self.running == sorted(self.running, key=lambda seq: seq.rank)
        assert {s.arrival for s in self.running} == by_status[Status.RUNNING]
        waiting = [*(s for _, s in self._waiting), *self._loading]
        assert len(waiting) == len(by_status[Status.WAITING])
        assert {s.arrival for s in waiting} == by_status[Status.WAITING]
        assert not by_status[Status.FINISHED]
        new = [s for s in self.sequences.values() if not s.was_placed]
        assert (self.num_new, self.num_new_tokens) == (len(new), sum(s.prompt_len for s in new))

    def _make_room(self, seq: Sequence) -> bool:
        """Pages for a decoding sequence's next two rows; False if it had to leave for them."""
        num_tokens = min(seq.num_computed + 1 + LOOKAHEAD_TOKENS, seq.max_len)
        if num_tokens <= len(seq.pages) * self.memory.page_size:
            return True
        while True:
            try:
                self.memory.grow(seq, num_tokens)
                return True
            except CapacityError:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    return False

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.status = Status.WAITING
        self.counters.num_preemptions += 1
        if not self.memory.move_out(seq):
            self.counters.num_recomputed += 1
        heapq.heappush(self._waiting, (seq.rank, seq))

    def _expire(self, now: float) -> None:
        """End what has waited for its first step longer than it may."""
        limit_s = self.config.queue_timeout_s
        while self._arrivals:
            seq = self._arrivals[0]
            if seq.status is Status.WAITING and not seq.was_placed:
                if limit_s is None or now - seq.times.submitted < limit_s:
                    return
                error = f"the request waited {limit_s:g} s (--queue-timeout); try again later"
                self.counters.num_queue_timeouts += 1
                event = self._finish(seq, FinishReason.ERROR, [], error=error)
                self._events.append(msgspec.structs.replace(event, overloaded=True))
            self._arrivals.popleft()

    def _fetch(self) -> None:
        """Have the first one waiting look for its prompt on disk; others pass it meanwhile."""
        for seq in [seq for seq in self._loading if self.memory.is_fetched(seq)]:
            self._loading.remove(seq)
            heapq.heappush(self._waiting, (seq.rank, seq))
        while self._waiting and self.memory.fetch(self._waiting[0][1]):
            self._loading.append(heapq.heappop(self._waiting)[1])

    def _give_way(self) -> None:
        """Preempt sequences of worse priority if that makes room for the first one waiting."""
        first = self._waiting[0][1]
        worse = [s for s in self.running if s.request.priority > first.request.priority]
        if not worse or first.num_pending or self._stuck == self._state_of(first):
            return
        if not self.memory.is_fetched(first):
            return
        num_tokens = self._tokens_to_place(first)
        for num_leaving in range(len(worse) + 1):
            leaving = worse[len(worse) - num_leaving :]
            if self.memory.has_room(first, num_tokens, leaving):
                for seq in reversed(leaving):
                    self._preempt(seq)
                return
        self._stuck = self._state_of(first)

    def _state_of(self, seq: Sequence) -> tuple[int, int]:
        """Changes whenever an attempt to place the sequence may have another outcome."""
        return seq.arrival, self.memory.num_releases

    def _tokens_to_place(self, seq: Sequence) -> int:
        return min(seq.num_scheduled + LOOKAHEAD_TOKENS, seq.max_len)

    def _admit(
        self, budget: int, rows: list[Row], num_decoding: int, better_than: int | None
    ) -> int:
        """Start waiting sequences in rank order while rows, slots and pages last.

        better_than: only those of better priority than this. Returns the rows that are left.
        """
        while budget > 0 and self._waiting:
            seq = self._waiting[0][1]
            if better_than is not None and seq.request.priority >= better_than:
                return budget
            if self._blocked == self._state_of(seq) or seq.num_pending:  # or moved out just now
                return budget
            if not self.memory.is_fetched(seq):
                self._fetch()
                if self._waiting and self._waiting[0][1] is seq and not seq.was_fetched:
                    return budget
                continue
            if not self.memory.place(seq, self._tokens_to_place(seq)):
                self._blocked = self._state_of(seq)
                return budget
            heapq.heappop(self._waiting)
            seq.status = Status.RUNNING
            insort(self.running, seq, key=lambda other: other.rank)
            if not seq.was_placed:
                self._leave_queue(seq)
                seq.times.admitted = perf_counter()
                self.counters.queue_time_s.observe(seq.times.admitted - seq.times.submitted)
                self.counters.prompt_tokens += seq.prompt_len
            num_rows = self._prefill(seq, budget, rows, num_decoding)
            budget -= num_rows if num_rows > 0 else budget
        return budget

    def _leave_queue(self, seq: Sequence) -> None:
        seq.was_placed = True
        self.num_new -= 1
        self.num_new_tokens -= seq.prompt_len

    def _prefill(self, seq: Sequence, budget: int, rows: list[Row], num_decoding: int) -> int:
        """Add a chunk of at most `budget` rows, ending at a page border or a stop; its size."""
        start, stop = seq.num_computed, self.memory.next_stop(seq)
        if seq.wants_prompt_logprobs and start < seq.prompt_len:
            if any(row.first_logprob >= 0 for row in rows):
                return 0  # a row's logits take vocab_size floats: one page of them a step
            budget = min(budget, self.memory.page_size)
        end = min(stop, start + budget)
        if end < stop:
            border = end // self.memory.page_size * self.memory.page_size
            if border > start:
                end = border
            elif len(rows) > num_decoding:
                return 0  # the next step has room up to a border
        rows.append(self._row(seq, end))
        return end - start

    def _row(self, seq: Sequence, end: int) -> Row:
        """Take the rows up to `end` as scheduled."""
        start = seq.num_computed
        sample = end == seq.num_scheduled and end < seq.max_len
        token_ids = seq.token_ids[start:end] if end <= len(seq.token_ids) else None
        first_logprob, targets = -1, []
        if seq.wants_prompt_logprobs and seq.num_logprobs_scheduled < min(end, seq.prompt_len - 1):
            first_logprob = max(start, seq.num_logprobs_scheduled)
            seq.num_logprobs_scheduled = min(end, seq.prompt_len - 1)
            targets = seq.token_ids[first_logprob + 1 : seq.num_logprobs_scheduled + 1]
        seq.num_computed = end
        seq.num_pending += sample
        return Row(
            seq,
            seq.slot,
            seq.epoch,
            start,
            end - start,
            token_ids,
            sample,
            first_logprob,
            targets,
            self.memory.snapshot_at(seq, end),
            seq.constraint.masks()[0] if sample and seq.constraint is not None else None,
        )

    def _append(
        self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float
    ) -> TokenEvent:
        seq.token_ids.append(token_id)
        self._observe_token(seq, now)
        listed = None if logprobs is None else [logprobs]
        num_generated = len(seq.token_ids) - seq.prompt_len
        if token_id in seq.stop_ids and num_generated >= seq.request.params.min_tokens:
            return self._finish(seq, FinishReason.STOP, [token_id], listed, stop_token_id=token_id)
        if seq.constraint is not None:
            if (
                token_id in seq.request.eos_token_ids
            ):  # min_tokens or not, the grammar has come to its end
                return self._finish(
                    seq, FinishReason.STOP, [token_id], listed, stop_token_id=token_id
                )
            if not seq.constraint.accept(token_id):
                error = f"token {token_id} was sampled, which the grammar forbids"
                return self._finish(seq, FinishReason.ERROR, [], error=error)
        if len(seq.token_ids) >= seq.max_len:
            return self._finish(seq, FinishReason.LENGTH, [token_id], listed)
        return self._event(seq, [token_id], listed)

    def _observe_token(self, seq: Sequence, now: float) -> None:
        counters, times = self.counters, seq.times
        counters.generation_tokens += 1
        if times.first_token == 0.0:
            times.first_token = now
            counters.time_to_first_token_s.observe(now - times.submitted)
            counters.prefill_time_s.observe(now - times.admitted)
        else:
            counters.inter_token_latency_s.observe(now - times.last_token)
        times.last_token = now

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """Free what a sequence holds and make its last event."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        else:
            self._loading = [other for other in self._loading if other is not seq]
            self._waiting = [entry for entry in self._waiting if entry[1] is not seq]
            heapq.heapify(self._waiting)
            if not seq.was_placed:
                self._leave_queue(seq)
        seq.status = Status.FINISHED
        self.memory.free(seq)
        del self.sequences[seq.request.request_id]
        now = perf_counter()
        self.counters.finished[reason.value] += 1
        self.counters.request_latency_s.observe(now - seq.times.submitted)
        if seq.times.first_token:
            self.counters.decode_time_s.observe(now - seq.times.first_token)
            num_later = len(seq.token_ids) - seq.prompt_len - 1
            if num_later > 0:
                decode_s = seq.times.last_token - seq.times.first_token
                self.counters.time_per_output_token_s.observe(decode_s / num_later)
        return self._event(
            seq, token_ids, logprobs, reason=reason, stop_token_id=stop_token_id, error=error
        )

    def _event(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        *,
        reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        first, seq.has_event = not seq.has_event, True
        complete = len(seq.prompt_logprobs) == seq.prompt_len
        return TokenEvent(
            request_id=seq.request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            logprobs=logprobs,
            prompt_logprobs=(
                seq.prompt_logprobs if first and complete and seq.wants_prompt_logprobs else None
            ),
            num_cached_tokens=seq.num_cached_tokens if first else 0,
            error=error,
        )
