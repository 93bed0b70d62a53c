"""A core in a process of its own, so that nothing done for HTTP can steal step time.

Commands and events travel as msgpack over two one-way sockets. Neither process outlives the other,
and one that is stopped or stuck is noticed by its silence.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from time import monotonic

import msgspec
import zmq

from moet import log
from moet.errors import EngineDeadError
from moet.runtime.host import IDLE_POLL_S, Build, Host, run_core
from moet.runtime.messages import Alive, Command, Message

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # a sign of life this often
LEAST_SILENCE_S = 10.0  # that tells anything, since a busy machine may miss some beats


class ProcessHost(Host):
    """Runs the core in a spawned process; neither side outlives the other for long."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="moet-"))
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PUSH)
        self._commands.bind(_address(self._folder, "commands"))
        self._heard_at_s = monotonic()
        self._send_lock = threading.Lock()  # a zmq socket may move between threads, not be shared
        root = logging.getLogger("moet")
        level = logging.getLevelName(root.level) if root.handlers else None
        self._process = multiprocessing.get_context("spawn").Process(
            target=_core_process, args=(build, str(self._folder), level), name="moet-core"
        )
        self._process.daemon = True
        self._thread = threading.Thread(target=self._listen, name="moet-host", daemon=True)

    @property
    def pid(self) -> int | None:
        """The core's process id."""
        return self._process.pid

    @property
    def silent_s(self) -> float | None:
        """As Host.silent_s; the limit is --step-timeout, since a step in which the whole process is
        stuck is not told of by its own watchdog. Never while it loads.
        """
        if self.state != "ready" or not self.ready.done():
            return None
        silent_s = monotonic() - self._heard_at_s
        limit_s = max(self.ready.result().step_timeout_s, LEAST_SILENCE_S)
        return silent_s if silent_s > limit_s else None

    def _handle(self, message: Message) -> None:
        self._heard_at_s = monotonic()
        super()._handle(message)

    def _launch(self) -> None:
        events = _socket(self._context, zmq.PULL)
        events.bind(_address(self._folder, "events"))
        self._events = events
        self._process.start()
        self._thread.start()

    def _send(self, command: Command) -> None:
        with self._send_lock:
            if not self._commands.closed:
                self._commands.send(msgspec.msgpack.encode(command))

    def _listen(self) -> None:
        """Pass messages on until the core says its last one or its process is gone."""
        decoder = msgspec.msgpack.Decoder(Message)
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._process.sentinel, zmq.POLLIN)
        try:
            while self.state in ("loading", "ready"):
                ready = dict(poller.poll())
                if self._events in ready:
                    self._handle(decoder.decode(self._events.recv()))
                elif self._process.sentinel in ready:
                    self._process.join()
                    code = self._process.exitcode
                    reason = f"the engine process {self.pid} ended with exit code {code}"
                    if self._is_closing:  # while it loads it hears nothing and is killed
                        self._end("closed", None)
                    else:
                        self._end("dead", EngineDeadError(reason))
        finally:
            self._events.close(linger=0)

    def _join(self, timeout_s: float) -> None:
        if self._process.pid is not None:
            if self.state != "loading":  # it hears nothing before, and has nothing to lose
                self._process.join(timeout_s)
                if self._process.is_alive():
                    logger.warning("the engine process %s did not end; killing it", self.pid)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
        with self._send_lock:
            self._commands.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # a slow reader must not hold the step loop
    return socket


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.decoder = msgspec.msgpack.Decoder(Command)

    def take(self, *, wait: bool) -> list[Command]:
        commands: list[Command] = []
        while self.socket.poll(int(1000 * IDLE_POLL_S) if wait and not commands else 0):
            commands.append(self.decoder.decode(self.socket.recv()))
        return commands


def _core_process(build: Build, folder: str, log_level: str | None) -> None:
    """The child's main function."""
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the parent decides
    # when the core may go, and its end is noticed below.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if log_level is not None:
        log.set_up(level=log_level)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands = _socket(context, zmq.PULL)
    commands.connect(_address(Path(folder), "commands"))
    events = _socket(context, zmq.PUSH)
    events.connect(_address(Path(folder), "events"))
    lock = threading.Lock()  # refusals may come from another thread than events

    def emit(message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        with lock:
            events.send(data)

    with _beating(emit):
        run_core(build, _SocketInbox(commands), emit)
    commands.close(linger=0)
    events.close(linger=1000)
    context.term()


@contextmanager
def _beating(emit: Callable[[Message], None], every_s: float = BEAT_S) -> Iterator[None]:
    """Emit a sign of life at once and every so often, from a thread, until the block is over."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
            emit(Alive())

    emit(Alive())
    thread = threading.Thread(target=beat, name="moet-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)
