"""How near to memory and matrix speed do the kernels run? `python bench/kernels.py [--out FILE]`

Every figure is the median of captured-graph replays over weights that rotate beyond the L2 cache,
and stands beside the read rate that the same run measured. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from moet.kernels import prefill_gemm
from moet.kernels.cubin import Kernels
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.stream_experts import (
    ExpertPool,
    SharedExpert,
    Work,
    combine,
    plan,
    quantise,
    route,
)
from moet.kernels.stream_gemm import StreamLinear, Workspace

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
    read_bytes_per_us: float = 1.0

    def time_us(self, calls: list[Callable[[], object]]) -> float:
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

    def streamed(self, op: str, shape: str, us: float, num_bytes: int, target: float) -> None:
        """A row whose floor is the time that its bytes take to be read."""
        share = 100 * num_bytes / us / self.read_bytes_per_us
        note = f"{us:.1f} us for {num_bytes:,} bytes"
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
        wanted = f" (target {target:.4g})" if target else ""
        print(f"{case:52s} {value:.4g} {unit}{wanted} {note}", flush=True)


def read_rate(bench: Bench) -> None:
    """Bytes per microsecond that a kernel which only reads gets, at the best of several grids."""
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int64, device=DEVICE)
    for ctas_per_sm in (2, 3, 4, 8):
        grid = ctas_per_sm * bench.kernels.num_sms
        unit = grid * 512 * 8
        words = (4 << 30) // 16 // unit * unit
        args = ReadArgs(source.data_ptr(), bench.error.data_ptr(), words)
        launch = partial(bench.kernels.launch, "read_buffer", threads=512, shared_bytes=0)
        us = bench.time_us([partial(launch, grid=grid, args=args)] * 4)
        bench.read_bytes_per_us = max(bench.read_bytes_per_us, words * 16 / us)
    rate = bench.read_bytes_per_us / 1e6
    bench.add("read, 4 GiB", rate, "TB/s", "higher", None, 0.0, "the 100 % of the other rows")


def random_pool(format: ExpertRows, experts: int) -> ExpertPool:
    """Random codes with plausible scales, made on the device."""
    rows = torch.randint(
        0, 256, (experts, format.row_bytes), dtype=torch.uint8, device=DEVICE
    ).view(experts, format.num_sub_rows, -1)
    start = sum(format.part_bytes[:3])
    rows[:, :, start:] = torch.randint(
        108, 120, rows[:, :, start:].shape, dtype=torch.uint8, device=DEVICE
    )
    base_rows = sum(n for n, _ in format.shapes)
    bases = torch.full(
        (experts, format.num_sub_rows, base_rows), 91, dtype=torch.uint8, device=DEVICE
    )
    return ExpertPool(format, rows.view(experts, -1), bases)


def one_row_each(bench: Bench, experts: int, active: int) -> Work:
    """A work list of `active` distinct random experts with one row each."""
    ids = torch.randperm(experts, device=DEVICE)[:active].view(-1, 1)
    return plan(bench.kernels, ids, torch.arange(experts, device=DEVICE), error=bench.error)


def grouped(bench: Bench, format: ExpertRows, experts: int, targets: dict[int, float]) -> None:
    pool = random_pool(format, experts)
    gate_up_bytes = format.num_sub_rows * (2 * (format.part_bytes[0] + format.scale_bytes[0]))
    down_bytes = format.num_sub_rows * (format.part_bytes[2] + format.scale_bytes[2])
    d, i = format.hidden_size, format.moe_intermediate_size
    for active, target in targets.items():
        works = [one_row_each(bench, experts, active) for _ in range(16)]
        q, scale = quantise(bench.kernels, torch.randn(active, d, device=DEVICE).bfloat16())
        h = torch.randn(active, i, device=DEVICE).bfloat16()

        def gate_up(work: Work, q: Tensor = q, scale: Tensor = scale) -> Tensor:
            return pool.gate_up(
                bench.kernels,
                q,
                scale,
                work,
                top_k=1,
                pair_weight=None,
                limit=10.0,
                error=bench.error,
                early=True,
            )

        def down(work: Work, h: Tensor = h) -> Tensor:
            return pool.down(bench.kernels, h, work, error=bench.error, early=True)

        us = bench.time_us([partial(gate_up, w) for w in works])
        name = f"{format.name} grouped"
        bench.streamed(f"{name} w13", f"{active} x {2 * i}x{d}", us, active * gate_up_bytes, target)
        us = bench.time_us([partial(down, w) for w in works])
        bench.streamed(f"{name} w2", f"{active} x {d}x{i}", us, active * down_bytes, target)


def dense_fp8(bench: Bench, n: int, k: int, target: float) -> None:
    count = max(2, min(48, (400 << 20) // (n * k)))
    weights = [
        StreamLinear(
            "fp8",
            torch.randint(0, 0x78, (n, k), dtype=torch.uint8, device=DEVICE),
            torch.ones(n // 128, k // 128, device=DEVICE),
            n,
            k,
        )
        for _ in range(count)
    ]
    space = Workspace.allocate(DEVICE, 16 * 8 * n, 8192)
    for t in (1, 3, 8):
        q, scale = quantise(bench.kernels, torch.randn(t, k, device=DEVICE).bfloat16())
        options = {"error": bench.error, "workspace": space}
        us = bench.time_us([partial(w, bench.kernels, q, scale, **options) for w in weights])
        bench.streamed("fp8 dense", f"{n}x{k} T={t}", us, n * k, target)


def dense_pair(n: int, k: int) -> tuple[Tensor, Tensor]:
    weight = torch.randint(0, 0x60, (n, k), dtype=torch.uint8)
    return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-12)


def moe_layer(bench: Bench) -> None:
    """Router, shared expert (beside it) and routed experts of one V4-Flash layer, 1 and 3 rows."""
    d, i, experts, top_k = 4096, 2048, 256, 6
    kernels, error = bench.kernels, bench.error
    format = W2Rows(d, i)
    pools = [random_pool(format, experts) for _ in range(2)]
    slot_of = torch.arange(experts, device=DEVICE)
    bias = torch.zeros(experts, device=DEVICE)
    layers = []
    for layer in range(8):
        shared = SharedExpert.fp8(dense_pair(i, d), dense_pair(i, d), dense_pair(d, i)).to(DEVICE)
        router = StreamLinear.bf16(torch.randn(experts, d).bfloat16()).to(DEVICE)
        layers.append((pools[layer % 2], shared, router))
    space, side_space = (Workspace.allocate(DEVICE, 1 << 20, 8192) for _ in range(2))
    side = torch.cuda.Stream()
    for t in (1, 3):
        xs = [torch.randn(t, d, device=DEVICE).bfloat16() for _ in layers]

        def call(x: Tensor, pool: ExpertPool, shared: SharedExpert, router: StreamLinear) -> Tensor:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                own = quantise(kernels, x)
                extra = shared(kernels, *own, limit=10.0, error=error, workspace=side_space)
            logits = router(kernels, x, None, error=error, workspace=space, output="f32")
            ids, weights = route(kernels, logits, top_k=top_k, scaling_factor=1.5, bias=bias)
            work = plan(kernels, ids, slot_of, error=error)
            q, scale = quantise(kernels, x)
            h = pool.gate_up(
                kernels,
                q,
                scale,
                work,
                top_k=top_k,
                pair_weight=weights,
                limit=10.0,
                error=error,
                early=True,
            )
            parts = pool.down(kernels, h, work, error=error, early=True)
            main.wait_stream(side)
            return combine(kernels, parts, top_k=top_k, shared=extra)

        us = bench.time_us([partial(call, x, *y) for x, y in zip(xs, layers, strict=True)])
        chosen = 0
        for x, (_, _, router) in zip(xs, layers, strict=True):
            logits = router(kernels, x, None, error=error, workspace=space, output="f32")
            ids, _ = route(kernels, logits, top_k=top_k, scaling_factor=1.5, bias=bias)
            chosen += int(ids.unique().numel())
        num_bytes = chosen / len(layers) * format.row_bytes + 3 * d * i + 2 * experts * d
        floor_us = num_bytes / bench.read_bytes_per_us
        case = f"moe layer, decode, V4-Flash T={t}"
        note = f"{num_bytes:,.0f} bytes"
        bench.add(case, us, "us", "lower", floor_us, 1.35 * floor_us + 6, note)


def prefill_experts(bench: Bench, format: ExpertRows, tokens: int, target: float) -> None:
    d, i, experts, top_k = format.hidden_size, format.moe_intermediate_size, 256, 6
    kernels, error = bench.kernels, bench.error
    pool = random_pool(format, experts)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(DEVICE)
    rows = prefill_gemm.tile_rows(kernels)
    work = prefill_gemm.plan_rows(ids, torch.arange(experts, device=DEVICE), rows)
    x = torch.randn(tokens, d, device=DEVICE).bfloat16()
    weights = torch.rand(tokens, top_k, device=DEVICE)
    h = torch.randn(tokens * top_k, i, device=DEVICE).bfloat16()
    x_tiles = prefill_gemm.make_tiles(kernels, x, work=work, top_k=top_k)
    h_tiles = prefill_gemm.make_tiles(kernels, h, work=work)

    def gate_up() -> Tensor:
        return prefill_gemm.gate_up(
            kernels, pool, x_tiles, work, pair_weight=weights, limit=10.0, error=error
        )

    def down() -> Tensor:
        return prefill_gemm.down(kernels, pool, h_tiles, work, error=error)

    slot_of = torch.arange(experts, device=DEVICE)

    def whole() -> Tensor:
        return prefill_gemm.mixture(
            kernels, pool, x, ids, weights, slot_of, limit=10.0, error=error
        )

    flops = 2.0 * tokens * top_k * d * i
    shape = f"{tokens} tokens, V4-Flash"
    up_us, down_us = bench.time_us([gate_up] * 2), bench.time_us([down] * 2)
    bench.computed(f"prefill {format.name} w13", shape, up_us, 2 * flops, target)
    bench.computed(f"prefill {format.name} w2", shape, down_us, flops, target)
    layer_us = bench.time_us([whole] * 2)  # sorting, tiles and the sum included
    bench.computed(f"prefill {format.name} layer", shape, layer_us, 3 * flops, target)


def prefill_dense(bench: Bench, t: int, n: int, k: int, target: float) -> None:
    kernels = bench.kernels
    weight = StreamLinear(
        "fp8",
        torch.randint(0, 0x60, (n, k), dtype=torch.uint8, device=DEVICE),
        torch.ones(n // 128, k // 128, device=DEVICE),
        n,
        k,
    )
    x = torch.randn(t, k, device=DEVICE).bfloat16()
    tiles = prefill_gemm.make_tiles(kernels, x)
    call = partial(prefill_gemm.linear, kernels, weight, tiles, t, error=bench.error)
    us = bench.time_us([call] * 2)
    bench.computed("prefill fp8 dense", f"{t} x {n}x{k}", us, 2.0 * t * n * k, target)


def peers(bench: Bench) -> None:
    """What torch does with the same shapes, where it can: bf16 products, dense and grouped."""
    d, i, active = 4096, 2048, 6
    weights = torch.randn(48, 2 * i, d, device=DEVICE).bfloat16()
    x = torch.randn(active, d, device=DEVICE).bfloat16()
    offsets = torch.arange(1, active + 1, dtype=torch.int32, device=DEVICE)
    groups = [weights[first : first + active] for first in range(0, 48, active)]
    if hasattr(torch, "_grouped_mm"):
        us = bench.time_us([partial(torch._grouped_mm, x, g.mT, offs=offsets) for g in groups])
        num_bytes = active * 4 * i * d
        bench.streamed("torch grouped mm, bf16", f"{active} x {2 * i}x{d}", us, num_bytes, 0.0)
    a = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    b = torch.randn(4096, 8192, device=DEVICE).bfloat16()
    us = bench.time_us([lambda: a @ b.T] * 2)
    bench.computed("torch mm, bf16", "8192 x 4096x8192", us, 2.0 * 8192 * 4096 * 8192, 0.0)
    f8 = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    one = torch.ones((), device=DEVICE)

    def scaled() -> Tensor:
        return torch._scaled_mm(f8[0], f8[1].T, one, one, out_dtype=torch.bfloat16)

    us = bench.time_us([scaled] * 2)
    bench.computed("torch scaled mm, fp8", "8192 x 4096x8192", us, 2.0 * 8192 * 4096 * 8192, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/kernels.json")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(Kernels(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE))
    read_rate(bench)
    grouped(bench, W2Rows(4096, 2048), 256, {6: 0.65, 18: 0.76, 48: 0.84, 128: 0.88})
    grouped(bench, W2Rows(6144, 2048), 128, {8: 0.60, 23: 0.70})
    grouped(bench, Mxfp4Rows(4096, 2048), 256, {6: 0.0, 18: 0.70, 128: 0.82})
    for n, k, target in ((32768, 1024, 0.80), (4096, 8192, 0.80), (129280, 4096, 0.93)):
        dense_fp8(bench, n, k, target)
    for n, k in ((1024, 4096), (4096, 2048), (4096, 4096)):
        dense_fp8(bench, n, k, 0.0)
    moe_layer(bench)
    for format in (W2Rows(4096, 2048), Mxfp4Rows(4096, 2048)):
        prefill_experts(bench, format, 8192, 500.0)
    prefill_dense(bench, 8192, 4096, 8192, 600.0)
    peers(bench)
    assert int(bench.error) == 0, f"a kernel reported error {int(bench.error)}"
    result = {
        "hardware": f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}",
        "commit": args.commit,
        "command": "python bench/kernels.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
