"""What benches on a GPU do around their kernels, on a stand-in for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mtp, timeline
from bench.suite import Bench
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import DummyModel
from moet.runtime.queues import CpuQueue
from tests.fakes import NoExperts
from tests.runtime.device_fakes import StepFakeModel, Tape


def test_an_engine_that_drafts_is_timed_by_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "placement_on", lambda device: Placement(CpuQueue(), Tape()))
    monkeypatch.setattr(mtp, "STREAMS", (2,))
    monkeypatch.setattr(mtp, "LOOP_TOKENS", 30)
    monkeypatch.setattr(Bench, "hardware", lambda self: "none")
    monkeypatch.setattr(mtp, "random_ids", lambda count: list(range(8)))
    bench = Bench(tmp_path / "out.json", "command", "", {})
    drafts = mtp.MOST_DRAFTS
    model = StepFakeModel(
        page_size=16, max_position_embeddings=4096, num_spec_tokens=drafts, draft_rate=0.0
    )
    mtp.adaptive_rows(bench, DummyModel(model, NoExperts(), {}), device=None)  # type: ignore[arg-type]
    assert bench.faults == {}
    assert [row.case.rpartition(", ")[0] for row in bench.rows[:2]] == [
        "engine loop, 2 streams"
    ] * 2
    assert len(bench.rows) == 3
    with bench.part("one that fails"):
        raise ValueError("so it does")
    assert bench.faults == {"one that fails": "ValueError: so it does"}


def test_what_a_kernel_adds_is_what_it_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("first", 10.0, 2.0), ("late", 30.0, 5.0), ("beside", 11.0, 4.0), ("inner", 12.0, 1.0)]
    found = timeline.moments(spans)
    assert [each.name for each in found] == ["first", "inner", "beside", "late"]
    assert [each.own_us for each in found] == [2.0, 1.0, 2.0, 20.0]
    assert [each.gap_us for each in found] == [0.0, 0.0, 0.0, 15.0]
    monkeypatch.setattr(timeline, "_spans", lambda work: spans)
    assert [line.split()[-1] for line in timeline.middle(lambda: None)] == ["inner", "late"]
