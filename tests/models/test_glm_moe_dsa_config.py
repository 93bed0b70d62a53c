"""GLM-5.2's config: every released form is read, every surprise stops the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from moet.errors import ConfigError
from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from tests.models.glm_configs import OWNERS, released, tiny

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_released_forms_are_read(flavour: Flavour) -> None:
    config = GlmMoeDsaConfig.from_dict(released(flavour))
    assert config.rope_theta == 8000000
    assert config.qk_head_dim == 256
    assert config.eos_token_id == (154820, 154827, 154829)
    assert config.num_draft_blocks == 1
    assert [i for i in range(78) if config.is_dense(i)] == [0, 1, 2]


def test_twenty_one_layers_and_the_draft_layer_own_an_indexer() -> None:
    listed = GlmMoeDsaConfig.from_dict(released())
    raw = released()
    del raw["indexer_types"]
    by_rule = GlmMoeDsaConfig.from_dict(raw)
    for config in (listed, by_rule):
        assert {i for i in range(78) if config.owns_indexer(i)} == OWNERS
        assert config.owns_indexer(78)
    assert len(OWNERS) == 21


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_written_config_reads_back_equal(flavour: Flavour) -> None:
    config = GlmMoeDsaConfig.from_dict(tiny(num_nextn_predict_layers=1, eos_token_id=[1, 7]))
    again = GlmMoeDsaConfig.from_dict(json.loads(json.dumps(config.to_dict(flavour))))
    assert again.to_dict(flavour) == config.to_dict(flavour)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"n_group": 8}, "n_group is 8"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters.rope_ty"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": None}, "rope_parameters is None"),
        ({"rope_theta": 10000.0}, "rope_theta is 10000.0; rope_parameters says"),
        ({"index_topk_pattern": "FSSS"}, "index_topk_pattern"),
        ({"indexer_types": ["full"] * 7}, "indexer_types is 7"),
        ({"indexer_types": ["shared"] * 8}, "the first layer has no selection"),
        ({"indexer_types": ["full"] * 7 + ["half"]}, "known are 'full' and 'shared'"),
        ({"mlp_layer_types": ["sparse"] * 8}, "mlp_layer_types"),
        ({"num_experts": 8}, "num_experts is 8; the other keys say 16"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17; there are 16"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be positive"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; an integer"),
        ({"eos_token_id": [256]}, "eos_token_id is 256"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
        ({"model_type": "glm4_moe"}, "model_type"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None; every release states it"),
    ],
)
def test_surprises_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        GlmMoeDsaConfig.from_dict(tiny(**change))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="does not exist"):
        GlmMoeDsaConfig.from_file(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        GlmMoeDsaConfig.from_file(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        GlmMoeDsaConfig.from_file(path)
