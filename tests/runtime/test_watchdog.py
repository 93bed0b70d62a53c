"""A step that hangs is told of while it hangs, and the queue does not keep anyone for ever."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import torch

from moet.errors import ConfigError, OverloadedError
from moet.kernels.moe import ExpertTable, F32Experts
from moet.runtime.engine import Engine
from moet.runtime.experts.usage import CountedExperts
from moet.runtime.host import ThreadHost
from moet.runtime.output import Output
from moet.runtime.watchdog import Watchdog
from moet.types import FinishReason, TokenEvent
from tests.fakes import FakeModel, drain, make_core, request
from tests.scripted import ScriptedCore
from tests.texts import text_side


def test_a_late_step_is_told_of_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str | None] = []
    late = threading.Event()

    def tell(doing: str | None) -> None:
        told.append(doing)
        late.set()

    with caplog.at_level(logging.WARNING, "moet"):
        watchdog = Watchdog(0.02, lambda: "3 rows of 7-0", tell)
        with watchdog.step():
            assert late.wait(30)
        with watchdog.step():
            pass
        watchdog.close()
    assert told == ["3 rows of 7-0", None]
    assert "3 rows of 7-0" in caplog.text
    assert "test_a_late_step_is_told_of" in caplog.text  # where the step's thread is


class HangingCore(ScriptedCore):
    """Its first step waits to be let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def step(self) -> list[TokenEvent]:
        self.let_go.wait(60)
        return super().step()

    def info(self) -> Any:
        import msgspec

        return msgspec.structs.replace(super().info(), step_timeout_s=0.02)


def test_an_engine_says_what_its_late_step_does() -> None:
    core = HangingCore()
    engine = Engine.over(ThreadHost(lambda progress: core), text_side)
    engine.wait_until_ready(60)
    with engine:
        assert engine.late_step is None
        answer = threading.Thread(target=engine.generate, args=("abc",))
        answer.start()
        while engine.late_step is None:
            time.sleep(0.005)
        assert engine.late_step == "1 scripts"
        core.let_go.set()
        answer.join(60)
        while engine.late_step is not None:
            time.sleep(0.005)


def test_a_request_that_waits_too_long_for_its_first_step_is_let_go() -> None:
    core = make_core(max_num_seqs=1, max_num_batched_tokens=8, queue_timeout_s=1e-9)
    core.submit(request("late", [1, 2, 3]))
    [event] = drain(core)["late"]
    assert (event.finish_reason, event.overloaded) == (FinishReason.ERROR, True)
    assert "--queue-timeout" in (event.error or "")
    stats = core.stats()
    assert (stats.num_queue_timeouts, stats.num_used_pages) == (1, 0)
    output = Output(
        index=0, pieces=[], token_ids=[], finish_reason=event.finish_reason, overloaded=True
    )
    with pytest.raises(OverloadedError):
        output.raise_if_failed()


def test_a_request_that_has_begun_is_not_let_go() -> None:
    core = make_core(max_num_seqs=1, max_num_batched_tokens=8, queue_timeout_s=100.0)
    core.submit(request("first", [1, 2, 3]))
    core.submit(request("second", [1, 2, 3]))
    core.step()
    core._scheduler._expire(time.perf_counter() + 200.0)
    ends = {key: events[-1].finish_reason for key, events in drain(core).items()}
    assert ends == {"first": FinishReason.LENGTH, "second": FinishReason.ERROR}


@pytest.mark.parametrize("name", ["queue_timeout_s", "step_timeout_s"])
def test_time_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match="must be finite and positive"):
        make_core(**{name: 0.0})


@pytest.mark.parametrize("overlap", [False, True])
def test_activity_names_sizes_and_requests_and_no_token(overlap: bool) -> None:
    core = make_core(FakeModel(), overlap=overlap)
    assert "no batch" in core.activity()
    core.submit(request("seven", [41, 42, 43]))
    core.step()
    core.step()
    assert "requests seven" in core.activity()
    assert "41" not in core.activity()
    core.shutdown()


class HalfResident:
    """An ExpertProvider whose odd experts are not there."""

    def __init__(self) -> None:
        slot_of = torch.tensor([0, -1, 1, -1])
        self.table = ExpertTable(F32Experts(2, 2), torch.zeros(2, 48, dtype=torch.uint8), slot_of)

    def resolve(self, layer_idx: int, expert_ids: torch.Tensor) -> ExpertTable:
        return self.table


def test_rows_are_counted_by_layer_and_expert() -> None:
    counted = CountedExperts(HalfResident())
    assert counted.stats().layers == []
    with torch.inference_mode():
        counted.resolve(3, torch.tensor([[0, 2], [2, 1]]))
    counted.resolve(3, torch.tensor([[2, 2]]))
    counted.resolve(1, torch.zeros(0, 2, dtype=torch.int64))
    first, second = counted.stats().layers
    assert (first.layer, first.rows) == (1, [0, 0, 0, 0])
    assert (second.layer, second.rows) == (3, [1, 1, 4, 0])
    assert (second.num_resident, second.resident) == (2, [True, False, True, False])
    assert second.format == "f32"
