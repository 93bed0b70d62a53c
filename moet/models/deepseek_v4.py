"""DeepSeek-V4-Flash, top to bottom: compressors, indexer, attention, decoder layer, MTP block,
model. Tensors to logits; knows nothing of scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.errors import CheckpointError, ConfigError
from moet.kernels.attention import sparse_attention
from moet.kernels.compressor import pool_overlapped_windows, pool_windows
from moet.kernels.gemm import grouped_linear, linear_fp32, streamed
from moet.kernels.hyper_connection import hc_head, hc_post, hc_pre
from moet.kernels.indexer import index_scores, select_top_k
from moet.kernels.moe import sqrt_softplus
from moet.kernels.norm import rms_norm
from moet.kernels.quant import fp4_qdq, hadamard
from moet.kernels.rope import Yarn, rope, rope_cos_sin, rope_frequencies
from moet.models.base import (
    ExpertProvider,
    ForwardInput,
    KVCacheSpec,
    KVTensors,
    ModelOutput,
    TensorSource,
)
from moet.models.deepseek_v4_cache import (
    PAGE_SIZE,
    RATIO_OF_KIND,
    CacheLayout,
)
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.layers import Embedding, Linear, LMHead, Weights
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.step import LayerCache, SequenceRows, sequences

CosSin = tuple[Tensor, Tensor]


class RopeTables:
    """The two rotations: plain for window-only layers, YaRN for layers with compressed entries."""

    def __init__(self, config: DeepseekV4Config) -> None:
        scaling = config.rope_scaling
        yarn = Yarn(
            factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        dim = config.qk_rope_head_dim
        self.main = rope_frequencies(dim, config.rope_theta)
        self.compress = rope_frequencies(dim, config.compress_rope_theta, yarn)


class Step:
    """One forward pass: what its rows are and which state they touch."""

    def __init__(self, inputs: ForwardInput, kv: KVTensors, tables: RopeTables) -> None:
        self.positions = inputs.positions
        self.token_ids = inputs.token_ids
        self.kv = kv
        self.sequences = sequences(inputs, PAGE_SIZE)
        self.tables = tables

    @cached_property
    def main(self) -> CosSin:
        return rope_cos_sin(self.positions, self.tables.main)

    @cached_property
    def compress(self) -> CosSin:
        return rope_cos_sin(self.positions, self.tables.compress)

    def write_ring(self, cache: LayerCache, rows: Tensor) -> None:
        """Store each sequence's last rows, as many as its ring holds."""
        size = cache.form.entries_per_page
        kept, slots = [], []
        for seq in self.sequences:
            count = min(seq.last - seq.first, size)
            kept.append(rows[seq.last - count : seq.last])
            slots.append(seq.ring_slots(seq.end - count, seq.end, size))
        cache.write(self.kv, torch.cat(slots), torch.cat(kept))


