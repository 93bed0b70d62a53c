"""Whatever ends a rank ends the group, which says why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moet.config import ParallelConfig
from moet.runtime.batch import Admit, Batch, Row, SetPages, StepResult
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.parallel.core import LeadingCore, follow
from moet.runtime.parallel.group import Group
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.steps import StepWriter
from moet.runtime.queues import CpuQueue
from tests.fakes import request
from tests.runtime.device_fakes import StepFakeModel, Tape, placed_core
from tests.runtime.parallel.test_group import same, together
from tests.runtime.parallel.test_steps import arrived

ENDED = "the process of rank 1 ended with exit code 1"
TWO = ParallelConfig(tensor=2)


class Broken:
    """A core that cannot carry out anything."""

    launches = False

    def on_fault(self, tell: object) -> None:
        pass

    def run(self, batch: Batch) -> StepResult:
        raise ValueError("its disk is gone")


def without_set_up() -> EngineCore:
    """Would go on without the row, and leave the others alone in their collectives."""
    core = placed_core(StepFakeModel(), Placement(CpuQueue(), Tape()))

    def admit(*args: object) -> None:
        raise OSError("no memory")

    core._runner.sampler.admit = admit  # type: ignore[method-assign]
    return core


def without_passes() -> EngineCore:
    """Tells of it when results are due, for which the others' must have been."""
    model = StepFakeModel()

    def compute_parts(*args: object) -> Iterator[None]:
        raise OSError("no memory for a pass")
        yield

    model.compute_parts = compute_parts  # type: ignore[assignment, method-assign]
    return placed_core(model, Placement(CpuQueue(), Tape()))


def batch_of(num_parts: int) -> Batch:
    """A prompt, which may be a divided pass of which this is the beginning."""
    seq = arrived(0)
    commands = [SetPages(0, 0, [0, 1]), Admit(seq, 0, 3)]
    rows = [Row(seq, 0, 0, 0, 3, [1, 2, 3], True)]
    return Batch(commands, [], begins=rows, num_parts=2) if num_parts else Batch(commands, rows)


@pytest.mark.parametrize(
    ("make", "num_parts", "reason"),
    [
        (Broken, 0, "ValueError: its disk is gone"),
        (without_set_up, 0, "set-up failed: OSError: no memory"),
        (without_passes, 0, "the step failed: OSError: no memory for a pass"),
        (without_passes, 3, "a part of a pass failed: no memory for a pass"),
    ],
)
def test_what_ends_a_follower_is_told_at_once_and_counts_more_than_its_end(
    make: Callable[[], Any], num_parts: int, reason: str
) -> None:
    has_ended = threading.Event()

    def work(group: Group) -> str:
        if group.rank == 1:
            try:
                follow(group, make())
            finally:
                has_ended.set()
        group.begin_step()
        group.announce(StepWriter().write(batch_of(num_parts)))
        assert has_ended.wait(30)
        return group.monitor.mourn(ENDED)

    told, error = together(TWO, work, same)
    assert isinstance(error, GroupError)
    assert f"rank 1 (stage 0, tensor rank 1) failed in step 1: {reason}" in str(error)
    assert str(error) in str(told)


@pytest.mark.parametrize("call", ["step", "check"])
def test_an_error_of_rank_0_ends_the_others(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever kind: they would wait for its next step, and hold their GPUs."""
    core = placed_core(StepFakeModel(), Placement(CpuQueue(), Tape()), kind=LeadingCore)
    assert isinstance(core, LeadingCore)
    reasons, killed = list[str](), list[bool]()
    monitor = SimpleNamespace(require_sound=lambda: None, fail=reasons.append, failure=None)
    group: Any = SimpleNamespace(monitor=monitor, name="rank 0")
    ranks: Any = SimpleNamespace(kill=lambda: killed.append(True))
    core.lead(group, ranks)
    core.submit(request("a", [1, 2]))

    def broken(*args: object) -> None:
        raise AssertionError("a page is lost")

    monkeypatch.setattr(core._scheduler, {"step": "schedule", "check": "check"}[call], broken)
    with pytest.raises(AssertionError):
        getattr(core, call)()
    assert reasons == ["rank 0 failed: AssertionError: a page is lost"]
    assert killed == [True]
