"""Tests that need a GPU: every one is marked, and skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from moet.kernels.device_gemm import Device
from moet.runtime.dummy import open_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The GPU of this machine."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = open_device()
    if device is None:
        pytest.skip("no kernels are built for this GPU")
    return device
