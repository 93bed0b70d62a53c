"""Sums and gathers over the ranks of one host through memory that all of them can write, for the
small messages of a decode step. One launch, no library, the same bits on every rank and in every
run.

Knows tensors and addresses. How ranks find each other is the affair of whoever calls; larger
messages, and ranks on other hosts, go through NCCL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moet.errors import KernelError
from moet.kernels.mixture import Mixture
from moet.kernels.stream_gemm import Launcher, pointer

THREADS = 256
MAX_RANKS = 4
PAIR_BYTES = 8  # of values that travel in one packet
PACKET_BYTES = 16  # with the number of the call beside each half
CTAS = 64  # all resident at once; always as many, since each counts its own calls
ERROR_RANK_MISSING = 1 << 16  # bit of the error word, shifted left by the rank
HANDLE_BYTES = 64
SHARED_FOLDER = Path("/dev/shm")


class PeerArgs(ctypes.Structure):
    """The windows as kernels take them, field for field `struct PeerArgs` of csrc/peers.cuh."""

    _fields_: ClassVar[Any] = [
        ("windows", ctypes.c_uint64 * MAX_RANKS),
        ("turns", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("capacity", "ranks", "rank")),
    ]


class _Args(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("peers", PeerArgs),
        *((name, ctypes.c_int32) for name in ("pairs", "per_row", "from_bf16", "to_bf16")),
    ]


def window_bytes(max_bytes: int, num_ranks: int) -> int:
    """Of the memory that a rank lets the others write: two halves, a part for each of them."""
    return 2 * num_ranks * (max_bytes // PAIR_BYTES) * PACKET_BYTES


@dataclass(frozen=True, slots=True)
class PeerLinks:
    """Sums and gathers of up to max_bytes a rank, over 1, 2 or 4 ranks.

    windows: the address of each rank's window (of window_bytes) as this rank sees it, zeroed before
    any rank begins. turns: [CTAS] int32, zero, calls so far; error: [1] int32. limit_ns: [1] int64
    in memory of the host that the kernel reads: how long a call waits for the others, which may be
    changed at any time. All ranks must call alike.
    """

    launcher: Launcher
    windows: tuple[int, ...]
    rank: int
    max_bytes: int
    turns: Tensor
    error: Tensor
    limit_ns: Tensor

    def __post_init__(self) -> None:
        assert len(self.windows) in (1, 2, MAX_RANKS), f"{len(self.windows)} ranks"
        assert self.max_bytes % PAIR_BYTES == 0

    def beside(self, max_bytes: int) -> PeerLinks:
        """Links of their own turns in the same windows, behind these."""
        own = window_bytes(self.max_bytes, len(self.windows))
        windows = tuple(address + own for address in self.windows)
        turns, limit_ns = torch.zeros_like(self.turns), self.limit_ns
        return PeerLinks(self.launcher, windows, self.rank, max_bytes, turns, self.error, limit_ns)

    def wait_at_most(self, seconds: float) -> None:
        """How long calls wait from now on, also those that wait already."""
        self.limit_ns[0] = int(seconds * 1e9)

    def sums(self, x: Tensor) -> bool:
        """Whether x can be summed so: fp32 or bf16, contiguous, in whole pairs, small enough."""
        return x.dtype in (torch.float32, torch.bfloat16) and self._fits(x, x.numel())

    def gathers(self, x: Tensor) -> bool:
        """Whether x, [rows, columns], can be gathered so: rows in whole pairs."""
        return x.dim() == 2 and self._fits(x, x.shape[1])

    def _fits(self, x: Tensor, run: int) -> bool:
        """run: values that must be a number of pairs."""
        size = x.element_size()
        whole = run * size % PAIR_BYTES == 0 and x.is_contiguous()
        return whole and x.numel() * size <= self.max_bytes

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of every rank's x by tree, (0 + 1) + (2 + 3), in fp32, rounded once to dtype.

        dtype: bf16, or that of x. A rank that does not come in time sets its bit in `error` and
        leaves the sum undefined; the call ends.
        """
        dtype = dtype or x.dtype
        assert self.sums(x), f"{x.dtype} {tuple(x.shape)}"
        assert dtype in (x.dtype, torch.bfloat16)
        out = torch.empty_like(x, dtype=dtype)
        args = self._args(x, out)
        args.from_bf16 = x.dtype == torch.bfloat16
        args.to_bf16 = dtype == torch.bfloat16
        self._launch("all_reduce", args)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's columns side by side. x: [rows, columns]; returns [rows, ranks * columns].

        A rank that does not come: as in sum.
        """
        assert self.gathers(x), f"{x.dtype} {tuple(x.shape)}"
        num_rows, width = x.shape
        out = x.new_empty(num_rows, len(self.windows) * width)
        args = self._args(x, out)
        args.per_row = width * x.element_size() // PAIR_BYTES
        self._launch("all_gather", args)
        return out

    def _args(self, x: Tensor, out: Tensor) -> _Args:
        pairs = x.numel() * x.element_size() // PAIR_BYTES
        return _Args(x=pointer(x), out=pointer(out), peers=self.arguments(), pairs=pairs)

    def arguments(self) -> PeerArgs:
        """As kernels take them."""
        args = PeerArgs(
            turns=pointer(self.turns),
            error=pointer(self.error),
            limit_ns=self.limit_ns.data_ptr(),
            capacity=self.max_bytes // PAIR_BYTES,
            ranks=len(self.windows),
            rank=self.rank,
        )
        for rank, address in enumerate(self.windows):
            args.windows[rank] = address
        return args

    def _launch(self, name: str, args: _Args) -> None:
        if args.pairs:
            self.launcher.launch(name, grid=CTAS, threads=THREADS, shared_bytes=0, args=args)


@dataclass(frozen=True, slots=True)
class RankPart:
    """This rank's part of a sum that whoever reads it makes on its way in. part: [rows, dim] bf16,
    contiguous, or a mixture of that shape. links: for such sums alone, with turns of their own.
    add: makes the sum by itself."""

    part: Tensor | Mixture
    links: PeerLinks
    add: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        like = self.part.shared if isinstance(self.part, Mixture) else self.part
        assert like.dtype == torch.bfloat16
        assert self.links.sums(like)


def added(x: Tensor | RankPart | Mixture) -> Tensor:
    """The sum, for those who cannot make it."""
    if isinstance(x, Mixture):
        return x.add()
    return x if isinstance(x, Tensor) else x.add(added(x.part))


class Window(Protocol):
    """Memory of each rank that all ranks write, by the address it has here."""

    addresses: tuple[int, ...]

    def close(self) -> None:
        """Let go of it; all ranks must have stopped using it."""
        ...


Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives every rank's bytes, at most 255, in rank order, given one's own; all ranks call alike."""


