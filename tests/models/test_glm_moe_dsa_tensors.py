"""The tensor inventories of GLM-5.2 against the published totals, and against transformers."""

from __future__ import annotations

from math import prod

import pytest
import torch

from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.glm_moe_dsa_tensors import inventory_parts, tensor_inventory
from tests.models.glm_configs import released, tiny

CONFIG = GlmMoeDsaConfig.from_dict(released())


@pytest.mark.parametrize(
    ("flavour", "num_bytes"),
    [
        ("bf16", 2 * 753_329_921_024 + 76 * 256 * 4),
        ("fp8", 755_617_140_416),
        ("nvfp4", 464_795_267_072),
    ],
)
def test_released_payloads_to_the_byte(flavour: Flavour, num_bytes: int) -> None:
    specs = tensor_inventory(CONFIG, flavour)
    assert sum(spec.num_bytes for spec in specs) == num_bytes
    assert len({spec.name for spec in specs}) == len(specs)


def test_parameters_of_the_parts() -> None:
    parts = inventory_parts(CONFIG, "bf16")
    router_bias = 256
    draft = sum(prod(spec.shape) for spec in parts["layers.78"])
    assert draft == 9_952_920_320 + router_bias
    main = sum(prod(spec.shape) for part, specs in parts.items() for spec in specs)
    assert main - draft - 75 * router_bias == 743_377_000_704


def test_quantised_linears_of_the_nvfp4_release() -> None:
    specs = {spec.name: spec for spec in tensor_inventory(CONFIG, "nvfp4")}
    quantised = [name for name in specs if name.endswith("weight_scale_2")]
    assert len(quantised) == 57_600
    assert all(".mlp.experts." in name and ".layers.78." not in name for name in quantised)
    down = "model.layers.3.mlp.experts.255.down_proj"
    assert specs[f"{down}.weight"].shape == (6144, 1024)
    assert specs[f"{down}.weight_scale"].shape == (6144, 128)
    assert specs["model.layers.78.mlp.experts.0.up_proj.weight"].dtype == "BF16"
    nibbles = sum(s.num_bytes for s in specs.values() if s.dtype == "U8")
    scales = sum(s.num_bytes for s in specs.values() if s.dtype == "F8_E4M3")
    assert (round(nibbles / 1e7), round(scales / 1e7)) == (36239, 4530)


def test_ragged_fp8_grids() -> None:
    specs = {spec.name: spec for spec in tensor_inventory(CONFIG, "fp8")}
    attention = "model.layers.0.self_attn"
    grids = {
        "kv_a_proj_with_mqa": (5, 48),
        "q_a_proj": (16, 48),
        "q_b_proj": (128, 16),
        "kv_b_proj": (224, 4),
        "o_proj": (48, 128),
        "indexer.wq_b": (32, 16),
        "indexer.wk": (1, 48),
    }
    for name, grid in grids.items():
        assert specs[f"{attention}.{name}.weight_scale_inv"].shape == grid
    assert specs[f"{attention}.indexer.weights_proj.weight"].dtype == "BF16"
    assert specs["model.layers.78.eh_proj.weight"].dtype == "BF16"


def test_tiny_names_and_shapes_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    raw = tiny()
    with torch.device("meta"):
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**raw))
    stacked = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    ours = {s.name: s.shape for s in tensor_inventory(GlmMoeDsaConfig.from_dict(raw), "bf16")}
    experts = {name for name in ours if ".mlp.experts." in name}
    assert {name: shape for name, shape in ours.items() if name not in experts} == {
        name: shape for name, shape in stacked.items() if ".mlp.experts." not in name
    }
    num_sparse, num_experts = 5, 16
    assert len(experts) == num_sparse * num_experts * 3
