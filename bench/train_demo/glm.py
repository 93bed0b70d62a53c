"""The GLM-5.2 architecture as a training graph: the served model's arithmetic over whole rows.

Keys and values are expanded. Parameters carry the official tensor names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train_demo.layers import (
    CHAINED_SHARE,
    Experts,
    LayerNorm,
    Linear,
    Losses,
    Norm,
    Store,
    angles,
    index_loss,
    mixture_weights,
    rotate,
    swiglu,
    token_loss,
    top_mask,
)
from moet.kernels.rope import rope_frequencies
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig

NEVER = -1e9
INDEX_NORM_EPS = 1e-6


class Look(NamedTuple):
    """How a pass looks at its rows: the rotation, and which queries teach the indexers."""

    cos: Tensor  # [T, rope_dim / 2]
    sin: Tensor
    sparse: bool  # attend to the indexers' choice only
    offset: Tensor  # [1] int64, first query that teaches
    stride: int  # distance to the next one

    def pick(self, x: Tensor, dim: int) -> Tensor:
        """Every stride-th entry of a dimension."""
        spread = x.unflatten(dim, (-1, self.stride))
        return spread.index_select(dim + 1, self.offset).squeeze(dim + 1)


class Indexer(nn.Module):
    """Scores positions. It sees detached inputs and learns from its own loss only."""

    def __init__(self, c: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.top_k = c.index_n_heads, c.index_head_dim, c.index_topk
        self.wq_b = Linear(c.q_lora_rank, self.heads * self.dim)
        self.wk = Linear(c.hidden_size, self.dim)
        self.k_norm = LayerNorm(self.dim, INDEX_NORM_EPS)
        self.weights_proj = Linear(c.hidden_size, self.heads, store="keep")

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.k_norm(self.wk(x)), cos, sin, at_end=False)

    def scores(self, x: Tensor, qr: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, q, n] fp32 for the queries x, qr ([B, q, ...]) at the positions of cos and sin."""
        q = rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.dim)), cos, sin, at_end=False)
        gate = F.linear(x.float(), self.weights_proj.weight.float())
        gate = gate * (self.heads**-0.5 * self.dim**-0.5)
        products = torch.einsum("bqhd,bnd->bqhn", q, keys).relu()
        return torch.einsum("bqhn,bqh->bqn", products, gate.to(products.dtype)).float()

    def taught(self, x: Tensor, qr: Tensor, look: Look) -> Tensor:
        """Scores of the queries that teach: [B, T / stride, T]."""
        x, qr = x.detach(), qr.detach()
        cos, sin = look.pick(look.cos, 0), look.pick(look.sin, 0)
        keys = self.keys(x, look.cos, look.sin)
        return self.scores(look.pick(x, 1), look.pick(qr, 1), keys, cos, sin)

    @torch.no_grad()
    def choice(self, x: Tensor, qr: Tensor, look: Look) -> Tensor:
        """[B, T, T] bool: the positions that would be selected, chunk by chunk of queries."""
        keys, parts = self.keys(x, look.cos, look.sin), []
        key_at = torch.arange(x.shape[1], device=x.device)
        for first in range(0, x.shape[1], 512):
            rows = slice(first, first + 512)
            cos, sin = look.cos[rows], look.sin[rows]
            scores = self.scores(x[:, rows], qr[:, rows], keys, cos, sin)
            past = key_at <= key_at[rows].unsqueeze(-1)
            parts.append(top_mask(scores.masked_fill(~past, NEVER), self.top_k) & past)
        return torch.cat(parts, 1)


