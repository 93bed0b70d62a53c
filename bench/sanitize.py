"""Small runs of every kernel family for compute-sanitizer: `python -m bench.sanitize [CASE...]`.

Everything but moet's own kernels runs on the CPU, since a tool slows all kernels alike. Each case
compares two ways to the same bits. Needs a CUDA device and the debug cubins; see sanitize.sh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moet.kernels import (
    decode_experts,
    device_choice,
    paired_experts,
    prefill_gemm,
    row_attention,
    short_stream,
)
from moet.kernels.attention import WindowKeys
from moet.kernels.build import VARIANTS
from moet.kernels.cache import Fp8Rows
from moet.kernels.cubin import Kernels
from moet.kernels.decode_experts import Router
from moet.kernels.device_attention import attend_chunk
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.hyper_connection import Logits, Site, balanced, hc_pass
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.quant import plain_values
from moet.kernels.rope import rope_cos_sin
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work, combine, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace
from moet.kernels.window_arguments import HEADS, ROPE, WIDTH
from tests.kernels.accelerated.world import filled, make_rows, paged, ringed

EXPERTS, TOKENS, HIDDEN, INTERMEDIATE = 3, 20, 256, 128


def pool_of(format: ExpertRows) -> ExpertPool:
    """Random experts on the device, packed on the CPU."""
    d, i = format.hidden_size, format.moe_intermediate_size
    low, high = (40, 72) if isinstance(format, Nvfp4Rows) else (108, 120)

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8)
        return codes, torch.randint(low, high, (n, k // format.scale_block), dtype=torch.uint8)

    rows = []
    for _ in range(EXPERTS):
        matrices = matrix(i, d), matrix(i, d), matrix(d, i)
        if isinstance(format, Nvfp4Rows):
            rows.append(format.pack_scaled(*matrices, torch.rand(3) * 2**-5))
        else:
            rows.append(format.pack(*matrices))
    bases = torch.stack([format.row_base(row) for row in rows])
    return ExpertPool(format, torch.stack(rows).cuda(), bases.cuda())


def fp8_matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Random weights and their scales."""
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)


def workspace(num_values: int, num_counters: int = 4096) -> Workspace:
    """Room for sums of slices."""
    counters = torch.zeros(num_counters, dtype=torch.int32).cuda()
    return Workspace(torch.empty(num_values, device="cuda"), counters)


def same(kernels: Kernels, error: Tensor, found: Tensor, expected: Tensor) -> None:
    torch.cuda.synchronize(kernels.device)
    if int(error.cpu()):
        raise SystemExit(f"error word {int(error.cpu())}")
    if not torch.equal(found.cpu(), expected.cpu()):
        raise SystemExit("two ways differ")


def experts(kernels: Kernels, error: Tensor, kind: type[ExpertRows]) -> None:
    """Prefill tiles against the decode step in one launch, of eight rows, and in several."""
    pool = pool_of(kind(HIDDEN, INTERMEDIATE))
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    weights, x = torch.rand(TOKENS, 2), torch.randn(TOKENS, HIDDEN).bfloat16().cuda()
    slots = torch.arange(EXPERTS)
    work = prefill_gemm.plan_rows(ids, slots, 16)  # on the CPU, in several entries an expert
    work = Work(work.entries.cuda(), work.num_entries.cuda(), work.pairs.cuda())
    tiles = prefill_gemm.make_tiles(kernels, x, work=work, top_k=2)
    on_device = weights.cuda()
    h = prefill_gemm.gate_up(
        kernels, pool, tiles, work, pair_weight=on_device, limit=10.0, error=error
    )
    tiles = prefill_gemm.make_tiles(kernels, h, work=work)
    parts = prefill_gemm.down(kernels, pool, tiles, work, error=error)
    found = combine(kernels, parts, top_k=2)
    rows = slice(0, 8)
    slot_of = slots.cuda()
    choice = decode_experts.given(
        kernels, ids[rows].cuda(), weights[rows].cuda(), slot_of, HIDDEN, error=error
    )
    first = x[rows]
    step = decode_experts.mix(kernels, first, choice, pool, limit=10.0, error=error, output="f32")
    same(kernels, error, found[rows], step)
    streamed = pool.mixture(kernels, x, ids.cuda(), on_device, slot_of, limit=10.0, error=error)
    same(kernels, error, found, streamed)


