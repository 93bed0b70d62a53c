"""GLM's attention kernels at released widths on a GPU, each in the variants that could be bound.

    python -m bench.glm_ops [--parts attention,chunks,products,tiles,index] [--out FILE]

A variant's calls for many layers, each with state and weights of its own, are captured together and
played as one, so that neither caches nor the host count. Knows the kernels' module constants.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.gpu import check_parts
from bench.suite import Bench
from moet.kernels import triton_indexer, triton_mla, triton_mla_attention
from moet.kernels.cache import Cache, PlanedFormat
from moet.kernels.mla_attention import HeadMatrices
from moet.kernels.mla_cache import Fp8IndexKeys, Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.rows import Rows
from moet.runtime.queues import CudaGraphs, CudaQueue

RESULTS = Path(__file__).parent / "results" / "glm_ops.json"
PAGE, LATENT, ROPE, HEADS, TOP_K, INDEX_HEADS, INDEX_DIM = 64, 512, 64, 64, 2048, 32, 128
LAYERS, CHUNK = 12, 8192
# Heads of a program, keys of a tile, warps; of chunks by heads of a rank.
ATTENTION = ((64, 64, 8), (64, 64, 4), (32, 64, 4), (16, 64, 8), (16, 64, 4))
CHUNKS = {64: ((64, 64, 8), (64, 64, 4)), 32: ((32, 64, 8), (32, 64, 4), (64, 64, 8))}
FORMS: dict[str, PlanedFormat] = {
    "fp8": Fp8LatentRows(LATENT, ROPE, PAGE),
    "nvfp4": Nvfp4LatentRows(LATENT, ROPE, PAGE),
}


@contextmanager
def constants(module: Any, values: dict[str, Any]) -> Iterator[None]:
    """A module's constants changed for a while."""
    kept = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def time_us(queue: CudaQueue, work: Callable[[], object]) -> float:
    """Median of some plays of captured work."""

    def once() -> None:
        work()

    torch.cuda.synchronize()  # its tensors were made on another stream
    with queue.working(), torch.inference_mode():
        play = CudaGraphs(queue)(once)
        times = []
        for _ in range(7):
            started = queue.moment()
            play()
            ended = queue.moment()
            ended.wait()
            times.append(1e6 * started.seconds_to(ended))
    return median(times)


def random_cache(form: PlanedFormat, num_pages: int) -> Cache:
    """Of bytes below 64, which are finite in every format."""
    shape = num_pages, form.page_bytes
    return Cache(torch.randint(64, shape, dtype=torch.uint8, device="cuda"), form)


