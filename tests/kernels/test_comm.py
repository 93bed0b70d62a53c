"""The all-reduce kernel on the CPU: ranks are processes that share memory, as GPUs do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moet.errors import KernelError
from moet.kernels.comm import (
    CTAS,
    ERROR_RANK_MISSING,
    HostWindow,
    PeerLinks,
    together,
    window_bytes,
)
from moet.kernels.gemm import tree_sum
from tests.kernels.emulation import Emulator, build
from tests.kernels.forks import in_ranks

MAX_BYTES = 1 << 12
SIZES = (4, 12, 8, MAX_BYTES // 4, 20, 512)  # of one call after the other


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return build(("all_reduce",), 90, num_sms=4)  # its source is the same for all


def terms(rank: int, call: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(size, generator=generator)


def links(
    emulator: Emulator, addresses: tuple[int, ...], rank: int, limit_s: float = 20.0
) -> PeerLinks:
    counters = torch.zeros(CTAS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    made = PeerLinks(
        emulator, addresses, rank, MAX_BYTES, *counters, torch.zeros(1, dtype=torch.int64)
    )
    made.wait_at_most(limit_s)
    return made


def on_ranks(
    emulator: Emulator, num_ranks: int, work: Callable[[PeerLinks], Tensor], room: int
) -> list[Tensor]:
    """What `work` returns on each rank, at most `room` fp32 values, and the error word."""
    windows = [
        torch.zeros(window_bytes(MAX_BYTES, num_ranks), dtype=torch.uint8).share_memory_()
        for _ in range(num_ranks)
    ]
    addresses = tuple(window.data_ptr() for window in windows)
    results = torch.zeros(num_ranks, room + 1).share_memory_()

    def rank(number: int) -> None:
        peers = links(emulator, addresses, number)
        made = work(peers)
        results[number, : len(made)] = made
        results[number, -1] = float(peers.error)

    in_ranks(num_ranks, rank)
    return list(results)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_gets_the_tree_sum_call_after_call(emulator: Emulator, num_ranks: int) -> None:
    def work(peers: PeerLinks) -> Tensor:
        made = []
        for call, size in enumerate(SIZES):
            x = terms(peers.rank, call, size)
            made += [peers.sum(x), peers.sum(x, torch.bfloat16).float()]
            made.append(peers.sum(x.bfloat16()).float())
        return torch.cat(made)

    expected = []
    for call, size in enumerate(SIZES):
        every = [terms(rank, call, size) for rank in range(num_ranks)]
        expected += [tree_sum(every), tree_sum(every).bfloat16().float()]
        expected.append(tree_sum([x.bfloat16().float() for x in every]).bfloat16().float())
    room = 3 * sum(SIZES)
    for found in on_ranks(emulator, num_ranks, work, room):
        assert found[-1] == 0
        assert torch.equal(found[:-1], torch.cat(expected))


def test_every_rank_gets_all_columns(emulator: Emulator) -> None:
    shapes = (1, 2), (3, 10), (2, 512)

    def mine(rank: int, call: int) -> Tensor:
        rows, columns = shapes[call]
        return terms(rank, call, rows * columns).view(rows, columns)

    def work(peers: PeerLinks) -> Tensor:
        return torch.cat([peers.gather(mine(peers.rank, call)).flatten() for call in range(3)])

    expected = [torch.cat([mine(0, call), mine(1, call)], 1).flatten() for call in range(3)]
    room = sum(map(len, expected))
    for found in on_ranks(emulator, 2, work, room):
        assert found[-1] == 0
        assert torch.equal(found[:-1], torch.cat(expected))


def test_a_rank_that_does_not_come_is_named_and_the_kernel_ends(emulator: Emulator) -> None:
    windows = [torch.zeros(window_bytes(MAX_BYTES, 2), dtype=torch.uint8) for _ in range(2)]
    peers = links(emulator, tuple(w.data_ptr() for w in windows), 0, limit_s=0.01)
    peers.sum(torch.zeros(4))
    assert int(peers.error) == ERROR_RANK_MISSING << 1


def test_what_does_not_fit_goes_another_way(emulator: Emulator) -> None:
    peers = links(emulator, (0,), 0)
    assert peers.sums(torch.zeros(MAX_BYTES // 4))
    assert peers.gathers(torch.zeros(3, 2))
    for x in (
        torch.zeros(MAX_BYTES // 4 + 4),
        torch.zeros(5),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(6, dtype=torch.bfloat16),
        torch.zeros(8, 2).t(),
    ):
        assert not peers.sums(x)
    assert not peers.gathers(torch.zeros(2, 3))


def test_ranks_share_host_memory_or_all_are_told_why_not() -> None:
    def alone(data: bytes) -> list[bytes]:
        return [data, b"\1"]

    name = f"test-{os.getpid()}"
    other = HostWindow(64, 0, 1, name, lambda data: [data], lambda place, size: place)
    (place,) = other.addresses
    assert ctypes.string_at(place, 64) == bytes(64)
    with pytest.raises(KernelError, match="rank 1: no GPU"):
        together(lambda data: [data, b"\0no GPU"], lambda: b"fine")
    with pytest.raises(KernelError, match="moet-test"):
        HostWindow(64, 0, 2, name, alone, lambda place, size: place)
