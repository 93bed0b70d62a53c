"""Small runs of every kernel family for compute-sanitizer: `python -m bench.sanitize [CASE...]`.

Everything but moet's own kernels runs on the CPU, since a tool slows all kernels alike. Each case
compares two ways to the same bits. Needs a CUDA device and the debug cubins; see sanitize.sh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moet.kernels import decode_experts, paired_experts, prefill_gemm
from moet.kernels.build import VARIANTS
from moet.kernels.cubin import Kernels
from moet.kernels.decode_experts import Router
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work, combine, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace

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
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        linear = StreamLinear.fp8(weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4))
    else:
        linear = StreamLinear.bf16(torch.randn(n, k).bfloat16())
    linear, x = linear.to("cuda"), torch.randn(TOKENS, k).bfloat16().cuda()
    space = Workspace(
        torch.empty(64 * TOKENS * n, device="cuda"), torch.zeros(4096, dtype=torch.int32).cuda()
    )
    tiles = prefill_gemm.make_tiles(kernels, x, fp8=codec == "fp8")
    operand, scale = quantise(kernels, x) if codec == "fp8" else (x, None)
    for output in ("bf16", "f32"):
        found = prefill_gemm.linear(kernels, linear, tiles, TOKENS, error=error, output=output)
        streamed = linear(kernels, operand, scale, error=error, workspace=space, output=output)
        same(kernels, error, found, streamed)


def shared(kernels: Kernels, error: Tensor) -> None:
    """The shared expert, prefilled and streamed."""

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)

    i, d = INTERMEDIATE, HIDDEN
    expert = SharedExpert.fp8(matrix(i, d), matrix(i, d), matrix(d, i)).to("cuda")
    x = torch.randn(TOKENS, d).bfloat16().cuda()
    space = Workspace(
        torch.empty(1 << 20, device="cuda"), torch.zeros(4096, dtype=torch.int32).cuda()
    )
    tiles = prefill_gemm.make_tiles(kernels, x)
    found = prefill_gemm.shared_expert(kernels, expert, tiles, TOKENS, limit=10.0, error=error)
    q, scale = quantise(kernels, x)
    streamed = expert(kernels, q, scale, limit=10.0, error=error, workspace=space)
    same(kernels, error, found, streamed)


def pairs(kernels: Kernels, error: Tensor, kind: type[ExpertRows], t: int) -> None:
    """A step of t rows whose shared expert runs beside the choice and the routed ones."""

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)

    i, d = INTERMEDIATE, HIDDEN
    pool = pool_of(kind(d, i))
    expert = SharedExpert.fp8(matrix(i, d), matrix(i, d), matrix(d, i)).to("cuda")
    router = Router(StreamLinear.bf16(torch.randn(EXPERTS, d).bfloat16()).to("cuda"), 2, 1.5)
    space = Workspace(
        torch.empty(1 << 16, device="cuda"), torch.zeros(64, dtype=torch.int32).cuda()
    )
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