class Attention(nn.Module):
    def __init__(self, c: GlmMoeDsaConfig, layer_idx: int) -> None:
        super().__init__()
        self.c = c
        heads, hidden, eps = c.num_attention_heads, c.hidden_size, c.rms_norm_eps
        self.q_a_proj = Linear(hidden, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, eps)
        self.q_b_proj = Linear(c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, hidden, gain=_residual_gain(c))
        if c.owns_indexer(layer_idx):
            self.indexer = Indexer(c)
        self.owner = c.owns_indexer(layer_idx)

    def forward(
        self, x: Tensor, look: Look, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x: [B, T, hidden]. mask: the selection of the owner below, unless this layer owns one.

        Returns the mixed rows, where the teaching queries attended, the indexer's scores of them
        (owners), and the selection in force (None while everything is attended to).
        """
        c = self.c
        qr = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(qr).unflatten(-1, (c.num_attention_heads, -1))
        q = rotate(q, look.cos, look.sin, at_end=True)
        latent, rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        rope = rotate(rope, look.cos, look.sin, at_end=True).unsqueeze(2)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1))
        nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        key = torch.cat([nope, rope.expand(-1, -1, c.num_attention_heads, -1)], -1)
        scores = None
        if self.owner:
            scores = self.indexer.taught(x, qr, look)
            mask = self.indexer.choice(x, qr, look) if look.sparse else None
        q, key, value = (z.transpose(1, 2) for z in (q, key, value))
        together = mask.unsqueeze(1) if mask is not None else None
        out = F.scaled_dot_product_attention(
            q, key, value, attn_mask=together, is_causal=together is None
        )
        target = self._attended(q, key, look, mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), target, scores, mask

    @torch.no_grad()
    def _attended(self, q: Tensor, key: Tensor, look: Look, mask: Tensor | None) -> Tensor:
        """Attention probabilities of the teaching queries, summed over heads: [B, q, T] fp32."""
        logits = torch.einsum("bhqd,bhkd->bhqk", look.pick(q, 2), key) * self.c.qk_head_dim**-0.5
        allowed = _past(look, key.shape[2], key.device)
        if mask is not None:
            allowed = allowed & look.pick(mask, 1).unsqueeze(1)
        return logits.float().masked_fill(~allowed, NEVER).softmax(-1).sum(1)


def _past(look: Look, length: int, device: torch.device) -> Tensor:
    """Which positions the teaching queries may see: [q, T] bool."""
    at = torch.arange(length, device=device)
    return at <= look.pick(at, 0).unsqueeze(-1)


def _residual_gain(c: GlmMoeDsaConfig) -> float:
    return (2 * c.num_hidden_layers) ** -0.5


class Mlp(nn.Module):
    def __init__(self, c: GlmMoeDsaConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, width)
        self.up_proj = Linear(c.hidden_size, width)
        self.down_proj = Linear(width, c.hidden_size, gain=_residual_gain(c))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), None).to(x.dtype))


class Gate(nn.Module):
    def __init__(self, c: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mixture weights [B, T, E] fp32 and tokens per expert [E]."""
        scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        chosen = (scores + self.e_score_correction_bias).topk(self.c.num_experts_per_tok, -1)
        weights = mixture_weights(scores, chosen.indices, self.c.routed_scaling_factor)
        return weights, (weights.detach() > 0).float().sum((0, 1))


class MoE(nn.Module):
    def __init__(self, c: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = Experts(
            c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, out_gain=_residual_gain(c)
        )
        self.shared_experts = Mlp(c, c.moe_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(x)
        return self.experts(x, weights, None) + self.shared_experts(x), load


class Layer(nn.Module):
    """A decoder layer; the draft layer is one too, with its extra parts beside."""

    def __init__(self, c: GlmMoeDsaConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer_idx)
        self.dense = c.is_dense(layer_idx)
        self.mlp = Mlp(c, c.intermediate_size) if self.dense else MoE(c)
        if layer_idx >= c.num_hidden_layers:
            hidden, eps = c.hidden_size, c.rms_norm_eps
            self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
            self.eh_proj = Linear(2 * hidden, hidden, store="keep")
            self.shared_head = nn.ModuleDict({"norm": Norm(hidden, eps)})

    def forward(
        self, x: Tensor, look: Look, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As Attention.forward, with the tokens per expert last (None in a dense layer)."""
        y, target, scores, mask = self.self_attn(self.input_layernorm(x), look, mask)
        x = x + y
        u = self.post_attention_layernorm(x)
        if self.dense:
            return x + self.mlp(u), target, scores, mask, None
        y, load = self.mlp(u)
        return x + y, target, scores, mask, load


class Body(nn.Module):
    def __init__(self, c: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=1.0)
        num_layers = c.num_hidden_layers + c.num_draft_blocks
        self.layers = nn.ModuleList(Layer(c, i) for i in range(num_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class Glm(nn.Module):
    """ids [B, T] to logits; `losses` for training. T is a multiple of the stride."""

    def __init__(self, config: GlmMoeDsaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, store="keep", gain=0.5)
        frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def look(
        self, length: int, *, sparse: bool = True, offset: Tensor | None = None, stride: int = 1
    ) -> Look:
        device = self.frequencies.device
        offset = torch.zeros(1, dtype=torch.long, device=device) if offset is None else offset
        cos, sin = angles(torch.arange(length, device=device), self.frequencies)
        return Look(cos, sin, sparse, offset, stride)

    def hidden(self, ids: Tensor, look: Look) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Hidden states after the final norm, the summed indexer loss, loads per sparse layer."""
        x = self.model.embed_tokens(ids).to(self.dtype)
        mask, loads, groups = None, [], []
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            x, target, scores, mask, load = layer(x, look, mask)
            if scores is not None:
                groups.append((scores, target, mask))
            else:
                groups[-1] = (groups[-1][0], groups[-1][1] + target, mask)
            if load is not None:
                loads.append(load)
        total = sum(
            (_teach(look, *group) for group in groups), x.new_zeros((), dtype=torch.float32)
        )
        return self.model.norm(x), total, loads

    def draft(self, next_ids: Tensor, hidden: Tensor, look: Look) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the draft layer after its norm, its indexer's loss, its loads."""
        layer = self.model.layers[self.config.num_hidden_layers]
        embedded = self.model.embed_tokens(next_ids).to(self.dtype)
        x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1))
        x, target, scores, mask, load = layer(x, look, None)
        return layer.shared_head["norm"](x), _teach(look, scores, target, mask), load

    def losses(self, ids: Tensor, weights: Tensor, **how: Any) -> Losses:
        """ids: [B, T + 2]; weights: [B, T + 2] fp32, how much predicting each token counts."""
        inputs, after = ids[:, :-2], ids[:, 1:-1]
        look = self.look(inputs.shape[1], **how)
        hidden, index, loads = self.hidden(inputs, look)
        main = token_loss(self.lm_head(hidden), after, weights[:, 1:-1])
        drafted, draft_index, load = self.draft(after, hidden, look)
        draft = token_loss(self.lm_head(drafted), ids[:, 2:], weights[:, 2:])
        # A second draft goes on from the first one's hidden states, a position further.
        again, _, _ = self.draft(after, F.pad(drafted[:, :-1], (0, 0, 1, 0)), look)
        chained = token_loss(self.lm_head(again), ids[:, 2:], weights[:, 2:])
        draft = (1 - CHAINED_SHARE) * draft + CHAINED_SHARE * chained
        weight = weights[:, 1:-1].sum()
        return Losses(main, draft, index + draft_index, weight, [*loads, load])


def _teach(look: Look, scores: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    visible = _past(look, target.shape[-1], target.device)
    if mask is not None:
        visible = visible & look.pick(mask, 1)
    return index_loss(scores, target, visible)


def kept_in_bf16(c: GlmMoeDsaConfig, name: str, store: Store) -> bool:
    """Whether the NVFP4 release stores a weight as bf16: everything but the decoder's experts."""
    return store != "expert" or name.startswith(f"model.layers.{c.num_hidden_layers}.")


def flops_per_token(c: GlmMoeDsaConfig, length: int) -> float:
    """Multiply-adds times two of one forward pass, as this graph computes them."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    experts = (c.n_routed_experts + 1) * 3 * hidden * c.moe_intermediate_size
    core = hidden * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim)
    core += c.q_lora_rank * heads * c.qk_head_dim + heads * c.v_head_dim * hidden
    core += c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    attention = heads * (c.qk_head_dim + c.v_head_dim) * length / 2
    layers = c.num_hidden_layers + c.num_draft_blocks
    return 2 * (layers * (experts + core + attention) + 2 * hidden * c.vocab_size)
