"""Decode: the streaming GEMMs and a whole MoE layer against the time of their bytes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.kernels.rig import DEVICE, Bench, dense_pair, random_pool
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


def measure(bench: Bench) -> None:
    """All rows of this part."""
    wanted = {6: 0.65, 18: 0.76, 48: 0.84, 128: 0.88}
    bench.attempt(grouped, W2Rows(4096, 2048), 256, wanted)
    bench.attempt(grouped, W2Rows(6144, 2048), 128, {8: 0.60, 23: 0.70})
    bench.attempt(grouped, Mxfp4Rows(4096, 2048), 256, {6: 0.0, 18: 0.70, 128: 0.82})
    for n, k, target in ((32768, 1024, 0.80), (4096, 8192, 0.80), (129280, 4096, 0.93)):
        bench.attempt(dense_fp8, n, k, target)
    for n, k in ((1024, 4096), (4096, 2048), (4096, 4096)):
        bench.attempt(dense_fp8, n, k, 0.0)
    bench.attempt(moe_layer)
