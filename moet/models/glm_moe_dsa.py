"""GLM-5.2, top to bottom: latent attention with a shared sparse selection, experts, draft layer.

Weights are read by their official names, each in the format that its dtype says. State is two
paged groups: the latent rows of every layer, and index keys of the layers that choose positions.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings, Rounding
from moet.errors import ConfigError, UnsupportedError
from moet.kernels.cache import PlainRows, PlanedFormat
from moet.kernels.comm import RankPart, added
from moet.kernels.device_gemm import Device, PackedMatrix
from moet.kernels.gemm import Matrix, linear_fp32, streamed
from moet.kernels.indexer import index_select
from moet.kernels.join_norm import NormWeight
from moet.kernels.latent_places import latent_places
from moet.kernels.mixture import Mixture
from moet.kernels.mla_attention import (
    BLOCK,
    HeadMatrices,
    IndexKeys,
    head_products,
    latent_attention,
    latent_chunks_fit,
    latent_inputs,
    latent_queries,
)
from moet.kernels.mla_cache import Fp8IndexKeys, latent_rows
from moet.kernels.moe import sigmoid_scores
from moet.kernels.norm import add_rms_norm
from moet.kernels.quant import Activations
from moet.kernels.rope import rope_frequencies
from moet.kernels.rows import Rows
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
from moet.models.layers import Embedding, Linear, LMHead, Weights
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.parts import InParts, rows_wanted
from moet.models.sharding import WHOLE, Shard, divide_glm_moe_dsa, glm_moe_dsa_layers
from moet.models.step import Place, step_rows

PAGE_SIZE = 64  # tokens
Sublayer = Tensor | RankPart | Mixture
"""What a sublayer made: [n, hidden], maybe not summed yet."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: what its rows are and which state they touch.

    cos_sin, slots: of each row, as latent_places makes them.
    """

    token_ids: Tensor
    rows: Rows
    kv: KVTensors
    cos_sin: tuple[Tensor, Tensor]
    slots: Tensor


class Indexer:
    """Chooses the positions that a row attends to, for its layer and those that share with it."""

    def __init__(self, weights: Weights, config: GlmMoeDsaConfig, keys: Place) -> None:
        arch = weights.settings.arch
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.top_k, self.keys = config.index_topk, keys
        self.form = keys.form if weights.settings.rounding == "deployed" else None
        width = self.num_heads * self.head_dim
        self.wq_b = weights.linear("wq_b", width, config.q_lora_rank)
        self.projection = self._load_projection(weights, config.hidden_size)
        self.k_norm_weight = weights.fp32("k_norm.weight", self.head_dim)
        self.k_norm_bias = weights.fp32("k_norm.bias", self.head_dim)
        self.gate_scale = self.num_heads**-0.5 * self.head_dim**-0.5
        self._project = linear_fp32.bind(arch=arch)
        self._select = index_select.bind(
            arch=arch, keys=keys.form, num_heads=self.num_heads, top_k=self.top_k
        )

    def _load_projection(self, weights: Weights, hidden: int) -> Matrix:
        """Key and gate, which read the same. wk is fp8 in one release, but no server rounds its
        input: it is merged with the gate."""
        wk, _ = weights.matrix("wk", self.head_dim, hidden)
        gate = weights.fp32("weights_proj.weight", self.num_heads, hidden)
        both = torch.cat((wk, gate))
        gpu = weights.gpu
        if gpu is None:
            return streamed(both)
        return PackedMatrix.pack(both.bfloat16(), None, gpu)

    def project(self, x: Activations) -> Tensor:
        """The rows' keys, before norm and rotation, and gates, side by side, fp32."""
        return self._project(x, self.projection)

    def sites(self, step: Step) -> IndexKeys:
        return IndexKeys(self.k_norm_weight, self.k_norm_bias, self.keys.cache(step.kv))

    def __call__(self, query: Tensor, projected: Tensor, step: Step) -> Tensor:
        """query: [n, num_heads, head_dim]; the rows' keys are stored. Returns [n, top_k] int32."""
        return self._select(
            query,
            projected[:, self.head_dim :],
            self.keys.cache(step.kv),
            step.rows,
            ratio=1,
            top_k=self.top_k,
            gate_scale=self.gate_scale,
        )


