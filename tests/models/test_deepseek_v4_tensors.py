import pytest

from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_tensors import (
    BASE,
    PREVIEW,
    RELEASE_0731,
    Artefact,
    inventory_parts,
    tensor_inventory,
)
from moet.models.tensor_spec import TensorSpec
from tests.models.released_config import CONFIG_0731, PREVIEW_CONFIG


@pytest.mark.parametrize(
    ("raw", "artefact", "num_tensors", "num_bytes", "num_shards"),
    [
        (PREVIEW_CONFIG, PREVIEW, 69_187, 159_609_485_896, 46),
        (CONFIG_0731, RELEASE_0731, 72_317, 166_878_536_440, 48),
    ],
)
def test_inventory_closes_to_the_byte(
    raw: dict[str, object], artefact: Artefact, num_tensors: int, num_bytes: int, num_shards: int
) -> None:
    config = DeepseekV4Config.from_dict(raw)
    inventory = tensor_inventory(config, artefact)
    assert len(inventory) == len({spec.name for spec in inventory}) == num_tensors
    assert sum(spec.num_bytes for spec in inventory) == num_bytes
    assert len(inventory_parts(config, artefact)) == num_shards


def test_draft_blocks_have_the_published_tensor_counts() -> None:
    preview = inventory_parts(DeepseekV4Config.from_dict(PREVIEW_CONFIG), PREVIEW)
    assert len(preview["mtp.0"]) == 1575
    stages = inventory_parts(DeepseekV4Config.from_dict(CONFIG_0731), RELEASE_0731)
    assert [len(stages[f"mtp.{i}"]) for i in range(3)] == [1568, 1565, 1572]
    assert sum(spec.num_bytes for spec in stages["mtp.1"]) == 3_559_944_536


def test_base_has_fp8_experts_and_float32_scales() -> None:
    config = DeepseekV4Config.from_dict(PREVIEW_CONFIG)
    by_name = {spec.name: spec for spec in tensor_inventory(config, BASE)}
    name = "layers.7.ffn.experts.3.w2"
    assert by_name[f"{name}.weight"] == TensorSpec(f"{name}.weight", "F8_E4M3", (4096, 2048))
    assert by_name[f"{name}.scale"] == TensorSpec(f"{name}.scale", "F32", (32, 16))
    assert by_name["layers.0.attn.wkv.scale"].dtype == "F32"
    assert len(by_name) == 69_187


def test_every_quantised_weight_has_a_scale_grid_that_covers_it() -> None:
    config = DeepseekV4Config.from_dict(PREVIEW_CONFIG)
    by_name = {spec.name: spec for spec in tensor_inventory(config, PREVIEW)}
    weights = {name: spec for name, spec in by_name.items() if name.endswith(".weight")}
    for name, spec in weights.items():
        scale = by_name.get(name.removesuffix(".weight") + ".scale")
        assert (scale is not None) == (spec.dtype in ("F8_E4M3", "I8"))
        if spec.dtype == "F8_E4M3" and scale is not None:
            assert scale.shape == tuple(-(-n // 128) for n in spec.shape)