class Compressor:
    """Turns every `ratio` tokens into one entry. With `overlapped`, a window pools the first half
    of the channels of the previous window's tokens and the second half of its own."""

    def __init__(
        self,
        weights: Weights,
        config: DeepseekV4Config,
        *,
        ratio: int,
        width: int,
        state: LayerCache,
        entries: LayerCache,
        rotate: bool,
    ) -> None:
        self.ratio = ratio
        self.overlapped = ratio == 4
        self.state = state
        self.entries = entries
        self.rotate = rotate  # Hadamard before the entry is stored
        channels = width * (2 if self.overlapped else 1)
        dim, arch = config.hidden_size, weights.settings.arch
        self.channels = channels
        self.ape = weights.fp32("ape", ratio, channels)
        parts = [weights.fp32(f"{name}.weight", channels, dim) for name in ("wkv", "wgate")]
        self.weight = streamed(torch.cat(parts))
        self.norm = weights.norm("norm", width, eps=config.rms_norm_eps)
        self._project = linear_fp32.bind(arch=arch)
        pool = pool_overlapped_windows if self.overlapped else pool_windows
        self._pool = pool.bind(arch=arch)
        self._rope = rope.bind(arch=arch)
        self._hadamard = hadamard.bind(arch=arch)

    def __call__(self, x: Tensor, step: Step) -> None:
        """Store the entries that x ([n, dim]) closes, and the rows that later ones need."""
        rows = self._project(x, self.weight)
        rows[:, self.channels :] += self.ape[step.positions % self.ratio]
        for seq in step.sequences:
            first, last = seq.start // self.ratio, seq.end // self.ratio
            if first == last:
                continue
            pooled = self._pool(*self._windows(rows[seq.first : seq.last], seq, step))
            entry = self.norm(pooled.to(x.dtype))
            positions = torch.arange(first, last) * self.ratio
            entry = self._rope(entry, *rope_cos_sin(positions, step.tables.compress))
            if self.rotate:
                entry = self._hadamard(entry)
            slots = seq.entry_slots(first, last, self.ratio)
            self.entries.write(step.kv, slots, entry.float())
        step.write_ring(self.state, rows)

    def _windows(self, rows: Tensor, seq: SequenceRows, step: Step) -> tuple[Tensor, Tensor]:
        """Values and scores of the windows that close: twice [n, tokens of a window, channels]."""
        ratio = self.ratio
        first, last = seq.start // ratio, seq.end // ratio
        oldest = max(first - 1, 0) if self.overlapped else first
        ring = self.state.form.entries_per_page
        past = self.state.read(step.kv, seq.ring_slots(oldest * ratio, seq.start, ring))
        rows = torch.cat([past, rows])[: (last - oldest) * ratio]
        if self.overlapped and first == 0:
            absent = rows.new_zeros(ratio, rows.shape[1])
            absent[:, self.channels :] = float("-inf")
            rows = torch.cat([absent, rows])
        windows = rows.view(-1, ratio, rows.shape[1])
        if self.overlapped:
            windows = torch.cat([windows[:-1], windows[1:]], 1)
        return windows[..., : self.channels], windows[..., self.channels :]