class Attention:
    """Latent attention in absorbed form: one key head, whose leading part is the value."""

    def __init__(
        self, weights: Weights, config: GlmMoeDsaConfig, latents: Place, indexer: Indexer | None
    ) -> None:
        arch, heads = weights.settings.arch, config.num_attention_heads
        hidden, latent, rope_dim = config.hidden_size, config.kv_lora_rank, config.qk_rope_head_dim
        nope, value, rank = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank
        self.latents, self.indexer, self.latent_dim = latents, indexer, latent
        self.scale, self.eps = config.qk_head_dim**-0.5, config.rms_norm_eps
        self.q_kv = Linear.stacked(
            [
                weights.linear("q_a_proj", rank, hidden),
                weights.linear("kv_a_proj_with_mqa", latent + rope_dim, hidden),
            ]
        )
        self.q_norm_weight = weights.fp32("q_a_layernorm.weight", rank)
        self.kv_norm_weight = weights.fp32("kv_a_layernorm.weight", latent)
        queries = [weights.linear("q_b_proj", heads * config.qk_head_dim, rank)]
        if indexer is not None:
            queries.append(indexer.wq_b)
        self.queries = Linear.stacked(queries)
        # [H, latent, nope] and [H, value, latent]
        self.w_uk, self.w_uv = _absorbed(weights, heads, nope, value, latent)
        self.o = weights.input_linear("o_proj", hidden, heads * value)
        index = None if indexer is None else indexer.keys.form
        self._inputs = latent_inputs.bind(arch=arch, rank=rank, form=latents.form, index=index)
        self._queries = latent_queries.bind(arch=arch, index=index, nope_dim=nope)
        self.launcher = None if weights.gpu is None else weights.gpu.launcher
        placed = self._has_chunk_kernel(weights, config)
        self._attend = latent_attention.bind(arch=arch, form=latents.form, placed=placed)
        self._values = head_products.bind(arch=arch)

    def _has_chunk_kernel(self, weights: Weights, config: GlmMoeDsaConfig) -> bool:
        gpu, form = weights.gpu, self.latents.form
        heads, top_k = config.num_attention_heads, config.index_topk
        if gpu is None or not gpu.latent_chunks:
            return False
        return latent_chunks_fit(arch=gpu.arch, form=form, num_heads=heads, top_k=top_k)

    def __call__(
        self, x: Activations, step: Step, selection: Tensor | None
    ) -> tuple[Tensor | RankPart, Tensor]:
        """x: [n, hidden], normalised. Returns the same and the selection that was used, [n, k].

        selection: that of the nearest owner below; None lets this layer's own indexer choose.
        """
        indexer = self.indexer
        projected = None if indexer is None else indexer.project(x)
        latents = self.latents.cache(step.kv)
        q_latent = self._inputs(
            self.q_kv(x),
            projected,
            self.q_norm_weight,
            self.kv_norm_weight,
            *step.cos_sin,
            latents,
            None if indexer is None else indexer.sites(step),
            step.slots,
            eps=self.eps,
        )
        query, index_query = self._queries(
            self.queries(q_latent),
            self.w_uk,
            *step.cos_sin,
            index_heads=0 if indexer is None else indexer.num_heads,
            index_dim=0 if indexer is None else indexer.head_dim,
            index_form=None if indexer is None else indexer.form,
        )
        if selection is None:
            assert indexer is not None, "the first layer that attends owns an indexer"
            assert index_query is not None
            assert projected is not None
            selection = indexer(index_query, projected, step)
        del index_query, projected  # much of a chunk's memory, as the query is
        mixed = self._attend(
            query,
            latents,
            selection,
            step.rows,
            scale=self.scale,
            latent_dim=self.latent_dim,
            launcher=self.launcher,
        )
        del query
        return self.o.on_read(self._values(mixed, self.w_uv, quantised=self.o.quantised)), selection


