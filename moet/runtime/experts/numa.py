"""Which processors are near a GPU: memory that they write first is near it, too."""

from __future__ import annotations

import os
from pathlib import Path

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")


def near(device: torch.device, root: Path = PCI_DEVICES) -> set[int]:
    """Processors of the NUMA node that a GPU hangs on, of those this process may use; empty where
    the system does not say or none is left."""
    if device.type != "cuda":
        return set()
    from cuda.bindings import driver  # type: ignore[import-untyped,unused-ignore]

    index = torch.cuda.current_device() if device.index is None else device.index
    status, name = driver.cuDeviceGetPCIBusId(16, index)
    if status != driver.CUresult.CUDA_SUCCESS:
        return set()
    place = name.split(b"\0")[0].decode().lower()
    return listed(root / place / "local_cpulist") & os.sched_getaffinity(0)


def listed(path: Path) -> set[int]:
    """The numbers in a file like "0-3,8"; none if there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def stay_on(processors: set[int]) -> None:
    """Let the calling thread run there alone; nothing if there are none."""
    if processors:
        os.sched_setaffinity(0, processors)
