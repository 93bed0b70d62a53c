"""Which sequences run, and what each step does: waiting and running -> Batch -> TokenEvents.

Every running sequence that decodes has a row in every step; prefills share what is left of the
step's rows, in rank order, and new sequences come last. A sequence is placed with pages for all of
its tokens; while it decodes, pages for two steps are there before a step is made. When pages run
out, the sequence of the highest rank (lowest priority, latest arrival) leaves the device. Since any
one sequence fits the pool alone, the one of the lowest rank always goes on: no deadlock. Sequences
also leave for a waiting one of better priority, which they can never send away in turn: nobody goes
to and fro.

A sequence that drafts brings up to 1 + num_spec_tokens rows, and is in a step again when the
results of its last one are known: how many rows held decides what comes next. Sequences that draft
wait one step for one another, so that the overlapped loop does not part them into two halves. While
none of them has drafts they are as others are.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable
from time import perf_counter

import msgspec

from moet.config import SchedulerConfig
from moet.errors import CapacityError
from moet.runtime.batch import Batch, Row, StepResult
from moet.runtime.draft_length import CostMeter, StepCosts, draft_length
from moet.runtime.metrics import Counters
from moet.runtime.pace import PrefillPace
from moet.runtime.parts_left import PartsLeft
from moet.runtime.sequence import Sequence, Status
from moet.runtime.sequence_memory import SequenceMemory
from moet.types import FinishReason, TokenEvent, TokenLogprobs


class Scheduler:
    """Owns the life of every sequence from `add` to its last event."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: SequenceMemory,
        counters: Counters,
        meter: CostMeter | None = None,
        *,
        num_parts: int = 1,
        divisible: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        """meter: learns what steps cost, which decides how many tokens are drafted; None: a guess
        does. num_parts: of a pass over prompts, that steps can carry one by one beside those who
        decode; divisible: whether a row may be part of such a pass."""
        self.config = config
        self.memory = memory
        self.counters = counters
        self.pace = PrefillPace(config.prefill_share)
        self.costs, self.meter = StepCosts() if meter is None else meter.costs, meter
        # Rows of a sequence in the step after the one being made.
        self.lookahead_tokens = 1 + config.num_spec_tokens
        self.sequences: dict[str, Sequence] = {}  # every unfinished one
        self.running: list[Sequence] = []  # by rank
        self.num_new = 0  # waiting and never placed
        self.num_new_tokens = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap by rank
        self._loading: list[Sequence] = []  # waiting for the disk, and in no line meanwhile
        self._blocked: tuple[int, int] | None = None  # who found no room, after how many releases
        self._stuck: tuple[int, int] | None = None  # for whom nobody's leaving would make room
        self._events: list[TokenEvent] = []
        self._num_parts, self._divisible = num_parts, divisible
        self._pass: PartsLeft | None = None
        self._has_waited = False  # drafting sequences, in the last step, for others of their kind
        self._arrivals: deque[Sequence] = deque()  # that may run out of time in the queue

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - len(self.running)

    @property
    def has_work(self) -> bool:
        """Whether a call of schedule or take_events can still lead anywhere."""
        return bool(self.sequences or self._events or self._pass or self.memory.has_work)

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
        if self._waiting and self.pace.debt_s <= 0:
            self._give_way()
        num_preemptions = self.counters.num_preemptions
        for seq, num_drafts in self._decoding():
            if seq.status is Status.RUNNING and self._make_room(seq, num_drafts):
                rows.append(self._row(seq, seq.num_computed + 1 + num_drafts, num_drafts))
        num_decoding, num_users = len(rows), self._num_users()
        divides = self._num_parts > 1 and num_users > 0 and self.pace.share < 1
        budget = self._budget(rows, num_users if divides else 0)
        may_admit = self.counters.num_preemptions == num_preemptions
        if len(self.running) > num_decoding:
            for seq in tuple(self.running):
                if budget > 0 and seq.is_prefilling:
                    if may_admit:
                        budget = self._admit(budget, rows, num_decoding, seq.request.priority)
                    budget -= self._prefill(seq, budget, rows, num_decoding) if budget > 0 else 0
        if may_admit:
            self._admit(budget, rows, num_decoding, None)
        batch = Batch([], rows, num_decoding)
        if divides and len(rows) > num_decoding and all(map(self._divisible, rows[num_decoding:])):
            batch.begins, rows[num_decoding:] = rows[num_decoding:], []
            self._pass = PartsLeft(batch.begins, self._num_parts)
        if self._pass is not None:
            self._go_on(self._pass, batch, num_users)
        batch.commands = self.memory.take_commands()
        return batch if rows or batch.commands or batch.begins or batch.num_parts else None

    def _num_users(self) -> int:
        """Sequences that decode, or would if the results of their last step were known."""
        return sum(not seq.is_prefilling and not self._is_passing(seq) for seq in self.running)

    def _is_passing(self, seq: Sequence) -> bool:
        """Whether rows of a sequence are in a divided pass, so that it can have no others yet."""
        return self._pass is not None and seq.arrival in self._pass.arrivals

    def _budget(self, rows: list[Row], num_users: int) -> int:
        """Rows of prefill that may be begun now. num_users: 0 if the pass would not be divided."""
        most = self.config.max_num_batched_tokens
        if self._pass is not None:
            return 0
        if num_users:
            return most if self.pace.parts(num_users, most) else 0
        budget = most - sum(row.num_tokens for row in rows)
        if len(rows) < len(self.running) or self._waiting:
            budget = self.pace.rows(len(rows), budget)
        return budget

    def _go_on(self, left: PartsLeft, batch: Batch, num_users: int) -> None:
        """Give a batch the parts of the pass that it may carry, all if nobody decodes."""
        wanted = self.pace.parts(num_users, left.num_rows) if num_users else left.num_parts
        batch.num_parts, batch.ends_pass = left.take(wanted)
        batch.num_rows_passing = left.num_rows
        if batch.ends_pass:
            batch.rows += left.rows
            self._pass = None

    def commit(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        """Apply what a step made: tokens, finished sequences, pages for the prefix cache.

        Rows of sequences that have ended since are discarded.
        """
        events = self.take_events()
        self.memory.committed(batch.commands)
        if batch.num_parts and not result.failed:
            self.pace.observe_parts(
                batch.num_decoding, batch.num_rows_passing, batch.num_parts, result.device_s
            )
        elif batch.rows and not result.failed and result.device_s > 0:  # 0: every row had a fault
            self.pace.observe(batch.num_decoding, batch.num_prefill_tokens, result.device_s)
            if self.meter is not None and batch.num_prefill_tokens == 0:
                num_drafts = max(row.num_to_draft for row in batch.rows)
                self.meter.observe(batch.num_tokens, num_drafts, result.device_s)
                self.costs = self.meter.costs
        now = perf_counter()
        page_size = self.memory.page_size
        for i, row in enumerate(batch.rows):
            seq = row.seq
            seq.num_pending -= row.num_samples
            if seq.status is Status.FINISHED:
                self.memory.drop_snapshot(row)
                continue
            if i in result.errors:
                self.memory.drop_snapshot(row)
                self.memory.forget(seq)
                events.append(self._finish(seq, FinishReason.ERROR, [], error=result.errors[i]))
                continue
            new = self._until_end(seq, result.tokens[i]) if row.sample else []
            if row.num_drafts:
                self._observe_drafts(seq, row.num_drafts, len(result.tokens[i]) - 1)
                row = row.settled(len(new))
                if row.epoch == seq.epoch or seq.is_on_host:
                    seq.num_computed = row.end
            seq.token_ids += new
            if row.snapshot is not None or row.end >= (seq.num_registered + 1) * page_size:
                self.memory.register(row)
            if i in result.prompt_logprobs:
                seq.prompt_logprobs += result.prompt_logprobs[i]
            if row.sample:
                seq.proposals = result.proposals.get(i, ())
                logprobs = result.logprobs.get(i)
                events.append(self._advance(seq, new, logprobs and logprobs[: len(new)], now))
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
        passing = self._pass.rows if self._pass is not None else []
        num_snapshots_in_flight += sum(row.snapshot is not None for row in passing)
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

    def _decoding(self) -> list[tuple[Sequence, int]]:
        """The sequences that decode in this step, in rank order, and their numbers of drafts."""
        running = [seq for seq in self.running if not self._is_passing(seq)]
        ready = [seq for seq in running if seq.is_decoding]
        if any(seq.num_spec_tokens for seq in ready):
            guessing = any(seq.is_guessing and seq.num_pending for seq in running)
            ready = [seq for seq in ready if not self._waits(seq, guessing)]
            self._has_waited = guessing and not self._has_waited
            if self._has_waited:
                ready = [seq for seq in ready if not seq.num_spec_tokens]
        return [(seq, self._num_drafts(seq)) for seq in ready]

    def _waits(self, seq: Sequence, guessing: bool) -> bool:
        """Whether a sequence that may draft needs its newest token: for those that do draft, or as
        the last row of a page joins its own token."""
        may_draft = seq.num_pending > 0 and seq.num_spec_tokens > 0
        return may_draft and (guessing or (seq.num_computed + 1) % self.memory.page_size == 0)

    def _num_drafts(self, seq: Sequence) -> int:
        """Drafts in the next step of a sequence that decodes; its last token needs no row."""
        return min(len(seq.proposals), seq.max_len - 2 - seq.num_computed)

    def _num_to_draft(self, seq: Sequence, end: int) -> int:
        """Tokens to propose behind rows that end at `end` at the most."""
        limit = min(seq.num_spec_tokens, seq.max_len - 2 - end)
        if limit <= 0 or not seq.adapts:
            return max(limit, 0)
        return draft_length(
            limit,
            seq.acceptance,
            num_decoding=len(self.running),
            costs=self.costs,
            num_plain_steps=seq.num_plain_steps,
        )

    def _observe_drafts(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        seq.acceptance = seq.acceptance.after(num_drafts, num_accepted)
        seq.num_drafted += num_drafts
        seq.num_accepted += num_accepted
        self.counters.observe_drafts(num_drafts, num_accepted)

    def _make_room(self, seq: Sequence, num_drafts: int) -> bool:
        """Pages for a decoding sequence's next two steps; False if it had to leave for them."""
        num_tokens = min(seq.num_computed + 1 + num_drafts + self.lookahead_tokens, seq.max_len)
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
        num_tokens = seq.num_scheduled + len(seq.proposals) + self.lookahead_tokens
        return min(num_tokens, seq.max_len)

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
        if seq.is_decoding and seq.proposals:  # it was away, and so were its drafts
            num_drafts = self._num_drafts(seq)
            if budget < 1 + num_drafts:
                return 0
            rows.append(self._row(seq, seq.num_computed + 1 + num_drafts, num_drafts))
            return 1 + num_drafts
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

    def _row(self, seq: Sequence, end: int, num_drafts: int = 0) -> Row:
        """Take the rows up to `end` as scheduled; the last num_drafts of them are drafts."""
        start = seq.num_computed
        known_end = end - num_drafts
        sample = known_end == seq.num_scheduled and known_end < seq.max_len
        proposals = seq.proposals[:num_drafts]
        drafts = [proposal.token_id for proposal in proposals]
        known = known_end <= len(seq.token_ids)
        token_ids = [*seq.token_ids[start:known_end], *drafts] if known else None
        first_logprob, targets = -1, []
        if seq.wants_prompt_logprobs and seq.num_logprobs_scheduled < min(end, seq.prompt_len - 1):
            first_logprob = max(start, seq.num_logprobs_scheduled)
            seq.num_logprobs_scheduled = min(end, seq.prompt_len - 1)
            targets = seq.token_ids[first_logprob + 1 : seq.num_logprobs_scheduled + 1]
        masks = seq.constraint.masks(drafts) if sample and seq.constraint is not None else None
        num_to_draft = self._num_to_draft(seq, end) if sample and seq.num_spec_tokens else 0
        if sample:
            seq.num_plain_steps = 0 if num_to_draft else seq.num_plain_steps + 1
            seq.is_guessing = num_to_draft > 0 or num_drafts > 0
        seq.num_computed = end
        row = Row(
            seq,
            seq.slot,
            seq.epoch,
            start,
            end - start,
            token_ids,
            sample,
            first_logprob,
            targets,
            self._snapshot_at(seq, start, end, num_drafts),
            proposals,
            masks,
            seq.token_ids[end] if end < len(seq.token_ids) else None,
            num_to_draft,
        )
        seq.num_pending += row.num_samples
        return row

    def _snapshot_at(self, seq: Sequence, start: int, end: int, num_drafts: int) -> int | None:
        """With drafts the border may lie before the last row: rings have room for so many more."""
        border = end // self.memory.page_size * self.memory.page_size if num_drafts else end
        return self.memory.snapshot_at(seq, border) if border > start else None

    def _until_end(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """The new tokens, up to the one that ends the sequence."""
        if len(tokens) == 1:
            return tokens
        for n, token_id in enumerate(tokens, start=1):
            if self._reason_to_end(seq, token_id, len(seq.token_ids) + n) is not None:
                return tokens[:n]
        return tokens

    def _reason_to_end(self, seq: Sequence, token_id: int, num_tokens: int) -> FinishReason | None:
        """Why a sequence of num_tokens, the last of which is token_id, ends; None if it goes on."""
        enough = num_tokens - seq.prompt_len >= seq.request.params.min_tokens
        if token_id in seq.stop_ids and enough:
            return FinishReason.STOP
        if seq.constraint is not None and token_id in seq.request.eos_token_ids:
            return FinishReason.STOP  # min_tokens or not, the grammar has come to its end
        return FinishReason.LENGTH if num_tokens >= seq.max_len else None

    def _advance(
        self, seq: Sequence, new: list[int], logprobs: list[TokenLogprobs] | None, now: float
    ) -> TokenEvent:
        """Tell of new tokens, which are in seq.token_ids; only the last one may end it."""
        for _ in new:
            self._observe_token(seq, now)
        last = new[-1]
        reason = self._reason_to_end(seq, last, len(seq.token_ids))
        if seq.constraint is not None:
            for token_id in new[:-1] if reason is FinishReason.STOP else new:
                if not seq.constraint.accept(token_id):
                    error = (
                        f"token {token_id} was sampled, which the grammar forbids"
                        if seq.constraint.has_next()
                        else "the grammar allows nothing behind what it allowed so far; one of its "
                        "rules cannot come to an end"
                    )
                    return self._finish(seq, FinishReason.ERROR, [], error=error)
        if reason is None:
            return self._event(seq, new, logprobs)
        stop_token_id = last if reason is FinishReason.STOP else None
        return self._finish(seq, reason, new, logprobs, stop_token_id=stop_token_id)

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
            num_draft_tokens=seq.num_drafted,
            num_accepted_tokens=seq.num_accepted,
        )
