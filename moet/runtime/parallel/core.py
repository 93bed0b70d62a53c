"""Engine cores of a group: one that schedules and tells the others, and those that follow.

Both carry out the same batches with the same parts, and compare what they sampled after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moet.runtime.batch import Batch, StepResult
from moet.runtime.core import EngineCore
from moet.runtime.parallel.group import Group
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.ranks import Ranks
from moet.runtime.parallel.steps import StepReader, digest, encode
from moet.types import TokenEvent

logger = logging.getLogger(__name__)

Runner = Callable[[Batch], StepResult]
STOP = b"\xc1"  # announced in place of a batch, which never begins like this


class LeadingCore(EngineCore):
    """The core of rank 0. `lead` must be called before its first step."""

    _group: Group
    _ranks: Ranks

    def lead(self, group: Group, ranks: Ranks) -> None:
        """Take charge of the other ranks."""
        self._group, self._ranks = group, ranks

    @property
    def has_work(self) -> bool:
        """Also when the group has ended: step() then says why."""
        return self._group.monitor.failure is not None or super().has_work

    def step(self) -> list[TokenEvent]:
        """As EngineCore.step. Raises GroupError when the group has ended."""
        try:
            self._group.monitor.require_sound()
            return super().step()
        except GroupError:
            self._ranks.kill()
            raise

    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch on every rank."""
        group = self._group
        group.monitor.require_sound()
        group.begin_step()
        group.announce(encode(batch))
        return carry_out(group, batch, super().run)

    def shutdown(self) -> None:
        """End the other ranks, too."""
        group = self._group
        if group.monitor.failure is None:
            super().shutdown()
            group.announce(STOP)
            group.settle()
            self._ranks.join()
        group.close()
        self._ranks.kill()


def carry_out(group: Group, batch: Batch, run: Runner) -> StepResult:
    """Run a batch on this rank and compare what it made with the other ranks'."""
    result = run(batch)
    group.monitor.require_sound()
    if result.failed:
        reason = next(iter(result.errors.values()))
        raise GroupError(group.monitor.fail(f"{group.name} failed in step {group.step}: {reason}"))
    group.agree(digest(result), "the tokens")
    return result


def follow(group: Group, core: EngineCore) -> None:
    """Carry out what rank 0 announces until it says stop. Raises GroupError if the group ends."""
    reader = StepReader()
    while True:
        data = group.heard()
        if data == STOP:
            break
        group.begin_step()
        carry_out(group, reader.read(data), core.run)
    group.settle()
    logger.info("%s stops, as rank 0 said", group.name)
    group.close()
    core.shutdown()
