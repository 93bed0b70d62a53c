"""The rig of `bench.step_h200` on a stand-in device and a tiny model: it does what it times."""

from __future__ import annotations

import pytest
import torch

from moet.bench import on_device
from moet.bench.device_rig import DeviceRig, check
from moet.bench.device_step import OpRecorder, num_bytes, read_rate, time_ops
from moet.bench.rig import Shape
from moet.config import EngineConfig, TargetConfig
from moet.errors import ConfigError
from moet.kernels.registry import watching
from moet.runtime.chunks import Chunk
from moet.runtime.device_runner import Placement
from moet.runtime.device_sampler import Kind
from moet.runtime.metrics import ExpertStats, LayerTier, TierStats
from moet.runtime.queues import CpuQueue, uncaptured
from tests.models.hash_weights import DEPLOYED, Rig, hash_source, load_rig


@pytest.fixture(scope="module")
def recorder() -> OpRecorder:
    return OpRecorder()


@pytest.fixture(scope="module")
def loaded(recorder: OpRecorder) -> Rig:
    with watching(recorder.watch):
        return load_rig(
            DEPLOYED, hash_source(DEPLOYED, quantised=True), "deployed", num_spec_tokens=2
        )


@pytest.fixture(scope="module")
def rig(loaded: Rig) -> DeviceRig:
    rig = DeviceRig(
        loaded.model,
        loaded.experts,
        Placement(CpuQueue(), uncaptured),
        num_seqs=2,
        num_rows=3,
        longest=600,
        others=300,
        num_drafts=2,
    )
    rig.fill()
    return rig


def test_every_page_of_a_context_is_filled(rig: DeviceRig) -> None:
    entries = rig.kv.tensors["csa_entries"]
    assert entries.shape[1] == 5 + 4
    first = entries[:, 0]
    assert (entries[:, 1:5] == first.unsqueeze(1)).all()
    assert (entries[:, 5:] != first.unsqueeze(1)).any()
    assert first.any()


@pytest.mark.parametrize(("num_seqs", "num_rows"), [(1, 1), (2, 3)])
def test_steps_run_and_give_times(rig: DeviceRig, num_seqs: int, num_rows: int) -> None:
    times = rig.time_steps(Shape(num_seqs=num_seqs, num_rows=num_rows, context=290), 2)
    assert times.step_ms > 0
    assert times.period_ms > 0
    rig.graphs.check()


def test_steps_may_draft(rig: DeviceRig) -> None:
    shape = Shape(num_seqs=2, num_rows=3, context=290)
    for kind in (Kind.GREEDY, Kind.RANKED):
        assert rig.time_steps(shape, 2, num_to_draft=2, kind=kind).step_ms > 0
    rig.graphs.check()


def test_prompts_leave_what_one_pass_would(rig: DeviceRig) -> None:
    assert rig.time_prompt(70, 32) > 0
    tokens = list(range(2, 72))
    firsts = []
    for sizes in ((70,), (32, 38)):
        start = 0
        for size in sizes:
            part = tokens[start : start + size]
            output = rig.chunks.launch([Chunk(0, start, part, Kind.GREEDY)]).result()
            start += size
        firsts.append(output.tokens)
    assert firsts[0] == firsts[1]


def test_ops_of_a_step_are_timed_with_their_bytes(
    rig: DeviceRig, loaded: Rig, recorder: OpRecorder
) -> None:
    rig.time_steps(Shape(num_seqs=1, num_rows=1, context=290), 1)
    recorder.record(lambda: rig.replay(Shape(num_seqs=1, num_rows=1, context=290)))
    queue = CpuQueue()
    costs = {cost.name: cost for cost in time_ops(recorder, queue, uncaptured)}
    layers = DEPLOYED.num_hidden_layers
    assert costs["hc_pass"].num_calls == 2 * layers - 1
    experts = next(cost for name, cost in costs.items() if name in ("moe", "expert_mixture"))
    assert experts.num_calls == layers
    table = loaded.experts.resolve(0, torch.zeros(1, 1, dtype=torch.int64))
    assert experts.num_bytes > layers * DEPLOYED.num_experts_per_tok * table.format.row_bytes
    assert all(cost.time_ms > 0 for cost in costs.values())
    one = recorder.calls["hc_pass"][0]
    assert num_bytes(one) > 0
    assert read_rate(queue, uncaptured, 1 << 20) > 0


def test_a_step_is_told_with_its_ops(rig: DeviceRig, recorder: OpRecorder) -> None:
    shape = Shape(num_seqs=2, num_rows=1, context=40)
    rows = on_device.time_rig(rig, recorder, shape, num_steps=2)
    assert [row.case for row in rows[:3]] == ["step", "gap between steps", "kernels of a step"]
    ops = {row.case: row.value for row in rows[3:]}
    assert {"hc_pass", "hc_enter"} <= ops.keys()
    assert rows[0].floor == pytest.approx(sum(row.floor or 0 for row in rows[3:]), abs=0.1)
    assert list(ops.values()) == sorted(ops.values(), reverse=True)


def test_tiers_are_told_a_step() -> None:
    def stats(hits: int, misses: int, stall_s: float) -> ExpertStats:
        sizes = dict.fromkeys(TierStats.__struct_fields__, 5)
        layer = LayerTier(
            layer=3,
            num_hits=hits,
            num_misses=misses,
            num_streamed=0,
            num_bytes=0,
            stall_s=stall_s,
        )
        tier = TierStats(**{**sizes, "format": "w2", "row_bytes": 10**6, "layers": [layer]})
        return ExpertStats(layers=[], tiers=[tier])

    hits, missed, copies = on_device.tier_rows(stats(10, 10, 0.5), stats(40, 20, 0.7), 5)
    assert (hits.value, missed.value, copies.value) == pytest.approx((75, 2, 40))
    assert "2.00 miss a step" in hits.note
    assert "3: 40000 us" in copies.note


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for target in (TargetConfig(device="cuda"), TargetConfig(weights="dummy")):
        config = EngineConfig(model="deepseek-v4-flash", target=target)
        with pytest.raises(ConfigError, match="GPU"):
            on_device.device_for(config)


def test_a_step_that_failed_gives_no_time() -> None:
    check(0, [False])
    with pytest.raises(RuntimeError, match="fault 0x2"):
        check(2, [False])
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        check(0, [True, False])


def test_steps_that_write_over_what_they_read_are_refused(loaded: Rig) -> None:
    with pytest.raises(ConfigError, match=r"4 rows of a sequence, but .* room for 3; load"):
        DeviceRig(
            loaded.model,
            loaded.experts,
            Placement(CpuQueue(), uncaptured),
            num_seqs=1,
            num_rows=4,
            longest=300,
            others=300,
        )
