"""Weights that a later kernel of a step reads, asked for while small kernels leave memory idle.

A kernel of a few instructions puts them into the second-level cache (`csrc/fetch_ahead.cu`); no
result depends on it. Knows tensors and a Device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.device_gemm import Device

THREADS, RANGES = 32, 4
MAX_BYTES = 36 << 20  # of one call: what the cache holds beside what the kernels between need


class FetchArgs(ctypes.Structure):
    """The kernel's only parameter, field for field `struct FetchArgs` of the source."""

    _fields_: ClassVar = [
        ("from_", ctypes.c_void_p * RANGES),
        ("bytes", ctypes.c_uint64 * RANGES),
        ("at_once", ctypes.c_int32),
    ]


class FetchAhead:
    """Launches the fetches of one model. beside: on a stream of its own, beside the step's, which
    `join` waits for; else in the step's. at_once: while the kernel ahead still runs."""

    def __init__(self, device: Device, *, beside: bool, at_once: bool = False) -> None:
        self.device, self._at_once = device, at_once
        self._side = torch.cuda.Stream(device.torch_device) if beside else None  # type: ignore[no-untyped-call]

    def __call__(self, weights: Sequence[Tensor]) -> None:
        """Ask for the first MAX_BYTES of up to four contiguous tensors."""
        if self._side is None:
            self._launch(weights)
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device.torch_device))
        with torch.cuda.stream(self._side):
            self._launch(weights)

    def join(self) -> None:
        """What is launched next comes after all fetches: a captured step must end in one stream."""
        if self._side is not None:
            torch.cuda.current_stream(self.device.torch_device).wait_stream(self._side)

    def _launch(self, weights: Sequence[Tensor]) -> None:
        args, left = FetchArgs(at_once=self._at_once), MAX_BYTES
        for i, weight in enumerate(weights[:RANGES]):
            size = min(left, weight.numel() * weight.element_size() // 16 * 16)
            args.from_[i], args.bytes[i] = weight.data_ptr(), size
            left -= size
        launcher = self.device.launcher
        launcher.launch(
            "fetch_ahead", grid=launcher.num_sms, threads=THREADS, shared_bytes=0, args=args
        )


class FetchNothing:
    """Where there is no cache to fill."""

    def __call__(self, weights: Sequence[Tensor]) -> None:
        pass

    def join(self) -> None:
        pass
