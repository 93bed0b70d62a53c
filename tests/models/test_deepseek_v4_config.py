import json
from pathlib import Path
from typing import Any

import pytest

from moet.errors import ConfigError
from moet.models.deepseek_v4_config import DeepseekV4Config
from tests.models.released_config import CONFIG_0731, PREVIEW_CONFIG


def test_released_config_is_accepted_and_gives_the_layer_map() -> None:
    config = DeepseekV4Config.from_dict(PREVIEW_CONFIG)
    kinds = [config.layer_kind(i) for i in range(43)]
    assert [kinds.count(kind) for kind in ("window", "csa", "hca")] == [2, 21, 20]
    assert kinds[:5] == ["window", "window", "csa", "hca", "csa"]
    assert config.layer_kind(43) == "window"
    assert [config.is_hash_layer(i) for i in (0, 2, 3, 43)] == [True, True, False, False]
    assert (config.qk_nope_head_dim, config.num_draft_blocks, config.has_dspark) == (448, 1, False)


def test_0731_extras_mean_three_dspark_stages_whatever_the_nextn_count_says() -> None:
    config = DeepseekV4Config.from_dict(CONFIG_0731)
    assert config.has_dspark
    assert config.num_draft_blocks == 3
    assert config.num_nextn_predict_layers == 1


def test_absent_expert_dtype_means_fp4() -> None:
    raw = {k: v for k, v in PREVIEW_CONFIG.items() if k != "expert_dtype"}
    assert DeepseekV4Config.from_dict(raw).expert_dtype == "fp4"


@pytest.mark.parametrize("raw", [PREVIEW_CONFIG, CONFIG_0731])
def test_to_dict_is_read_back_as_the_same_config(raw: dict[str, Any]) -> None:
    config = DeepseekV4Config.from_dict(raw)
    assert DeepseekV4Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("model_type", "deepseek_v41"),
        ("norm_topk_prob", False),
        ("n_group", 8),
        ("num_key_value_heads", 8),
        ("tie_word_embeddings", True),
        ("expert_dtype", "int4"),
        ("vocab_size", "many"),
        ("vocab_size", True),
        ("hidden_size", 0),
        ("o_groups", 7),
        ("compress_ratios", [0] * 42),
        ("compress_ratios", [0] * 42 + [8, 0]),
        ("compress_ratios", [0] * 43 + [4]),
        ("num_experts_per_tok", 257),
        ("eos_token_id", 129280),
        ("rope_scaling", {"type": "linear", "factor": 16}),
        ("rope_scaling", PREVIEW_CONFIG["rope_scaling"] | {"mscale": 1.0}),
        ("rope_scaling", {"type": "yarn", "factor": 16}),
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"weight_block_size": [32, 32]}),
        ("dspark_block_size", 5),
    ],
)
def test_surprising_values_stop_the_load_and_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepseekV4Config.from_dict(PREVIEW_CONFIG | {key: value})
    assert key.split("_")[0] in str(caught.value)


@pytest.mark.parametrize("key", ["hidden_size", "scoring_func", "rope_scaling", "swiglu_limit"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = {k: v for k, v in PREVIEW_CONFIG.items() if k != key}
    with pytest.raises(ConfigError, match=key):
        DeepseekV4Config.from_dict(raw)


def test_a_config_file_that_is_absent_or_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="does not exist"):
        DeepseekV4Config.from_file(path)
    for text in ("{", "[]", '"x"'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            DeepseekV4Config.from_file(path)
