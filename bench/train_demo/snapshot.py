"""Weights-only snapshots in eight bits, in parts small enough to travel.

For going on elsewhere when the machine that held the full state is gone."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.train_demo.optim import Optimizer

PART_BYTES = 15 << 20
SMALL = 4096  # tensors of fewer values stay fp32


def save_snapshot(
    folder: Path, name: str, optimizer: Optimizer, model: nn.Module, seconds: float
) -> None:
    """Write NAME.partN files: masters with a scale per row, router biases, seconds trained."""
    kept = {key: _pack(master) for key, master in optimizer.masters.items()}
    biases = {key: b.cpu() for key, b in model.named_buffers() if key.endswith("bias")}
    buffer = io.BytesIO()
    torch.save({"masters": kept, "biases": biases, "seconds": seconds}, buffer)
    write_parts(folder, name, buffer.getvalue())


def write_parts(folder: Path, name: str, raw: bytes) -> None:
    """Files FOLDER/NAME.part0, .part1, ... that joined give raw."""
    for idx, first in enumerate(range(0, len(raw), PART_BYTES)):
        (folder / f"{name}.part{idx}").write_bytes(raw[first : first + PART_BYTES])


@torch.no_grad()
def load_snapshot(path: Path, optimizer: Optimizer, model: nn.Module) -> float:
    """path: FOLDER/NAME of the parts. Fills masters and biases; returns the seconds trained."""
    parts = sorted(path.parent.glob(f"{path.name}.part*"))
    state = torch.load(io.BytesIO(b"".join(part.read_bytes() for part in parts)))
    for key, packed in state["masters"].items():
        optimizer.masters[key].copy_(_unpack(*packed))
    own = dict(model.named_buffers())
    for key, bias in state["biases"].items():
        own[key].copy_(bias)
    optimizer.refresh(None)
    return float(state["seconds"])


def _pack(master: Tensor) -> tuple[Tensor, Tensor | None]:
    if master.numel() < SMALL or master.dim() < 2:
        return master.cpu(), None
    scale = master.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (master / scale).round().to(torch.int8).cpu(), scale.cpu()


def _unpack(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values.float() * scale
