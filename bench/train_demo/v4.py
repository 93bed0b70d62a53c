"""The V4-Flash architecture as a training graph: the served model's arithmetic over whole rows.

Parameters carry the official tensor names, so that a state dict is nearly a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train_demo.layers import (
    CHAINED_SHARE,
    Experts,
    Linear,
    Losses,
    Norm,
    angles,
    index_loss,
    mixture_weights,
    rms,
    rotate,
    swiglu,
    token_loss,
    top_mask,
)
from bench.train_demo.sinkhorn import sinkhorn
from moet.kernels.rope import Yarn, rope_frequencies
from moet.models.deepseek_v4_config import DeepseekV4Config

NEVER = -1e9  # a logit that takes no part


class Compressor(nn.Module):
    """Pools every `ratio` tokens into one entry; ratio 4 reaches back over the previous window."""

    def __init__(self, c: DeepseekV4Config, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width = ratio, width
        channels = width * (2 if ratio == 4 else 1)
        self.ape = nn.Parameter(torch.randn(ratio, channels))
        self.wkv = Linear(c.hidden_size, channels, store="keep")
        self.wgate = Linear(c.hidden_size, channels, store="keep", gain=0.5)
        self.norm = Norm(width, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, dim], T a multiple of ratio. Returns [B, T / ratio, width]."""
        ratio, width = self.ratio, self.width
        values = self.wkv(x).float().unflatten(1, (-1, ratio))
        scores = self.wgate(x).float().unflatten(1, (-1, ratio)) + self.ape.float()
        if ratio == 4:
            values = _overlapped(values, width, 0.0)
            scores = _overlapped(scores, width, NEVER)
        entry = (values * scores.softmax(2)).sum(2).to(x.dtype)
        return rotate(self.norm(entry), cos[::ratio], sin[::ratio], at_end=True)


def _overlapped(x: Tensor, width: int, absent: float) -> Tensor:
    """[B, S, 4, 2w] -> [B, S, 8, w]: first halves of the window before, second halves of this."""
    before = F.pad(x[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=absent)
    return torch.cat([before, x[..., width:]], 2)


class Indexer(nn.Module):
    """Scores compressed entries. It sees detached inputs and learns from its own loss only."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.heads, self.dim = c.index_n_heads, c.index_head_dim
        self.wq_b = Linear(c.q_lora_rank, self.heads * self.dim)
        self.weights_proj = Linear(c.hidden_size, self.heads, store="keep")
        self.compressor = Compressor(c, 4, self.dim)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.compressor(x, cos, sin)

    def scores(self, x: Tensor, qr: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, q, n] fp32 for the queries x, qr ([B, q, ...]) at the positions of cos and sin."""
        q = rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.dim)), cos, sin, at_end=True)
        weights = self.weights_proj(x).float() * (self.dim**-0.5 * self.heads**-0.5)
        products = torch.einsum("bqhd,bnd->bqhn", q, keys).relu()
        return torch.einsum("bqhn,bqh->bqn", products, weights.to(products.dtype)).float()


