"""What the parts share: timing, the rows of the result, the read rate, random experts."""

from __future__ import annotations

import ctypes
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.kernels import attempts
from moet.kernels.cubin import Kernels
from moet.kernels.layout import ExpertRows
from moet.kernels.stream_experts import ExpertPool

REPLAYS = 9
DEVICE = torch.device("cuda")


class ReadArgs(ctypes.Structure):
    _fields_: ClassVar = [
        ("source", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
    ]


@dataclass
class Bench:
    kernels: Kernels
    error: Tensor
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    read_bytes_per_us: float = 1.0

    def attempt(self, part: Callable[..., object], *args: object, **options: object) -> None:
        """Run a part; one that fails is told and does not keep the others from running."""
        try:
            part(self, *args, **options)
        except Exception as problem:
            name = getattr(part, "__name__", str(part))
            self.failures.append(f"{name} {args}: {problem}")
            traceback.print_exc()
        torch.cuda.empty_cache()

    def time_us(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of one call, the calls captured back to back in one graph."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
        return statistics.median(times)

    def streamed(self, op: str, shape: str, us: float, num_bytes: float, target: float) -> None:
        """A row whose floor is the time that its bytes take to be read."""
        share = 100 * num_bytes / us / self.read_bytes_per_us
        note = f"{us:.1f} us for {num_bytes:,.0f} bytes"
        self.add(f"{op}, {shape}", share, "% of read rate", "higher", 100.0, 100 * target, note)

    def computed(self, op: str, shape: str, us: float, flops: float, target: float) -> None:
        """A row whose figure is arithmetic."""
        rate = flops / us / 1e6
        self.add(f"{op}, {shape}", rate, "TFLOP/s", "higher", None, target, f"{us:.0f} us")

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        better: str,
        floor: float | None,
        target: float,
        note: str = "",
    ) -> None:
        """Keep a row of the result file and print it. A target of 0 is none."""
        wanted = f" (target {target:.4g})" if target else ""
        print(f"{case:52s} {value:.4g} {unit}{wanted} {note}", flush=True)
        if target and (value < target if better == "higher" else value > target):
            note = f"{note}; {attempts.of(case)}" if attempts.of(case) else note
        row = {
            "case": case,
            "value": value,
            "unit": unit,
            "better": better,
            "floor": floor,
            "target": target or None,
            "note": note,
        }
        self.rows.append(row)


READ_BYTES = 4 << 30
ROUND_BYTES = 512 * 8 * 16  # of a CTA that reads


def read_us(bench: Bench, num_bytes: int, grid: int) -> float:
    """Time of a launch of so many CTAs that reads so many bytes of 4 GiB, to whole rounds."""
    source = torch.zeros(READ_BYTES // 8, dtype=torch.int64, device=DEVICE)
    unit = grid * ROUND_BYTES // 16
    words = max(1, round(num_bytes / 16 / unit)) * unit
    launch = partial(bench.kernels.launch, "read_buffer", grid=grid, threads=512, shared_bytes=0)
    calls = [
        partial(launch, args=ReadArgs(source.data_ptr() + at, bench.error.data_ptr(), words))
        for at in range(0, READ_BYTES - 16 * words + 1, 16 * words)
    ]
    return bench.time_us(calls[:16] if len(calls) > 1 else calls * 4) * num_bytes / (16 * words)


def read_rate(bench: Bench) -> None:
    """Bytes per microsecond that a kernel which only reads gets, at the best of several grids."""
    for ctas_per_sm in (2, 3, 4, 8):
        grid = ctas_per_sm * bench.kernels.num_sms
        num_bytes = READ_BYTES // (grid * ROUND_BYTES) * grid * ROUND_BYTES
        us = read_us(bench, num_bytes, grid)
        bench.read_bytes_per_us = max(bench.read_bytes_per_us, num_bytes / us)
    rate = bench.read_bytes_per_us / 1e6
    bench.add("read, 4 GiB", rate, "TB/s", "higher", None, 0.0, "the 100 % of the other rows")


SCALE_BYTES = 108, 119  # the least and the largest exponent of random blocks


def random_pool(
    format: ExpertRows, experts: int, device: torch.device | str = DEVICE
) -> ExpertPool:
    """Random codes with plausible scales, made on the device."""
    rows = torch.randint(
        0, 256, (experts, format.row_bytes), dtype=torch.uint8, device=device
    ).view(experts, format.num_sub_rows, -1)
    start, (low, high) = sum(format.part_bytes[:3]), SCALE_BYTES
    rows[:, :, start:] = torch.randint(
        low, high + 1, rows[:, :, start:].shape, dtype=torch.uint8, device=device
    )
    base_rows = sum(n for n, _ in format.shapes)
    if format.name == "nvfp4":  # whose tensor scales follow the block scales
        base_rows, at = 0, start + sum(format.scale_bytes)
        scale = torch.full((3,), 2.0**-12, device=device).view(torch.uint8)
        rows[:, :, at : at + 12] = scale
    # No row may reach further above its base than the format does: e5m2 ends there.
    base = high - format.exponent_span if base_rows else 0
    shape = experts, format.num_sub_rows, base_rows
    bases = torch.full(shape, base, dtype=torch.uint8, device=device)
    return ExpertPool(format, rows.view(experts, -1), bases)


def dense_pair(n: int, k: int) -> tuple[Tensor, Tensor]:
    """A random fp8 weight [n, k] and its block scales."""
    weight = torch.randint(0, 0x60, (n, k), dtype=torch.uint8)
    return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-12)
