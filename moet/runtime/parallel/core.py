"""Engine cores of a group: one that schedules and tells the others, and those that follow.

Both carry out the same batches with the same parts, and compare what they sampled after each. On
devices a batch is launched while the one before it runs, on every rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from moet.errors import RequestError
from moet.runtime.batch import Batch, StepResult
from moet.runtime.core import EngineCore, PendingResult
from moet.runtime.parallel.group import Group
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.ranks import Ranks
from moet.runtime.parallel.steps import StepReader, StepWriter, digest
from moet.types import TokenEvent

logger = logging.getLogger(__name__)

PAUSE, STOP = b"\xc0", b"\xc1"  # announced in place of a batch, which never begins like this


class LeadingCore(EngineCore):
    """The core of rank 0. `lead` must be called before its first step."""

    _group: Group
    _ranks: Ranks
    _writer: StepWriter
    _is_compared: bool  # whether all ranks have compared all steps

    def lead(self, group: Group, ranks: Ranks) -> None:
        """Take charge of the other ranks."""
        self._group, self._ranks, self._writer = group, ranks, StepWriter()
        self._is_compared = True
        end_on_faults(group, self)

    @property
    def has_work(self) -> bool:
        """Also when the group has ended: step() then says why."""
        return self._group.monitor.failure is not None or super().has_work

    def step(self) -> list[TokenEvent]:
        """As EngineCore.step. Raises GroupError when the group has ended."""
        with self._or_end():
            self._group.monitor.require_sound()
            events = super().step()
            if not self._is_compared and not self.has_work:
                self._pause()
            return events

    def check(self) -> None:
        """As EngineCore.check."""
        with self._or_end():
            super().check()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """Whatever ends this core ends the other ranks, which would wait for it for ever."""
        try:
            yield
        except GroupError:
            self._ranks.kill()
            raise
        except Exception as error:
            self._group.monitor.fail(f"{self._group.name} failed: {told(error)}")
            self._ranks.kill()
            raise

    def tune_experts(
        self, *, tau: float | None, pool_bytes: int | None, kv_bytes: int | None = None
    ) -> None:
        """Refused: the other ranks would not hear of it."""
        raise RequestError("several ranks keep their sizes while they serve; start with others")

    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch on every rank."""
        group = self._group
        self._announce(batch)
        return compared(group, group.step, super().run(batch))

    def launch(self, batch: Batch) -> PendingResult:
        """Begin with a batch on every rank; `run` does so by itself."""
        if not self.launches:
            return super().launch(batch)
        self._announce(batch)
        return Launched(self._group, self._group.step, super().launch(batch))

    def _announce(self, batch: Batch) -> None:
        group = self._group
        group.monitor.require_sound()
        group.begin_step()
        self._is_compared = False
        group.announce(self._writer.write(batch))

    def _pause(self) -> None:
        """Compare the last steps, too, before the next request comes to grief by them."""
        self._group.announce(PAUSE)
        self._group.settle()
        self._is_compared = True

    def shutdown(self) -> None:
        """End the other ranks, too."""
        group = self._group
        try:
            if group.monitor.failure is None:
                super().shutdown()
                group.announce(STOP)
                group.settle()
                self._ranks.join()
        finally:
            group.close()
            self._ranks.kill()


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch that was begun on this rank, in step number `step` of the group."""

    group: Group
    step: int
    pending: PendingResult

    def result(self) -> StepResult:
        """Wait for it, and compare."""
        return compared(self.group, self.step, self.pending.result())


def compared(group: Group, step: int, result: StepResult) -> StepResult:
    """What this rank made in a step; the others' is compared with it, a step or two later.

    Raises GroupError if the step failed, here or elsewhere.
    """
    group.monitor.require_sound()
    if result.failed:
        raise ended(group, step, next(iter(result.errors.values())))
    group.agree(digest(result), f"the tokens of step {step}")
    return result


def ended(group: Group, step: int, why: str) -> GroupError:
    """End the group for what went wrong on this rank in a step; says what counts."""
    return GroupError(group.monitor.fail(f"{group.name} failed in step {step}: {why}"))


def end_on_faults(group: Group, core: EngineCore) -> None:
    """Have what fails on this rank end the group at once: it would go on with other rows than the
    others, whose collectives then wait, bring nonsense, or abort the process."""

    def tell(fault: str) -> NoReturn:
        raise ended(group, group.step, fault)

    core.on_fault(tell)


def follow(group: Group, core: EngineCore) -> None:
    """Carry out what rank 0 announces until it says stop. Raises GroupError if the group ends, as
    it does with whatever goes wrong here."""
    end_on_faults(group, core)
    try:
        _carry_out(group, core)
    except GroupError:
        raise
    except Exception as error:
        logger.exception("%s cannot go on", group.name)
        raise ended(group, group.step, told(error)) from error
    logger.info("%s stops, as rank 0 said", group.name)
    group.close()
    core.shutdown()


def _carry_out(group: Group, core: EngineCore) -> None:
    """Results are read when one more batch is under way, as rank 0 does."""
    reader, launched = StepReader(), deque[Launched]()
    while True:
        data = group.heard()
        if data in (PAUSE, STOP):
            while launched:
                launched.popleft().result()
            group.settle()
            if data == STOP:
                return
            continue
        group.begin_step()
        batch = reader.read(data)
        if not core.launches:
            compared(group, group.step, core.run(batch))
            continue
        launched.append(Launched(group, group.step, core.launch(batch)))
        if len(launched) > 1:
            launched.popleft().result()


def told(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"
