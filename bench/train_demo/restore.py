"""Reads a demo checkpoint back into a training graph, so that training goes on from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.train_demo.glm import Glm
from bench.train_demo.optim import Optimizer
from bench.train_demo.v4 import official_name
from moet.kernels.nvfp4 import nvfp4_dequantize
from moet.models.base import TensorSource
from moet.models.checkpoint import Checkpoint
from moet.models.formats import dequantize_fp8_block, dequantize_mxfp4

GLM_NAMES = ("gate_proj", "up_proj", "down_proj")


class Decoded:
    """A source whose tensors are all plain numbers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


def decode(source: TensorSource) -> Decoded:
    """Every quantised weight of a checkpoint as fp32, scales gone."""
    names, found = set(source.names()), {}
    for name in names:
        value, scale_name = source.load(name), name.replace(".weight", ".scale")
        if name.endswith((".scale", ".weight_scale", "_scale_2", ".input_scale")):
            continue
        if value.dtype == torch.uint8:
            scale = source.load(f"{name}_scale").view(torch.uint8)
            whole = float(source.load(f"{name}_scale_2"))
            found[name] = nvfp4_dequantize(value, scale, global_scale=whole)
        elif value.dtype == torch.int8:
            found[name] = dequantize_mxfp4(value, source.load(scale_name))
        elif value.dtype == torch.float8_e4m3fn:
            found[name] = dequantize_fp8_block(value, source.load(scale_name))
        else:
            found[name] = value
    return Decoded(found)


@torch.no_grad()
def adopt(model: nn.Module, source: Decoded) -> None:
    """Put a checkpoint's decoded weights into a training graph."""
    glm = isinstance(model, Glm)
    for name, own in model.state_dict().items():
        official = official_name(name)
        if ".experts.w" not in name:
            own.copy_(source.load(official))
            continue
        prefix, matrix = official.rsplit(".", 1)
        matrix = (
            {"w1": GLM_NAMES[0], "w3": GLM_NAMES[1], "w2": GLM_NAMES[2]}[matrix] if glm else matrix
        )
        for expert_id in range(len(own)):
            own[expert_id].copy_(source.load(f"{prefix}.{expert_id}.{matrix}.weight"))


@torch.no_grad()
def restore(folder: Path, optimizer: Optimizer, model: nn.Module) -> None:
    """Fill masters and router biases from the checkpoint in `folder`: its rounded weights."""
    adopt(model, decode(Checkpoint.open(folder)))
    for name, parameter in model.named_parameters():
        optimizer.masters[name].copy_(parameter)
