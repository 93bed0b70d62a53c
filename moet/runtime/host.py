"""Hosts of an engine core, near side: submit, abort and ask from any thread, and hear of its end.

`ThreadHost` runs the core on a thread of this process, `process.ProcessHost` in one of its own.
Both run the same loop (`run_core`) and offer the same calls, so nothing above can tell them
apart. A host knows messages, tickets and death; it knows nothing of text, tensors or HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from moet.errors import EngineDeadError, MoetError
from moet.runtime.messages import (
    Abort,
    Accepted,
    Alive,
    Answer,
    Ask,
    AskExperts,
    Closed,
    Command,
    ErrorInfo,
    Events,
    ExpertAnswer,
    Failed,
    ForgetPrefixes,
    Late,
    Loading,
    Message,
    Ready,
    Refused,
    Stop,
    Submit,
)
from moet.runtime.metrics import CoreInfo, CoreStats, ExpertStats
from moet.runtime.watchdog import Watchdog
from moet.types import FinishReason, Request, TokenEvent

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0  # how often a core without work is asked whether it has some after all
HostState = Literal["loading", "ready", "dead", "closed"]
T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with a stage ("convert", "weights") and the done share of it, 0 to 1."""


class Seen(NamedTuple, Generic[T]):
    """What a core said of itself, and when that arrived, by `time.monotonic`."""

    value: T
    at_s: float


