"""GLM-5.2, top to bottom: latent attention with a shared sparse selection, experts, draft layer.

Weights are read by their official names, each in the format that its dtype says. State is two
paged groups: the latent rows of every layer, and index keys of the layers that choose positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings, Rounding
from moet.errors import ConfigError
from moet.kernels.attention import sparse_attention
from moet.kernels.cache import EntryFormat, PlainRows
from moet.kernels.gemm import grouped_linear, linear, linear_fp32, streamed
from moet.kernels.indexer import index_scores, select_top_k
from moet.kernels.mla_cache import Fp8IndexKeys, latent_rows
from moet.kernels.moe import sigmoid_scores
from moet.kernels.norm import layer_norm
from moet.kernels.rope import rope, rope_cos_sin, rope_frequencies
from moet.models.base import (
    ExpertProvider,
    ForwardInput,
    KVCacheSpec,
    KVGroup,
    KVTensors,
    ModelOutput,
    TensorSource,
)
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.layers import Embedding, LMHead, RMSNorm, Weights
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.sharding import WHOLE, Shard, divide_glm_moe_dsa, glm_moe_dsa_layers
from moet.models.step import LayerCache, SequenceRows, sequences

PAGE_SIZE = 64  # tokens
INDEX_NORM_EPS = 1e-6  # of the index keys' LayerNorm, whatever rms_norm_eps is

Selection = Sequence["Tensor | int"]
"""Per row the positions that it attends to: ascending indices, or the number of leading ones."""


class Step:
    """One forward pass: what its rows are and which state they touch."""

    def __init__(self, inputs: ForwardInput, kv: KVTensors, frequencies: Tensor) -> None:
        self.token_ids = inputs.token_ids
        self.positions = inputs.positions
        self.kv = kv
        self.sequences = sequences(inputs, PAGE_SIZE)
        self.cos, self.sin = rope_cos_sin(inputs.positions, frequencies)
        own = [seq.entry_slots(seq.start, seq.end, 1) for seq in self.sequences]
        self.slots = torch.cat(own)  # [num_tokens], where each row's state goes


class Indexer:
    """Chooses the positions that a row attends to, for its layer and those that share with it."""

    def __init__(self, weights: Weights, config: GlmMoeDsaConfig, keys: LayerCache) -> None:
        settings = weights.settings
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_dim, self.top_k = config.qk_rope_head_dim, config.index_topk
        self.keys = keys
        self.round_queries = settings.rounding == "deployed"
        width = self.num_heads * self.head_dim
        self.wq_b = weights.linear("wq_b", width, config.q_lora_rank)
        # wk is fp8 in one release, but no server rounds its input: it is merged with the gate.
        self.wk, _ = weights.matrix("wk", self.head_dim, config.hidden_size)
        self.k_norm_weight = weights.fp32("k_norm.weight", self.head_dim)
        self.k_norm_bias = weights.fp32("k_norm.bias", self.head_dim)
        self.gate = streamed(
            weights.fp32("weights_proj.weight", self.num_heads, config.hidden_size)
        )
        self.gate_scale = self.num_heads**-0.5 * self.head_dim**-0.5
        self._linear = linear.bind(arch=settings.arch)
        self._linear_fp32 = linear_fp32.bind(arch=settings.arch)
        self._layer_norm = layer_norm.bind(arch=settings.arch)
        self._rope = rope.bind(arch=settings.arch)
        self._scores = index_scores.bind(arch=settings.arch)
        self._top_k = select_top_k.bind(arch=settings.arch)

    def _rotate(self, x: Tensor, step: Step) -> Tensor:
        """Rotate the first rope_dim values; attention heads have theirs at the end."""
        rotated = self._rope(x[..., : self.rope_dim].contiguous(), step.cos, step.sin)
        return torch.cat((rotated, x[..., self.rope_dim :]), dim=-1)

    def __call__(self, x: Tensor, q_latent: Tensor, step: Step) -> Selection:
        """x: [n, hidden], q_latent: [n, q_lora_rank]. Writes the rows' keys, then selects."""
        key = self._layer_norm(
            self._linear(x, self.wk), self.k_norm_weight, self.k_norm_bias, eps=INDEX_NORM_EPS
        )
        self.keys.write(step.kv, step.slots, self._rotate(key, step).float())
        query = self.wq_b(q_latent).view(-1, self.num_heads, self.head_dim)
        query = self._rotate(query, step).float()
        if self.round_queries:
            query = self.keys.form.round(query)
        gate = self._linear_fp32(x, self.gate) * self.gate_scale
        selection: list[Tensor | int] = []
        for seq in step.sequences:
            selection += self._choose(query, gate, seq, step)
        return selection

    def _choose(
        self, query: Tensor, gate: Tensor, seq: SequenceRows, step: Step
    ) -> list[Tensor | int]:
        """What the rows of one sequence attend to."""
        if seq.end <= self.top_k:
            return list(range(seq.start + 1, seq.end + 1))
        keys = self.keys.read(step.kv, seq.entry_slots(0, seq.end, 1))
        chosen: list[Tensor | int] = []
        for row, visible in enumerate(range(seq.start + 1, seq.end + 1), start=seq.first):
            if visible <= self.top_k:
                chosen.append(visible)
                continue
            scores = self._scores(query[row], keys[:visible], gate[row])
            chosen.append(self._top_k(scores, k=self.top_k))
        return chosen


