"""Decode, more rows than run in pairs: the layer of experts whole, in two ways, and its parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.rig import DEVICE, Bench, dense_pair, random_pool
from moet.kernels import device_moe
from moet.kernels.device_gemm import Beside, Device, PackedMatrix
from moet.kernels.layout import W2Rows
from moet.kernels.moe import ExpertTable
from moet.kernels.moe_layer import RouterWeights, SharedWeights
from moet.kernels.quant import Activations
from moet.kernels.stream_experts import SharedExpert, plan, quantise, route
from moet.kernels.stream_gemm import StreamLinear, Workspace

HIDDEN, INTER, EXPERTS, TOP_K, LIMIT = 4096, 2048, 256, 6, 10.0
LAYERS = 4
ROWS = 24, 32, 96


class Layers:
    """Layers of V4-Flash, every weight of which is read once before it is read again."""

    def __init__(self, bench: Bench) -> None:
        self.kernels, self.error = bench.kernels, bench.error
        self.format = W2Rows(HIDDEN, INTER)
        pools = [random_pool(self.format, EXPERTS) for _ in range(2)]
        self.pools = [pools[n % 2] for n in range(LAYERS)]
        self.slot_of = torch.arange(EXPERTS, device=DEVICE)
        self.bias = torch.zeros(EXPERTS, device=DEVICE)
        shapes = (INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER)
        self.shared = [
            SharedExpert.fp8(*(dense_pair(*shape) for shape in shapes)).to(DEVICE)
            for _ in range(LAYERS)
        ]
        self.routers = [
            StreamLinear.bf16(torch.randn(EXPERTS, HIDDEN).bfloat16()).to(DEVICE)
            for _ in range(LAYERS)
        ]
        self.space = Workspace.allocate(DEVICE, 1 << 22, 8192)
        plain = Device.around(self.kernels, self.kernels.arch, DEVICE)
        self.ways = {
            "": plain,
            ", shared expert beside": replace(plain, beside=Beside.open(DEVICE)),
        }

    def whole(self, n: int, x: Activations, device: Device) -> Tensor:
        router = PackedMatrix(self.routers[n], device)
        at = torch.arange(x.num_rows, device=DEVICE)
        pool = self.pools[n]
        return device_moe.moe(
            x,
            at,
            at,
            RouterWeights(router, self.bias, None, TOP_K, 1.5, False),
            ExpertTable(self.format, pool.rows, self.slot_of, pool.bases),
            SharedWeights(None, None, True, self.shared[n]),
            limit=LIMIT,
            weigh_output=False,
        )

    def choice(self, n: int, x: Activations) -> Any:
        """Ids, weights and the work list."""
        rows = 32 if x.num_rows > 16 else 16
        options: dict[str, Any] = {"error": self.error, "workspace": self.space}
        logits = self.routers[n](self.kernels, x.plain(), None, output="f32", rows=rows, **options)
        ids, weights = route(self.kernels, logits, top_k=TOP_K, scaling_factor=1.5, bias=self.bias)
        return ids, weights, plan(self.kernels, ids, self.slot_of, error=self.error)

    def own(self, n: int, x: Activations) -> Tensor:
        """The shared expert."""
        options: dict[str, Any] = {"error": self.error, "workspace": self.space}
        return self.shared[n](self.kernels, x.codes, x.scale, limit=LIMIT, **options)  # type: ignore[arg-type]

    def gate_up(self, n: int, x: Activations, chosen: Any) -> Tensor:
        _, weights, work = chosen
        options: dict[str, Any] = {"limit": LIMIT, "error": self.error, "early": True}
        return self.pools[n].gate_up(
            self.kernels,
            x.codes,  # type: ignore[arg-type]
            x.scale,  # type: ignore[arg-type]
            work,
            top_k=TOP_K,
            pair_weight=weights,
            **options,
        )

    def down(self, n: int, hidden: Tensor, chosen: Any) -> Tensor:
        work = chosen[2]
        return self.pools[n].down(self.kernels, hidden, work, error=self.error, early=True)


def many_rows(bench: Bench, layers: Layers, t: int) -> None:
    """T rows: the bits of both ways, then their times and those of the parts."""
    values = [torch.randn(t, HIDDEN, device=DEVICE).bfloat16() for _ in range(LAYERS)]
    xs = [Activations(v, *quantise(bench.kernels, v)) for v in values]
    every = range(LAYERS)
    wanted = [layers.whole(n, xs[n], layers.ways[""]) for n in every]
    assert all(out.isfinite().all() for out in wanted), "not finite"
    for way, device in [*layers.ways.items()] * 2:
        for n in every:
            found = layers.whole(n, xs[n], device)
            assert torch.equal(found, wanted[n]), f"{t} rows{way}: other bits"
    few = Activations(*(part[:9] for part in (xs[0].values, xs[0].codes, xs[0].scale)))  # type: ignore[index]
    alone = layers.whole(0, few, layers.ways[""])
    assert torch.equal(alone, wanted[0][:9]), "rows depend on their batch"
    chosen = [layers.choice(n, xs[n]) for n in every]
    experts = sum(int(ids.unique().numel()) for ids, _, _ in chosen) / LAYERS
    row_bytes = experts * layers.format.row_bytes
    floor_us = (row_bytes + 3 * HIDDEN * INTER + 2 * EXPERTS * HIDDEN) / bench.read_bytes_per_us
    name = f"moe layer, decode, V4-Flash T={t}"
    for way, device in layers.ways.items():
        us = bench.time_us([partial(layers.whole, n, xs[n], device) for n in every])
        bench.add(name + way, us, "us", "lower", floor_us, 1.25 * floor_us, f"{experts} experts")
    hidden = [layers.gate_up(n, xs[n], chosen[n]) for n in every]
    us = bench.time_us([partial(layers.gate_up, n, xs[n], chosen[n]) for n in every])
    bench.streamed(f"{name}, gate and up alone", f"{experts} experts", us, row_bytes * 2 / 3, 0.0)
    us = bench.time_us([partial(layers.down, n, hidden[n], chosen[n]) for n in every])
    bench.streamed(f"{name}, down alone", f"{experts} experts", us, row_bytes / 3, 0.0)
    for what, part in (("choice", layers.choice), ("shared expert", layers.own)):
        us = bench.time_us([partial(part, n, xs[n]) for n in every])
        bench.add(f"{name}, {what} alone", us, "us", "lower", None, 0.0)


def measure(bench: Bench) -> None:
    """All rows of this part."""
    made: list[Layers] = []
    bench.attempt(lambda bench: made.append(Layers(bench)))
    for layers in made:
        for t in ROWS:
            bench.attempt(many_rows, layers, t)
