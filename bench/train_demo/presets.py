"""The shapes of the demo models, and of miniatures for tests."""

from __future__ import annotations

from typing import Literal

from moet.models.deepseek_v4_config import DeepseekV4Config, RopeScaling
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig

MAX_LENGTH = 16384


Size = Literal["wide", "narrow", "micro"]
"""wide: 256 channels. narrow: 128, for files of at most 12 MB. micro: for tests."""


def v4_config(vocab_size: int, size: Size = "wide") -> DeepseekV4Config:
    """All three attention kinds, hash and biased routing, one MTP block."""
    ratios = {
        "wide": (0, 0, 4, 128, 4, 128, 0),
        "narrow": (0, 0, 4, 128, 4, 128, 4, 128, 0),
        "micro": (0, 4, 128, 4, 0),
    }[size]
    micro = size == "micro"
    return DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=256 if size == "wide" else 128,
        num_hidden_layers=len(ratios) - 1,
        num_attention_heads=2 if micro else 4,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        sliding_window=128,
        compress_ratios=ratios,
        index_n_heads=32 if micro else 8,  # few heads make ties, which differ between graphs
        index_head_dim=128,
        index_topk=64 if micro else 256,
        n_routed_experts=4 if micro else 16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        num_hash_layers=1 if micro else 2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        max_position_embeddings=MAX_LENGTH,
        rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=65536),
        rope_theta=10000,
        compress_rope_theta=160000,
        rms_norm_eps=1e-6,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        num_nextn_predict_layers=1,
    )


def glm_config(
    vocab_size: int, eos_token_id: tuple[int, ...] = (0,), size: Size = "wide"
) -> GlmMoeDsaConfig:
    """Latent attention, index owners and sharers, one dense layer, one MTP layer."""
    micro = size == "micro"
    layers = 4 if micro else 6
    return GlmMoeDsaConfig(
        vocab_size=vocab_size,
        hidden_size=256 if size == "wide" else 128,
        num_hidden_layers=layers,
        num_attention_heads=2 if micro else 4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        # Few heads make ties, which differ between graphs; many make a large file.
        index_n_heads={"wide": 8, "narrow": 4, "micro": 32}[size],
        index_head_dim=128,
        index_topk=64 if micro else 1024,
        intermediate_size=512 if size == "wide" else 256,
        moe_intermediate_size=128,
        n_routed_experts=4 if micro else 16,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=8_000_000.0,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id[0],
        indexer_types=("full", "shared") * (layers // 2),
        num_nextn_predict_layers=1,
        index_share_for_mtp_iteration=True,
    )
