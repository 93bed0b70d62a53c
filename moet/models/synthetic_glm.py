"""GLM-5.2 in synthetic sizes: configs, tensors and text files; no weights."""

from __future__ import annotations

from dataclasses import replace

from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.glm_moe_dsa_tensors import inventory_parts
from moet.models.synthetic_design import Design, Size
from moet.models.synthetic_tokenizer_glm import (
    END_TOKENS,
    special_token_ids,
    tokenizer_config,
    tokenizer_json,
)

MODEL_NAME = "glm-5.2"

_FULL = GlmMoeDsaConfig(
    vocab_size=154880,
    hidden_size=6144,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-5,
    rope_theta=8000000,
    eos_token_id=(),
    index_topk_freq=4,
    index_skip_topk_offset=3,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
)
_TINY = replace(
    _FULL,
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=7,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=96,
    index_head_dim=64,
    index_topk=32,
    intermediate_size=384,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    max_position_embeddings=65536,
)
_SMALL = replace(
    _TINY,
    vocab_size=4096,
    hidden_size=1024,
    num_hidden_layers=9,
    num_attention_heads=16,
    q_lora_rank=256,
    kv_lora_rank=256,
    index_head_dim=128,
    index_topk=128,
    intermediate_size=2048,
    moe_intermediate_size=256,
)
_SIZES: dict[Size, GlmMoeDsaConfig] = {"tiny": _TINY, "small": _SMALL, "full": _FULL}


def design(size: Size, flavour: Flavour) -> Design:
    """One size in one of the published flavours."""
    config = _SIZES[size]
    ids = special_token_ids(config.vocab_size)
    ends = tuple(ids[text] for text in END_TOKENS)
    config = replace(config, eos_token_id=ends, pad_token_id=ends[0])
    generation = {
        "do_sample": True,
        "eos_token_id": list(ends),
        "pad_token_id": ends[0],
        "temperature": 1.0,
        "top_p": 0.95,
    }
    texts = {
        "config.json": config.to_dict(flavour),
        "generation_config.json": generation,
        "tokenizer.json": tokenizer_json(config.vocab_size),
        "tokenizer_config.json": tokenizer_config(config.max_position_embeddings),
    }
    return Design(config, inventory_parts(config, flavour), texts)