def rows_of(num_rows: int, context: int) -> Rows:
    """One row each of num_rows sequences that share a page table of their own pages."""
    pages = -(-context // PAGE)
    row = torch.arange(num_rows, device="cuda")
    position = torch.full_like(row, context - 1)
    table = torch.randperm(num_rows * pages, device="cuda").view(num_rows, pages)
    return Rows(position, position, position + 1, row, row, table, PAGE, True)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def attention_rows(bench: Bench, queue: CudaQueue) -> None:
    for kv_dtype, num_rows in (("nvfp4", 1), ("nvfp4", 8)):
        rows = rows_of(num_rows, 8192)
        num_pages = rows.page_table.numel()
        caches = [random_cache(FORMS[kv_dtype], num_pages) for _ in range(LAYERS)]
        query = bf16(num_rows, HEADS, LATENT + ROPE) * 0.05
        every = torch.rand(num_rows, 8192, device="cuda").topk(TOP_K).indices
        selected = every.sort().values.int()

        def work(
            query: Tensor = query,
            caches: list[Cache] = caches,
            selected: Tensor = selected,
            rows: Rows = rows,
        ) -> bool:
            for cache in caches:
                triton_mla_attention.latent_attention(
                    query, cache, selected, rows, scale=1 / 16, latent_dim=LATENT
                )
            return True

        first: Tensor | None = None
        for heads, keys, warps in ATTENTION:
            case = f"latent_attention, {kv_dtype}, {num_rows} rows, {heads} heads, {keys} keys"
            case += f", {warps} warps"
            with bench.part(case):
                each = {"sm90a": heads, "sm120a": heads}
                values = {"HEADS_APART": each, "KEYS": keys, "WARPS": warps}
                with constants(triton_mla_attention, values):
                    taken_us = time_us(queue, work) / LAYERS
                    found = triton_mla_attention.latent_attention(
                        query, caches[0], selected, rows, scale=1 / 16, latent_dim=LATENT
                    )
                    first = found if first is None else first
                    bench.add(case, taken_us, "us", note=differing(found, first))


def differing(found: Tensor, first: Tensor) -> str:
    """How many values have other bits than the first variant's, and by how much at most."""
    gap = float((found.float() - first.float()).abs().max() / first.float().abs().max())
    return f"{int((found != first).sum())} of {found.numel()} differ, by {gap:.1e} of the largest"


def prefill_rows(bench: Bench, queue: CudaQueue) -> None:
    """Attention of a chunk's rows, which take their tiles in turn, of all heads and of a rank's."""
    rows = rows_of(1, 8192)
    one = torch.zeros(1024, dtype=torch.int64, device="cuda")
    position = torch.arange(8192 - 1024, 8192, device="cuda")
    rows = Rows(
        position, position[:1].expand(1024), one + 8192, one, one, rows.page_table, 64, True
    )
    every = torch.rand(1024, 7168, device="cuda").topk(TOP_K).indices
    selected = every.sort().values.int()
    for kv_dtype, num_heads in (("nvfp4", 64), ("nvfp4", 32)):
        cache = random_cache(FORMS[kv_dtype], rows.page_table.numel())
        query = bf16(1024, num_heads, LATENT + ROPE) * 0.05
        for heads, keys, warps in CHUNKS[num_heads]:
            case = f"latent_attention, {kv_dtype}, 1024 rows of {num_heads} heads, {heads} heads, "
            case += f"{keys} keys, {warps} warps"
            with bench.part(case):
                each = {"sm90a": heads, "sm120a": heads}
                values = {"HEADS_EACH": each, "KEYS": keys, "WARPS": warps}
                attend = partial(
                    triton_mla_attention.latent_attention,
                    query,
                    cache,
                    selected,
                    rows,
                    scale=1 / 16,
                    latent_dim=LATENT,
                )
                with constants(triton_mla_attention, values):
                    taken_us = time_us(queue, attend)
                flops = 2 * 1024 * num_heads * TOP_K * (2 * LATENT + ROPE)
                bench.add(case, taken_us, "us", note=f"{flops / taken_us / 1e6:.0f} TFLOP/s")


def product_rows(bench: Bench, queue: CudaQueue) -> None:
    for n, k in ((LATENT, 192), (256, LATENT)):
        for fp8 in (True, False):
            weights = [matrices(n, k, fp8=fp8) for _ in range(LAYERS)]
            for num_rows in (1, 8, 2048):
                x = bf16(num_rows, HEADS, k)

                def work(
                    x: Tensor = x,
                    weights: list[HeadMatrices] = weights,
                    quantised: bool = fp8,
                ) -> bool:
                    for weight in weights:
                        triton_mla.head_products(x, weight, quantised=quantised)
                    return True

                case = f"head_products {n}x{k}, {'fp8' if fp8 else 'bf16'}, {num_rows} rows"
                with bench.part(case):
                    num_bytes = weights[0].values.nbytes
                    floor = round(num_bytes / 4.54e12 * 1e6, 2)
                    bench.add(case, time_us(queue, work) / LAYERS, "us", floor=floor)


def tile_rows(bench: Bench, queue: CudaQueue) -> None:
    """Products a head of a whole chunk, by the rows that a program takes at once."""
    cos, sin = (torch.rand(CHUNK, ROPE // 2, device="cuda") for _ in range(2))
    for num_heads in (HEADS, HEADS // 2):
        w_uk, w_uv = (
            HeadMatrices(each.values[:num_heads], each.scales[:num_heads])  # type: ignore[index]
            for each in (matrices(LATENT, 192, fp8=True), matrices(256, LATENT, fp8=True))
        )
        q, mixed = bf16(CHUNK, num_heads * 256), bf16(CHUNK, num_heads, LATENT)
        calls: dict[str, tuple[Callable[[], Tensor], float]] = {
            "latent_queries": (
                lambda q=q, w=w_uk: triton_mla.latent_queries(  # type: ignore[misc]
                    q, w, cos, sin, index_heads=0, index_dim=0, index_form=None
                )[0],
                2.0 * CHUNK * num_heads * 192 * LATENT,
            ),
            "head_products": (
                lambda x=mixed, w=w_uv: triton_mla.head_products(  # type: ignore[misc]
                    x, w, quantised=True
                ).plain(),
                2.0 * CHUNK * num_heads * 256 * LATENT,
            ),
        }
        for name, (call, flops) in calls.items():
            first: Tensor | None = None
            for many in (64, 128, 256):
                case = f"{name} of {CHUNK} rows, {num_heads} heads, {many} rows at once"
                with bench.part(case), constants(triton_mla, {"MANY_ROWS": many}):
                    found = call()
                    first = found if first is None else first
                    taken_us = time_us(queue, call)
                    note = f"{flops / taken_us / 1e6:.0f} TFLOP/s; {differing(found, first)}"
                    bench.add(case, taken_us, "us", note=note)


def matrices(n: int, k: int, *, fp8: bool) -> HeadMatrices:
    """Random ones, one a head."""
    values = bf16(HEADS, n, k)
    if not fp8:
        return HeadMatrices(values)
    scales = torch.ones(HEADS, n // 64, k // 64, device="cuda")
    return HeadMatrices(values.to(torch.float8_e4m3fn), scales)


def index_rows(bench: Bench, queue: CudaQueue) -> None:
    form = Fp8IndexKeys(INDEX_DIM, PAGE)
    for num_rows, context in ((1, 262_144), (1, 32_768), (3, 262_144), (1, 1_048_576)):
        rows = rows_of(1, context)
        if num_rows > 1:
            one = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
            position = rows.positions - torch.arange(num_rows - 1, -1, -1, device="cuda")
            rows = Rows(position, position, position + 1, one, one, rows.page_table, PAGE, True)
        caches = [random_cache(form, rows.page_table.numel()) for _ in range(4)]
        for cache in caches:
            scales = cache.pages[:, PAGE * INDEX_DIM :].view(torch.float32)
            scales.copy_(torch.rand_like(scales) * 0.01)
        query = bf16(num_rows, INDEX_HEADS, INDEX_DIM)
        gate = torch.randn(num_rows, INDEX_HEADS, device="cuda")
        case = f"index_select, {num_rows} rows, context {context}"

        def select(
            cache: Cache, query: Tensor = query, gate: Tensor = gate, rows: Rows = rows
        ) -> Tensor:
            return triton_indexer.index_select(
                query, gate, cache, rows, ratio=1, top_k=TOP_K, gate_scale=0.01
            )

        with bench.part(case):
            work = partial(lambda caches, select: [select(c) for c in caches], caches, select)
            floor = round(context * 132 / 4.54e12 * 1e6, 2)
            bench.add(case, time_us(queue, work) / len(caches), "us", floor=floor)


PARTS: dict[str, Callable[[Bench, CudaQueue], None]] = {
    "attention": attention_rows,
    "chunks": prefill_rows,
    "products": product_rows,
    "tiles": tile_rows,
    "index": index_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=tuple(PARTS))
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    check_parts(parser, args.parts, tuple(PARTS))
    if not torch.cuda.is_available():
        sys.exit("there is no GPU")
    torch.manual_seed(0)
    queue = CudaQueue()
    bench = Bench(args.out, "python -m bench.glm_ops", args.commit, {})
    for part in args.parts:
        PARTS[part](bench, queue)
    bench.write()
    print(f"faults: {bench.faults}" if bench.faults else "no faults", flush=True)


if __name__ == "__main__":
    main()
