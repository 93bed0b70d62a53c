"""Tiny DeepSeek-V4-Flash models whose weights come from a hash of (tensor name, flat index), so
that any machine can make them; and a driver that feeds token ids through them in any order."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings, Rounding
from moet.models.base import ExpertProvider, ForwardInput, KVTensors, TensorSource
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.deepseek_v4_config import DeepseekV4Config, RopeScaling
from moet.models.deepseek_v4_tensors import PREVIEW, tensor_inventory
from moet.models.formats import quantize_fp8_block, quantize_mxfp4
from moet.models.layers import Weights
from moet.models.moe import ResidentExperts

GOLDEN = DeepseekV4Config(
    vocab_size=257,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    num_hash_layers=2,
    sliding_window=8,
    compress_ratios=(0, 0, 4, 128, 4, 128, 0),
    index_n_heads=32,
    index_head_dim=16,
    index_topk=6,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    max_position_embeddings=4096,
    rope_theta=1e4,
    compress_rope_theta=1.6e5,
    rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=64),
    rms_norm_eps=1e-6,
    num_nextn_predict_layers=1,
)
# Widths that the block formats of fp8 rows and MXFP4 keys need.
DEPLOYED = replace(
    GOLDEN,
    hidden_size=128,
    moe_intermediate_size=64,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=64,
    index_head_dim=128,
    o_lora_rank=32,
)
GOLDEN_IDS = [(37 * i + 11) % 255 + 2 for i in range(300)]


def hash_uniform(name: str, shape: Sequence[int]) -> Tensor:
    """[-1, 1) from the lowbias32 hash of crc32(name) + 1 + flat index."""
    mask = np.uint64(0xFFFFFFFF)
    start = np.uint64(1 + zlib.crc32(name.encode()))
    x = (np.arange(int(np.prod(shape)), dtype=np.uint64) + start) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint64(shift)
        x = (x * np.uint64(factor)) & mask
    x ^= x >> np.uint64(16)
    return torch.tensor(x.astype(np.float64) / 2**31 - 1.0, dtype=torch.float32).view(*shape)


def hash_weight(name: str, shape: Sequence[int]) -> Tensor:
    """A float weight scaled by what its name says it is."""
    x = hash_uniform(name, shape)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * x
    if name.endswith(("attn_sink", ".ape")):
        return 1.5 * x
    if name.endswith("_base"):
        return x
    if name.endswith("_scale"):
        return 1 + 0.5 * x
    return 0.5 * x if name.endswith(("_fn", "gate.bias")) else 0.3 * x


class DictSource:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


def hash_source(config: DeepseekV4Config, *, quantised: bool = False) -> DictSource:
    """All tensors of the official inventory; float32 unless `quantised`, then as released."""
    tensors: dict[str, Tensor] = {}
    for spec in tensor_inventory(config, PREVIEW):
        if spec.name.endswith(".scale"):
            continue
        if spec.dtype == "I64":
            rows, top_k = spec.shape
            ids = 7 * torch.arange(rows)[:, None] + 3 * torch.arange(top_k)
            tensors[spec.name] = ids % config.n_routed_experts
            continue
        pairs = spec.dtype == "I8"
        shape = (spec.shape[0], spec.shape[1] * 2) if pairs else spec.shape
        weight = hash_weight(spec.name, shape)
        if not quantised or spec.dtype == "F32":
            tensors[spec.name] = weight
        elif spec.dtype == "BF16":
            tensors[spec.name] = weight.bfloat16()
        else:
            codes, scale = quantize_mxfp4(weight) if pairs else quantize_fp8_block(weight)
            tensors[spec.name] = codes.view(torch.int8 if pairs else torch.float8_e4m3fn)
            scale_name = spec.name.removesuffix(".weight") + ".scale"
            tensors[scale_name] = scale.view(torch.float8_e8m0fnu)
    return DictSource(tensors)


def resident_experts(
    config: DeepseekV4Config, source: TensorSource, settings: ModelSettings, *, mtp: bool = False
) -> ResidentExperts:
    prefixes = {i: f"layers.{i}.ffn.experts." for i in range(config.num_hidden_layers)}
    if mtp:
        prefixes[config.num_hidden_layers] = "mtp.0.ffn.experts."
    return ResidentExperts.load(
        Weights(source, settings),
        prefixes,
        num_experts=config.n_routed_experts,
        dim=config.hidden_size,
        inter=config.moe_intermediate_size,
    )


@dataclass(eq=False)
class Rig:
    """A model with experts and freshly dirtied KV state."""

    model: DeepseekV4
    experts: ExpertProvider
    kv: KVTensors


def load_rig(
    config: DeepseekV4Config,
    source: TensorSource,
    rounding: Rounding = "none",
    *,
    num_spec_tokens: int = 0,
    kv_dtype: KVDtype | None = None,
) -> Rig:
    settings = ModelSettings(rounding=rounding)
    dtype: KVDtype = kv_dtype or ("fp32" if rounding == "none" else "fp8")
    model = DeepseekV4.load(config, source, settings, dtype, num_spec_tokens)
    experts = resident_experts(config, source, settings, mtp=num_spec_tokens > 0)
    return Rig(model, experts, dirty_kv(model))


def dirty_kv(model: DeepseekV4, num_pages: int = 8, num_slots: int = 6) -> dict[str, Tensor]:
    """KV tensors full of bytes that read as NaN or as huge numbers: old state must never count."""
    return {
        group.name: torch.full(
            (
                len(group.layers),
                num_pages if group.kind == "paged" else num_slots,
                group.page_bytes,
            ),
            0x7F,
            dtype=torch.uint8,
        )
        for group in model.kv_cache_spec().groups
    }


@dataclass(frozen=True)
class Piece:
    """Rows of one sequence in a step: its tokens from `start` on, and where its state lives."""

    token_ids: Sequence[int]
    start: int
    seq_slot: int = 0
    pages: tuple[int, ...] = (0, 1, 2)


def forward_input(pieces: Sequence[Piece]) -> ForwardInput:
    """A step over several sequences, with the logits of every row."""
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + len(piece.token_ids))
    positions = [torch.arange(p.start, p.start + len(p.token_ids)) for p in pieces]
    return ForwardInput(
        token_ids=torch.tensor([t for p in pieces for t in p.token_ids], dtype=torch.int64),
        positions=torch.cat(positions),
        cu_seqlens_q=tuple(bounds),
        seq_slots=torch.tensor([p.seq_slot for p in pieces]),
        page_table=torch.tensor([p.pages for p in pieces]),
        seq_lens=tuple(p.start + len(p.token_ids) for p in pieces),
        logits_indices=torch.arange(bounds[-1]),
    )


def run_step(rig: Rig, pieces: Sequence[Piece]) -> list[Tensor]:
    """Logits per piece, [rows, vocab_size]."""
    output = rig.model.forward(forward_input(pieces), rig.kv, rig.experts)
    return list(torch.split(output.logits, [len(p.token_ids) for p in pieces]))


def run_chunks(
    rig: Rig,
    token_ids: Sequence[int],
    chunks: Sequence[int],
    *,
    seq_slot: int = 0,
    pages: tuple[int, ...] = (0, 1, 2),
) -> Tensor:
    """Logits of every position, fed in chunks of the given sizes (the last one takes the rest)."""
    logits, start = [], 0
    for size in [*chunks, len(token_ids)]:
        part = token_ids[start : start + size]
        if part:
            logits += run_step(rig, [Piece(part, start, seq_slot, pages)])
        start += size
    return torch.cat(logits)
