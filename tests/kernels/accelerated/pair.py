"""One small synthetic V4 model twice: on the reference ops, and as a GPU would run it, with every
weight packed and every op bound for its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moet.config import ModelSettings, Precision
from moet.kernels.device_gemm import Device
from moet.kernels.moe import ExpertTable
from moet.models.base import TensorSource
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.expert_encoder import encode_expert, row_formats
from moet.models.moe import ResidentExperts, UnpackedExperts
from moet.runtime.experts.store import DeviceExperts
from tests.models.hash_weights import Rig


@dataclass(frozen=True)
class Pair:
    """The same model on the reference ops and on a GPU's."""

    config: DeepseekV4Config
    reference: Rig
    gpu: Rig


def encoded(
    source: TensorSource, config: DeepseekV4Config, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Rows and bases of every expert of every layer that is no draft."""
    forms = row_formats(config.hidden_size, config.moe_intermediate_size)
    rows, bases = [], []
    for layer_idx in range(config.num_hidden_layers):
        for expert_id in range(config.n_routed_experts):
            prefix = f"layers.{layer_idx}.ffn.experts.{expert_id}."
            names = (f"{prefix}w1", f"{prefix}w3", f"{prefix}w2")
            expert = encode_expert(source.load, names, {precision: forms[precision]}, "mse")
            rows.append(expert.rows[precision])
            bases.append(expert.bases[precision])
    return torch.stack(rows), torch.stack(bases)


def state(model: DeepseekV4, device: torch.device, num_pages: int = 24) -> dict[str, Tensor]:
    """KV tensors full of bytes that read as NaN or as huge numbers."""
    sizes = {"paged": num_pages, "ring": 12}
    return {
        group.name: torch.full(
            (len(group.layers), sizes[group.kind], group.page_bytes),
            0x7F,
            dtype=torch.uint8,
            device=device,
        )
        for group in model.kv_cache_spec().groups
    }


class Confident:
    """A synthetic checkpoint whose head also reads the token that was put in, so that the best
    logit leads by more than noise, as in a trained model; of random weights it leads by a hair."""

    LEAD = 24.0  # deviations of the other logits

    def __init__(self, folder: Path) -> None:
        self._checkpoint = Checkpoint.open(folder)

    @property
    def config(self) -> DeepseekV4Config:
        config = self._checkpoint.config
        assert isinstance(config, DeepseekV4Config)
        return config

    def names(self) -> Iterator[str]:
        return self._checkpoint.names()

    def load(self, name: str) -> Tensor:
        stored = self._checkpoint.load(name)
        if name != "head.weight":
            return stored
        embed = self._checkpoint.load("embed.weight").float()
        order = torch.randperm(len(embed), generator=torch.Generator().manual_seed(5))
        echo = embed[order] / embed.shape[1] * self.LEAD
        return (stored.float() + echo).to(stored.dtype)


def make_pair(
    config: DeepseekV4Config,
    source: TensorSource,
    device: Device,
    *,
    precision: Precision = "w2",
) -> Pair:
    """source: a checkpoint's tensors, the experts in FP4."""
    settings = ModelSettings(rounding="deployed", precision=precision)
    reference = DeepseekV4.load(config, source, settings, "fp8")
    rows, bases = encoded(source, config, precision)
    form = row_formats(config.hidden_size, config.moe_intermediate_size)[precision]
    layers, count = range(config.num_hidden_layers), config.n_routed_experts
    tables = {i: ExpertTable(form, rows, torch.arange(i * count, (i + 1) * count)) for i in layers}
    experts = UnpackedExperts(ResidentExperts(tables))
    on_gpu = ModelSettings(arch=device.arch, rounding="deployed", precision=precision)
    model = DeepseekV4.load(config, source, on_gpu, "fp8", gpu=device)
    where = device.torch_device
    placed = DeviceExperts(form, rows.to(where), bases.to(where), layers)
    return Pair(
        config,
        Rig(reference, experts, state(reference, torch.device("cpu"))),
        Rig(model, placed, state(model, where)),
    )
