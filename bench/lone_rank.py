"""One rank of several on a GPU of its own: it has its part of the weights, and for sums and gathers
only its own terms. What a rank computes costs what it costs among others; what it waits for costs
nothing, and its logits mean nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.comm import CTAS, PeerLinks, RankPart, added, window_bytes
from moet.kernels.device_gemm import Device
from moet.kernels.mixture import Mixture
from moet.models.sharding import Alone, Shard
from moet.runtime.parallel.device import READ_ROWS

MAX_BYTES = 4 << 20


class LoneComm(Alone):
    """Sums are launches that copy; those that the op behind them makes have one term."""

    def __init__(self, device: Device, size: int) -> None:
        where, self.size = device.torch_device, size
        self.window = torch.zeros(window_bytes(MAX_BYTES, 1), dtype=torch.uint8, device=where)
        turns, limit_ns = torch.zeros(CTAS, dtype=torch.int32, device=where), torch.ones(1).long()
        window = (self.window.data_ptr(),)
        self.links = PeerLinks(device.launcher, window, 0, MAX_BYTES, turns, device.error, limit_ns)
        self.sums_on_read = True

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        x = x.contiguous()
        return self.links.sum(x, dtype) if self.links.sums(x) else x.to(dtype or x.dtype)

    def sum_on_read(  # type: ignore[override]
        self, x: Tensor | Mixture, dtype: torch.dtype | None = None
    ) -> Tensor | RankPart:
        like = x.shared if isinstance(x, Mixture) else x
        few = len(like) <= READ_ROWS and dtype in (None, like.dtype) and self.links.sums(like)
        if not few or not self.sums_on_read or like.dtype != torch.bfloat16:
            return self.sum(added(x), dtype)
        return RankPart(x, self.links, self.sum)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, 1)


def lone_rank(device: Device, size: int) -> Shard:
    """Rank 0 of `size`."""
    return Shard(size=size, comm=LoneComm(device, size))
