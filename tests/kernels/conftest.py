"""The emulated kernels, built once for each architecture's matrix units."""

from __future__ import annotations

import shutil

import pytest

from tests.kernels import emulation
from tests.kernels.emulation import Emulator


@pytest.fixture(scope="session", params=[90, 120])
def launcher(request: pytest.FixtureRequest) -> Emulator:
    """A Launcher that runs csrc/ on the CPU; skips where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sources = (
        *("stream_gemm", "moe", "moe_decode", "moe_pair", "prefill_gemm", "projections"),
        "short_stream",
    )
    return emulation.build(sources, request.param, num_sms=3)
