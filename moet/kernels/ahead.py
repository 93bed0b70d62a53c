"""A product that begins long before its inputs are there (`csrc/projections.cu`): nearly all of its
weights wait in rings as deep as an SM's memory, the rest in the second-level cache.

The bits are those of `stream_gemm.py`. Knows a Launcher; not what is multiplied.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moet.kernels.stream_gemm import THREADS, Instance, Launcher, StreamArgs, complete, share_among

LANES = 32
MAX_NEXT_BYTES = 16 << 20  # what the cache holds beside what is read meanwhile


class AheadArgs(ctypes.Structure):
    """Field for field `struct AheadArgs` of the source."""

    _fields_: ClassVar = [
        ("stream", StreamArgs),
        ("next", ctypes.c_void_p),
        ("next_bytes", ctypes.c_uint32),
    ]


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel for at most eight rows of e4m3, the stages of its ring and its CTAs in an SM."""

    name: str
    stages: int
    ctas_per_sm: int

    def instance(self) -> Instance:
        return Instance("fp8", 8, "bf16", False, self.stages, self.ctas_per_sm)


WIDE, DEEP = Form("groups_n8", 2, 2), Form("groups_n8_deep", 6, 1)


def run(
    launcher: Launcher,
    form: Form,
    args: StreamArgs,
    *,
    items: int,
    following: Tensor | None = None,
    next_bytes: int = MAX_NEXT_BYTES,
) -> None:
    """Launch on at most `items` items. args.entries must be older than the kernel ahead.

    following: contiguous, what is read after this launch; its first next_bytes are asked for.
    """
    assert args.early, "entries that the kernel ahead writes cannot be read before it ends"
    stages = complete(args, "fp8")
    instance = form.instance()
    resident = launcher.num_sms * instance.resident(stages, launcher.max_shared_bytes)
    grid = max(1, min(items, resident))
    share_among(args, grid, items)
    given = AheadArgs(args)
    if following is not None:
        given.next = following.data_ptr()
        size = min(next_bytes, following.numel() * following.element_size())
        given.next_bytes = size // grid // (16 * LANES) * (16 * LANES)
    launcher.launch(
        form.name,
        grid=grid,
        threads=THREADS,
        shared_bytes=instance.shared_bytes(stages),
        args=given,
    )


def fits(launcher: Launcher, form: Form, stages: int) -> bool:
    """Whether an SM holds a CTA of a form whose slices have so many stages."""
    return form.instance().shared_bytes(stages) <= launcher.max_shared_bytes
