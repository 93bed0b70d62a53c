"""Between a host and its callers: each event to the reader of its request, as text.

Knows readers on plain threads and on event loops; knows nothing of prompts or defaults.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType

import msgspec

from moet.runtime.host import Host
from moet.runtime.output import Output, TextAssembler
from moet.runtime.tokenizer import Tokenizer
from moet.types import FinishReason, Request, TokenEvent


class Route(msgspec.Struct, frozen=True, eq=False):
    """Where a request's events go: called directly, or on the loop if there is one."""

    put: Callable[[TokenEvent], None]
    loop: asyncio.AbstractEventLoop | None


def _put_all(batch: list[tuple[Route, TokenEvent]]) -> None:
    for route, event in batch:
        route.put(event)


class Router:
    """Who reads which request."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._routes: dict[str, Route] = {}

    @property
    def num_open(self) -> int:
        """Requests that somebody still reads."""
        return len(self._routes)

    def submit(self, request: Request, route: Route) -> Future[None]:
        """Hand a request to the host; the future tells when it is queued, or why it is not."""
        with self._lock:
            self._routes[request.request_id] = route
        return self._host.submit(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop a request; its reader hears no more of it."""
        with self._lock:
            self._routes.pop(request_id, None)
        self._host.abort(request_id, reason=reason)

    def deliver(self, events: list[TokenEvent]) -> None:
        """Sort a step's events to their readers; one wake-up per event loop and step."""
        per_loop: dict[asyncio.AbstractEventLoop, list[tuple[Route, TokenEvent]]] = {}
        with self._lock:
            routed = [(self._routes.get(event.request_id), event) for event in events]
            for event in events:
                if event.finish_reason is not None:
                    self._routes.pop(event.request_id, None)
        for route, event in routed:
            if route is None:
                continue
            if route.loop is None:
                route.put(event)
            else:
                per_loop.setdefault(route.loop, []).append((route, event))
        for loop, batch in per_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed: nobody reads these any more
                for _, event in batch:
                    self.abort(event.request_id)


class Merge:
    """Several requests of one caller: their texts, and which of them are still open."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        put: Callable[[TokenEvent], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._route = Route(put, loop)
        self._waiting = iter(requests)
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._open: dict[str, TextAssembler] = {}
        self.unfinished = len(requests)

    def submit_up_to(self, limit: int) -> Iterable[Future[None]]:
        """Submit requests, in order, until `limit` are open or none is left."""
        while len(self._open) < limit:
            request = next(self._waiting, None)
            if request is None:
                return
            self._open[request.request_id] = TextAssembler(
                self._index[request.request_id], request, self._tokenizer
            )
            yield self._router.submit(request, self._route)

    def take(self, event: TokenEvent) -> Output | None:
        """The increment that an event makes; None if its request ended before it."""
        assembler = self._open.get(event.request_id)
        if assembler is None:
            return None
        output = assembler.push(event)
        if output.finish_reason is not None:
            del self._open[event.request_id]
            self.unfinished -= 1
            if event.finish_reason is None:  # a stop string, which the core does not know
                self._router.abort(event.request_id, FinishReason.STOP)
        return output

    def close(self) -> None:
        """Stop what is still open."""
        for request_id in self._open:
            self._router.abort(request_id)
        self._open.clear()
        self.unfinished = 0


class Generation:
    """The increments of several requests as they come; leaving the context stops what is left."""

    def __init__(self, router: Router, tokenizer: Tokenizer, requests: Sequence[Request]) -> None:
        self._inbox: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._requests = requests
        loop = asyncio.get_running_loop()
        self._merge = Merge(router, tokenizer, requests, self._inbox.put_nowait, loop)

    async def submit(self) -> None:
        """Hand all requests over and wait until they are queued; all or none."""
        try:
            futures = [
                asyncio.wrap_future(future)
                for future in self._merge.submit_up_to(len(self._requests))
            ]
            results = await asyncio.gather(*futures, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Output:
        while self._merge.unfinished:
            output = self._merge.take(await self._inbox.get())
            if output is not None:
                return output
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop what is still open."""
        self._merge.close()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