class Attention:
    """Latent attention in absorbed form: one key head, whose leading part is the value."""

    def __init__(
        self, weights: Weights, config: GlmMoeDsaConfig, rows: LayerCache, indexer: Indexer | None
    ) -> None:
        settings, heads = weights.settings, config.num_attention_heads
        hidden, latent, rope_dim = config.hidden_size, config.kv_lora_rank, config.qk_rope_head_dim
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        self.num_heads, self.latent_dim, self.nope_dim = heads, latent, nope
        self.rows, self.indexer = rows, indexer
        self.scale = config.qk_head_dim**-0.5
        eps = config.rms_norm_eps
        self.q_a = weights.linear("q_a_proj", config.q_lora_rank, hidden)
        self.q_a_norm = weights.norm("q_a_layernorm", config.q_lora_rank, eps=eps)
        self.q_b = weights.linear("q_b_proj", heads * config.qk_head_dim, config.q_lora_rank)
        self.kv_a = weights.linear("kv_a_proj_with_mqa", latent + rope_dim, hidden)
        self.kv_a_norm = weights.norm("kv_a_layernorm", latent, eps=eps)
        # fp8 blocks straddle the heads of kv_b, so it is decoded whole and then split.
        kv_b, _ = weights.matrix("kv_b_proj", heads * (nope + value), latent)
        w_uk, w_uv = torch.split(kv_b.view(heads, nope + value, latent), [nope, value], dim=1)
        self.w_uk = streamed(w_uk.transpose(1, 2))  # [H, latent, nope]
        self.w_uv = streamed(w_uv)  # [H, value, latent]
        self.o = weights.input_linear("o_proj", hidden, heads * value)
        self.no_sink = torch.full((heads,), -torch.inf)
        self._rope = rope.bind(arch=settings.arch)
        self._grouped = grouped_linear.bind(arch=settings.arch)
        self._attention = sparse_attention.bind(arch=settings.arch)

    def __call__(
        self, x: Tensor, step: Step, selection: Selection | None
    ) -> tuple[Tensor, Selection]:
        """x: [n, hidden], normalised. Returns the same and the selection that was used.

        selection: that of the nearest owner below; None lets this layer's own indexer choose.
        """
        q_latent = self.q_a_norm(self.q_a(x))
        kv = self.kv_a(x)
        latent = self.kv_a_norm(kv[:, : self.latent_dim].contiguous())
        rope_key = self._rope(kv[:, self.latent_dim :].contiguous(), step.cos, step.sin)
        self.rows.write(step.kv, step.slots, torch.cat((latent, rope_key), dim=-1).float())
        if selection is None:
            assert self.indexer is not None, "the first layer that attends owns an indexer"
            selection = self.indexer(x, q_latent, step)
        q = self.q_b(q_latent).view(x.shape[0], self.num_heads, -1)
        q = self._rope(q, step.cos, step.sin)
        absorbed = self._grouped(q[..., : self.nope_dim], self.w_uk)
        query = torch.cat((absorbed, q[..., self.nope_dim :]), dim=-1)
        parts = [self._sequence(query, selection, seq, step) for seq in step.sequences]
        mixed = torch.cat(parts)
        out = self._grouped(mixed[..., : self.latent_dim], self.w_uv)
        return self.o(out.flatten(1)), selection

    def _sequence(
        self, query: Tensor, selection: Selection, seq: SequenceRows, step: Step
    ) -> Tensor:
        """One sequence's queries over their selected entries: [its rows, H, latent + rope]."""
        chosen = selection[seq.first : seq.last]
        only = chosen[0]
        if len(chosen) == 1 and isinstance(only, Tensor):  # read no more than is used
            slots, chosen = seq.slots_of(only, 1), [len(only)]
        else:
            slots = seq.entry_slots(0, seq.end, 1)
        entries = self.rows.read(step.kv, slots)
        return self._attention(
            query[seq.first : seq.last],
            entries[:0],  # no window beside the selection
            [(0, 0)] * len(chosen),
            entries,
            chosen,
            self.no_sink,
            scale=self.scale,
        )


