"""The all-reduce kernel on the CPU: ranks are processes that share memory, as GPUs do."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moet.kernels.comm import CTAS, ERROR_RANK_MISSING, PeerSum, window_bytes
from moet.kernels.gemm import tree_sum
from tests.kernels.emulation import Emulator, build

MAX_BYTES = 1 << 12
SIZES = (4, 12, 8, MAX_BYTES // 4, 20)  # of one call after the other


@pytest.fixture(scope="module", params=[90, 120])
def emulator(request: pytest.FixtureRequest) -> Emulator:
    return build(("all_reduce",), request.param, num_sms=4)


def terms(rank: int, call: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(size, generator=generator)


def on_ranks(emulator: Emulator, num_ranks: int, work: Callable[[PeerSum], Tensor]) -> list[Tensor]:
    """What `work` returns on each rank, [values] fp32; ranks above 0 are children."""
    windows = [
        torch.zeros(window_bytes(MAX_BYTES, num_ranks), dtype=torch.uint8).share_memory_()
        for _ in range(num_ranks)
    ]
    addresses = tuple(window.data_ptr() for window in windows)
    results = torch.zeros(num_ranks, sum(SIZES) + 1).share_memory_()

    def rank(number: int) -> None:
        turns = torch.zeros(CTAS, dtype=torch.int32)
        error = torch.zeros(1, dtype=torch.int32)
        peers = PeerSum(emulator, addresses, number, MAX_BYTES, turns, error, timeout_s=20.0)
        made = work(peers)
        results[number, : len(made)] = made
        results[number, -1] = float(error)

    children = []
    for number in range(1, num_ranks):
        pid = os.fork()
        if pid == 0:
            try:
                rank(number)
            finally:
                os._exit(0)
        children.append(pid)
    rank(0)
    for pid in children:
        os.waitpid(pid, 0)
    return list(results)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_gets_the_tree_sum_call_after_call(emulator: Emulator, num_ranks: int) -> None:
    def work(peers: PeerSum) -> Tensor:
        return torch.cat([peers(terms(peers.rank, call, size)) for call, size in enumerate(SIZES)])

    expected = torch.cat(
        [
            tree_sum([terms(rank, call, size) for rank in range(num_ranks)])
            for call, size in enumerate(SIZES)
        ]
    )
    for found in on_ranks(emulator, num_ranks, work):
        assert found[-1] == 0
        assert torch.equal(found[:-1], expected)


def test_the_input_may_be_the_output(emulator: Emulator) -> None:
    x = terms(0, 0, 64)
    expected = x.clone()
    window = torch.zeros(window_bytes(MAX_BYTES, 1), dtype=torch.uint8)
    turns, error = torch.zeros(CTAS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    peers = PeerSum(emulator, (window.data_ptr(),), 0, MAX_BYTES, turns, error)
    assert peers(x, x) is x
    assert torch.equal(x, expected)


def test_a_rank_that_does_not_come_is_named_and_the_kernel_ends(emulator: Emulator) -> None:
    windows = [torch.zeros(window_bytes(MAX_BYTES, 2), dtype=torch.uint8) for _ in range(2)]
    addresses = tuple(window.data_ptr() for window in windows)
    turns, error = torch.zeros(CTAS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    peers = PeerSum(emulator, addresses, 0, MAX_BYTES, turns, error, timeout_s=0.01)
    peers(torch.zeros(4))
    assert int(error) == ERROR_RANK_MISSING << 1


def test_what_does_not_fit_goes_another_way(emulator: Emulator) -> None:
    turns, error = torch.zeros(CTAS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    peers = PeerSum(emulator, (0,), 0, MAX_BYTES, turns, error)
    assert peers.fits(torch.zeros(MAX_BYTES // 4))
    for x in (
        torch.zeros(MAX_BYTES // 4 + 4),
        torch.zeros(6),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(8, 2).t(),
    ):
        assert not peers.fits(x)
