"""A rank on a GPU among others: small sums through memory that all read, the rest through NCCL.

All of it can be captured in a graph. Knows one stage of tensor ranks; knows nothing of steps.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moet.errors import KernelError
from moet.kernels.comm import CTAS, PeerSum, PeerWindow, window_bytes
from moet.kernels.device_gemm import Device

logger = logging.getLogger(__name__)

T = TypeVar("T")
PEER_BYTES = 1 << 20  # largest sum that goes through peer memory; NCCL is faster beyond
PROBE_ROUNDS = 8


class DeviceComm:
    """models.sharding.Comm of the tensor ranks of one stage, one GPU each.

    group: NCCL, of these ranks in order. peers: None if the GPUs cannot read each other.
    """

    def __init__(self, group: dist.ProcessGroup, peers: PeerSum | None) -> None:
        self.group = group
        self.peers = peers

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.peers is not None and self.peers.fits(x):
            return self.peers(x)
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def gather(self, x: Tensor) -> Tensor:
        size, (num_rows, width) = self.group.size(), x.shape
        parts = x.new_empty(size * num_rows, width)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        by_rank = parts.view(size, num_rows, width)
        return by_rank.transpose(0, 1).reshape(num_rows, size * width)

    def receive(self, like: Tensor) -> Tensor:
        raise AssertionError("one stage")

    def send(self, x: Tensor) -> None:
        raise AssertionError("one stage")

    def from_last(self, x: Tensor) -> Tensor:
        return x


def open_comm(group: dist.ProcessGroup, device: Device) -> DeviceComm:
    """Connect the ranks; peer memory is used if a probe finds what was sent. All ranks must call.

    A rank whose peers cannot be read, or read wrongly, says so, and then none of them uses it.
    """
    peers, fault = None, ""
    try:
        peers = _peer_sum(group, device)
        fault = _probe(group, peers)
    except KernelError as error:
        fault = str(error)
    faults = _everywhere(group, fault)
    if any(faults):
        bad = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(faults) if each)
        logger.warning("sums go through NCCL alone: %s", bad)
        peers = None
    return DeviceComm(group, peers)


def _peer_sum(group: dist.ProcessGroup, device: Device) -> PeerSum:
    size, rank = group.size(), group.rank()
    window = PeerWindow(window_bytes(PEER_BYTES, size), rank, lambda data: _everywhere(group, data))
    with torch.inference_mode(False):  # to stay writable outside of a forward pass
        turns = torch.zeros(CTAS, dtype=torch.int32, device=device.torch_device)
    return PeerSum(device.launcher, window.addresses, rank, PEER_BYTES, turns, device.error)


def _probe(group: dist.ProcessGroup, peers: PeerSum) -> str:
    """What is wrong with sums of known terms; "" if nothing. Ends when a rank does not come."""
    size, device = group.size(), peers.turns.device
    for turn in range(PROBE_ROUNDS):
        numbers = torch.arange(PEER_BYTES // 4, dtype=torch.float32, device=device) + turn
        found = peers(numbers * (1 + peers.rank))
        if int(peers.error):
            error, _ = int(peers.error), peers.error.zero_()
            return f"error bits {error:#x} after round {turn}: a rank did not come"
        if not torch.equal(found, numbers * (size * (size + 1) // 2)):
            return f"round {turn} brought wrong sums"
    return ""


def _everywhere(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Every rank's value, in rank order."""
    found: list[T] = [mine] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found
