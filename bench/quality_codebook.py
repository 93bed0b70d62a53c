"""Checkpoints whose experts keep only a few of FP4's values: which codebooks a model survives.

The values of e2m1 include the levels of any codebook tried here, so a checkpoint of few levels is
written in the official format and served like any other, at FP4. Scales are the source's.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moet.kernels.nvfp4 import E2M1_VALUES, pack_nibbles, unpack_nibbles

SYMMETRIC = (-4.0, -1.0, 1.0, 4.0)
ASYMMETRIC = (-3.0, -1.0, 0.5, 4.0)  # about as near, but its errors lean to one side
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")


def write_codebook(source: Path, target: Path, levels: Sequence[float]) -> dict[str, float]:
    """Copy a checkpoint folder, each expert weight put on the nearest level.

    Returns the errors over all expert weights in units of their scales: `bias`, mean(q - w) /
    rms(w), and `rel_rms`, rms(q - w) / rms(w).
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    table, counts = _table(levels), torch.zeros(16, dtype=torch.float64)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            kept = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        for name, value in kept.items():
            if _EXPERT.search(name) and value.dtype in (torch.int8, torch.uint8):
                codes = unpack_nibbles(value.view(torch.uint8))
                counts += torch.bincount(codes.flatten().long(), minlength=16)
                kept[name] = pack_nibbles(table[codes.long()]).view(value.dtype)
        save_file(kept, target / file.name, metadata={"format": "pt"})
    return _errors(table, counts)


def _table(levels: Sequence[float]) -> Tensor:
    """For each e2m1 code that of the nearest level; a zero goes where its sign bit points."""
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8, dtype=torch.float64)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64) + signs * 1e-3
    nearest = (values.unsqueeze(-1) - torch.tensor(levels, dtype=torch.float64)).abs().argmin(-1)
    codes = [E2M1_VALUES.index(level) for level in levels]
    return torch.tensor(codes, dtype=torch.uint8)[nearest]


def _errors(table: Tensor, counts: Tensor) -> dict[str, float]:
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    error, share = values[table.long()] - values, counts / counts.sum()
    size = float((share * values**2).sum().sqrt())
    return {
        "bias": float((share * error).sum()) / size,
        "rel_rms": float((share * error**2).sum().sqrt()) / size,
    }
