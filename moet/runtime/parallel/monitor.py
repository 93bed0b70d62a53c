"""Signs of life between the ranks of a group, and the one reason that ends them all.

Every rank writes a pulse and what it is doing into a store that all reach, and reads the others'.
Knows nothing of tensors or steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from torch._C._distributed_c10d import Store

from moet.errors import EngineDeadError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
JOIN_S = 2.0  # for an exchange with the store that is under way
TELL_S = 1.0  # for a reason to reach the store, before whoever gives it may end its process


class GroupError(EngineDeadError):
    """The group of ranks has ended; says which rank, what it was doing, and in which collective."""


@dataclass(slots=True)
class _Pulse:
    text: str
    seen_at: float


class Monitor:
    """Watches the other ranks from a thread of its own.

    name: "rank 1 (stage 0, tensor rank 1)" of a rank. The store must be used by nobody else.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        timeout_s: float,
        name: Callable[[int], str],
    ) -> None:
        self.phase = "starting"
        self.failure: str | None = None
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._timeout_s = timeout_s
        self._name = name
        self._beats = 0
        self._ends: list[Callable[[], None]] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="moet-monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch, once every rank has a first pulse."""
        self._thread.start()

    def fail(self, reason: str) -> str:
        """End the group. Returns its reason, which is an earlier one if there was one."""
        with self._lock:
            if self.failure is not None:
                return self.failure
            self.failure = reason
            logger.error("the group ends: %s", reason)
            telling = threading.Thread(target=self._publish, args=(reason,), daemon=True)
            telling.start()
            self._end()
        telling.join(TELL_S)
        return reason

    def mourn(self, reason: str) -> str:
        """End the group since a rank is gone, which may have told why; returns what counts."""
        try:
            told = self._told()
        except RuntimeError:
            told = ""
        return self._heed(told) if told else self.fail(reason)

    def at_end(self, end: Callable[[], None]) -> None:
        """Call this, from a thread of its own, once the group has failed."""
        self._ends.append(end)

    def require_sound(self) -> None:
        """Raise GroupError if the group has ended."""
        if self.failure is not None:
            raise GroupError(self.failure)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._ends = []
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def phases(self) -> str:
        """What every other rank last said it was doing."""
        texts = self._read()
        return "; ".join(f"{self._name(o)}: {t}" for o, t in zip(self._others, texts, strict=True))

    def _told(self) -> str:
        """The reason that another rank has given, if one has."""
        return self._store.get("failure").decode() if self._store.check(["failure"]) else ""

    def _heed(self, told: str) -> str:
        with self._lock:
            if self.failure is None:
                self.failure = told
                self._end()
            return self.failure

    def _end(self) -> None:
        for end in self._ends:
            threading.Thread(target=end, name="moet-end", daemon=True).start()

    def _publish(self, reason: str) -> None:
        try:
            self._store.set("failure", f"{reason} (told by {self._name(self._rank)})")
        except RuntimeError:
            logger.debug("nobody is left to be told")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"pulse/{self._rank}", f"{self._beats}|{self.phase}")

    def _read(self) -> list[str]:
        """What the others do, as they said last."""
        return [text.partition("|")[2] for text in self._pulses()]

    def _pulses(self) -> list[str]:
        if not self._others:
            return []
        return [raw.decode() for raw in self._store.multi_get([f"pulse/{o}" for o in self._others])]

    def _watch(self) -> None:
        pulses = {other: _Pulse("", monotonic()) for other in self._others}
        last = monotonic()
        while not self._closed.wait(BEAT_S) and self.failure is None:
            try:
                self._beat()
                texts = self._pulses()
                told = self._told()
            except RuntimeError as error:
                if not self._closed.is_set():
                    self.fail(
                        f"the ranks' common store is gone, and with it {self._name(0)}: {error}"
                    )
                return
            if told:
                self._heed(told)
                return
            now = monotonic()
            slept, last = now - last > self._timeout_s / 2, now
            for other, text in zip(self._others, texts, strict=True):
                pulse = pulses[other]
                if (
                    text != pulse.text or slept
                ):  # having been stopped oneself says nothing of others
                    pulse.text, pulse.seen_at = text, now
                elif now - pulse.seen_at > self._timeout_s:
                    self.fail(
                        f"{self._name(other)} has given no sign of life for {self._timeout_s:g} s; "
                        f"its last was in: {text.partition('|')[2]}. {self._name(self._rank)} is "
                        f"in: {self.phase}"
                    )
                    break