class Attention(nn.Module):
    """Window branch in blocks of the window's size, compressed entries beside it, one softmax."""

    def __init__(self, c: DeepseekV4Config, ratio: int) -> None:
        super().__init__()
        self.c, self.ratio = c, ratio
        dim, rank, width = c.hidden_size, c.q_lora_rank, c.head_dim
        heads, groups = c.num_attention_heads, c.o_groups
        self.wq_a = Linear(dim, rank)
        self.q_norm = Norm(rank, c.rms_norm_eps)
        self.wq_b = Linear(rank, heads * width)
        self.wkv = Linear(dim, width)
        self.kv_norm = Norm(width, c.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = Linear(heads * width // groups, groups * c.o_lora_rank)
        self.wo_b = Linear(groups * c.o_lora_rank, dim, gain=_residual_gain(c))
        if ratio:
            self.compressor = Compressor(c, ratio, width)
        if ratio == 4:
            self.indexer = Indexer(c)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, sparse: bool, offset: Tensor, stride: int
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, dim]. Returns [B, T, dim] and the indexer's loss (zero without one).

        sparse: attend to the indexer's choice only. The indexer's loss looks at every stride-th
        query, from `offset` ([1] int64) on.
        """
        c, (batch, length, _) = self.c, x.shape
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = rotate(rms(q.float(), c.rms_norm_eps).to(x.dtype), cos, sin, at_end=True)
        kv = rotate(self.kv_norm(self.wkv(x)), cos, sin, at_end=True)
        logits = []
        blocks = _window_logits(q, kv, c.sliding_window)
        logits.append(blocks[0])
        loss = x.new_zeros((), dtype=torch.float32)
        entries, chosen, visible = None, None, None
        if self.ratio:
            entries = self.compressor(x, cos, sin)
            at = torch.arange(length, device=x.device)
            count = (at + 1) // self.ratio
            visible = torch.arange(entries.shape[1], device=x.device) < count.unsqueeze(-1)
            chosen = visible.expand(batch, -1, -1)
            if self.ratio == 4 and sparse:
                chosen = chosen & self._choice(x, qr, cos, sin, visible)
            logits.append(_entry_logits(q, entries, chosen, c.sliding_window))
        sink = self.attn_sink.float().view(1, 1, -1, 1, 1).expand(*blocks[0].shape[:-1], 1)
        scale = c.head_dim**-0.5
        p = torch.cat([*(z.float() * scale for z in logits), sink], -1).softmax(-1).to(x.dtype)
        near = p[..., : 2 * c.sliding_window]
        out = torch.einsum("bnhqk,bnkd->bnqhd", near, blocks[1])
        if entries is not None:
            far = p[..., 2 * c.sliding_window : -1]
            out = out + torch.einsum("bnhqs,bsd->bnqhd", far, entries)
            if self.ratio == 4:
                assert chosen is not None
                target = far.detach().float().mean(2).flatten(1, 2)
                loss = self._index_loss(x, qr, cos, sin, target, chosen, offset, stride)
        o = rotate(out.flatten(1, 2), cos, sin, at_end=True, inverse=True)
        o = o.flatten(-2).unflatten(-1, (c.o_groups, -1))
        weight = self.wo_a.weight.to(x.dtype).unflatten(0, (c.o_groups, -1))
        return self.wo_b(torch.einsum("btgd,grd->btgr", o, weight).flatten(-2)), loss

    @torch.no_grad()
    def _choice(self, x: Tensor, qr: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        """[B, T, n] bool: the entries that the indexer would select, chunk by chunk of queries."""
        keys, parts = self.indexer.keys(x, cos, sin), []
        for first in range(0, x.shape[1], 1024):
            rows = slice(first, first + 1024)
            scores = self.indexer.scores(x[:, rows], qr[:, rows], keys, cos[rows], sin[rows])
            parts.append(top_mask(scores.masked_fill(~visible[rows], NEVER), self.c.index_topk))
        return torch.cat(parts, 1)

    def _index_loss(
        self,
        x: Tensor,
        qr: Tensor,
        cos: Tensor,
        sin: Tensor,
        target: Tensor,
        chosen: Tensor,
        offset: Tensor,
        stride: int,
    ) -> Tensor:
        x, qr = x.detach(), qr.detach()

        def pick(y: Tensor, dim: int) -> Tensor:
            return y.unflatten(dim, (-1, stride)).index_select(dim + 1, offset).squeeze(dim + 1)

        keys = self.indexer.keys(x, cos, sin)
        scores = self.indexer.scores(pick(x, 1), pick(qr, 1), keys, pick(cos, 0), pick(sin, 0))
        return index_loss(scores, pick(target, 1), pick(chosen, 1))


def _window_logits(q: Tensor, kv: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Products with the own and the previous block: [B, n, H, window, 2 * window], and the keys."""
    blocks = kv.unflatten(1, (-1, window))
    keys = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)
    logits = torch.einsum("bnqhd,bnkd->bnhqk", q.unflatten(1, (-1, window)), keys)
    row = torch.arange(window, device=q.device).unsqueeze(-1)
    key = torch.arange(2 * window, device=q.device)
    inside = (key > row) & (key <= row + window)
    first = torch.arange(blocks.shape[1], device=q.device).view(-1, 1, 1) == 0
    inside = inside & ~(first & (key < window))
    return logits.masked_fill(~inside.unsqueeze(1), NEVER), keys


