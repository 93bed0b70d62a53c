"""Whatever ends a rank ends the group, which says why."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from moet.config import ParallelConfig
from moet.runtime.batch import Batch, StepResult
from moet.runtime.device_runner import Placement
from moet.runtime.parallel.core import LeadingCore, follow
from moet.runtime.parallel.group import Group
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.steps import StepWriter
from moet.runtime.queues import CpuQueue
from tests.fakes import request
from tests.runtime.device_fakes import StepFakeModel, Tape, placed_core
from tests.runtime.parallel.test_group import same, together

ENDED = "the process of rank 1 ended with exit code 1"
TWO = ParallelConfig(tensor=2)


class Broken:
    """A core that cannot carry out anything."""

    launches = False

    def run(self, batch: Batch) -> StepResult:
        raise ValueError("its disk is gone")


def test_what_ends_a_follower_is_told_and_counts_more_than_its_end() -> None:
    has_ended = threading.Event()

    def work(group: Group) -> str:
        if group.rank == 1:
            try:
                follow(group, Broken())  # type: ignore[arg-type]
            finally:
                has_ended.set()
        group.begin_step()
        group.announce(StepWriter().write(Batch([], [])))
        assert has_ended.wait(30)
        return group.monitor.mourn(ENDED)

    told, error = together(TWO, work, same)
    assert isinstance(error, GroupError)
    assert "rank 1 (stage 0, tensor rank 1) failed in step 1: ValueError: its disk is gone" in str(
        error
    )
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
