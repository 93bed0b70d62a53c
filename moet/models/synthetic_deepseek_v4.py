"""DeepSeek-V4-Flash in synthetic sizes: configs, tensors and text files; no weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moet.models.deepseek_v4_config import DeepseekV4Config, RopeScaling
from moet.models.deepseek_v4_tensors import ARTEFACTS, inventory_parts
from moet.models.synthetic_design import Design, Size
from moet.models.synthetic_tokenizer import (
    BOS,
    EOS,
    NOISE,
    special_token_ids,
    tokenizer_config,
    tokenizer_json,
)

MODEL_NAME = "deepseek-v4-flash"
Flavour = Literal["preview", "0731", "base"]

_FULL = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    max_position_embeddings=1048576,
    rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=65536),
    rope_theta=10000,
    compress_rope_theta=160000,
    rms_norm_eps=1e-6,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    num_nextn_predict_layers=1,
)
_TINY = replace(
    _FULL,
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=7,
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0),
    index_n_heads=32,
    index_topk=32,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    max_position_embeddings=65536,
    rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=4096),
)
_SMALL = replace(
    _TINY,
    vocab_size=4096,
    hidden_size=1024,
    num_hidden_layers=9,
    num_attention_heads=16,
    head_dim=256,
    q_lora_rank=256,
    o_groups=4,
    o_lora_rank=256,
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128, 4, 0),
    index_topk=128,
    n_routed_experts=32,
    moe_intermediate_size=512,
)
_SIZES: dict[Size, DeepseekV4Config] = {"tiny": _TINY, "small": _SMALL, "full": _FULL}


def design(size: Size, flavour: Flavour) -> Design:
    """One size in one of the published forms."""
    config = _with_flavour(_SIZES[size], flavour)
    generation = {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": config.eos_token_id,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    texts = {
        "config.json": config.to_dict(),
        "generation_config.json": generation,
        "tokenizer.json": tokenizer_json(config.vocab_size),
        "tokenizer_config.json": tokenizer_config(config.max_position_embeddings),
    }
    return Design(config, inventory_parts(config, ARTEFACTS[flavour]), texts)


def _with_flavour(config: DeepseekV4Config, flavour: Flavour) -> DeepseekV4Config:
    ids = special_token_ids(config.vocab_size)
    config = replace(config, bos_token_id=ids[BOS], eos_token_id=ids[EOS])
    if flavour == "base":
        return replace(config, expert_dtype="fp8")
    if flavour == "preview":
        return config
    layers = config.num_hidden_layers
    return replace(
        config,
        compress_ratios=(*config.compress_ratios, 0, 0),
        dspark_block_size=5,
        dspark_noise_token_id=ids[NOISE],
        dspark_target_layer_ids=tuple(range(layers - 3, layers)),
        dspark_markov_rank=config.hidden_size // 16,
    )
