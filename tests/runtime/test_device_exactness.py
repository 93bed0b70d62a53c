"""The tests of exactness and of drafting, around a core on a stand-in device."""

from __future__ import annotations

from typing import Any

import pytest

import tests.fakes
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.queues import CpuQueue
from tests.fakes import FakeModel
from tests.runtime import test_exactness, test_speculation, test_speculation_state
from tests.runtime.device_fakes import StepFakeModel, Tape

LONG = {"test_any_settings_and_arrivals"}  # a minute, and its parts are here
DRAFTING = {  # of those of test_speculation; most take long, and tokens are compared elsewhere
    "test_drafting_plain_and_prefilling_ones_share_steps",
    "test_events_carry_what_a_step_made",
    "test_others_start_behind_what_the_draft_block_has_read",
}


class _PlacedCore(EngineCore):
    """A core that puts every FakeModel on a stand-in device."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        if type(model) is FakeModel:
            model.__class__ = StepFakeModel
            options["placement"] = Placement(CpuQueue(), Tape())
        super().__init__(model, *args, **options)


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.fakes, "EngineCore", _PlacedCore)


def test_the_core_is_placed() -> None:
    core = tests.fakes.make_core(FakeModel())
    assert core._launcher is not None


def _tests_of(module: Any) -> dict[str, Any]:
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_")}
    return {name: value for name, value in tests.items() if name not in LONG}


globals().update(_tests_of(test_exactness))
globals().update(_tests_of(test_speculation_state))
globals().update({name: vars(test_speculation)[name] for name in sorted(DRAFTING)})
