"""Accelerated ops beside their references: on a GPU, or in Triton's interpreter on the CPU, which
has to be asked for before Triton is imported (tests/kernels/test_accelerated.py does so)."""

import os

import pytest
import torch

from tests.kernels.accelerated import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from moet.kernels import triton_attention

    interpreter.repair()
    triton_attention.HEADS_JOINED = 64  # the interpreter takes its time per program


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "accelerated" in item.path.parts and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)