class Indexer:
    """Chooses which compressed entries each query of a CSA layer attends to."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        self.num_heads, self.dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.quantised = layout.quantised_index
        self.keys = layout.cache("index_keys", layer_idx)
        self.wq_b = weights.linear("wq_b", self.num_heads * self.dim, config.q_lora_rank)
        self.weights_proj = weights.linear("weights_proj", self.num_heads, config.hidden_size)
        self.compressor = Compressor(
            weights.under("compressor."),
            config,
            ratio=4,
            width=self.dim,
            state=layout.cache("index_state", layer_idx),
            entries=self.keys,
            rotate=self.quantised,
        )
        arch = weights.settings.arch
        self._rope = rope.bind(arch=arch)
        self._hadamard = hadamard.bind(arch=arch)
        self._fp4 = fp4_qdq.bind(arch=arch)
        self._scores = index_scores.bind(arch=arch)
        self._select = select_top_k.bind(arch=arch)

    def __call__(self, qr: Tensor, x: Tensor, step: Step) -> list[list[Tensor | int]]:
        """Per sequence and row: ascending entry numbers, or the count if all visible ones are in.

        qr: [n, q_lora_rank], the normalised query latent. x: [n, dim], the sublayer's input.
        """
        self.compressor(x, step)
        if all(seq.end // 4 <= self.top_k for seq in step.sequences):
            return [[(p + 1) // 4 for p in range(s.start, s.end)] for s in step.sequences]
        q = self._rope(self.wq_b(qr).view(-1, self.num_heads, self.dim), *step.compress)
        if self.quantised:
            q = self._fp4(self._hadamard(q))
        head_weights = self.weights_proj(x).float() * (self.dim**-0.5 * self.num_heads**-0.5)
        return [self._choose(q.float(), head_weights, seq, step) for seq in step.sequences]

    def _choose(
        self, q: Tensor, head_weights: Tensor, seq: SequenceRows, step: Step
    ) -> list[Tensor | int]:
        keys = self.keys.read(step.kv, seq.entry_slots(0, seq.end // 4, 4))
        chosen: list[Tensor | int] = []
        for row, position in zip(
            range(seq.first, seq.last), range(seq.start, seq.end), strict=True
        ):
            visible = (position + 1) // 4
            if visible <= self.top_k:
                chosen.append(visible)
            else:
                scores = self._scores(q[row], keys[:visible], head_weights[row])
                chosen.append(self._select(scores, k=self.top_k))
        return chosen


class Attention:
    """Attention over the sliding window and, by layer kind, over compressed entries."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        kind = config.layer_kind(layer_idx)
        dim, rank, head_dim = config.hidden_size, config.q_lora_rank, config.head_dim
        heads, groups = config.num_attention_heads, config.o_groups
        eps, arch = config.rms_norm_eps, weights.settings.arch
        self.ratio = RATIO_OF_KIND[kind]
        self.num_heads, self.head_dim, self.num_groups = heads, head_dim, groups
        self.sliding_window, self.eps = config.sliding_window, eps
        self.window = layout.cache("window", layer_idx)
        self.q_lora_rank = rank
        parts = [weights.linear("wq_a", rank, dim), weights.linear("wkv", head_dim, dim)]
        self.wqa_wkv = Linear.stacked(parts)
        self.q_norm = weights.norm("q_norm", rank, eps=eps)
        self.wq_b = weights.linear("wq_b", heads * head_dim, rank)
        self.kv_norm = weights.norm("kv_norm", head_dim, eps=eps)
        self.sink = weights.fp32("attn_sink", heads)
        group_in = heads * head_dim // groups
        wo_a, _ = weights.matrix("wo_a", groups * config.o_lora_rank, group_in)
        self.wo_a = streamed(wo_a.reshape(groups, config.o_lora_rank, group_in))
        self.wo_b = weights.linear("wo_b", dim, groups * config.o_lora_rank)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if self.ratio:
            self.compressor = Compressor(
                weights.under("compressor."),
                config,
                ratio=self.ratio,
                width=head_dim,
                state=layout.cache(f"{kind}_state", layer_idx),
                entries=layout.cache(f"{kind}_entries", layer_idx),
                rotate=False,
            )
        if kind == "csa":
            self.indexer = Indexer(weights.under("indexer."), config, layout, layer_idx)
        self._head_norm = rms_norm.bind(arch=arch)
        self._rope = rope.bind(arch=arch)
        self._attend = sparse_attention.bind(arch=arch)
        self._grouped = grouped_linear.bind(arch=arch)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [n, dim], normalised. Returns [n, dim] and updates this layer's state."""
        cos_sin = step.compress if self.ratio else step.main
        qr, kv = self.wqa_wkv(x).tensor_split([self.q_lora_rank], 1)
        qr = self.q_norm(qr)
        q = self.wq_b(qr).view(-1, self.num_heads, self.head_dim)
        q = self._rope(self._head_norm(q, None, eps=self.eps), *cos_sin)
        kv = self._rope(self.kv_norm(kv), *cos_sin).float()
        if self.compressor is not None:
            self.compressor(x, step)
        chosen = self._chosen(qr, x, step)
        stored = self.window.form.round(kv)  # a row counts as its stored form from the first step
        out = [
            self._sequence(q, stored, rows, seq, step)
            for seq, rows in zip(step.sequences, chosen, strict=True)
        ]
        step.write_ring(self.window, kv)
        o = self._rope(torch.cat(out), *cos_sin, inverse=True)
        return self.wo_b(self._grouped(o.view(len(x), self.num_groups, -1), self.wo_a).flatten(1))

    def _chosen(self, qr: Tensor, x: Tensor, step: Step) -> list[list[Tensor | int]]:
        """Compressed entries of each sequence's rows: HCA layers and short contexts see all."""
        if self.indexer is not None:
            return self.indexer(qr, x, step)
        if self.ratio == 0:
            return [[0] * (seq.end - seq.start) for seq in step.sequences]
        return [[(p + 1) // self.ratio for p in range(s.start, s.end)] for s in step.sequences]

    def _sequence(
        self, q: Tensor, stored: Tensor, chosen: list[Tensor | int], seq: SequenceRows, step: Step
    ) -> Tensor:
        """One sequence's queries over its window and entries: [its rows, heads, head_dim]."""
        oldest = max(seq.start - self.sliding_window + 1, 0)
        ring = self.window.form.entries_per_page
        past = self.window.read(step.kv, seq.ring_slots(oldest, seq.start, ring))
        window = torch.cat([past, stored[seq.first : seq.last]])
        spans = [
            (max(p - self.sliding_window + 1, 0) - oldest, p + 1 - oldest)
            for p in range(seq.start, seq.end)
        ]
        compressed = window[:0]
        if self.compressor is not None:
            only = chosen[0]
            if len(chosen) == 1 and isinstance(only, Tensor):  # read no more than is used
                slots, chosen = seq.slots_of(only, self.ratio), [len(only)]
            else:
                slots = seq.entry_slots(0, seq.end // self.ratio, self.ratio)
            compressed = self.compressor.entries.read(step.kv, slots)
        return self._attend(
            q[seq.first : seq.last],
            window,
            spans,
            compressed,
            chosen,
            self.sink,
            scale=self.head_dim**-0.5,
        )


class HyperConnection:
    """One site of a layer: streams to sublayer input, sublayer output back to streams."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, site: str) -> None:
        mult = config.hc_mult
        rows = (2 + mult) * mult
        self.fn = streamed(weights.fp32(f"hc_{site}_fn", rows, mult * config.hidden_size))
        self.base = weights.fp32(f"hc_{site}_base", rows)
        self.scale = weights.fp32(f"hc_{site}_scale", 3)
        self.config = config
        self._pre = hc_pre.bind(arch=weights.settings.arch)
        self._post = hc_post.bind(arch=weights.settings.arch)

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, h, dim] to x [n, dim], post [n, h], mix [n, h, h]."""
        return self._pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            norm_eps=self.config.rms_norm_eps,
            hc_eps=self.config.hc_eps,
            num_iters=self.config.hc_sinkhorn_iters,
        )

    def expand(self, y: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        return self._post(y, streams, post, mix)


class Block:
    """A decoder layer: attention, then experts, each between collapse and expansion."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn = HyperConnection(weights, config, "attn")
        self.hc_ffn = HyperConnection(weights, config, "ffn")
        self.attn_norm = weights.norm("attn_norm", dim, eps=eps)
        self.ffn_norm = weights.norm("ffn_norm", dim, eps=eps)
        self.attn = Attention(weights.under("attn."), config, layout, layer_idx)
        self.ffn = _load_moe(weights.under("ffn."), config, layer_idx)

    def __call__(self, streams: Tensor, step: Step, experts: ExpertProvider) -> Tensor:
        """streams: [n, h, dim]. Returns the same."""
        x, post, mix = self.hc_attn.collapse(streams)
        y = self.attn(self.attn_norm(x), step)
        streams = self.hc_attn.expand(y, streams, post, mix)
        x, post, mix = self.hc_ffn.collapse(streams)
        y = self.ffn(self.ffn_norm(x), step.token_ids, experts)
        return self.hc_ffn.expand(y, streams, post, mix)


def _load_moe(weights: Weights, config: DeepseekV4Config, layer_idx: int) -> MoE:
    dim, inter = config.hidden_size, config.moe_intermediate_size
    num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    settings, limit = weights.settings, config.swiglu_limit
    bias = table = None
    if config.is_hash_layer(layer_idx):
        table = weights.tensor("gate.tid2eid", config.vocab_size, top_k).long()
        if int(table.min()) < 0 or int(table.max()) >= num_experts:
            raise CheckpointError(
                f"{weights.prefix}gate.tid2eid names expert {int(table.max())} "
                f"(lowest {int(table.min())}); there are {num_experts}"
            )
    else:
        bias = weights.fp32("gate.bias", num_experts)
    router = Router(
        streamed(weights.fp32("gate.weight", num_experts, dim)),
        bias=bias,
        table=table,
        top_k=top_k,
        scaling_factor=config.routed_scaling_factor,
        scores=sqrt_softplus,
        arch=settings.arch,
    )
    shared = SwigluMlp(
        weights.linear("shared_experts.w1", inter, dim),
        weights.linear("shared_experts.w3", inter, dim),
        weights.linear("shared_experts.w2", dim, inter),
        limit=limit,
        arch=settings.arch,
    )
    return MoE(layer_idx, router, shared, limit=limit, settings=settings)


class Head:
    """Streams to logits: last collapse, norm, vocabulary projection."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, lm_head: LMHead) -> None:
        mult, dim = config.hc_mult, config.hidden_size
        self.fn = streamed(weights.fp32("hc_head_fn", mult, mult * dim))
        self.base = weights.fp32("hc_head_base", mult)
        self.scale = weights.fp32("hc_head_scale", 1)
        self.norm = weights.norm("norm", dim, eps=config.rms_norm_eps)
        self.lm_head = lm_head
        self.norm_eps, self.hc_eps = config.rms_norm_eps, config.hc_eps
        self._collapse = hc_head.bind(arch=weights.settings.arch)

    def __call__(self, streams: Tensor) -> Tensor:
        """[n, h, dim] to [n, vocab_size] fp32."""
        x = self._collapse(
            streams, self.fn, self.base, self.scale, norm_eps=self.norm_eps, hc_eps=self.hc_eps
        )
        return self.lm_head(self.norm(x))


class MTPBlock:
    """The draft block: the next token and the target's streams to logits one token further on."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, lm_head: LMHead
    ) -> None:
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = weights.norm("enorm", dim, eps=eps)
        self.hnorm = weights.norm("hnorm", dim, eps=eps)
        self.e_proj = weights.linear("e_proj", dim, dim)
        self.h_proj = weights.linear("h_proj", dim, dim)
        self.block = Block(weights, config, layout, config.num_hidden_layers)
        self.head = Head(weights, config, lm_head)

    def __call__(
        self, embedded: Tensor, streams: Tensor, step: Step, experts: ExpertProvider
    ) -> Tensor:
        """embedded: [n, dim] of the tokens at positions + 1; streams: [n, h, dim] at positions."""
        e = self.e_proj(self.enorm(embedded))
        h = self.h_proj(self.hnorm(streams).flatten(0, 1)).view(streams.shape)
        return self.block(h + e.unsqueeze(1), step, experts)


@dataclass(eq=False)
class DeepseekV4:
    """The whole model. `load` builds it; `forward` runs a step."""

    config: DeepseekV4Config
    layout: CacheLayout
    embed: Embedding
    layers: list[Block]
    head: Head
    mtp: MTPBlock | None

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings
        self.tables = RopeTables(self.config)

    @classmethod
    def load(
        cls,
        config: DeepseekV4Config,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
    ) -> DeepseekV4:
        """Read everything but the routed experts.

        rounding "none" computes in fp32 and needs kv_dtype "fp32"; "deployed" rounds activations to
        bf16 and fp8. num_spec_tokens > 0 loads the draft block and makes room for its rows.

        Raises ConfigError for settings that do not fit, CheckpointError for tensors that do not.
        """
        if settings.rounding == "none" and kv_dtype != "fp32":
            raise ConfigError(
                f"rounding none keeps all numbers in fp32, but the KV format is {kv_dtype}; "
                "use --kv-dtype fp32 with it"
            )
        weights = Weights(source, settings)
        if num_spec_tokens and not weights.has("mtp.0.e_proj.weight"):
            raise ConfigError(
                f"{num_spec_tokens} draft tokens were asked for, but the checkpoint has no MTP "
                "block (mtp.0.e_proj.weight); use 0"
            )
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        layout = CacheLayout(config, kv_dtype, num_spec_tokens)
        vocab, dim = config.vocab_size, config.hidden_size
        lm_head = LMHead(weights.fp32("head.weight", vocab, dim), arch=settings.arch)
        return cls(
            config=config,
            layout=layout,
            embed=Embedding(weights.tensor("embed.weight", vocab, dim), dtype),
            layers=[
                Block(weights.under(f"layers.{i}."), config, layout, i)
                for i in range(config.num_hidden_layers)
            ],
            head=Head(weights, config, lm_head),
            mtp=MTPBlock(weights.under("mtp.0."), config, layout, lm_head)
            if num_spec_tokens
            else None,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.layout.spec()

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """Run one step. hidden_states: [num_tokens, h, dim], streams before the last collapse."""
        with torch.inference_mode():
            step = Step(inputs, kv, self.tables)
            embedded = self.embed(inputs.token_ids).unsqueeze(1)
            streams = embedded.expand(-1, self.config.hc_mult, -1).contiguous()
            for layer in self.layers:
                streams = layer(streams, step, experts)
            logits = self.head(streams[inputs.logits_indices])
        return ModelOutput(logits.clone(), streams)  # a clone may be changed in place

    def draft(
        self, inputs: ForwardInput, streams: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """Run the draft block on rows whose streams are known.

        inputs.token_ids are those at positions + 1. streams: [num_tokens, h, dim], hidden_states
        of forward or of a previous draft. Needs num_spec_tokens > 0 at load.
        """
        assert self.mtp is not None, "loaded without a draft block"
        with torch.inference_mode():
            step = Step(inputs, kv, self.tables)
            streams = self.mtp(self.embed(inputs.token_ids), streams, step, experts)
            logits = self.mtp.head(streams[inputs.logits_indices])
        return ModelOutput(logits.clone(), streams)
