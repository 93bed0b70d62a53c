"""Decode: the streaming GEMMs and a whole MoE layer against the time of their bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.rig import DEVICE, ROUND_BYTES, Bench, dense_pair, random_pool, read_us
from moet.kernels import decode_experts, paired_experts, short_stream
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import (
    ExpertPool,
    SharedExpert,
    Work,
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
    """Gate and up, whose target it is, and down: of w2 the one is 4096 x 4096, the other is not."""
    pool = random_pool(format, experts)
    gate_up_bytes = format.num_sub_rows * (2 * (format.part_bytes[0] + format.scale_bytes[0]))
    down_bytes = format.num_sub_rows * (format.part_bytes[2] + format.scale_bytes[2])
    d, i = format.hidden_size, format.moe_intermediate_size
    for active, target in targets.items():
        down_target = 0.0 if format.name == "w2" else target
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
        bench.streamed(f"{name} w2", f"{active} x {d}x{i}", us, active * down_bytes, down_target)


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

        def product(weight: StreamLinear, q: Tensor = q, scale: Tensor = scale) -> Tensor:
            """As a step has it: by a kernel of few rows where there is one."""
            error = bench.error
            short = short_stream.multiply(bench.kernels, weight, q, scale, error=error)
            if short is not None:
                return short
            return weight(bench.kernels, q, scale, error=error, workspace=space)

        us = bench.time_us([partial(product, w) for w in weights])
        bench.streamed("fp8 dense", f"{n}x{k} T={t}", us, n * k, target)


def pairs_are_right(bench: Bench, format: ExpertRows, t: int) -> None:
    """Bits of the separate kernels, of three runs, and of rows alone. Raises AssertionError."""
    kernels, error, experts, top_k = bench.kernels, bench.error, 32, 6
    d, i = format.hidden_size, format.moe_intermediate_size
    pool, slot_of = random_pool(format, experts), torch.arange(experts, device=DEVICE)
    shared = SharedExpert.fp8(dense_pair(i, d), dense_pair(i, d), dense_pair(d, i)).to(DEVICE)
    router = decode_experts.Router(
        StreamLinear.bf16(torch.randn(experts, d).bfloat16()).to(DEVICE), top_k, 1.5
    )
    space = Workspace.allocate(DEVICE, 1 << 20, 8192)
    x = torch.randn(t, d, device=DEVICE).bfloat16()
    options: dict[str, Any] = {"limit": 10.0, "error": error}

    def run(rows: slice, pool: ExpertPool = pool) -> tuple[Tensor, decode_experts.Choice]:
        part = x[rows].contiguous()
        coded = quantise(kernels, part)
        begun = paired_experts.begin(
            kernels, part, *coded, router, slot_of, shared, workspace=space, **options
        )
        found = paired_experts.mix_on_read(
            kernels, *coded, begun, pool, shared, dtype=torch.float32, **options
        )
        return found.add(), begun.choice

    first, how = run(slice(0, t))
    assert first.isfinite().all(), "not finite"
    assert first.abs().sum() > 0, "nothing but zeros"
    assert all(torch.equal(run(slice(0, t))[0], first) for _ in range(2)), "three runs differ"
    for row in range(t):
        alone, _ = run(slice(row, row + 1))
        assert torch.equal(alone[0], first[row]), f"row {row} depends on its batch"
    logits = router.weight(kernels, x, None, error=error, workspace=space, output="f32")
    ids, weights = route(kernels, logits, top_k=top_k, scaling_factor=1.5)
    assert torch.equal(how.expert_ids, ids), "other experts than the separate router"
    assert torch.equal(how.weights, weights), "other weights than the separate router"
    extra = shared(kernels, *quantise(kernels, x), workspace=space, **options)
    expected = pool.mixture(kernels, x, ids, weights, slot_of, shared=extra, **options)
    assert torch.equal(first, expected), (
        f"off by {(first - expected).abs().max()} of {expected.abs().max()}"
    )
    plan_of = plan(kernels, ids, slot_of, error=error)
    count = int(plan_of.num_entries)
    assert int(how.work.num_entries) == count, "another number of entries"
    assert torch.equal(how.work.entries[:count], plan_of.entries[:count]), "other entries"
    assert torch.equal(how.work.pairs, plan_of.pairs), "other places"
    assert int(error) == 0, f"error word {int(error)}"
    print(f"right: {format.name} {d}x{i} T={t}", flush=True)


CHAIN = (  # the fp8 products of a V4-Flash layer, in their order
    (1536, 4096),
    (40960, 1024),
    (4096, 8192),
)


def chain(bench: Bench, t: int, layers: int) -> None:
    """All the different linears of `layers` layers in one graph: weights are cold, as in a step.

    Each reads what the one before it wrote, so that none begins early but its weights.
    """
    kernels, error = bench.kernels, bench.error
    space = Workspace.allocate(DEVICE, 1 << 20, 8192)
    weights = [
        [
            StreamLinear(
                "fp8",
                torch.randint(0, 0x60, (n, k), dtype=torch.uint8, device=DEVICE),
                torch.full((n // 128, k // 128), 2.0**-12, device=DEVICE),
                n,
                k,
            )
            for n, k in CHAIN
        ]
        for _ in range(layers)
    ]
    x = torch.randn(t, 4096, device=DEVICE).bfloat16()

    def walk() -> None:
        value = x
        for weight in (weight for layer in weights for weight in layer):
            source = value[:, : weight.in_features]
            value = weight(kernels, source, None, error=error, workspace=space)

    us = bench.time_us([walk])
    num_bytes = layers * sum(n * k for n, k in CHAIN)
    count = layers * len(CHAIN)
    bench.streamed(
        f"chain of {count} fp8 linears, T={t}", f"{us / count:.2f} us each", us, num_bytes, 0.8
    )


def paired_layer(bench: Bench, format: ExpertRows, top_k: int, tokens: tuple[int, ...]) -> None:
    """The layer of experts in four launches."""
    d, i, experts = format.hidden_size, format.moe_intermediate_size, 256
    kernels, error = bench.kernels, bench.error
    pools = [random_pool(format, experts) for _ in range(2)]
    slot_of, bias = torch.arange(experts, device=DEVICE), torch.zeros(experts, device=DEVICE)
    shared = [
        SharedExpert.fp8(dense_pair(i, d), dense_pair(i, d), dense_pair(d, i)).to(DEVICE)
        for _ in range(8)
    ]
    routers = [
        decode_experts.Router(
            StreamLinear.bf16(torch.randn(experts, d).bfloat16()).to(DEVICE), top_k, 1.5, bias
        )
        for _ in range(8)
    ]
    space = Workspace.allocate(DEVICE, 1 << 20, 8192)
    for t in tokens:
        xs = [torch.randn(t, d, device=DEVICE).bfloat16() for _ in range(8)]
        coded = [quantise(kernels, x) for x in xs]

        def choice(n: int, xs: list[Tensor] = xs) -> decode_experts.Choice:
            return decode_experts.choose(
                kernels, xs[n], routers[n], slot_of, error=error, workspace=space
            )

        def begin(
            n: int, xs: list[Tensor] = xs, coded: list[tuple[Tensor, Tensor]] = coded
        ) -> paired_experts.Begun:
            return paired_experts.begin(
                kernels,
                xs[n],
                *coded[n],
                routers[n],
                slot_of,
                shared[n],
                limit=10.0,
                error=error,
                workspace=space,
            )

        def rest(
            n: int,
            begun: paired_experts.Begun,
            coded: list[tuple[Tensor, Tensor]] = coded,
        ) -> Tensor:
            return paired_experts.mix_on_read(
                kernels,
                *coded[n],
                begun,
                pools[n % 2],
                shared[n],
                limit=10.0,
                error=error,
            ).add()

        def layer(n: int) -> Tensor:
            return rest(n, begin(n))

        made = [begin(n) for n in range(8)]
        chosen = sum(int(begun.choice.num_chosen) for begun in made) / 8
        all_bytes = chosen * format.row_bytes + 3 * d * i + 2 * experts * d
        floor_us = all_bytes / bench.read_bytes_per_us
        name = f"moe layer in pairs, {format.name} {d}, top {top_k}, T={t}"
        us = bench.time_us([partial(layer, n) for n in range(8)])
        bench.add(name, us, "us", "lower", floor_us, 1.35 * floor_us + 6, f"{chosen} experts")
        us = bench.time_us([partial(begin, n) for n in range(8)])
        bench.add(f"{name}, begin alone", us, "us", "lower", None, 0.0)
        us = bench.time_us([partial(rest, n, made[n]) for n in range(8)])
        bench.add(f"{name}, all but begin", us, "us", "lower", None, 0.0)
        us = bench.time_us([partial(choice, n) for n in range(8)])
        bench.add(f"{name}, choose alone", us, "us", "lower", None, 0.0)


def nvfp4_pool(format: Nvfp4Rows, experts: int) -> ExpertPool:
    """A random pool whose tensor scales are plausible, too."""
    pool = random_pool(format, experts)
    starts = sum(format.part_bytes[:3]) + sum(format.scale_bytes)
    sub_rows = pool.rows.view(experts, format.num_sub_rows, -1)
    scales = torch.tensor([2.0**-14, 2.0**-13, 1.5 * 2.0**-14], device=DEVICE)
    sub_rows[:, :, starts : starts + 12] = scales.view(torch.uint8)
    return pool


def nvfp4_is_right(bench: Bench, format: Nvfp4Rows, t: int) -> None:
    """Against float64, from the bytes. Raises AssertionError."""
    kernels, error, experts, top_k = bench.kernels, bench.error, 6, 2
    pool, slot_of = nvfp4_pool(format, experts), torch.arange(experts, device=DEVICE)
    d = format.hidden_size
    x = torch.randn(t, d, device=DEVICE).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(t)]).to(DEVICE)
    weights = torch.rand(t, top_k, device=DEVICE)
    found = pool.mixture(kernels, x, ids, weights, slot_of, limit=10.0, error=error)

    def rounded(x: Tensor) -> Tensor:
        q, scale = quantise(kernels, x)
        words = q.view(*q.shape[:-1], -1, 2, 4, 4).transpose(-3, -2).reshape(q.shape)
        values = words.view(torch.float8_e4m3fn).double()
        return values * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]

    expected, xs = torch.zeros(t, d, dtype=torch.float64, device=DEVICE), rounded(x)
    for token in range(t):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            w1, w3, w2 = (w.double().to(DEVICE) for w in format.unpack(pool.rows[expert].cpu()))
            gate = (w1 @ xs[token]).bfloat16().double().clamp(max=10.0)
            up = (w3 @ xs[token]).bfloat16().double().clamp(-10.0, 10.0)
            h = (torch.nn.functional.silu(gate) * up * weight).bfloat16()
            expected[token] += w2 @ rounded(h[None])[0]
    off = float((found.double() - expected).norm() / expected.norm())
    assert off < 2**-7, f"relative error {off} against float64"
    print(f"right: nvfp4 {d} T={t}, relative error {off:.1e}", flush=True)


def short_reads(bench: Bench) -> None:
    """What launches that only read take, one behind the other, for as many bytes as these kernels
    read. They begin once the one ahead has ended."""
    for megabytes in (8, 14, 28, 34, 45, 85, 505):
        num_bytes = megabytes << 20
        grids = [max(1, round(num_bytes / ROUND_BYTES / rounds)) for rounds in (1, 2, 3, 4, 6, 8)]
        best, grid = min((read_us(bench, num_bytes, grid), grid) for grid in grids)
        name = f"nothing but reading, {grid} CTAs"
        bench.streamed(name, f"{megabytes} MiB", best, num_bytes, 0.0)


def measure(bench: Bench) -> None:
    """All rows of this part."""
    w2, mxfp4 = W2Rows(4096, 2048), Mxfp4Rows(4096, 2048)
    wide, nvfp4 = W2Rows(6144, 2048), Nvfp4Rows(6144, 2048)
    for format in (w2, mxfp4, wide, nvfp4):
        for t in (1, 3, 8):
            bench.attempt(pairs_are_right, format, t)
    for shard in (1024, 512):
        bench.attempt(pairs_are_right, W2Rows(4096, shard), 3)
    bench.attempt(nvfp4_is_right, Nvfp4Rows(4096, 512), 3)
    bench.attempt(short_reads)
    bench.attempt(paired_layer, w2, 6, (1, 3, 8))
    bench.attempt(paired_layer, mxfp4, 6, (1, 3))
    bench.attempt(paired_layer, wide, 8, (1, 3))
    bench.attempt(paired_layer, nvfp4, 8, (1,))
    bench.attempt(grouped, w2, 256, {6: 0.65, 18: 0.76, 48: 0.84, 128: 0.88})
    bench.attempt(grouped, wide, 128, {8: 0.60, 23: 0.70})
    bench.attempt(grouped, mxfp4, 256, {6: 0.0, 18: 0.70, 128: 0.82})
    bench.attempt(grouped, nvfp4, 128, {8: 0.65, 128: 0.80})
    for n, k, target in ((32768, 1024, 0.80), (4096, 8192, 0.80), (129280, 4096, 0.93)):
        bench.attempt(dense_fp8, n, k, target)
    for n, k in ((1024, 4096), (4096, 2048), (4096, 4096)):
        bench.attempt(dense_fp8, n, k, 0.0)
    for t in (1, 3, 8):
        bench.attempt(chain, t, 14)
