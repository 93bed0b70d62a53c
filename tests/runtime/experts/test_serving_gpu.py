"""From settings to experts on a GPU, whose kernels are emulated: sizes, tiers, heat and books."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moet.config import EngineConfig, ExpertConfig, SchedulerConfig
from moet.errors import ConfigError, RequestError
from moet.kernels.device_gemm import Device
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.experts import serving_gpu
from moet.runtime.experts.device_traces import Ring
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.hot import write_hot
from moet.runtime.experts.layer_stream import stream_from
from moet.runtime.experts.numa import listed, near
from moet.runtime.experts.serving_gpu import DeviceServed, device_sizes
from moet.runtime.experts.sizes import TierSizes
from moet.runtime.experts.sources import DummyRows, PackRows
from moet.runtime.experts.traces import read_trace
from moet.runtime.plan_types import ExpertPlan
from tests.kernels import emulation

LAYERS, NUM_EXPERTS = 3, 16
ROW = 4096


def plan(num_static: int, num_cached: int, row_bytes: int = ROW) -> ExpertPlan:
    return ExpertPlan(
        row_bytes=row_bytes,
        num_rows=LAYERS * NUM_EXPERTS,
        num_static=num_static,
        num_cached=num_cached,
        num_host=LAYERS * NUM_EXPERTS,
        num_disk=0,
        num_layer_rows=NUM_EXPERTS,
    )


def sizes(made: ExpertPlan, experts: ExpertConfig, tier: str = "w2", seqs: int = 2) -> object:
    config = EngineConfig(model="m", experts=experts, scheduler=SchedulerConfig(max_num_seqs=seqs))
    return device_sizes(
        config,
        tier,  # type: ignore[arg-type]
        made,
        row_bytes=ROW,
        num_layers=LAYERS,
        top_k=4,
        free=1000 * ROW,
    )


def test_sizes_follow_the_plan_or_what_is_asked_for() -> None:
    every = plan(LAYERS * NUM_EXPERTS, 0)
    assert sizes(every, ExpertConfig()) is None
    assert sizes(every, ExpertConfig(pool_bytes=100 * ROW)) is None
    split = sizes(plan(5, 20), ExpertConfig())
    assert (split.num_slots, split.num_static, split.num_places) == (25, 5, 43)  # type: ignore[attr-defined]
    asked = sizes(every, ExpertConfig(pool_bytes=18 * ROW, host_bytes=40 * ROW))
    assert (asked.num_slots, asked.num_places) == (18, 40)  # type: ignore[attr-defined]
    second = sizes(every, ExpertConfig(offered=("fp4",)), "fp4")
    assert second.num_slots == NUM_EXPERTS  # type: ignore[attr-defined]


def test_a_pool_that_no_step_fits_is_refused_with_what_it_needs() -> None:
    made = plan(LAYERS * NUM_EXPERTS, 0)
    with pytest.raises(ConfigError, match=r"gives 7 slots .* 2 decoding rows may ask for 8"):
        sizes(made, ExpertConfig(pool_bytes=7 * ROW))
    on_disk = sizes(made, ExpertConfig(pool_bytes=9 * ROW, host_bytes=40 * ROW))
    assert on_disk.num_slots == 9  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("serving-gpu")
    write_checkpoint(folder / "checkpoint", size="tiny")
    options = ConvertOptions(num_workers=1)
    return convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", options)


def test_rows_on_disk_are_served_and_heat_is_kept(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    kernels = emulation.build(("expert_cache",), 90, num_sms=2)
    device = Device.around(kernels, "sm90a", "cpu")
    row_bytes, layers = pack.format("w2").row_bytes, list(pack.experts.layers[:LAYERS])
    experts = ExpertConfig(
        pool_bytes=18 * row_bytes,
        static_bytes=2 * row_bytes,
        host_bytes=34 * row_bytes,
        heat_file=str(tmp_path / "heat"),
        trace_file=str(tmp_path / "trace"),
        offered=("w2+hot",),
    )
    write_hot(pack, [pack.experts.row(layers[0], 3), pack.experts.row(layers[2], 14)])
    config = EngineConfig(
        model=str(pack.folder), experts=experts, scheduler=SchedulerConfig(max_num_seqs=1)
    )
    made = plan(LAYERS * NUM_EXPERTS, 0, row_bytes)

    def serve() -> DeviceServed:
        return DeviceServed(PackRows(pack, layers, device), config, made, lambda done, total: None)

    served = serve()
    provider = served.precisions.drafting
    for layer in (layers[2], layers[0], layers[2]):
        ids = torch.tensor([[15, 3, 9, 14]])
        table = provider.resolve(layer, ids)
        for expert_id in ids[0].tolist():
            row = table.rows[table.slot_of[expert_id]]
            assert torch.equal(row, pack.expert_row("w2", layer, expert_id))
    assert int(device.error) == 0
    (tier,) = served.stats().tiers
    assert (tier.num_static, tier.num_disk_reads, tier.total("num_hits")) == (2, 4, 4)
    assert served.explain() is None
    held = served.caches["w2"].heat()
    for layer in layers:
        table = provider.resolve(layer, torch.arange(NUM_EXPERTS).view(-1, 1).repeat(4, 1))
        for expert_id in range(NUM_EXPERTS):
            row = table.rows[table.slot_of[expert_id]]
            assert torch.equal(row, pack.expert_row("w2", layer, expert_id))
    assert served.caches["w2"].heat() == held, "a prompt has changed what decoding keeps"
    monkeypatch.setattr(serving_gpu, "WATCHED", 1)
    with caplog.at_level(logging.WARNING):
        served.stats()
    assert "33 % of the w2 experts" in caplog.text
    assert "--expert-pool" in caplog.text
    assert "4 of the 12 w2 experts asked for lately were read from disk" in caplog.text
    assert "--host-experts" in caplog.text
    with pytest.raises(RequestError, match=r"has 0 slots; 6 are needed"):
        served.tune(pool_bytes=1)
    assert not served.take_moved()
    served.tune(pool_bytes=21 * row_bytes)
    assert served.take_moved()
    assert len(served.caches["w2"].tables.row_of) == 21
    for layer in (layers[0], layers[2]):
        table = provider.resolve(layer, ids)
        for expert_id in ids[0].tolist():
            row = table.rows[table.slot_of[expert_id]]
            assert torch.equal(row, pack.expert_row("w2", layer, expert_id))
    served.caches["w2"].check()
    assert served.caches["w2"].num_static == 2
    heat, feeder = served.caches["w2"].heat(), served.caches["w2"].host.feeder
    assert feeder is not None
    assert set(feeder.rows()) < set(heat)
    assert len(set(heat)) == len(heat)
    hot = served.precisions.providers["w2+hot"].resolve(layers[2], ids)
    for expert_id, tier_of in ((14, "fp4"), (3, "w2")):
        row = pack.expert_row(tier_of, layers[2], expert_id)  # type: ignore[arg-type]
        expected = pack.format(tier_of).unpack(row)  # type: ignore[arg-type]
        assert all(map(torch.equal, hot.matrices(expert_id), expected))
    assert "hot" in served.identity
    served.tune(tau=0.25)
    assert served.stats().tau == 0.25
    served.close()
    trace = read_trace(tmp_path / "trace")
    assert (trace.num_experts, trace.num_layers) == (NUM_EXPERTS, LAYERS)
    steps = [(place, asked) for place, asked in trace.calls if len(asked) == 4]
    assert steps == [(place, [15, 3, 9, 14]) for place in (2, 0, 2, 0, 2)]
    again = serve()
    slot_of = again.caches["w2"].tables.slot_of
    warm = [place * NUM_EXPERTS + expert for place in (0, 2) for expert in (15, 3, 9, 14)]
    assert all(int(slot_of[row]) >= 0 for row in warm)
    again.close()


def test_a_ring_that_nobody_reads_in_time_loses_records_and_says_so() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    kernels = emulation.build(("expert_cache",), 90, num_sms=2)
    ring, ids = Ring(Device.around(kernels, "sm90a", "cpu"), 16), torch.tensor([[7, -1, 2]])
    for posts in (1, 3, 0):
        for n in range(posts):
            ring.post(n, ids)
        assert ring.read() == [(n, [7, 2]) for n in range(posts)]
    for _ in range(4):
        ring.post(0, ids)
    assert ring.read() is None
    ring.post(5, ids)
    assert ring.read() == [(5, [7, 2])]


def test_dummy_rows_are_the_same_wherever_they_are(pack: Pack) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    kernels = emulation.build(("expert_cache",), 90, num_sms=2)
    device = Device.around(kernels, "sm90a", "cpu")
    source = DummyRows(pack.experts, [0, 2], 4, device, seed=5)
    told: list[int] = []
    whole = source.resident("w2", lambda done, total: None)
    every = TierSizes(num_slots=16, num_static=0, num_places=32, num_staging=2, num_rows=32)
    cached = source.cached("w2", every, ExpertConfig(), lambda done, total: told.append(done))
    for layer in (0, 2):
        ids = torch.tensor([[1, 15, 7]])
        table, other = cached.resolve(layer, ids), whole.resident(layer)
        for expert_id in ids[0].tolist():
            row = other.rows[other.slot_of[expert_id]]
            assert torch.equal(table.rows[table.slot_of[expert_id]], row)
        assert table.bases is not None
        assert other.bases is not None
        assert torch.equal(table.bases, other.bases)
    assert told[-1] == 32 * cached.form.row_bytes
    with pytest.raises(ConfigError, match="room for 31 of 32 rows"):
        source.cached("w2", replace(every, num_places=31), ExpertConfig(), lambda done, total: None)


def test_a_rank_reads_its_part_of_every_row(tmp_path: Path) -> None:
    content = torch.arange(6, dtype=torch.uint8).repeat_interleave(4096)
    (tmp_path / "rows").write_bytes(content.numpy().tobytes())
    file = RowFile(tmp_path / "rows", 4096, stride_bytes=8192, offset_bytes=4096)
    out = torch.zeros(4096 * 2, dtype=torch.uint8)
    out = out[-out.data_ptr() % 4096 :][:4096]
    file.read(2, out).result()
    assert bool((out == 5).all())
    file.close()


def test_processors_beside_a_gpu_are_those_the_system_lists(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("0-2,7,9-9\n")
    assert listed(tmp_path / "list") == {0, 1, 2, 7, 9}
    assert listed(tmp_path / "none") == set()
    assert near(torch.device("cpu")) == set()


def test_steps_of_decoding_never_stream_layers() -> None:
    assert stream_from(256, 6, 1000, decode_rows=32) == 86
    assert stream_from(256, 6, 1000, decode_rows=96) == 97
    assert stream_from(256, 6, 200, decode_rows=32) == 34, "35 rows may ask for 210 experts"
    assert stream_from(256, 6, 6, decode_rows=1) == 2