class DecoderLayer:
    """Attention and an MLP or experts, each behind a norm and beside the residual stream."""

    def __init__(
        self,
        weights: Weights,
        config: GlmMoeDsaConfig,
        layout: CacheLayout,
        layer_idx: int,
    ) -> None:
        eps = config.rms_norm_eps
        self.input_norm = weights.norm("input_layernorm", config.hidden_size, eps=eps)
        self.post_norm = weights.norm("post_attention_layernorm", config.hidden_size, eps=eps)
        attention, indexer = weights.under("self_attn."), None
        if config.owns_indexer(layer_idx):
            keys = layout.index_cache(layer_idx)
            indexer = Indexer(attention.under("indexer."), config, keys)
        self.attention = Attention(attention, config, layout.row_cache(layer_idx), indexer)
        mlp = weights.under("mlp.")
        self.mlp: SwigluMlp | None = None
        self.moe: MoE | None = None
        if config.is_dense(layer_idx):
            self.mlp = _mlp(mlp, config.hidden_size, config.intermediate_size)
        else:
            self.moe = _moe(mlp, config, layer_idx)

    @property
    def owns_indexer(self) -> bool:
        return self.attention.indexer is not None

    def __call__(
        self,
        x: Tensor,
        step: Step,
        selection: Selection | None,
        experts: ExpertProvider,
    ) -> tuple[Tensor, Selection]:
        """x: [n, hidden]. Returns the same and the selection that was used."""
        mixed, selection = self.attention(self.input_norm(x), step, selection)
        x = x + mixed
        u = self.post_norm(x)
        if self.mlp is not None:
            return x + self.mlp(u), selection
        assert self.moe is not None
        return x + self.moe(u, step.token_ids, step.positions, experts), selection


def _mlp(weights: Weights, hidden: int, width: int) -> SwigluMlp:
    gate = weights.linear("gate_proj", width, hidden)
    up = weights.linear("up_proj", width, hidden)
    down = weights.input_linear("down_proj", hidden, width)
    return SwigluMlp(gate, up, down, limit=None, arch=weights.settings.arch)