def _entry_logits(q: Tensor, entries: Tensor, chosen: Tensor, window: int) -> Tensor:
    """Products with compressed entries, shaped like those of the window: [B, n, H, window, S]."""
    logits = torch.einsum("bnqhd,bsd->bnhqs", q.unflatten(1, (-1, window)), entries)
    return logits.masked_fill(~chosen.unflatten(1, (-1, window)).unsqueeze(2), NEVER)


def _residual_gain(c: DeepseekV4Config) -> float:
    return (2 * c.num_hidden_layers) ** -0.5


class Gate(nn.Module):
    """Router: by token id from a fixed table, or by score plus a bias that only selects."""

    def __init__(self, c: DeepseekV4Config, hashed: bool) -> None:
        super().__init__()
        self.c, self.hashed = c, hashed
        self.weight = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size) * 0.02)
        top_k = c.num_experts_per_tok
        if hashed:
            table = torch.rand(c.vocab_size, c.n_routed_experts).argsort(-1)[:, :top_k]
            self.register_buffer("tid2eid", table.contiguous())
        else:
            self.register_buffer("bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Mixture weights [B, T, E] fp32 and tokens per expert [E]."""
        scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        if self.hashed:
            chosen = self.tid2eid[ids]
        else:
            chosen = (scores + self.bias).topk(self.c.num_experts_per_tok, -1).indices
        weights = mixture_weights(scores, chosen, self.c.routed_scaling_factor)
        return weights, (weights.detach() > 0).float().sum((0, 1))


class SharedExpert(nn.Module):
    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.w1 = Linear(c.hidden_size, c.moe_intermediate_size)
        self.w3 = Linear(c.hidden_size, c.moe_intermediate_size)
        self.w2 = Linear(c.moe_intermediate_size, c.hidden_size, gain=_residual_gain(c))
        self.limit = c.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    def __init__(self, c: DeepseekV4Config, hashed: bool) -> None:
        super().__init__()
        self.gate = Gate(c, hashed)
        gain = _residual_gain(c)
        self.experts = Experts(
            c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, out_gain=gain
        )
        self.shared_experts = SharedExpert(c)
        self.limit = c.swiglu_limit

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(x, ids)
        return self.experts(x, weights, self.limit) + self.shared_experts(x), load


class Site(nn.Module):
    """mHC around one sublayer. `fn`, `base` and `scale` keep the names of the checkpoint."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.c, h = c, c.hc_mult
        self.fn = nn.Parameter(torch.randn((2 + h) * h, h * c.hidden_size) * 0.02)
        pre, post = torch.randn(h), torch.randn(h) * 0.5
        self.base = nn.Parameter(torch.cat([pre, post, 4 * torch.eye(h).flatten()]))
        self.scale = nn.Parameter(torch.full((3,), 0.1))

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, h, D] -> x [B, T, D], post [B, T, h], mix [B, T, h, h]."""
        c, h = self.c, self.c.hc_mult
        m = _mixing(streams, self.fn, c.rms_norm_eps)
        base, scale = self.base.float(), self.scale.float()
        pre = torch.sigmoid(m[..., :h] * scale[0] + base[:h]) + c.hc_eps
        post = 2 * torch.sigmoid(m[..., h : 2 * h] * scale[1] + base[h : 2 * h])
        logits = (m[..., 2 * h :] * scale[2] + base[2 * h :]).view(-1, h, h)
        mix = sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps).view(*m.shape[:-1], h, h)
        return _weighted(streams, pre), post, mix

    def expand(self, y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        total = post.unsqueeze(-1) * y.float().unsqueeze(-2)
        for j in range(self.c.hc_mult):
            total = total + mix[..., j, :].unsqueeze(-1) * streams[..., j : j + 1, :].float()
        return total.to(streams.dtype)


def _mixing(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams.float().flatten(-2)
    return F.linear(flat, fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _weighted(streams: Tensor, pre: Tensor) -> Tensor:
    total = streams[..., 0, :].float() * pre[..., :1]
    for j in range(1, streams.shape[-2]):
        total = total + streams[..., j, :].float() * pre[..., j : j + 1]
    return total.to(streams.dtype)


class Block(nn.Module):
    def __init__(self, c: DeepseekV4Config, layer_idx: int) -> None:
        super().__init__()
        self.ratio = c.compress_ratios[layer_idx]
        self.hc_attn, self.hc_ffn = Site(c), Site(c)
        self.attn_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, self.ratio)
        self.ffn = MoE(c, c.is_hash_layer(layer_idx))

    def forward(
        self,
        streams: Tensor,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        sparse: bool,
        offset: Tensor,
        stride: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new streams, the indexer's loss and the tokens per expert."""
        x, post, mix = self.hc_attn.collapse(streams)
        y, loss = self.attn(self.attn_norm(x), cos, sin, sparse, offset, stride)
        streams = self.hc_attn.expand(y, streams, post, mix)
        x, post, mix = self.hc_ffn.collapse(streams)
        y, load = self.ffn(self.ffn_norm(x), ids)
        return self.hc_ffn.expand(y, streams, post, mix), loss, load


class HeadSite(nn.Module):
    """The last collapse, without a mixing matrix."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.c = c
        self.fn = nn.Parameter(torch.randn(c.hc_mult, c.hc_mult * c.hidden_size) * 0.02)
        self.base = nn.Parameter(torch.randn(c.hc_mult) * 0.5)
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, streams: Tensor) -> Tensor:
        m = _mixing(streams, self.fn, self.c.rms_norm_eps)
        pre = torch.sigmoid(m * self.scale.float() + self.base.float()) + self.c.hc_eps
        return _weighted(streams, pre)


class Draft(nn.Module):
    """mtp.0: the next token's embedding and the target's streams, through one window-only block."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        dim, eps = c.hidden_size, c.rms_norm_eps
        self.enorm, self.hnorm, self.norm = Norm(dim, eps), Norm(dim, eps), Norm(dim, eps)
        self.e_proj, self.h_proj = Linear(dim, dim), Linear(dim, dim)
        self.block = Block(c, c.num_hidden_layers)
        self.hc_head = HeadSite(c)

    def mix(self, embedded: Tensor, streams: Tensor) -> Tensor:
        return self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedded)).unsqueeze(-2)


class V4(nn.Module):
    """ids [B, T] to logits; `losses` for training. T is a multiple of the window and of 128."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        c = config
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed.weight, std=1.0)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.hc_head = HeadSite(c)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.head = Linear(c.hidden_size, c.vocab_size, store="keep", gain=0.5)
        self.mtp = nn.ModuleList([Draft(c)])
        scaling = c.rope_scaling
        yarn = Yarn(
            factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        plain = rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
        slow = rope_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, yarn)
        self.register_buffer("plain", plain, persistent=False)
        self.register_buffer("slow", slow, persistent=False)

    def streams(
        self, ids: Tensor, *, sparse: bool = True, offset: Tensor | None = None, stride: int = 1
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Streams before the last collapse, the summed indexer loss, loads per layer."""
        offset = torch.zeros(1, dtype=torch.long, device=ids.device) if offset is None else offset
        at = torch.arange(ids.shape[1], device=ids.device)
        tables = {True: angles(at, self.slow), False: angles(at, self.plain)}
        x = self.embed(ids).to(self.dtype).unsqueeze(-2).expand(-1, -1, self.config.hc_mult, -1)
        total, loads = torch.zeros((), device=ids.device), []
        for layer in self.layers:
            cos, sin = tables[layer.ratio > 0]
            x, loss, load = layer(x, ids, cos, sin, sparse, offset, stride)
            total = total + loss
            loads.append(load)
        return x, total, loads

    def logits(self, streams: Tensor) -> Tensor:
        return self.head(self.norm(self.hc_head(streams)))

    def draft(self, next_ids: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Streams of the draft block and its loads. next_ids: [B, T], the tokens one further on."""
        mtp, at = self.mtp[0], torch.arange(next_ids.shape[1], device=next_ids.device)
        offset = torch.zeros(1, dtype=torch.long, device=next_ids.device)
        x = mtp.mix(self.embed(next_ids).to(self.dtype), streams)
        x, _, load = mtp.block(x, next_ids, *angles(at, self.plain), False, offset, 1)
        return x, load

    def draft_logits(self, streams: Tensor) -> Tensor:
        return self.head(self.mtp[0].norm(self.mtp[0].hc_head(streams)))

    def losses(self, ids: Tensor, weights: Tensor, **how: Any) -> Losses:
        """ids: [B, T + 2]; weights: [B, T + 2] fp32, how much predicting each token counts."""
        inputs, after = ids[:, :-2], ids[:, 1:-1]
        streams, index, loads = self.streams(inputs, **how)
        main = token_loss(self.logits(streams), after, weights[:, 1:-1])
        drafted, load = self.draft(after, streams)
        draft = token_loss(self.draft_logits(drafted), ids[:, 2:], weights[:, 2:])
        # A second draft goes on from the first one's streams, a position further.
        again, _ = self.draft(after, F.pad(drafted[:, :-1], (0, 0, 0, 0, 1, 0)))
        chained = token_loss(self.draft_logits(again), ids[:, 2:], weights[:, 2:])
        draft = (1 - CHAINED_SHARE) * draft + CHAINED_SHARE * chained
        return Losses(main, draft, index, weights[:, 1:-1].sum(), [*loads, load])


def fill_hash_tables(model: V4, counts: Tensor) -> None:
    """Spread the tokens of hash-routed layers so that each expert gets the same share of `counts`
    ([vocab_size], how often each token occurs)."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.layers:
        table = getattr(layer.ffn.gate, "tid2eid", None)
        if table is None:
            continue
        num_experts, top_k = model.config.n_routed_experts, table.shape[1]
        load = torch.rand(num_experts, generator=generator)
        for token_id in counts.argsort(descending=True).tolist():
            chosen = load.argsort()[:top_k]
            table[token_id] = chosen.to(table.device)
            load[chosen] += float(counts[token_id]) + 1 + torch.rand(top_k, generator=generator)


def official_name(name: str) -> str:
    """A parameter's name in the checkpoint."""
    name = name.replace("mtp.0.block.", "mtp.0.")
    for site in ("hc_attn", "hc_ffn", "hc_head"):
        for part in ("fn", "base", "scale"):
            name = name.replace(f"{site}.{part}", f"{site}_{part}")
    return name


def flops_per_token(c: DeepseekV4Config, length: int) -> float:
    """Multiply-adds times two of one forward pass, as this graph computes them."""
    dim, width, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    experts = (c.n_routed_experts + 1) * 3 * dim * c.moe_intermediate_size
    core = dim * (c.q_lora_rank + width) + c.q_lora_rank * heads * width
    core += heads * width * c.o_lora_rank + c.o_groups * c.o_lora_rank * dim
    mix = 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * dim
    total = 0.0
    for ratio in c.compress_ratios:
        keys = 2 * c.sliding_window + (length // ratio if ratio else 0)
        total += experts + core + mix + 2 * heads * width * keys
        total += 2 * dim * width * (2 if ratio == 4 else 1) * (ratio > 0)
    return 2 * (total + 2 * dim * c.vocab_size + 2 * dim * dim)
