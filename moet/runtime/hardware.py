"""Cards that moet plans for, as numbers: memory, rates of memory, arithmetic and links.

A preset describes one host with 1, 2 or 4 equal cards. Measured figures are an H200's; the others
are data-sheet figures, scaled by what the H200 reaches of its own, and say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moet.errors import ConfigError

GIB = 1 << 30
COUNTS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """num_devices equal cards of one host, or the CPU reference with the host's memory.

    memory_bytes: of one card, as the driver reports it. read_bytes_per_s: streaming reads of its
    memory. fp8_flops: dense, fp32 accumulation. link_bytes_per_s: host memory to one card.
    peer_bytes_per_s, collective_s: card to card, and the time of one small all-reduce.
    host_bytes: memory of the host that the process may use. `basis` says where figures come from.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    num_devices: int
    memory_bytes: int
    host_bytes: int
    read_bytes_per_s: float
    fp8_flops: float
    link_bytes_per_s: float
    peer_bytes_per_s: float
    collective_s: float
    disk_bytes_per_s: float = 6e9  # one NVMe drive of PCIe 4, assumed
    basis: str = ""

    @property
    def label(self) -> str:
        return self.name if self.num_devices == 1 else f"{self.name}x{self.num_devices}"


_PRESETS: Mapping[str, Hardware] = {
    "rtx-5090": Hardware(
        name="rtx-5090",
        kind="cuda",
        num_devices=1,
        memory_bytes=32607 << 20,
        host_bytes=0,
        read_bytes_per_s=1.79e12 * 0.946,
        fp8_flops=419e12,
        link_bytes_per_s=52.7e9,
        peer_bytes_per_s=40e9,
        collective_s=15e-6,
        basis="data sheet; memory at the share of its peak that an H200 reaches, link as published",
    ),
    "rtx-pro-6000": Hardware(
        name="rtx-pro-6000",
        kind="cuda",
        num_devices=1,
        memory_bytes=97887 << 20,
        host_bytes=0,
        read_bytes_per_s=1.79e12 * 0.946,
        fp8_flops=924e12,
        link_bytes_per_s=51.5e9,
        peer_bytes_per_s=40e9,
        collective_s=15e-6,
        basis="data sheet; memory at the share of its peak that an H200 reaches, link as published",
    ),
    "h200": Hardware(
        name="h200",
        kind="cuda",
        num_devices=1,
        memory_bytes=143771 << 20,
        host_bytes=0,
        read_bytes_per_s=4.54e12,
        fp8_flops=1979e12,
        link_bytes_per_s=46e9,
        peer_bytes_per_s=300e9,
        collective_s=8e-6,
        basis="memory and link measured, the rest from the data sheet",
    ),
}
PRESETS = tuple(_PRESETS)


def hardware(spec: str, *, host_bytes: int, memory_bytes: int | None = None) -> Hardware:
    """Cards by name, such as rtx-5090 or rtx-5090x4, in a host with that much memory.

    memory_bytes: what may be used of each card; None: all of it. Raises ConfigError naming what
    there is.
    """
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", spec.lower())
    name, count = (match[1], int(match[2] or 1)) if match else (spec, 1)
    if name not in _PRESETS or count not in COUNTS:
        known = ", ".join(_PRESETS)
        raise ConfigError(
            f"--gpu {spec}: there are {known}, each alone or as x2 or x4, such as {PRESETS[0]}x2"
        )
    preset = replace(_PRESETS[name], num_devices=count, host_bytes=host_bytes)
    if memory_bytes is None:
        return preset
    if not 0 < memory_bytes <= preset.memory_bytes:
        raise ConfigError(
            f"--gpu-memory is {memory_bytes / GIB:.2f} GiB; a {name} has "
            f"{preset.memory_bytes / GIB:.2f} GiB"
        )
    return replace(preset, memory_bytes=memory_bytes)


def this_host(available_bytes: int) -> Hardware:
    """The CPU reference: weights, experts and state live in host memory, nothing moves."""
    return Hardware(
        name="cpu",
        kind="cpu",
        num_devices=1,
        memory_bytes=available_bytes,
        host_bytes=0,
        read_bytes_per_s=0.0,
        fp8_flops=0.0,
        link_bytes_per_s=0.0,
        peer_bytes_per_s=0.0,
        collective_s=0.0,
        basis="memory that is free now",
    )
