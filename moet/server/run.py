"""Serves an application until a signal or the engine's death, and drains before it goes."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from moet.config import ServerConfig
from moet.errors import ConfigError, EngineDeadError
from moet.runtime.engine import Engine
from moet.server.app import create_app

logger = logging.getLogger(__name__)

# Clients keep idle connections for 5 s or a minute; whoever closes first must not be the server,
# or it closes just as a request arrives.
IDLE_CONNECTION_S = 75
LAST_WORDS_S = 1.0  # for the error events of a dead engine to leave

MakeEngine = Callable[[Callable[[], None]], Engine]
"""Makes an engine that does not wait, given what to call when it dies."""


class Server(uvicorn.Server):
    """uvicorn with our own end: drain on the first signal, leave at once on the second."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while serving, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in kept:
            signal.signal(number, self._take_signal)
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self._on_signal()


class Service:
    """One engine behind one HTTP server."""

    def __init__(self, make_engine: MakeEngine, config: ServerConfig) -> None:
        self.config = config
        self.died = False
        self._listener = _listen(config.host, config.port)  # a port in use is said before work
        self.engine = make_engine(self._engine_died)
        self.app = create_app(self.engine, config)
        self.server = Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=IDLE_CONNECTION_S,
            ),
            self.stop,
        )
        self._num_signals = 0
        self._hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serve until the end. Raises what ended the engine, if that was the reason."""
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            self._loop = None
            self._listener.close()
            self.engine.close()
            self.app.state.operations.close()
        if self.died:
            raise self.engine.error or EngineDeadError("the engine has died")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.died:
            return
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", host, port)
        await self.server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Drain, then end; called a second time: end what is under way; a third: drop it."""
        self._num_signals += 1
        if self._num_signals > 2:
            logger.warning("third signal: leaving without a word")
            self._leave()
            return
        assert self._loop is not None
        first = self._num_signals == 1
        self._loop.call_soon_threadsafe(self._start_draining if first else self._hurried.set)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        traffic = self.app.state.traffic
        traffic.drain()
        limit_s = self.config.shutdown_timeout_s
        logger.info("draining: no new requests, at most %.0f s for those under way", limit_s)
        ends = [asyncio.ensure_future(event.wait()) for event in (traffic.idle, self._hurried)]
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not traffic.idle.is_set():
            reason = (
                "a second signal came" if self._hurried.is_set() else "--shutdown-timeout is up"
            )
            logger.warning("%s; ending the requests that are under way", reason)
            await asyncio.to_thread(self.engine.close)
        self.server.should_exit = True

    def _engine_died(self) -> None:
        """On the host's thread: let the last events out, then end."""
        self.died = True
        logger.error("the engine has died: %s", self.engine.error)
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(loop.call_later, LAST_WORDS_S, self._leave)

    def _leave(self) -> None:
        self.server.force_exit = True
        self.server.should_exit = True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # clients may come as soon as the log says so
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
    return listener