def _absorbed(
    weights: Weights, heads: int, nope: int, value: int, latent: int
) -> tuple[HeadMatrices, HeadMatrices]:
    """kv_b in two, by head: what turns queries into latents, [H, latent, nope], and latents into
    values, [H, value, latent].

    Its blocks of fp8 straddle the heads, but halves of them do not: on a GPU it stays as stored.
    """
    parts, width = [nope, value], heads * (nope + value)
    if weights.gpu is None:
        kv_b, _ = weights.matrix("kv_b_proj", width, latent)
        uk, uv = torch.split(kv_b.view(heads, nope + value, latent), parts, dim=1)
        return HeadMatrices(streamed(uk.transpose(1, 2))), HeadMatrices(streamed(uv))
    stored, scale = weights.stored("kv_b_proj", width, latent)
    uk, uv = torch.split(stored.view(heads, nope + value, latent), parts, dim=1)
    uk = uk.transpose(1, 2).contiguous()
    if scale is None:
        return HeadMatrices(uk.bfloat16()), HeadMatrices(uv.bfloat16().contiguous())
    if nope % BLOCK or value % BLOCK or latent % BLOCK:
        raise UnsupportedError(
            f"{weights.prefix}kv_b_proj is fp8 with heads of {nope} and {value} rows of {latent}; "
            f"on a GPU all are multiples of {BLOCK}"
        )
    halves = scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    halves = halves[: width // BLOCK, : latent // BLOCK].reshape(heads, -1, latent // BLOCK)
    uk_scale, uv_scale = torch.split(halves, [part // BLOCK for part in parts], dim=1)
    return (
        HeadMatrices(uk, uk_scale.transpose(1, 2).contiguous()),
        HeadMatrices(uv.contiguous(), uv_scale.contiguous()),
    )


class AddNorm:
    """What a sublayer made joins the residual stream; the next one gets the norm of that."""

    def __init__(self, weights: Weights, name: str, config: GlmMoeDsaConfig) -> None:
        dim, gpu = config.hidden_size, weights.gpu
        weight = weights.fp32(f"{name}.weight", dim)
        self.weight = weight if gpu is None else NormWeight(weight, gpu)
        self.eps = config.rms_norm_eps
        self._op = add_rms_norm.bind(arch=weights.settings.arch, dim=dim)

    def __call__(self, x: Tensor, y: Sublayer | None) -> tuple[Tensor, Activations]:
        """x: [n, hidden], the stream; y: what joins it. Returns the stream and its norm."""
        return self._op(x, y, self.weight, eps=self.eps)


class DecoderLayer:
    """Attention and an MLP or experts, each behind a norm and beside the residual stream."""

    def __init__(
        self,
        weights: Weights,
        config: GlmMoeDsaConfig,
        layout: CacheLayout,
        layer_idx: int,
    ) -> None:
        self.input_norm = AddNorm(weights, "input_layernorm", config)
        self.post_norm = AddNorm(weights, "post_attention_layernorm", config)
        attention, indexer = weights.under("self_attn."), None
        if config.owns_indexer(layer_idx):
            keys = layout.index_place(layer_idx)
            indexer = Indexer(attention.under("indexer."), config, keys)
        self.attention = Attention(attention, config, layout.latent_place(layer_idx), indexer)
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
        y: Sublayer | None,
        step: Step,
        selection: Tensor | None,
        experts: ExpertProvider,
    ) -> tuple[Tensor, Sublayer, Tensor]:
        """x: [n, hidden], the residual stream, and y, what is still to join it, if anything.

        Returns both as they are behind the layer, and the selection that was used.
        """
        x, normed = self.input_norm(x, y)
        mixed, selection = self.attention(normed, step, selection)
        x, normed = self.post_norm(x, mixed)
        if self.mlp is not None:
            return x, self.mlp(normed), selection
        assert self.moe is not None
        return x, self.moe(normed, step.token_ids, step.rows.positions, experts), selection


def _mlp(weights: Weights, hidden: int, width: int) -> SwigluMlp:
    gate = weights.linear("gate_proj", width, hidden)
    up = weights.linear("up_proj", width, hidden)
    down = weights.input_linear("down_proj", hidden, width)
    return SwigluMlp(gate, up, down, limit=None, arch=weights.settings.arch)


def _moe(weights: Weights, config: GlmMoeDsaConfig, layer_idx: int) -> MoE:
    num_experts, hidden = config.n_routed_experts, config.hidden_size
    router = Router(
        weights.operand("gate", num_experts, hidden)[0],
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
        on_read=True,
        unsummed=True,
    )


class DraftLayer:
    """The multi-token-prediction layer: the next token and the state before it, joined."""

    def __init__(self, weights: Weights, config: GlmMoeDsaConfig, layer: DecoderLayer) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = weights.norm("enorm", hidden, eps=eps)
        self.hnorm = weights.norm("hnorm", hidden, eps=eps)
        self.eh_proj = weights.linear("eh_proj", hidden, 2 * hidden)
        self.norm = AddNorm(weights, "shared_head.norm", config)
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
        self.index_keys: PlanedFormat = Fp8IndexKeys(index_dim, PAGE_SIZE)
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

    def latent_place(self, layer_idx: int) -> Place:
        return Place("latent", self.held.index(layer_idx), self.rows)

    def index_place(self, layer_idx: int) -> Place:
        """Raises ValueError for a layer without an indexer."""
        return Place("index", self.held_owners.index(layer_idx), self.index_keys)


@dataclass(eq=False)
class GlmMoeDsa(InParts):
    """The whole model. `load` builds it; `forward` runs a step."""

    config: GlmMoeDsaConfig
    layout: CacheLayout
    embed: Embedding | None
    layers: list[DecoderLayer]
    norm: AddNorm | None
    head: LMHead | None
    draft_head: LMHead | None
    mtp: DraftLayer | None
    frequencies: Tensor
    shard: Shard
    dtype: torch.dtype
    device: Device | None = None

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings
        arch = "reference" if self.device is None else self.device.arch
        self._places = latent_places.bind(arch=arch, rope_dim=self.config.qk_rope_head_dim)

    def _step(self, token_ids: Tensor, rows: Rows, kv: KVTensors) -> Step:
        cos, sin, slots = self._places(rows, self.frequencies)
        return Step(token_ids, rows, kv, (cos, sin), slots)

    @classmethod
    def load(
        cls,
        config: GlmMoeDsaConfig,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
        shard: Shard = WHOLE,
        gpu: Device | None = None,
    ) -> GlmMoeDsa:
        """Read everything but the routed experts; the draft layer only for num_spec_tokens > 0.

        shard: what this process holds of it. gpu: where to; it must be there unless the arch is
        "reference".

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
        weights = Weights(source, settings, gpu=gpu)
        own, drafts = glm_moe_dsa_layers(config, shard), num_spec_tokens > 0 and shard.is_last
        held = range(own.start, own.stop + drafts)
        layout = CacheLayout(config, kv_dtype, settings.rounding, num_spec_tokens > 0, held)
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        table = (config.vocab_size, config.hidden_size)
        embed = norm = head = draft_head = mtp = None
        layers = [
            DecoderLayer(weights.under(f"model.layers.{idx}."), config, layout, idx) for idx in held
        ]
        if drafts:
            idx = config.num_hidden_layers
            mtp = DraftLayer(weights.under(f"model.layers.{idx}."), config, layers.pop())
        if shard.is_first or drafts:
            embed = Embedding(weights.tensor("model.embed_tokens.weight", *table), dtype)
        if shard.is_last:
            norm = AddNorm(weights, "model.norm", config)
            head = draft_head = LMHead.load(weights, "lm_head", *table)
        if drafts and gpu is not None:
            draft_head = LMHead.guessing(weights, "lm_head", *table)
        return cls(
            config=config,
            layout=layout,
            embed=embed,
            layers=layers,
            norm=norm,
            head=head,
            draft_head=draft_head,
            mtp=mtp,
            frequencies=rope_frequencies(config.qk_rope_head_dim, config.rope_theta).to(
                weights.device
            ),
            shard=shard,
            dtype=dtype,
            device=gpu,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        """Latent rows of every layer, index keys of the layers that own an indexer."""
        return self.layout.spec()

    def rows(self, inputs: ForwardInput) -> Rows:
        """A step's rows as the ops take them, on the device. No state is overwritten, so that any
        number of rows is short."""
        num_tokens = len(inputs.positions)
        return step_rows(inputs, PAGE_SIZE, max_short=num_tokens, device=self.frequencies.device)

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """As Model.forward. hidden_states: [num_tokens, hidden], after the final norm."""
        with torch.inference_mode():
            rows, (token_ids, chosen) = self.rows(inputs), self._placed(inputs)
            output = self.compute(token_ids, rows, chosen, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)  # may be changed in place

    def _placed(self, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
        """Token ids and the rows whose logits are wanted, on the device."""
        device = self.frequencies.device
        return inputs.token_ids.to(device), inputs.logits_indices.to(device)

    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        step = self._step(token_ids, rows, kv)
        x = self._enter(token_ids)
        y: Sublayer | None = None
        selection: Tensor | None = None
        for n, layer in enumerate(self.layers, 1):
            inherited = None if layer.owns_indexer else selection
            x, y, selection = layer(x, y, step, inherited, experts)
            if n < self.num_parts:
                yield
        if self.norm is None:
            x = x if y is None else x + added(y)
            self.shard.comm.send(x)
        else:
            x = self.norm(x, y)[1].plain()
        return ModelOutput(self._logits(self.head, rows_wanted(x, logits_indices)), x)

    def _enter(self, token_ids: Tensor) -> Tensor:
        """What this process's first layer gets: [n, hidden]."""
        if not self.shard.is_first:
            shape = len(token_ids), self.config.hidden_size
            like = torch.empty(shape, dtype=self.dtype, device=self.frequencies.device)
            return self.shard.comm.receive(like)
        assert self.embed is not None
        return self.embed(token_ids)

    def _logits(self, head: LMHead | None, hidden_states: Tensor) -> Tensor:
        """Those of the last stage, on every stage. hidden_states: [n, hidden], of rows wanted."""
        if head is None:
            shape = len(hidden_states), self.vocab_size
            logits = torch.empty(shape, dtype=torch.float32, device=self.frequencies.device)
        else:
            logits = head(hidden_states)
        return self.shard.comm.from_last(logits)

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """Run the draft layer on rows whose hidden states are known.

        inputs.token_ids are those at positions + 1. hidden_states: [num_tokens, hidden], of
        `forward` or of a previous draft, each after its norm. Needs num_spec_tokens > 0 at load.
        """
        with torch.inference_mode():
            rows, (token_ids, chosen) = self.rows(inputs), self._placed(inputs)
            output = self.compute_draft(token_ids, rows, chosen, hidden_states, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """`draft` as `compute` is `forward`."""
        assert self.mtp is not None or not self.shard.is_last, "loaded without the draft layer"
        if self.mtp is not None:
            assert self.embed is not None
            step = self._step(token_ids, rows, kv)
            x = self.mtp.join(self.embed(token_ids), hidden_states)
            x, y, _ = self.mtp.layer(x, None, step, None, experts)
            hidden_states = self.mtp.norm(x, y)[1].plain()
        logits = self._logits(self.draft_head, rows_wanted(hidden_states, logits_indices))
        return ModelOutput(logits, hidden_states)
