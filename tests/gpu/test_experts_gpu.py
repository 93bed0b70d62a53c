"""Where experts are changes no token on a GPU: whatever fits the pool, behind it host memory alone
or a disk, cold or warm, in any company, with drafts or without. And a fault names its row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moet.config import CacheConfig, EngineConfig, ExpertConfig, SchedulerConfig, TargetConfig
from moet.kernels.device_gemm import Device
from moet.models.base import ResidentProvider
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.feeder import RowFeeder
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import RETRY_AFTER_S, Arena, mapped_numbers
from moet.runtime.experts.hot import write_hot
from moet.runtime.experts.layer_stream import ByLength, LayerStream, stream_from
from moet.runtime.experts.open_gpu import least_places
from moet.runtime.experts.staged import StagedRows
from moet.runtime.experts.store import DeviceExperts
from moet.runtime.experts.traces import read_trace
from moet.runtime.loader import load_core
from moet.runtime.queues import CudaGraphs, CudaQueue
from tests.fakes import drain, request, tokens_of
from tests.gpu.steps import NUM_DRAFTS, dummy
from tests.runtime.experts.device_storm import FlakyFile, storm

REQUESTS = [
    request(f"r{n}", [(13 * i + 7 * n) % 400 + 2 for i in range(length)], max_tokens=16)
    for n, length in enumerate((3, 40, 250, 300, 5, 130, 17, 64))
]


@dataclass
class Rig:
    """A model, its rows resident, and the same rows in host memory and in a file."""

    model: Any
    experts: DeviceExperts
    device: Device
    arena: Arena
    file: Path

    def __post_init__(self) -> None:
        config = self.model.config
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.layers = list(range(len(self.experts.rows) // self.num_experts))
        tables = [self.experts.resident(layer) for layer in self.layers]
        self.form: Any = tables[0].format
        self.bases = torch.cat([table.bases for table in tables if table.bases is not None])

    def pool(self, num_slots: int, host: HostSide | None = None) -> CachedExperts:
        return CachedExperts(
            self.device.launcher,
            self.form,
            host or HostSide(arena=self.arena),
            self.bases,
            self.layers,
            num_slots,
            error=self.device.error,
            timeout_s=20,
        )

    def on_disk(self, disk: FlakyFile | None = None) -> HostSide:
        """An arena that begins empty and holds as little as it may."""
        row_bytes, num_rows = self.form.row_bytes, len(self.bases)
        arena = Arena(least_places(self.num_experts), row_bytes, pin=True)
        place_of = mapped_numbers(num_rows, -1, pin=True)
        requests = mapped_numbers(1 + 1024, 0, pin=True)
        options: dict[str, Any] = {} if disk is None else {"preadv": disk.preadv}
        feeder = RowFeeder(
            arena,
            RowFile(self.file, row_bytes, **options),
            place_of,
            requests,
            file_rows=range(num_rows),
            in_flight=self.num_experts,
        )
        feeder.start()
        staged = StagedRows(
            RowFile(self.file, row_bytes, **options), range(num_rows), pin=True, rows_at_once=7
        )
        return HostSide(
            arena=arena, place_of=place_of, requests=requests, feeder=feeder, staged=staged
        )

    def core(
        self, experts: ResidentProvider, *, batch: int, drafts: int = 0, explain: Any = None
    ) -> EngineCore:
        queue = CudaQueue(self.device.torch_device)
        page_bytes = self.model.kv_cache_spec().bytes_per_page
        return EngineCore(
            self.model,
            experts,
            cache=CacheConfig(budget_bytes=40 * page_bytes, prefix_cache="off"),
            scheduler=SchedulerConfig(
                max_num_seqs=batch,
                max_num_batched_tokens=2048,  # no prompt is cut
                prefill_share=1.0,
                num_spec_tokens=drafts,
            ),
            precision="w2",
            vocab_size=self.model.vocab_size,
            seed=0,
            placement=Placement(
                queue, CudaGraphs(queue), self.device.error, self.device.arch, explain
            ),
        )


@pytest.fixture(scope="module")
def rig(gpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model, experts = dummy("tiny", gpu)
    assert isinstance(experts, DeviceExperts)
    rows = experts.rows.cpu()
    file = tmp_path_factory.mktemp("rows") / "rows"
    file.write_bytes(rows.numpy().tobytes())
    arena = Arena(len(rows), rows.shape[1], pin=True, chunk_bytes=11 * rows.shape[1])
    for place, row in enumerate(rows):
        arena.place(place).copy_(row)
    return Rig(model, experts, gpu, arena, file)


def answers(core: EngineCore) -> list[list[int]]:
    """Tokens of all requests."""
    for one in REQUESTS:
        core.submit(one)
    events = drain(core)
    assert not [e.error for each in events.values() for e in each if e.error]
    return [tokens_of(events[one.request_id]) for one in REQUESTS]


@pytest.fixture(scope="module")
def expected(rig: Rig) -> list[list[int]]:
    core = rig.core(rig.experts, batch=8)
    found = answers(core)
    core.shutdown()
    return found


CASES = [  # share of the rows in the pool (0: what a token asks for), batch, drafts, disk
    (1.0, 8, 0, False),
    (0.5, 1, 0, True),
    (0.2, 8, NUM_DRAFTS, True),
    (0.05, 8, 0, False),
    (0.05, 1, NUM_DRAFTS, False),
    (0.0, 1, 0, False),
]


@pytest.mark.parametrize(("share", "batch", "drafts", "disk"), CASES)
def test_answers_are_those_of_resident_experts(
    rig: Rig, expected: list[list[int]], share: float, batch: int, drafts: int, disk: bool
) -> None:
    rows = batch * (1 + drafts)
    least = rig.num_experts if disk else min(rig.num_experts, rows * rig.top_k)
    num_slots = max(int(share * len(rig.bases)), least)
    host = rig.on_disk() if disk else None
    pool = rig.pool(num_slots, host)
    stream = LayerStream(rig.form, rig.bases, rig.layers, pool.copy_rows)
    from_rows = stream_from(rig.num_experts, rig.top_k, num_slots, rows)
    provider = ByLength(pool, stream, from_rows)
    core = rig.core(provider, batch=batch, drafts=drafts)
    for turn in ("cold", "warm"):
        assert answers(core) == expected, turn
        torch.cuda.synchronize()
        pool.check()
    core.shutdown()
    if host is not None:
        assert pool.stats().num_disk_reads > 0
        host.close()


def test_a_storm_leaves_every_row_right_or_absent(gpu: Device, tmp_path: Path) -> None:
    happened = storm(gpu.launcher, gpu.torch_device, tmp_path, 600)
    assert min(happened.values()) > 0, happened


def test_a_row_that_cannot_be_read_ends_its_step_by_name(
    rig: Rig, expected: list[list[int]]
) -> None:
    disk = FlakyFile(rig.form.row_bytes)
    host = rig.on_disk(disk)
    pool = rig.pool(max(rig.num_experts, len(rig.bases) // 5), host)
    core = rig.core(pool, batch=1, explain=pool.explain)
    disk.bad = set(range(len(rig.bases)))
    core.submit(REQUESTS[1])
    errors = [e.error for each in drain(core).values() for e in each if e.error]
    assert len(errors) == 1
    assert str(rig.file) in errors[0]
    assert "row" in errors[0]
    disk.bad = set()
    time.sleep(1.2 * RETRY_AFTER_S)
    assert answers(core) == expected
    core.shutdown()
    host.close()


POLICIES = (None, "fp4", "gate", "w2+hot")


def policy_answers(
    pack: Pack,
    experts: ExpertConfig,
    policies: Sequence[str | None] = POLICIES,
    *,
    resized_bytes: int | None = None,
) -> tuple[list[list[int]], Any]:
    """Tokens of a request of each policy, from a core that is loaded as an engine's is.
    resized_bytes: of its pool when some steps are over."""
    config = EngineConfig(
        model=str(pack.folder),
        target=TargetConfig(device="cuda"),
        cache=CacheConfig(budget_bytes=64 << 20, prefix_cache="off"),
        scheduler=SchedulerConfig(max_num_seqs=2, max_model_len=2048),
        experts=experts,
    )
    core = load_core(config, lambda stage, share: None)
    asked = [
        request(
            f"r{n}", [(13 * i + 5) % 250 + 2 for i in range(60)], max_tokens=12, precision=policy
        )
        for n, policy in enumerate(policies)
    ]
    for one in asked:
        core.submit(one)
    begun = [event for _ in range(6) for event in core.step()]
    if resized_bytes is not None:
        core.tune_experts(tau=None, pool_bytes=resized_bytes)
    events = drain(core)
    for event in reversed(begun):
        events.setdefault(event.request_id, []).insert(0, event)
    assert not [e.error for each in events.values() for e in each if e.error]
    stats = core.expert_stats()
    core.shutdown()
    return [tokens_of(events[one.request_id]) for one in asked], stats


def test_a_pack_is_served_alike_from_every_tier(gpu: Device, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", size="tiny")
    source = Checkpoint.open(tmp_path / "checkpoint")
    pack = convert(source, tmp_path / "pack", ConvertOptions(num_workers=2))
    w2, fp4 = (pack.format(tier).row_bytes for tier in ("w2", "fp4"))
    num_rows, num_experts = pack.experts.num_rows, pack.experts.num_experts
    tau, offered = 0.02, ("fp4", "gate", "w2+hot")
    write_hot(pack, range(0, num_rows, 3))
    expected, _ = policy_answers(
        pack,
        ExpertConfig(offered=offered, tau=tau, fp4_pool_bytes=num_rows * fp4),
    )
    by_default, _ = policy_answers(pack, ExpertConfig(policy="w2+hot"), [None])
    assert by_default == expected[-1:]
    tiers = ExpertConfig(
        offered=offered,
        tau=tau,
        pool_bytes=(num_experts + 2) * w2,
        static_bytes=2 * w2,
        fp4_pool_bytes=num_experts * fp4,
        host_bytes=4 * num_experts * (w2 + fp4),
        heat_file=str(tmp_path / "heat"),
    )
    found, stats = policy_answers(pack, tiers)
    assert found == expected
    assert all(tier.num_disk_reads > 0 for tier in stats.tiers)
    assert 0 < stats.num_gated_rows <= stats.num_gate_rows
    in_memory = replace(
        tiers,
        host_bytes=None,
        pool_bytes=10 * w2,
        static_bytes=0,
        trace_file=str(tmp_path / "trace"),
    )
    found, stats = policy_answers(pack, in_memory, resized_bytes=14 * w2)
    assert found == expected
    assert stats.tiers[0].num_slots == 14
    trace = read_trace(tmp_path / "trace")
    assert {layer for layer, _ in trace.calls} == set(range(trace.num_layers))
    assert len(trace.calls) > 12 * trace.num_layers
