"""EngineCore: requests of token ids in, token events out, one step at a time.

Wires the parts and owns the loop; knows no text, no files and no transport. All calls come from one
thread. With `overlap`, batches are carried out in order by a thread of their own and the next one
is made before the last one's results are read; the plain loop carries each out in place. Both give
the same tokens.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import msgspec

from moet.config import CacheConfig, SchedulerConfig
from moet.errors import CapacityError, OverloadedError, RequestError
from moet.models.base import ExpertProvider, Model
from moet.runtime.admission import num_drafts, require_room, require_servable
from moet.runtime.batch import Batch, StepResult
from moet.runtime.core_parts import core_info, open_memory, open_runner
from moet.runtime.core_stats import core_stats
from moet.runtime.device_runner import DeviceRunner, Placement
from moet.runtime.draft_length import CostMeter
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.experts.serving import Served
from moet.runtime.grammar_compiler import CompileJob, GrammarCompiler
from moet.runtime.metrics import CoreInfo, CoreStats, Counters, ExpertStats
from moet.runtime.model_runner import ModelRunner
from moet.runtime.prefix_cache import root_key
from moet.runtime.scheduler import Scheduler
from moet.runtime.sequence import Sequence
from moet.types import FinishReason, Request, TokenEvent

logger = logging.getLogger(__name__)

MAX_NAMED = 16  # requests in a description of a step
IDLE_WAIT_S = 0.01  # for the disk, before new commands are heard
COMPILE_POLL_S = 0.01  # how long an idle step waits for a grammar before new commands are heard


class PendingResult(Protocol):
    """What a batch will have made."""

    def result(self) -> StepResult:
        """Wait for it."""
        ...


class EngineCore:
    """A model at work. `precision` names the policy that the experts are computed with.

    vocab_size: of the tokenizer. The model's ids beyond it are padding, neither taken nor made.

    With scheduler.num_spec_tokens, the model must have been built for as many drafts.

    Without `grammars`, requests that bring one are refused. kv_identity: everything that KV state
    depends on besides tokens, for a cache that outlives the core.

    With a placement the model, which then is a DeviceModel, runs on its queue; batches are launched
    from the calling thread, and with `overlap` one more is when the results of one are read.

    precisions: what requests may choose from; None: `experts`, under the name of `precision`.
    served: brings precisions, books and what may be changed about them; it is closed at the end.
    """

    def __init__(
        self,
        model: Model,
        experts: ExpertProvider,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        precision: str,
        vocab_size: int,
        seed: int,
        grammars: GrammarCompiler | None = None,
        kv_identity: str = "",
        expert_stats: Callable[[], ExpertStats] = lambda: ExpertStats(layers=[]),
        placement: Placement | None = None,
        precisions: PrecisionSet | None = None,
        served: Served | None = None,
    ) -> None:
        self._served = served
        if served is not None:
            experts, expert_stats = served.precisions.drafting, served.stats
            precisions = served.precisions
        self.expert_stats = expert_stats
        self._precisions = precisions or PrecisionSet.single(experts, precision)
        if placement is not None:  # whose steps are captured with one kind of experts
            experts = self._precisions.decoding
        self._counters = Counters()
        self._at_work: Batch | None = None  # whose results are awaited
        memory = open_memory(
            model,
            cache,
            scheduler,
            device="cpu" if placement is None else str(placement.queue.device),
            kv_identity=kv_identity,
            counters=self._counters,
        )
        self._kv = memory.kv
        self._runner = open_runner(
            model,
            experts,
            memory,
            placement,
            self._precisions,
            num_token_ids=vocab_size,
            scheduler=scheduler,
        )
        self._launcher = self._runner if isinstance(self._runner, DeviceRunner) else None
        meter = CostMeter() if placement is not None and scheduler.num_spec_tokens else None
        runner = self._launcher
        self._scheduler = Scheduler(
            scheduler,
            memory.sequences,
            self._counters,
            meter,
            num_parts=1 if runner is None else runner.num_parts,
            divisible=(lambda row: True) if runner is None else runner.is_divisible,
        )
        self._grammars = grammars
        self._compiling: dict[str, _Compiling] = {}
        self._in_flight: deque[tuple[Batch, PendingResult]] = deque()
        self._overlap = scheduler.overlap
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="moet-step")
            if scheduler.overlap and placement is None
            else None
        )
        self._seeds = random.Random(seed)
        self._num_submitted = 0
        self._info = core_info(memory, cache, scheduler, self._precisions, vocab_size)
        logger.info("engine core %s", self._info)

    @property
    def has_work(self) -> bool:
        """Whether step() still has something to do or to tell."""
        return bool(self._in_flight or self._compiling) or self._scheduler.has_work

    def submit(self, request: Request) -> Future[None] | None:
        """Queue a request.

        Raises RequestError (ContextLengthError) for what can never be served and OverloadedError
        when too much waits; nothing has happened then. A request with a grammar is queued when that
        is compiled: the future that is returned for it then resolves, within step(), or has the
        refusal.
        """
        max_len, params = self._require_admissible(request), request.params
        eos = () if params.ignore_eos else request.eos_token_ids
        policy = self._precisions.policy(params.precision)
        num_spec_tokens = num_drafts(params, self._info.num_spec_tokens)
        drawn = self._seeds.getrandbits(63)  # always, so that one request moves no other's draw
        seq = Sequence(
            request=request,
            arrival=self._num_submitted,
            seed=drawn if params.seed is None else params.seed,
            max_len=max_len,
            root=root_key(request.cache_salt, self._precisions.of_prompt(policy)),
            stop_ids=frozenset(params.stop_token_ids).union(eos),
            token_ids=list(request.prompt_token_ids),
            num_spec_tokens=num_spec_tokens,
            # The draft block has not seen what was generated without drafts.
            shares_generated=self._precisions.shares_generated(policy)
            and (num_spec_tokens > 0 or self._info.num_spec_tokens == 0),
        )
        # Above temperature 0 tokens depend on the number of drafts: a seed asks for a steady one.
        steady = params.temperature > 0 and params.seed is not None
        seq.adapts = self._scheduler.config.adaptive_spec and not steady
        seq.times.submitted = perf_counter()
        self._num_submitted += 1
        if request.grammar is None:
            self._scheduler.add(seq)
            return None
        assert self._grammars is not None
        waiting = _Compiling(seq, self._grammars.start(request.grammar), Future())
        self._compiling[request.request_id] = waiting
        return waiting.queued

    def _require_admissible(self, request: Request) -> int:
        """The most tokens that its sequence may reach; raises as `submit`."""
        scheduler = self._scheduler
        if request.request_id in scheduler.sequences or request.request_id in self._compiling:
            raise RequestError(
                f"request id {request.request_id!r} is in use; ids must be unique",
                param="request_id",
            )
        max_len = require_servable(request, self._info, self._grammars is not None)
        compiling = [waiting.seq.prompt_len for waiting in self._compiling.values()]
        try:
            require_room(
                scheduler.config,
                num_waiting=scheduler.num_new + len(compiling),
                waiting_tokens=scheduler.num_new_tokens + sum(compiling),
                num_tokens=len(request.prompt_token_ids),
            )
        except OverloadedError:
            self._counters.num_rejected += 1
            raise
        return max_len

    def abort(self, request_id: str, *, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at once; its last event, with this reason, comes from the next step().

        An id that is not there (any more) is no error: the request may have just finished.
        """
        waiting = self._compiling.pop(request_id, None)
        if waiting is not None:
            self._scheduler.add(waiting.seq)
            waiting.queued.set_result(None)
        self._scheduler.abort(request_id, reason)

    def step(self) -> list[TokenEvent]:
        """Make one batch and apply the results of the oldest one in flight."""
        if self._compiling:
            self._take_compiled()
        batch = self._scheduler.schedule()
        if batch is None and not self._in_flight:
            return self._take_events()
        if not self._overlap:
            assert batch is not None
            self._at_work = batch
            return self._apply(batch, self.run(batch))
        if batch is not None:
            self._in_flight.append((batch, self.launch(batch)))
        if self._in_flight and (batch is None or len(self._in_flight) > 1):
            oldest, future = self._in_flight.popleft()
            self._at_work = oldest
            events = self._apply(oldest, future.result())
            if self._launcher is not None and not self._in_flight:
                self._launch_next()  # who drafts waits for results; the device need not for events
            return events
        return self._take_events()

    def _launch_next(self) -> None:
        batch = self._scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self.launch(batch)))

    def on_fault(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, which may raise to end the step, as soon as a part of a batch fails, before
        the rest of it is carried out without that part."""
        runner = self._runner
        (runner if isinstance(runner, ModelRunner) else runner.eager).on_fault = tell

    @property
    def launches(self) -> bool:
        """Whether batches are queued on a device from the calling thread."""
        return self._launcher is not None

    def launch(self, batch: Batch) -> PendingResult:
        """Begin with a batch; its results are read later, in the order of the launches."""
        if self._launcher is not None:
            return self._launcher.launch(batch)
        assert self._thread is not None
        return self._thread.submit(self.run, batch)

    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch and wait for it. Batches come one at a time, in order."""
        return self._runner.run(batch)

    def _take_events(self) -> list[TokenEvent]:
        """Events that no step has made; if there are none, wait a moment for the disk."""
        events = self._scheduler.take_events()
        if not events and not self._in_flight:
            self._scheduler.memory.wait(IDLE_WAIT_S)
        return events

    def activity(self) -> str:
        """What the last step was asked to do, by sizes and request ids; from any thread."""
        batch, number = self._at_work, self._counters.num_steps
        if batch is None:
            return f"step {number} has no batch"
        ids = ", ".join(row.seq.request.request_id for row in batch.rows[:MAX_NAMED])
        more = f" and {len(batch.rows) - MAX_NAMED} more" if len(batch.rows) > MAX_NAMED else ""
        num_prefill = batch.num_prefill_tokens
        num_decode = batch.num_tokens - num_prefill
        return (
            f"step {number}, {num_decode} decode and {num_prefill} prefill rows, "
            f"{len(batch.commands)} memory commands, requests {ids}{more}"
        )

    def info(self) -> CoreInfo:
        return self._info

    def stats(self) -> CoreStats:
        """The books as they are now. O(1) but for the histograms."""
        return core_stats(self._scheduler, self._counters)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. Between steps; O(pages)."""
        rows = [row for batch, _ in self._in_flight for row in batch.rows]
        self._scheduler.check(sum(row.snapshot is not None for row in rows))
        if not self.has_work:
            self._runner.sampler.check()
            if self._launcher is not None:
                self._launcher.check()

    def clear_prefix_cache(self) -> None:
        """Forget every page that no sequence holds, and find none of the others again."""
        self._scheduler.memory.clear_cache()

    def tune_experts(
        self, *, tau: float | None, pool_bytes: int | None, kv_bytes: int | None = None
    ) -> None:
        """Change the gate's tau, the expert pool or the pages, once the steps in flight are over.

        kv_bytes: of pages, whose content is forgotten; while no request is under way. Raises
        RequestError; what was asked for has not changed then, but pages that were to give room.
        """
        served, num_pages = self._served, None
        if served is None and kv_bytes is None:
            raise RequestError("this engine's experts have nothing that may be changed")
        if served is None and (tau is not None or pool_bytes is not None):
            raise RequestError("this engine's experts have nothing that may be changed")
        if kv_bytes is not None:
            num_pages = self._num_pages(kv_bytes)
        wait([future for _, future in self._in_flight if isinstance(future, Future)])
        runner = None if pool_bytes is kv_bytes is None else self._launcher
        if runner is not None:
            runner.settle()
        gives_room = num_pages is not None and num_pages < self._info.num_pages
        try:
            if num_pages is not None and gives_room:
                self._resize_pages(num_pages)
            if served is not None:
                served.tune(tau=tau, pool_bytes=pool_bytes)
            if num_pages is not None and not gives_room:
                self._resize_pages(num_pages)
        finally:
            has_moved = served is not None and served.take_moved()
            if runner is not None and (has_moved or num_pages is not None):
                runner.capture_again()

    def _num_pages(self, kv_bytes: int) -> int:
        """Pages of a new size. Raises RequestError if they cannot be had now."""
        info, page_bytes = self._info, self._kv.block_bytes
        num_pages = kv_bytes // page_bytes
        needed = self._scheduler.memory.num_pages_for(info.max_model_len)
        if num_pages < needed:
            raise RequestError(
                f"{kv_bytes} bytes are {num_pages} pages; a sequence of {info.max_model_len} "
                f"tokens (--max-model-len) needs {needed}, {needed * page_bytes} bytes",
                param="kv_gib",
            )
        if self.has_work:
            raise RequestError(
                "requests are under way; the pages can be changed while there are none",
                param="kv_gib",
            )
        return num_pages

    def _resize_pages(self, num_pages: int) -> None:
        more = num_pages - self._info.num_pages
        self.clear_prefix_cache()
        try:
            self._kv.resize(num_pages)
        except CapacityError as error:
            raise RequestError(str(error), param="kv_gib") from None
        self._scheduler.memory.cache.pool.resize(num_pages)
        self._info = msgspec.structs.replace(
            self._info,
            num_pages=num_pages,
            kv_cache_bytes=self._info.kv_cache_bytes + more * self._kv.block_bytes,
        )

    def shutdown(self) -> None:
        """Abort what is open, wait for the steps in flight and stop; events are dropped."""
        for request_id in [*self._compiling, *self._scheduler.sequences]:
            self.abort(request_id)
        while self.has_work:
            self.step()
        if self._thread is not None:
            self._thread.shutdown()
        if self._served is not None:
            self._served.close()
        if self._grammars is not None:
            self._grammars.close()
        self._scheduler.memory.close()

    def _take_compiled(self) -> None:
        """Queue, or refuse, the requests whose grammars are compiled; wait if there is no more."""
        if not self._in_flight and not self._scheduler.has_work:
            jobs = [waiting.job.future for waiting in self._compiling.values()]
            wait(jobs, COMPILE_POLL_S, FIRST_COMPLETED)
        for request_id, waiting in list(self._compiling.items()):
            if not waiting.job.is_over:
                continue
            del self._compiling[request_id]
            seq, spec = waiting.seq, waiting.job.spec
            assert self._grammars is not None
            try:
                compiled = waiting.job.result()
                end_token_ids = seq.request.eos_token_ids
                seq.constraint = self._grammars.constraint(spec, compiled, end_token_ids)
            except Exception as error:
                self._counters.num_grammars_refused += 1
                waiting.queued.set_exception(error)
            else:
                self._count_grammar(waiting.job)
                self._scheduler.add(seq)
                waiting.queued.set_result(None)

    def _count_grammar(self, job: CompileJob) -> None:
        if job.took_s is None:
            self._counters.num_grammar_hits += 1
        else:
            self._counters.grammar_compile_s.observe(job.took_s)

    def _apply(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        counters = self._counters
        if batch.rows:
            counters.num_steps += 1
            counters.step_time_s.observe(result.device_s)
            counters.step_tokens.observe(batch.num_tokens)
            counters.num_corrupted += result.num_corrupted
            counters.num_failed_steps += result.failed
            counters.num_split_steps += result.num_splits > 0
        events = self._scheduler.commit(batch, result)
        if not self.has_work:
            self._scheduler.memory.check_idle()
        return events


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request whose grammar is not ready; `queued` tells its sender how that ended."""

    seq: Sequence
    job: CompileJob
    queued: Future[None]