def dense(kernels: Kernels, error: Tensor, codec: str, n: int, k: int) -> None:
    """A dense product, prefilled and streamed, columns in slices."""
    if codec == "fp8":
        linear = StreamLinear.fp8(*fp8_matrix(n, k))
    else:
        linear = StreamLinear.bf16(torch.randn(n, k).bfloat16())
    linear, x = linear.to("cuda"), torch.randn(TOKENS, k).bfloat16().cuda()
    space = workspace(64 * TOKENS * n)
    tiles = prefill_gemm.make_tiles(kernels, x, fp8=codec == "fp8")
    operand, scale = quantise(kernels, x) if codec == "fp8" else (x, None)
    for output in ("bf16", "f32"):
        found = prefill_gemm.linear(kernels, linear, tiles, TOKENS, error=error, output=output)
        streamed = linear(kernels, operand, scale, error=error, workspace=space, output=output)
        same(kernels, error, found, streamed)


def shared(kernels: Kernels, error: Tensor) -> None:
    """The shared expert, prefilled and streamed."""

    i, d = INTERMEDIATE, HIDDEN
    expert = SharedExpert.fp8(fp8_matrix(i, d), fp8_matrix(i, d), fp8_matrix(d, i)).to("cuda")
    x = torch.randn(TOKENS, d).bfloat16().cuda()
    space = workspace(1 << 20)
    tiles = prefill_gemm.make_tiles(kernels, x)
    found = prefill_gemm.shared_expert(kernels, expert, tiles, TOKENS, limit=10.0, error=error)
    q, scale = quantise(kernels, x)
    streamed = expert(kernels, q, scale, limit=10.0, error=error, workspace=space)
    same(kernels, error, found, streamed)


def pairs(kernels: Kernels, error: Tensor, kind: type[ExpertRows], t: int) -> None:
    """A step of t rows whose shared expert runs beside the choice and the routed ones."""

    i, d = INTERMEDIATE, HIDDEN
    pool = pool_of(kind(d, i))
    expert = SharedExpert.fp8(fp8_matrix(i, d), fp8_matrix(i, d), fp8_matrix(d, i)).to("cuda")
    router = Router(StreamLinear.bf16(torch.randn(EXPERTS, d).bfloat16()).to("cuda"), 2, 1.5)
    space = workspace(1 << 16, 64)
    x, slot_of = torch.randn(t, d).bfloat16().cuda(), torch.arange(EXPERTS).cuda()
    codes, scale = quantise(kernels, x)
    begun = paired_experts.begin(
        kernels, x, codes, scale, router, slot_of, expert, limit=10.0, error=error, workspace=space
    )
    found = paired_experts.mix_on_read(
        kernels, codes, scale, begun, pool, expert, limit=10.0, error=error, dtype=torch.float32
    )
    own = expert(kernels, codes, scale, limit=10.0, error=error, workspace=space)
    chosen = begun.choice
    expected = pool.mixture(
        kernels, x, chosen.expert_ids, chosen.weights, slot_of, limit=10.0, error=error, shared=own
    )
    same(kernels, error, found.add(), expected)


def short(kernels: Kernels, error: Tensor, n: int, k: int) -> None:
    """A product of three rows whose slices a cluster sums, or that has one, against the stream."""
    linear = StreamLinear.fp8(*fp8_matrix(n, k)).to("cuda")
    space = workspace(64 * 3 * n)
    codes, scale = quantise(kernels, torch.randn(3, k).bfloat16().cuda())
    found = short_stream.multiply(kernels, linear, codes, scale, error=error)
    if found is None:
        raise SystemExit("no short kernel")
    same(kernels, error, found, linear(kernels, codes, scale, error=error, workspace=space))


def choice(kernels: Kernels, error: Tensor) -> None:
    """A cluster's choice against sorting."""
    scores = torch.randn(2, 4096)
    best = scores.sort(descending=True, stable=True).indices[:, :512].sort().values.int()
    found = torch.empty(2, 512, dtype=torch.int32).cuda()
    positions = torch.full((2,), 4 * 4096 - 1).cuda()
    device_choice.run(kernels, scores.cuda(), positions, found, ratio=4)
    same(kernels, error, found, best)


