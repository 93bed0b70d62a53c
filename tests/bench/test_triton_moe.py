"""The peer that the kernel bench measures computes what it is said to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from bench.kernels import triton_moe

torch.manual_seed(0)
experts, n, k, tokens = 4, 256, 256, 5
weight = torch.randn(experts, n, k).to(torch.float8_e4m3fn)
weight_scale = torch.rand(experts, n // 128, k // 128)
x, x_scale = torch.randn(tokens, k).to(torch.float8_e4m3fn), torch.rand(tokens, k // 128)
ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
aligned = triton_moe.align(ids, experts, 16)
found = triton_moe.grouped(
    x, x_scale, weight, weight_scale, aligned, pairs=2 * tokens, divisor=2, rows=16, GROUP=2
)
full = weight.float() * weight_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
rows = x.float() * x_scale.repeat_interleave(128, 1)
for pair in range(2 * tokens):
    expected = full[ids.flatten()[pair]] @ rows[pair // 2]
    assert (found[pair].float() - expected).norm() < 2**-7 * expected.norm(), pair
print("equal")
"""


def test_the_triton_peer_is_a_grouped_product() -> None:
    """In the interpreter, which must be asked for before Triton is imported."""
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, cwd=root, check=False, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("equal"), done.stderr
