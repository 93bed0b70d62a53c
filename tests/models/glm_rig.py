"""Tiny GLM-5.2 models with seeded weights, in memory, in every flavour that is published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings, Rounding
from moet.kernels.quant import Activations
from moet.models.base import KVTensors
from moet.models.formats import quantize_fp8_block
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.glm_moe_dsa_attention import Attention, Step
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.glm_moe_dsa_tensors import tensor_inventory
from moet.models.layers import Weights
from moet.models.moe import ResidentExperts
from tests.models.glm_configs import tiny
from tests.models.hash_weights import DictSource

TINY = GlmMoeDsaConfig.from_dict(tiny())
DRAFTING = GlmMoeDsaConfig.from_dict(tiny(num_nextn_predict_layers=1))
IDS = [(37 * i + 11) % 251 + 2 for i in range(100)]


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Scales at which logits are about 1, selections differ and no scores tie."""
    x = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * x
    if name.endswith("e_score_correction_bias"):
        return 0.3 * x
    return (0.05 if len(shape) == 1 else 0.08) * x


def random_source(
    config: GlmMoeDsaConfig, form: Literal["fp32", "bf16", "fp8"] = "fp32", seed: int = 0
) -> DictSource:
    """All tensors of the inventory: float32, or as the bf16 and fp8 releases store them."""
    generator = torch.Generator().manual_seed(seed)
    specs = {spec.name: spec for spec in tensor_inventory(config, "bf16")}
    weights = {n: random_weight(n, spec.shape, generator) for n, spec in specs.items()}
    if form == "fp32":
        return DictSource(weights)
    tensors: dict[str, Any] = {}
    for spec in tensor_inventory(config, form):
        if spec.name.endswith("_scale_inv"):
            continue
        weight = weights[spec.name]
        if spec.dtype == "F8_E4M3":
            codes, exponents = quantize_fp8_block(weight)
            tensors[spec.name] = codes
            factors = torch.exp2(exponents.float() - 127)
            tensors[spec.name + "_scale_inv"] = factors
        else:
            tensors[spec.name] = weight if spec.dtype == "F32" else weight.bfloat16()
    return DictSource(tensors)


def resident(config: GlmMoeDsaConfig, source: DictSource) -> ResidentExperts:
    layers = range(config.first_k_dense_replace, config.num_hidden_layers + config.num_draft_blocks)
    return ResidentExperts.load(
        Weights(source, ModelSettings()),
        {i: f"model.layers.{i}.mlp.experts." for i in layers},
        num_experts=config.n_routed_experts,
        dim=config.hidden_size,
        inter=config.moe_intermediate_size,
        names=("gate_proj", "up_proj", "down_proj"),
    )


def load_model(
    config: GlmMoeDsaConfig,
    source: DictSource,
    rounding: Rounding = "none",
    kv_dtype: KVDtype = "fp32",
    num_spec_tokens: int = 0,
) -> GlmMoeDsa:
    settings = ModelSettings(rounding=rounding)
    return GlmMoeDsa.load(config, source, settings, kv_dtype, num_spec_tokens)


class BesideNarrow:
    """An attention that also runs its twin over narrower rows, and notes how far that one is."""

    def __init__(self, own: Attention, narrow: Attention, kv: KVTensors) -> None:
        self.own, self.narrow, self.kv, self.indexer = own, narrow, kv, own.indexer
        self.error = 0.0

    def __call__(
        self, x: Activations, step: Step, selection: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, selection = self.own(x, step, selection)
        beside = replace(step, kv=self.kv)
        got, _ = self.narrow(x, beside, selection)
        self.error = float((got - out).float().norm() / out.float().norm())
        return out, selection
