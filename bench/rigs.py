"""Steps of dummy models on a GPU: the place that they run in and a rig around them."""

from __future__ import annotations

from moet.bench.device_rig import DeviceRig
from moet.kernels.device_gemm import Device
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import DummyModel
from moet.runtime.queues import CudaGraphs, CudaQueue

CONTEXT = 1024  # tokens, the usual one


def placement_on(device: Device, queue: CudaQueue | None = None) -> Placement:
    """Where steps are captured. queue: None for one of their own."""
    queue = CudaQueue() if queue is None else queue
    return Placement(queue, CudaGraphs(queue), device.error, device.arch)


def rig_on(
    placement: Placement,
    made: DummyModel,
    *,
    num_seqs: int,
    num_rows: int,
    longest: int,
    num_drafts: int = 0,
) -> DeviceRig:
    """As DeviceRig; all sequences but the first have the usual context."""
    return DeviceRig(
        made.model,  # type: ignore[arg-type]
        made.experts,
        placement,
        num_seqs=num_seqs,
        num_rows=num_rows,
        longest=longest,
        others=CONTEXT,
        num_drafts=num_drafts,
    )
