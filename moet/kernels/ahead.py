"""A product of few rows that may begin long before its inputs are there (`csrc/projections.cu`).

Nearly all of its weights wait in rings as deep as an SM's memory, the rest in the second-level
cache. The bits are those of `stream_gemm.py`. Knows a Launcher; not what is multiplied.
"""

from __future__ import annotations

from moet.kernels.stream_gemm import THREADS, Instance, Launcher, StreamArgs, complete, share_among

STAGES = 6
INSTANCE = Instance("fp8", 8, "bf16", False, STAGES, 1)


def run(launcher: Launcher, args: StreamArgs, *, items: int) -> None:
    """Launch on at most `items` items of e4m3. args.entries must be older than the kernel ahead."""
    assert args.early, "entries that the kernel ahead writes cannot be read before it ends"
    stages = complete(args, "fp8")
    grid = max(1, min(items, launcher.num_sms))
    share_among(args, grid, items)
    launcher.launch(
        "groups_n8_deep",
        grid=grid,
        threads=THREADS,
        shared_bytes=INSTANCE.shared_bytes(stages),
        args=args,
    )


def fits(launcher: Launcher, stages: int) -> bool:
    """Whether an SM holds a CTA whose slices have so many stages."""
    return INSTANCE.shared_bytes(stages) <= launcher.max_shared_bytes
