"""Processes of the ranks that rank 0 starts on its own machine, and their end.

A rank lives no longer than rank 0: it ends when the pipe that it was given its orders through
closes. Knows processes; knows nothing of models.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from subprocess import Popen
from time import monotonic

import msgspec

from moet.config import EngineConfig, environment_with
from moet.runtime.parallel.group import Place, rank_names

logger = logging.getLogger(__name__)

FOLLOWER = "moet.runtime.parallel.follower"
LOOK_S = 0.2
JOIN_S = 10.0


class Orders(msgspec.Struct, frozen=True):
    """What a rank is started with: one line of JSON."""

    config: EngineConfig
    place: Place
    log_level: str | None


class Ranks:
    """The processes of ranks 1 and up; none if they are started from outside."""

    def __init__(self) -> None:
        self._processes: dict[int, Popen[bytes]] = {}
        self._name: Callable[[int], str] = str
        self._closing = threading.Event()

    def start(self, config: EngineConfig, place: Place, log_level: str | None) -> None:
        """Start every other rank beside this one."""
        self._name = rank_names(config.parallel)
        for rank in range(1, config.parallel.num_ranks):
            process = Popen(
                [sys.executable, "-m", FOLLOWER],
                stdin=subprocess.PIPE,
                env=environment_with({"TORCH_CPP_LOG_LEVEL": "ERROR"}),  # the log says it better
            )
            self._processes[rank] = process
            theirs = Place(rank, place.host, place.port, hosts_store=False, attempt=place.attempt)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(Orders(config, theirs, log_level)) + b"\n")
            process.stdin.flush()

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 1 first."""
        return [process.pid for process in self._processes.values()]

    def lost(self) -> str | None:
        """Which rank's process has ended, and how; None while all run."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                return f"the process of {self._name(rank)} ended with {how}"
        return None

    def watch(self, tell: Callable[[str], object]) -> None:
        """Call `tell`, once and from a thread, when a process ends that was not asked to."""

        def look() -> None:
            while not self._closing.wait(LOOK_S):
                lost = self.lost()
                if lost is not None:
                    if not self._closing.is_set():
                        tell(lost)
                    return

        threading.Thread(target=look, name="moet-ranks", daemon=True).start()

    def expect_end(self) -> None:
        """From now on processes may end."""
        self._closing.set()

    def join(self) -> None:
        """Wait for all of them, who have been told to stop; kill those that do not."""
        self.expect_end()
        until = monotonic() + JOIN_S
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, until - monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop within %g s; killing it", self._name(rank), JOIN_S)
        self.kill()

    def kill(self) -> None:
        """End all that still run. SIGKILL ends stopped processes, too."""
        self.expect_end()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