class Core(Protocol):
    """What a host runs; `runtime.core.EngineCore` is the real one."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> Future[None] | None: ...
    def abort(self, request_id: str, *, reason: FinishReason) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def stats(self) -> CoreStats: ...
    def expert_stats(self) -> ExpertStats: ...
    def tune_experts(
        self, *, tau: float | None, pool_bytes: int | None, kv_bytes: int | None
    ) -> None: ...
    def clear_prefix_cache(self) -> None: ...
    def activity(self) -> str: ...
    def info(self) -> CoreInfo: ...
    def check(self) -> None: ...
    def shutdown(self) -> None: ...


Build = Callable[[Progress], Core]
"""Makes the core, reporting progress. For a ProcessHost it must be picklable."""


class Inbox(Protocol):
    """Where the loop gets its commands."""

    def take(self, *, wait: bool) -> list[Command]:
        """All commands that are there; with `wait`, at least one, or none after IDLE_POLL_S."""
        ...


def run_core(build: Build, inbox: Inbox, emit: Callable[[Message], None]) -> None:
    """Build a core and step it until told to stop. Ends with one Closed or Failed message."""
    try:
        core = build(lambda stage, done: emit(Loading(stage, done)))
    except Exception as error:
        if not isinstance(error, MoetError):
            logger.exception("the core cannot be built")
        emit(Failed(ErrorInfo.of(error)))
        return
    try:
        emit(Ready(core.info(), core.stats()))
        watchdog = Watchdog(
            core.info().step_timeout_s, core.activity, lambda doing: emit(Late(doing))
        )
        try:
            _loop(core, inbox, emit, watchdog)
        finally:
            watchdog.close()
    except Exception as error:
        logger.exception("the step loop has ended")
        emit(Failed(ErrorInfo.of(error)))
    else:
        core.shutdown()
        emit(Closed())


def _loop(core: Core, inbox: Inbox, emit: Callable[[Message], None], watchdog: Watchdog) -> None:
    while True:
        for command in inbox.take(wait=not core.has_work):
            if isinstance(command, Stop):
                return
            _obey(core, command, emit)
        if core.has_work:
            with watchdog.step():
                events = core.step()
            if events:
                emit(Events(events))
            if not core.has_work:
                core.check()


def _obey(
    core: Core,
    command: Submit | Abort | Ask | AskExperts | ForgetPrefixes,
    emit: Callable[[Message], None],
) -> None:
    if isinstance(command, Abort):
        core.abort(command.request_id, reason=command.reason)
        return
    try:
        if isinstance(command, Submit):
            later = core.submit(command.request)
            if later is None:
                emit(Accepted(command.ticket))
            else:
                later.add_done_callback(lambda queued: emit(_outcome(command.ticket, queued)))
        elif isinstance(command, Ask):
            emit(Answer(command.ticket, core.stats()))
        elif isinstance(command, ForgetPrefixes):
            core.clear_prefix_cache()
            emit(Accepted(command.ticket))
        else:
            tau, pool_bytes, kv_bytes = command.tau, command.pool_bytes, command.kv_bytes
            if not (tau is pool_bytes is kv_bytes is None):
                core.tune_experts(tau=tau, pool_bytes=pool_bytes, kv_bytes=kv_bytes)
            emit(ExpertAnswer(command.ticket, core.expert_stats()))
    except Exception as error:  # a refusal belongs to the one who asked
        emit(Refused(command.ticket, ErrorInfo.of(error)))


def _outcome(ticket: int, queued: Future[None]) -> Accepted | Refused:
    """How a request fared that could not be queued at once."""
    error = queued.exception()
    if error is None:
        return Accepted(ticket)
    assert isinstance(error, Exception)
    return Refused(ticket, ErrorInfo.of(error))


class Host:
    """The near side of a core: submit, abort and ask from any thread; events come to `deliver`.

    `deliver` runs on the host's own thread and must not block. When the core dies, every open
    request gets a final event with FinishReason.ERROR, then `on_death` is called once.
    """

    def __init__(self) -> None:
        self.state: HostState = "loading"
        self.stage: tuple[str, float] = ("start", 0.0)
        self.load_times_s: dict[str, float] = {}  # of stages that are over
        self._stage_began = monotonic()
        self.error: Exception | None = None
        self._is_closing = False
        self.late_step: str | None = None  # what it does, while one takes too long
        self.last_stats: Seen[CoreStats] | None = None  # there from "ready" on
        self.last_expert_stats: Seen[ExpertStats] | None = None
        self.ready: Future[CoreInfo] = Future()
        self._lock = threading.Lock()
        self._ticket_numbers = count()
        self._tickets: dict[int, tuple[Future[Any], str]] = {}  # with the request's id
        self._open: set[str] = set()
        self._deliver: Callable[[list[TokenEvent]], None] = lambda events: None
        self._on_death: Callable[[], None] = lambda: None

    def start(
        self,
        deliver: Callable[[list[TokenEvent]], None],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to build the core; returns at once. `ready` resolves when it takes requests."""
        self._deliver = deliver
        self._on_death = on_death
        self._launch()

    def submit(self, request: Request) -> Future[None]:
        """Hand a request over; the future resolves when it is queued, or raises its refusal."""
        with self._lock:
            self._require_alive()
            self._open.add(request.request_id)
            ticket, future = self._new_ticket(request.request_id)
        self._send(Submit(ticket, request))
        return future

    def abort(self, request_id: str, *, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request; no later event of it is delivered. Unknown ids are ignored.

        reason: what it counts as; STOP if a stop string has ended it.
        """
        with self._lock:
            known = request_id in self._open
            self._open.discard(request_id)
            alive = self.state in ("loading", "ready")
        if known and alive:
            self._send(Abort(request_id, reason))

    def stats(self) -> Future[CoreStats]:
        """The core's counters, taken between two steps."""
        with self._lock:
            self._require_alive()
            ticket, future = self._new_ticket("")
        self._send(Ask(ticket))
        return future

    def expert_stats(
        self,
        *,
        tau: float | None = None,
        pool_bytes: int | None = None,
        kv_bytes: int | None = None,
    ) -> Future[ExpertStats]:
        """Where the experts are and how often they were asked for, taken between two steps.

        What is given is changed before; see EngineCore.tune_experts.
        """
        with self._lock:
            self._require_alive()
            ticket, future = self._new_ticket("")
        self._send(AskExperts(ticket, tau, pool_bytes, kv_bytes))
        return future

    def forget_prefixes(self) -> Future[None]:
        """Have no later request start from what was cached so far, in any tier."""
        with self._lock:
            self._require_alive()
            ticket, future = self._new_ticket("")
        self._send(ForgetPrefixes(ticket))
        return future

    @property
    def silent_s(self) -> float | None:
        """Seconds since the core's process was heard of, if that is longer than it may be.

        Never for a core in this process, whose steps the watchdog sees.
        """
        return None

    def close(self, timeout_s: float = 10.0) -> None:
        """End the core. Open requests end with an error event. Idempotent."""
        with self._lock:
            running, self._is_closing = self.state in ("loading", "ready"), True
        if running:
            self._send(Stop())
        self._join(timeout_s)
        self._end("closed", None)

    def _launch(self) -> None:
        raise NotImplementedError

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _join(self, timeout_s: float) -> None:
        raise NotImplementedError

    def _require_alive(self) -> None:
        if self.state in ("dead", "closed"):
            raise EngineDeadError(f"the engine is {self.state}: {self.error or 'it was shut down'}")

    def _new_ticket(self, request_id: str) -> tuple[int, Future[Any]]:
        ticket = next(self._ticket_numbers)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody else may cancel it
        self._tickets[ticket] = future, request_id
        return ticket, future

    def _take_ticket(self, ticket: int) -> tuple[Future[Any], str]:
        with self._lock:
            return self._tickets.pop(ticket, (Future(), ""))  # closed meanwhile: answer nobody

    def _handle(self, message: Message) -> None:
        """Take one message of the core; runs on the host's thread."""
        match message:
            case Events(events):
                self._pass_on(events)
            case Loading(stage, done):
                if stage != self.stage[0]:
                    self._end_stage()
                self.stage = (stage, done)
            case Ready(info, stats):
                self._end_stage()
                self.last_stats = Seen(stats, monotonic())
                self.state = "ready"
                self.ready.set_result(info)
            case Accepted(ticket):
                self._take_ticket(ticket)[0].set_result(None)
            case Late(doing):
                self.late_step = doing
            case Alive():
                pass
            case Answer(ticket, stats):
                self.last_stats = Seen(stats, monotonic())
                self._take_ticket(ticket)[0].set_result(stats)
            case ExpertAnswer(ticket, experts):
                self.last_expert_stats = Seen(experts, monotonic())
                self._take_ticket(ticket)[0].set_result(experts)
            case Refused(ticket, error):
                future, request_id = self._take_ticket(ticket)
                with self._lock:
                    self._open.discard(request_id)
                future.set_exception(error.exception())
            case Failed(error):
                self._end("dead", error.exception())
            case Closed():
                self._end("closed", None)

    def _end_stage(self) -> None:
        now = monotonic()
        before = self.load_times_s.get(self.stage[0], 0.0)
        self.load_times_s[self.stage[0]] = before + now - self._stage_began
        self._stage_began = now

    def _pass_on(self, events: list[TokenEvent]) -> None:
        with self._lock:
            events = [event for event in events if event.request_id in self._open]
            for event in events:
                if event.finish_reason is not None:
                    self._open.discard(event.request_id)
        if events:
            self._deliver(events)

    def _end(self, state: Literal["dead", "closed"], error: Exception | None) -> None:
        """Answer everything that is still open, once."""
        with self._lock:
            if self.state in ("dead", "closed"):
                return
            self.state, self.error = state, error
            tickets, self._tickets = self._tickets, {}
            request_ids, self._open = self._open, set()
        reason = str(error) if error else "the engine was shut down"
        if not self.ready.done():
            self.ready.set_exception(error or EngineDeadError(reason))
        for future, _ in tickets.values():
            future.set_exception(EngineDeadError(reason))
        if request_ids:
            self._deliver([_error_event(request_id, reason) for request_id in request_ids])
        if state == "dead":
            self._on_death()


def _error_event(request_id: str, reason: str) -> TokenEvent:
    return TokenEvent(
        request_id=request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=reason
    )


class _QueueInbox:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def take(self, *, wait: bool) -> list[Command]:
        commands = []
        if wait:
            with suppress(queue.Empty):
                commands.append(self.queue.get(timeout=IDLE_POLL_S))
        while not self.queue.empty():
            commands.append(self.queue.get())
        return commands


class ThreadHost(Host):
    """Runs the core on a thread of this process."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._inbox = _QueueInbox()
        self._thread = threading.Thread(
            target=run_core, args=(build, self._inbox, self._handle), name="moet-core", daemon=True
        )

    def _launch(self) -> None:
        self._thread.start()

    def _send(self, command: Command) -> None:
        self._inbox.queue.put(command)

    def _join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():  # which may be the last to know of us
            self._thread.join(timeout_s)
