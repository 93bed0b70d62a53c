"""Sums over the ranks of one host through memory that all of them can read, for the small messages
of a decode step. One kernel, no library, the same bits on every rank and in every run.

Knows tensors and addresses. How ranks find each other is the affair of whoever calls; larger
messages, and ranks on other hosts, go through NCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moet.errors import KernelError
from moet.kernels.stream_gemm import Launcher, pointer

THREADS = 256
MAX_RANKS = 4
VECTOR_BYTES = 16
CTAS = 16  # all resident at once; each waits for its fellow on the other ranks
TIMEOUT_S = 2.0
ERROR_RANK_MISSING = 1 << 16  # bit of the error word, shifted left by the rank


class _Args(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("buffers", ctypes.c_uint64 * MAX_RANKS),
        ("flags", ctypes.c_uint64 * MAX_RANKS),
        ("turns", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("vectors", "capacity", "ranks", "rank")),
    ]


def flag_bytes(num_ranks: int) -> int:
    """Of the flags that a rank keeps for the others, zero at the start."""
    return 4 * num_ranks * CTAS


def window_bytes(max_bytes: int, num_ranks: int) -> int:
    """Of the memory that a rank shows the others: two halves of max_bytes, then its flags."""
    return 2 * max_bytes + flag_bytes(num_ranks)


@dataclass(frozen=True, slots=True)
class PeerSum:
    """Sums of up to max_bytes over 1, 2 or 4 ranks.

    windows: the address of each rank's window (of window_bytes) as this rank sees it, zeroed before
    any rank begins. turns: [CTAS] int32, zero; error: [1] int32. All ranks must call alike.
    """

    launcher: Launcher
    windows: tuple[int, ...]
    rank: int
    max_bytes: int
    turns: Tensor
    error: Tensor
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        assert len(self.windows) in (1, 2, MAX_RANKS), f"{len(self.windows)} ranks"
        assert self.max_bytes % VECTOR_BYTES == 0

    def fits(self, x: Tensor) -> bool:
        """Whether x can be summed so: fp32, contiguous, a multiple of 16 bytes, small enough."""
        num_bytes = x.numel() * x.element_size()
        whole = num_bytes % VECTOR_BYTES == 0 and x.is_contiguous()
        return x.dtype == torch.float32 and whole and num_bytes <= self.max_bytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of every rank's x by tree, (0 + 1) + (2 + 3). out may be x.

        A rank that does not come within timeout_s sets its bit in `error` and leaves the sum
        undefined; the call ends.
        """
        assert self.fits(x), f"{x.dtype} {tuple(x.shape)}"
        out = torch.empty_like(x) if out is None else out
        vectors = x.numel() * 4 // VECTOR_BYTES
        if vectors == 0:
            return out
        args = _Args(
            x=pointer(x),
            out=pointer(out),
            turns=pointer(self.turns),
            error=pointer(self.error),
            timeout_ns=int(self.timeout_s * 1e9),
            vectors=vectors,
            capacity=self.max_bytes // VECTOR_BYTES,
            ranks=len(self.windows),
            rank=self.rank,
        )
        for rank, address in enumerate(self.windows):
            args.buffers[rank] = address
            args.flags[rank] = address + 2 * self.max_bytes
        # Always the same grid, since a CTA's turn counts its own calls.
        self.launcher.launch(
            "all_reduce_f32", grid=CTAS, threads=THREADS, shared_bytes=0, args=args
        )
        return out


class PeerWindow:
    """A window on the current GPU that other processes of the host map, and theirs mapped here.

    exchange: gives every rank's bytes in rank order, given one's own.
    """

    def __init__(
        self, num_bytes: int, rank: int, exchange: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        from cuda.bindings import driver  # type: ignore[import-untyped,unused-ignore]

        self._driver = driver
        self._own = int(self._done(driver.cuMemAlloc(num_bytes)))
        self._done(driver.cuMemsetD8(self._own, 0, num_bytes))
        self._done(driver.cuCtxSynchronize())
        handle = self._done(driver.cuIpcGetMemHandle(self._own))
        addresses = []
        for other, data in enumerate(exchange(bytes(handle.reserved))):
            if other == rank:
                addresses.append(self._own)
                continue
            theirs = driver.CUipcMemHandle()
            theirs.reserved = data
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            addresses.append(int(self._done(driver.cuIpcOpenMemHandle(theirs, flags))))
        self.addresses = tuple(addresses)
        self._rank = rank

    def close(self) -> None:
        """Unmap the others' windows and free one's own; all ranks must have stopped using them."""
        for other, address in enumerate(self.addresses):
            if other != self._rank:
                self._done(self._driver.cuIpcCloseMemHandle(address))
        self._done(self._driver.cuMemFree(self._own))

    def _done(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(
                f"the GPUs of this host cannot read each other's memory: {code}; NCCL is used "
                "without it"
            )
        return values[0] if values else None