def together(exchange: Exchange, work: Callable[[], bytes]) -> Sequence[bytes]:
    """What `work` makes on every rank. Raises KernelError on all of them if it does so on one."""
    fault, made = "", b""
    try:
        made = work()
    except (KernelError, OSError) as error:
        fault = str(error)
    every = exchange(b"\1" + made if not fault else b"\0" + fault.encode()[:200])
    bad = [f"rank {r}: {e[1:].decode()}" for r, e in enumerate(every) if e[:1] == b"\0"]
    if bad:
        raise KernelError("; ".join(bad))
    return [each[1:] for each in every]


class PeerWindow:
    """On each rank's GPU, mapped by the others. Raises KernelError where GPUs cannot do that."""

    def __init__(self, num_bytes: int, rank: int, exchange: Exchange) -> None:
        self._driver, self._rank = _driver(), rank
        driver = self._driver

        def own() -> bytes:
            self._own = int(_done(driver, driver.cuMemAlloc(num_bytes)))
            _done(driver, driver.cuMemsetD8(self._own, 0, num_bytes))
            _done(driver, driver.cuCtxSynchronize())
            handle = _done(driver, driver.cuIpcGetMemHandle(self._own))
            return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

        handles = together(exchange, own)
        places: list[int] = []

        def others() -> bytes:
            places.extend(self._own if r == rank else self._open(h) for r, h in enumerate(handles))
            return b""

        together(exchange, others)
        self.addresses = tuple(places)

    def _open(self, handle: bytes) -> int:
        driver = self._driver
        theirs = driver.CUipcMemHandle()
        ctypes.memmove(int(theirs.getPtr()), handle, HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_done(driver, driver.cuIpcOpenMemHandle(theirs, flags.value)))

    def close(self) -> None:
        for other, address in enumerate(self.addresses):
            if other != self._rank:
                _done(self._driver, self._driver.cuIpcCloseMemHandle(address))
        _done(self._driver, self._driver.cuMemFree(self._own))


class HostWindow:
    """In host memory that every rank's GPU maps: for GPUs that cannot read each other.

    name: the same on all ranks and in no use. register: makes host memory known to the GPU and
    gives the address that it has there. Raises KernelError where that cannot be done.
    """

    def __init__(
        self,
        num_bytes: int,
        rank: int,
        num_ranks: int,
        name: str,
        exchange: Exchange,
        register: Callable[[int, int], int],
    ) -> None:
        paths = [SHARED_FOLDER / f"moet-{name}-{other}" for other in range(num_ranks)]
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        places: list[int] = []

        def own() -> bytes:
            with paths[rank].open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            return b""

        def every() -> bytes:
            self._maps = [_mapped(path, num_bytes) for path in paths]
            starts = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._maps]
            places.extend(register(start, num_bytes) for start in starts)
            return b""

        try:
            together(exchange, own)
            together(exchange, every)
        finally:
            paths[rank].unlink(missing_ok=True)
        self.addresses = tuple(places)

    def close(self) -> None:
        """What is mapped goes with the process."""


def register_host(place: int, num_bytes: int) -> int:
    """Map host memory into the current GPU; returns its address there. Raises KernelError."""
    driver = _driver()
    _done(driver, driver.cuMemHostRegister(place, num_bytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP))
    return int(_done(driver, driver.cuMemHostGetDevicePointer(place, 0)))


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes)


def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-untyped,unused-ignore]

    return driver


def _done(driver: Any, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"GPUs cannot share this memory: {code}")
    return values[0] if values else None