def _moe(weights: Weights, config: GlmMoeDsaConfig, layer_idx: int) -> MoE:
    num_experts, hidden = config.n_routed_experts, config.hidden_size
    router = Router(
        streamed(weights.fp32("gate.weight", num_experts, hidden)),
        bias=weights.fp32("gate.e_score_correction_bias", num_experts),
        table=None,
        top_k=config.num_experts_per_tok,
        scaling_factor=config.routed_scaling_factor,
        scores=sigmoid_scores,
        arch=weights.settings.arch,
    )
    shared = _mlp(weights.under("shared_experts."), hidden, config.moe_intermediate_size)
    return MoE(
        layer_idx,
        router,
        shared,
        limit=None,
        weigh_output=True,
        settings=weights.settings,
    )


class DraftLayer:
    """The multi-token-prediction layer: the next token and the state before it, joined."""

    def __init__(self, weights: Weights, config: GlmMoeDsaConfig, layer: DecoderLayer) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = weights.norm("enorm", hidden, eps=eps)
        self.hnorm = weights.norm("hnorm", hidden, eps=eps)
        self.eh_proj = weights.linear("eh_proj", hidden, 2 * hidden)
        self.norm = weights.norm("shared_head.norm", hidden, eps=eps)
        self.layer = layer

    def join(self, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        """embedded: [n, hidden] of the tokens at positions + 1; hidden_states at positions."""
        joined = (self.enorm(embedded), self.hnorm(hidden_states))
        return self.eh_proj(torch.cat(joined, dim=-1))


class CacheLayout:
    """The two kinds of state, under one KV format.

    kv_dtype is that of the latent rows; index keys are fp8 as deployed, or fp32 without rounding.
    The draft layer, if it is used, comes last in both groups. held: the layers whose state this
    process keeps; None: all.
    """

    def __init__(
        self,
        config: GlmMoeDsaConfig,
        kv_dtype: KVDtype,
        rounding: Rounding,
        with_draft: bool,
        held: range | None = None,
    ) -> None:
        self.rows = latent_rows(
            kv_dtype,
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            entries_per_page=PAGE_SIZE,
        )
        index_dim = config.index_head_dim
        self.index_keys: EntryFormat = Fp8IndexKeys(index_dim, PAGE_SIZE)
        if rounding == "none":
            self.index_keys = PlainRows(index_dim, PAGE_SIZE, torch.float32)
        self.layers = tuple(range(config.num_hidden_layers + with_draft))
        self.owners = tuple(idx for idx in self.layers if config.owns_indexer(idx))
        kept = self.layers if held is None else held
        self.held = tuple(idx for idx in self.layers if idx in kept)
        self.held_owners = tuple(idx for idx in self.owners if idx in kept)

    def spec(self) -> KVCacheSpec:
        rows = KVGroup(
            "latent", "paged", self.layers, PAGE_SIZE, self.rows.page_bytes, held=self.held
        )
        keys = KVGroup(
            "index",
            "paged",
            self.owners,
            PAGE_SIZE,
            self.index_keys.page_bytes,
            held=self.held_owners,
        )
        return KVCacheSpec(PAGE_SIZE, (rows, keys))

    def row_cache(self, layer_idx: int) -> LayerCache:
        return LayerCache("latent", self.held.index(layer_idx), self.rows)

    def index_cache(self, layer_idx: int) -> LayerCache:
        """Raises ValueError for a layer without an indexer."""
        return LayerCache("index", self.held_owners.index(layer_idx), self.index_keys)


@dataclass(eq=False)
class GlmMoeDsa:
    """The whole model. `load` builds it; `forward` runs a step."""

    config: GlmMoeDsaConfig
    layout: CacheLayout
    embed: Embedding | None
    layers: list[DecoderLayer]
    norm: RMSNorm | None
    head: LMHead | None
    mtp: DraftLayer | None
    shard: Shard
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings
        self.frequencies = rope_frequencies(self.config.qk_rope_head_dim, self.config.rope_theta)

    @classmethod
    def load(
        cls,
        config: GlmMoeDsaConfig,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
        shard: Shard = WHOLE,
    ) -> GlmMoeDsa:
        """Read everything but the routed experts; the draft layer only for num_spec_tokens > 0.

        shard: what this process holds of it.

        rounding "none" computes in fp32; "deployed" rounds activations to bf16 (to e4m3 before
        fp8 weights) and index keys to e4m3. KV rows follow kv_dtype in both.

        Raises ConfigError for settings that do not fit, CheckpointError for tensors that do not.
        """
        if num_spec_tokens and config.num_draft_blocks == 0:
            raise ConfigError(
                f"{num_spec_tokens} draft tokens were asked for, but num_nextn_predict_layers is 0 "
                "in this model's config.json; use 0"
            )
        config, source = divide_glm_moe_dsa(config, source, shard)
        weights = Weights(source, settings)
        own, drafts = glm_moe_dsa_layers(config, shard), num_spec_tokens > 0 and shard.is_last
        held = range(own.start, own.stop + drafts)
        layout = CacheLayout(config, kv_dtype, settings.rounding, num_spec_tokens > 0, held)
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        table = (config.vocab_size, config.hidden_size)
        embed = norm = head = mtp = None
        layers = [
            DecoderLayer(weights.under(f"model.layers.{idx}."), config, layout, idx) for idx in held
        ]
        if drafts:
            idx = config.num_hidden_layers
            mtp = DraftLayer(weights.under(f"model.layers.{idx}."), config, layers.pop())
        if shard.is_first or drafts:
            embed = Embedding(weights.tensor("model.embed_tokens.weight", *table), dtype)
        if shard.is_last:
            norm = weights.norm("model.norm", config.hidden_size, eps=config.rms_norm_eps)
            head = LMHead.load(weights, "lm_head", *table)
        return cls(
            config=config,
            layout=layout,
            embed=embed,
            layers=layers,
            norm=norm,
            head=head,
            mtp=mtp,
            shard=shard,
            dtype=dtype,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        """Latent rows of every layer, index keys of the layers that own an indexer."""
        return self.layout.spec()

    @torch.no_grad()
    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """As Model.forward. hidden_states: [num_tokens, hidden], after the final norm."""
        step = Step(inputs, kv, self.frequencies)
        x = self._enter(inputs.token_ids)
        selection: Selection | None = None
        for layer in self.layers:
            inherited = None if layer.owns_indexer else selection
            x, selection = layer(x, step, inherited, experts)
        if self.norm is None:
            self.shard.comm.send(x)
        else:
            x = self.norm(x)
        return ModelOutput(self._logits(x[inputs.logits_indices]), x)

    def _enter(self, token_ids: Tensor) -> Tensor:
        """What this process's first layer gets: [n, hidden]."""
        if not self.shard.is_first:
            shape = len(token_ids), self.config.hidden_size
            return self.shard.comm.receive(torch.empty(shape, dtype=self.dtype))
        assert self.embed is not None
        return self.embed(token_ids)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Those of the last stage, on every stage. hidden_states: [n, hidden], of rows wanted."""
        if self.head is None:
            logits = torch.empty(len(hidden_states), self.vocab_size)
        else:
            logits = self.head(hidden_states)
        return self.shard.comm.from_last(logits)

    @torch.no_grad()
    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """Run the draft layer on rows whose hidden states are known.

        inputs.token_ids are those at positions + 1. hidden_states: [num_tokens, hidden], of
        `forward` or of a previous draft, each after its norm. Needs num_spec_tokens > 0 at load.
        """
        assert self.mtp is not None or not self.shard.is_last, "loaded without the draft layer"
        if self.mtp is not None:
            assert self.embed is not None
            step = Step(inputs, kv, self.frequencies)
            x = self.mtp.join(self.embed(inputs.token_ids), hidden_states)
            x, _ = self.mtp.layer(x, step, None, experts)
            hidden_states = self.mtp.norm(x)
        return ModelOutput(self._logits(hidden_states[inputs.logits_indices]), hidden_states)
