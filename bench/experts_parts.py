"""What the parts of bench.experts share: the model with its rows in host memory, and its link."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.experts_rig import (
    CapturedStep,
    Rig,
    link_rate,
)
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.runtime.experts.gpu import HostSide

WARM_STEPS, STEPS, SLOW_STEPS = 60, 200, 40
TOKENS_A_STEP = {1: 1.0, 3: 2.6}  # rows of a step -> tokens that it yields
LARGE_POOL, SMALL_POOL = 0.193, 0.152  # of all rows: 14 and 11 GiB of 72.6
WHOLE_MODEL = 43  # layers
START_ROWS = 1024  # of a file from which a start is timed

Results = dict[str, Any]


@dataclass
class Bench:
    """What the parts share."""

    device: Device
    layers: int
    fp4_layers: int
    disk_layers: int
    folder: Path
    rig: Rig = field(init=False)
    host: HostSide = field(init=False)
    link: float = field(init=False)
    skews: dict[tuple[int, float], float] = field(default_factory=dict)
    resident: dict[int, CapturedStep] = field(default_factory=dict)
    fp4: tuple[Rig, HostSide] | None = None
    files: dict[Path, str] = field(default_factory=dict)

    @property
    def num_file_rows(self) -> int:
        return self.disk_layers * (len(self.rig.bases) // self.layers)

    def slots(self, share: float, layers: int | None = None) -> int:
        num_experts = len(self.rig.bases) // self.layers
        return int(share * num_experts * (layers or self.layers))


def open_bench(bench: Bench) -> Results:
    begin = perf_counter()
    bench.rig = Rig(bench.device, bench.layers)
    built_s = perf_counter() - begin
    try:
        arena, found = bench.rig.to_host()
    except ConfigError as error:  # fewer layers, then, as far as memory can be pinned
        if bench.layers <= 8:
            raise
        print(error, flush=True)
        del bench.rig
        gc.collect()
        torch.cuda.empty_cache()
        bench.layers = bench.layers * 2 // 3
        bench.disk_layers = min(bench.disk_layers, bench.layers)
        bench.fp4_layers = bench.fp4_layers * 2 // 3
        return open_bench(bench)
    bench.host, bench.link = HostSide(arena=arena), link_rate(arena)
    bench.resident = {n: CapturedStep(bench.rig, bench.rig.resident, n) for n in (1, 3)}
    return {
        **found,
        "layers": bench.layers,
        "built s": round(built_s, 1),
        "link GB/s": round(bench.link / 1e9, 2),
    }