def rows(kernels: Kernels, error: Tensor) -> None:
    """Attention of three rows against that of each alone."""
    every = make_rows([(700, 703)], short=True, device=torch.device("cuda"))
    ring = ringed(Fp8Rows(WIDTH - ROPE, ROPE, 130), every)
    entries = paged(Fp8Rows(WIDTH - ROPE, ROPE, 64), every)
    q, sink = torch.randn(3, HEADS, WIDTH).bfloat16().cuda(), torch.randn(HEADS).cuda()
    cos, sin = rope_cos_sin(every.positions, torch.rand(ROPE // 2).cuda())

    def attend(some: slice) -> Tensor:
        own = {
            name: getattr(every, name)[some]
            for name in ("positions", "starts", "ends", "seq_slots", "page_rows")
        }
        keys = WindowKeys(replace(every, **own), ring, None, entries, None, 128, 4)
        given = q[some], sink, keys, cos[some], sin[some]
        return row_attention.attend(kernels, *given, scale=WIDTH**-0.5, num_groups=8).codes

    alone = torch.cat([attend(slice(i, i + 1)) for i in range(3)])
    same(kernels, error, attend(slice(3)), alone)


def chunk(kernels: Kernels, error: Tensor) -> None:
    """Attention of a chunk, twice: whole tiles of keys, a part of one, several of a row."""
    cuda = torch.device("cuda")
    every = make_rows([(0, 9), (300, 303), (760, 764)], short=False, device=cuda)
    num, form = len(every.positions), partial(Fp8Rows, WIDTH - ROPE, ROPE)
    own = filled(form(num), 1, cuda)
    keys = WindowKeys(every, ringed(form(130), every), own, paged(form(64), every), None, 128, 4)
    q, sink = torch.randn(num, HEADS, WIDTH).bfloat16().cuda(), torch.randn(HEADS).cuda()
    given = q, sink, keys, *rope_cos_sin(every.positions, torch.rand(ROPE // 2).cuda())
    facts = {"scale": WIDTH**-0.5, "num_groups": 8, "tiled": False}
    found, again = (attend_chunk(kernels, *given, **facts).codes for _ in range(2))
    same(kernels, error, found, again)


def streams(kernels: Kernels, error: Tensor) -> None:
    """Passes of hyper-connections: rows that are told their parts, of a grid, in tiles."""
    dim, most = 4096, 40
    device = Device.around(kernels, kernels.arch, "cuda")
    fn, base = torch.randn(24, 4 * dim).cuda() * 0.02, torch.randn(24).cuda()
    scale, weight = torch.ones(3).cuda(), torch.randn(dim).cuda()
    site = Site(MixMatrix(fn, device), base, scale, weight, 1e-6, 1e-6, 20)
    y, held = torch.randn(most, dim).bfloat16().cuda(), torch.randn(most, 4, dim).bfloat16().cuda()
    post, mix = torch.rand(most, 4).cuda(), (torch.rand(most, 4, 4) / 4).cuda()
    run = hc_pass.bind(arch=kernels.arch, mult=4, dim=dim, placed=True)

    def values(some: slice) -> Tensor:
        made = run(y[some], held[some], post[some], mix[some], site)
        torch.zeros(1, device="cuda")  # what the next pass reads ahead of its wait is older
        parts = [balanced(x) if isinstance(x, Logits) else plain_values(x) for x in made]
        return torch.cat([part.float().flatten(1) for part in parts], 1)

    whole = values(slice(most))
    for count in (1, 3, 9):
        same(kernels, error, values(slice(count)), whole[:count])


CASES: dict[str, Callable[[Kernels, Tensor], None]] = {
    "w2": partial(experts, kind=W2Rows),
    "mxfp4": partial(experts, kind=Mxfp4Rows),
    "nvfp4": partial(experts, kind=Nvfp4Rows),
    "fp8": partial(dense, codec="fp8", n=192, k=1024),
    "bf16": partial(dense, codec="bf16", n=72, k=512),
    "shared": shared,
    "pairs": partial(pairs, kind=W2Rows, t=8),
    "listed": partial(pairs, kind=W2Rows, t=3),
    "few": partial(pairs, kind=Nvfp4Rows, t=3),
    "short": partial(short, n=128, k=2048),
    "short whole": partial(short, n=1024, k=512),
    "choice": choice,
    "rows": rows,
    "chunk": chunk,
    "streams": streams,
}


def main() -> None:
    """Run the named cases, or all; each prints its name and `ok`."""
    torch.manual_seed(0)
    kernels = Kernels(torch.device("cuda"), VARIANTS / "cubins-debug")
    error = torch.zeros(1, dtype=torch.int32).cuda()
    for name in sys.argv[1:] or CASES:
        CASES[name](kernels, error)
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    main()
