"""DeepSeek-V4-Flash, top to bottom: compressors, indexer, attention, decoder layer, MTP block,
model. Tensors to logits; knows nothing of scheduling."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.errors import CheckpointError, ConfigError
from moet.kernels.attention import Sink, chunks_fit, window_attention_q
from moet.kernels.attention_inputs import CompressorSite, attention_inputs
from moet.kernels.cache import EntryFormat, copy_entries
from moet.kernels.comm import RankPart, added
from moet.kernels.device_attention import PlacedSink
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.gemm import linear_fp32, linear_pair, streamed
from moet.kernels.hyper_connection import hc_enter, hc_head_norm, hc_pass, hc_post
from moet.kernels.indexer import index_select
from moet.kernels.mixture import Mixture
from moet.kernels.moe import sqrt_softplus
from moet.kernels.quant import Activations
from moet.kernels.query_heads import query_heads
from moet.kernels.rope import Yarn, rope_frequencies
from moet.kernels.rows import Rows
from moet.kernels.window_places import CosSin, window_places
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
from moet.models.layers import (
    Embedding,
    GroupedLinear,
    Linear,
    LMHead,
    Weights,
    joined,
)
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.parts import InParts, rows_wanted
from moet.models.sharding import WHOLE, Shard, deepseek_v4_layers, divide_deepseek_v4
from moet.models.step import Place, step_rows


class RopeTables:
    """The two rotations: plain for window-only layers, YaRN for layers with compressed entries."""

    def __init__(
        self,
        config: DeepseekV4Config,
        device: torch.device | str = "cpu",
        *,
        arch: str = "reference",
    ) -> None:
        scaling = config.rope_scaling
        yarn = Yarn(
            factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        dim = config.qk_rope_head_dim
        self.main = rope_frequencies(dim, config.rope_theta).to(device)
        self.compress = rope_frequencies(dim, config.compress_rope_theta, yarn).to(device)
        self.ratios = tuple(ratio for ratio in RATIO_OF_KIND.values() if ratio)
        self._places = window_places.bind(arch=arch, rope_dim=dim, num_ratios=len(self.ratios))

    def places(self, rows: Rows, num_entries: int) -> tuple[list[CosSin], Tensor]:
        """As the op window_places."""
        return self._places(
            rows, self.main, self.compress, ratios=self.ratios, num_entries=num_entries
        )


class Step:
    """One forward pass: what its rows are and which state they touch.

    num_entries: of the rings of sliding windows.
    """

    def __init__(
        self, token_ids: Tensor, rows: Rows, kv: KVTensors, tables: RopeTables, num_entries: int
    ) -> None:
        self.token_ids = token_ids
        self.rows = rows
        self.kv = kv
        angles, self.ring_slots = tables.places(rows, num_entries)
        self.main, self.compress, *starts = angles
        self._window_starts = dict(zip(tables.ratios, starts, strict=True))

    @cached_property
    def row_ids(self) -> Tensor:
        return self.rows.row_ids

    def window_start(self, ratio: int) -> CosSin:
        """Of the first token of the window of `ratio` tokens that a row is in."""
        return self._window_starts[ratio]


class Compressor:
    """Turns every `ratio` tokens into one entry. With ratio 4 a window reaches back over the one
    before. The projections (`parts`) are multiplied together with others of the same input."""

    def __init__(
        self,
        weights: Weights,
        config: DeepseekV4Config,
        *,
        ratio: int,
        width: int,
        state: Place,
        entries: Place,
        rotate: bool,
    ) -> None:
        self.ratio, self.overlapped, self.rotate = ratio, ratio == 4, rotate
        self.state, self.entries = state, entries
        channels = width * (2 if self.overlapped else 1)
        self.ape = weights.fp32("ape", ratio, channels)
        self.parts = [
            weights.operand(name, channels, config.hidden_size)[0] for name in ("wkv", "wgate")
        ]
        self.norm_weight = weights.fp32("norm.weight", width)

    @property
    def facts(self) -> tuple[EntryFormat, EntryFormat, int, bool]:
        """What an implementation has to know of it."""
        return self.state.form, self.entries.form, self.ratio, self.rotate

    def site(self, step: Step, columns: tuple[int, int]) -> CompressorSite:
        """As the op takes it. columns: where in the step's projections those of `parts` are."""
        return CompressorSite(
            self.ape,
            self.norm_weight,
            *step.window_start(self.ratio),
            self.state.cache(step.kv),
            self.entries.cache(step.kv),
            columns,
            self.overlapped,
            self.rotate,
        )


class Indexer:
    """Chooses which compressed entries each query of a CSA layer attends to."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        self.num_heads, self.dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.quantised = layout.quantised_index
        self.keys = layout.place("index_keys", layer_idx)
        self.wq_b = weights.linear("wq_b", self.num_heads * self.dim, config.q_lora_rank)
        self.gate, _ = weights.operand("weights_proj", self.num_heads, config.hidden_size)
        self.gate_scale = self.dim**-0.5 * self.num_heads**-0.5
        self.compressor = Compressor(
            weights.under("compressor."),
            config,
            ratio=4,
            width=self.dim,
            state=layout.place("index_state", layer_idx),
            entries=self.keys,
            rotate=self.quantised,
        )
        arch = weights.settings.arch
        self._select = index_select.bind(
            arch=arch, keys=self.keys.form, num_heads=self.num_heads, top_k=self.top_k
        )

    def __call__(self, query: Tensor, gate: Tensor, step: Step) -> Tensor:
        """query: [n, num_heads, dim]. gate: [n, num_heads] fp32, the product with `gate`.

        Returns [n, top_k] int32, entry numbers. The step's own keys are stored already.
        """
        return self._select(
            query,
            gate,
            self.keys.cache(step.kv),
            step.rows,
            ratio=4,
            top_k=self.top_k,
            gate_scale=self.gate_scale,
        )


class Attention:
    """Attention over the sliding window and, by layer kind, over compressed entries."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        kind = config.layer_kind(layer_idx)
        rank, head_dim = config.q_lora_rank, config.head_dim
        heads, groups = config.num_attention_heads, config.o_groups
        self.eps, arch = config.rms_norm_eps, weights.settings.arch
        self.ratio = RATIO_OF_KIND[kind]
        self.num_heads, self.head_dim, self.num_groups = heads, head_dim, groups
        self.sliding_window, self.q_lora_rank = config.sliding_window, rank
        self.window = layout.place("window", layer_idx)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if self.ratio:
            self.compressor = Compressor(
                weights.under("compressor."),
                config,
                ratio=self.ratio,
                width=head_dim,
                state=layout.place(f"{kind}_state", layer_idx),
                entries=layout.place(f"{kind}_entries", layer_idx),
                rotate=False,
            )
        if kind == "csa":
            self.indexer = Indexer(weights.under("indexer."), config, layout, layer_idx)
        self._load_projections(weights, config)
        compressors = [self.compressor] if self.compressor else []
        if self.indexer is not None:
            compressors.append(self.indexer.compressor)
        self._compressors = compressors
        form, facts = self.window.form, tuple(part.facts for part in compressors)
        self._inputs = attention_inputs.bind(arch=arch, rank=rank, form=form, compressors=facts)
        self._heads = query_heads.bind(
            arch=arch,
            head_dim=head_dim,
            rope_dim=config.qk_rope_head_dim,
            index_dim=self.indexer.dim if self.indexer else 0,
            quantised=layout.quantised_index,
        )
        self.sink = self._placed_sink(weights)
        self._attend = window_attention_q.bind(
            arch=arch, form=form, num_heads=heads, placed=isinstance(self.sink, PlacedSink)
        )
        self._copy = copy_entries.bind(arch=arch, form=form)

    def _placed_sink(self, weights: Weights) -> Sink:
        """The sink's logits as the form of attention that is bound takes them."""
        sink, gpu = weights.fp32("attn_sink", self.num_heads), weights.gpu
        if gpu is None or not gpu.chunk_attention:
            return sink
        if not chunks_fit(arch=gpu.arch, form=self.window.form, num_heads=self.num_heads):
            return sink
        return PlacedSink(sink, gpu.launcher)

    def _load_projections(self, weights: Weights, config: DeepseekV4Config) -> None:
        """Matrices of one input are multiplied at once: fewer and longer streams of weights."""
        dim, rank, head_dim = config.hidden_size, self.q_lora_rank, self.head_dim
        heads, groups = self.num_heads, self.num_groups
        self.wqa_wkv = Linear.stacked(
            [weights.linear("wq_a", rank, dim), weights.linear("wkv", head_dim, dim)]
        )
        self.q_norm_weight = weights.fp32("q_norm.weight", rank)
        self.kv_norm_weight = weights.fp32("kv_norm.weight", head_dim)
        queries = [weights.linear("wq_b", heads * head_dim, rank)]
        users = [] if self.compressor is None else [self.compressor.parts]
        if self.indexer is not None:
            queries.append(self.indexer.wq_b)
            users += [self.indexer.compressor.parts, [self.indexer.gate]]
        unquantised = [part for parts in users for part in parts]
        self.queries = Linear.stacked(queries)
        self.unquantised = joined(unquantised) if unquantised else None
        self.widths = [sum(part.shape[0] for part in parts) for parts in users]
        self._project = linear_fp32.bind(arch=weights.settings.arch)
        self._project_both = linear_pair.bind(arch=weights.settings.arch)
        self._at_once = weights.gpu is not None and self.wqa_wkv.quantised
        group_in = heads * head_dim // groups
        self.wo_a = GroupedLinear(weights, "wo_a", groups, config.o_lora_rank, group_in)
        self.wo_b = weights.input_linear("wo_b", dim, groups * config.o_lora_rank)

    def __call__(self, x: Tensor | Activations, step: Step) -> Tensor:
        """x: [n, dim], normalised. Returns [n, dim] and updates this layer's state."""
        cos_sin = step.compress if self.ratio else step.main
        qr_kv, projected = self._projections(x)
        ring = self.window.cache(step.kv)
        chunk = None if step.rows.short else ring.scratch(len(qr_kv))
        own, places = (ring, step.ring_slots) if chunk is None else (chunk, step.row_ids)
        qr = self._inputs(
            qr_kv,
            projected,
            self.q_norm_weight,
            self.kv_norm_weight,
            *cos_sin,
            own,
            places,
            self._sites(step),
            step.rows,
            eps=self.eps,
        )
        q, index_q = self._heads(
            self.queries(qr),
            *cos_sin,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            index_heads=self.indexer.num_heads if self.indexer else 0,
            eps=self.eps,
            quantised=self.indexer.quantised if self.indexer else False,
        )
        o = self._attend(
            q,
            self.sink,
            ring,
            chunk,
            self.compressor.entries.cache(step.kv) if self.compressor else None,
            self._selected(index_q, projected, step),
            *cos_sin,
            step.rows,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            ratio=self.ratio,
            num_groups=self.num_groups,
        )
        if chunk is not None:
            self._copy(chunk, ring, step.ring_slots)
        return self.wo_b(self.wo_a(o).flatten(1))

    def _projections(self, x: Tensor | Activations) -> tuple[Tensor, Tensor | None]:
        """Latents of queries and KV, and what compressors and indexer read: [n, columns] fp32."""
        if self.unquantised is None:
            return self.wqa_wkv(x), None
        if self._at_once:
            return self._project_both(x, self.wqa_wkv.weight, self.unquantised)
        return self.wqa_wkv(x), self._project(x, self.unquantised)

    def _sites(self, step: Step) -> tuple[CompressorSite, ...]:
        ends = list(accumulate(self.widths, initial=0))
        spans = pairwise(ends)
        return tuple(
            part.site(step, span) for part, span in zip(self._compressors, spans, strict=False)
        )

    def _selected(
        self, index_q: Tensor | None, projected: Tensor | None, step: Step
    ) -> Tensor | None:
        """The entries that each row attends to, if this layer chooses."""
        if self.indexer is None:
            return None
        assert index_q is not None
        assert projected is not None
        return self.indexer(index_q, projected[:, -self.indexer.num_heads :], step)


class Residual:
    """The streams of a step, with a sublayer's output that is not mixed in before the next sublayer
    begins, so that both happen in one op."""

    def __init__(self, streams: Tensor) -> None:
        self.streams = streams
        # y, post, mix
        self.pending: tuple[Tensor | Mixture, Tensor, Tensor] | None = None


def _mix_matrix(weights: Weights, name: str, num_out: int, num_in: int) -> Tensor | MixMatrix:
    """fn of a site, where the ops that collapse streams want it."""
    fn = weights.fp32(name, num_out, num_in)
    return streamed(fn) if weights.gpu is None else MixMatrix(fn, weights.gpu)


class HyperConnection:
    """One site of a layer: streams to sublayer input, sublayer output back to streams."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, site: str) -> None:
        mult, arch = config.hc_mult, weights.settings.arch
        rows = (2 + mult) * mult
        self.fn = _mix_matrix(weights, f"hc_{site}_fn", rows, mult * config.hidden_size)
        self.base = weights.fp32(f"hc_{site}_base", rows)
        self.scale = weights.fp32(f"hc_{site}_scale", 3)
        self.norm_weight = weights.fp32(f"{site}_norm.weight", config.hidden_size)
        self.config = config
        facts = {"mult": mult, "dim": config.hidden_size, "placed": weights.gpu is not None}
        self._enter = hc_enter.bind(arch=arch, **facts)
        self._pass = hc_pass.bind(arch=arch, **facts)
        self._post = hc_post.bind(arch=arch, **facts)

    def enter(self, residual: Residual) -> tuple[Tensor | Activations, Tensor, Tensor]:
        """The sublayer's normed input [n, dim]; post [n, h] and mix [n, h, h] for its output.

        What is pending in the residual is mixed into its streams first.
        """
        site = self.fn, self.base, self.scale, self.norm_weight
        eps, hc_eps = self.config.rms_norm_eps, self.config.hc_eps
        iters = self.config.hc_sinkhorn_iters
        if residual.pending is None:
            return self._enter(
                residual.streams, *site, norm_eps=eps, hc_eps=hc_eps, num_iters=iters
            )
        y, post, mix = residual.pending
        residual.streams, x, post, mix = self._pass(
            y, residual.streams, post, mix, *site, norm_eps=eps, hc_eps=hc_eps, num_iters=iters
        )
        return x, post, mix

    def finish(self, residual: Residual) -> Tensor:
        """The streams with everything mixed in."""
        if residual.pending is not None:
            y, post, mix = residual.pending
            residual.streams = self._post(added(y), residual.streams, post, mix)
            residual.pending = None
        return residual.streams


class Block:
    """A decoder layer: attention, then experts, each between collapse and expansion."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        self.hc_attn = HyperConnection(weights, config, "attn")
        self.hc_ffn = HyperConnection(weights, config, "ffn")
        self.attn = Attention(weights.under("attn."), config, layout, layer_idx)
        self.ffn = _load_moe(weights.under("ffn."), config, layer_idx)

    def __call__(self, residual: Residual, step: Step, experts: ExpertProvider) -> None:
        """Pass the residual on, this layer's last output pending in it."""
        x, post, mix = self.hc_attn.enter(residual)
        residual.pending = self.attn(x, step), post, mix
        x, post, mix = self.hc_ffn.enter(residual)
        y = self.ffn(x, step.token_ids, step.rows.positions, experts)
        assert not isinstance(y, RankPart), "sums of ranks are asked for"
        residual.pending = y, post, mix

    def finish(self, residual: Residual) -> Tensor:
        """[n, h, dim], behind this layer."""
        return self.hc_ffn.finish(residual)

    def hand_on(self, residual: Residual) -> Tensor:
        """As finish, with the bits that the next layer's first site would make."""
        self.hc_ffn.enter(residual)  # what else it makes is not read
        return residual.streams


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
        weights.operand("gate", num_experts, dim)[0],
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
        weights.input_linear("shared_experts.w2", dim, inter),
        limit=limit,
        arch=settings.arch,
    )
    return MoE(layer_idx, router, shared, limit=limit, settings=settings, unsummed=True)


class Head:
    """Streams to logits: last collapse, norm, vocabulary projection."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, lm_head: LMHead) -> None:
        mult, dim = config.hc_mult, config.hidden_size
        self.fn = _mix_matrix(weights, "hc_head_fn", mult, mult * dim)
        self.base = weights.fp32("hc_head_base", mult)
        self.scale = weights.fp32("hc_head_scale", 1)
        self.norm_weight = weights.fp32("norm.weight", dim)
        self.lm_head = lm_head
        self.norm_eps, self.hc_eps = config.rms_norm_eps, config.hc_eps
        self._collapse = hc_head_norm.bind(
            arch=weights.settings.arch, mult=mult, dim=dim, placed=weights.gpu is not None
        )

    def __call__(self, streams: Tensor) -> Tensor:
        """[n, h, dim] to [n, vocab_size] fp32."""
        x = self._collapse(
            streams,
            self.fn,
            self.base,
            self.scale,
            self.norm_weight,
            norm_eps=self.norm_eps,
            hc_eps=self.hc_eps,
        )
        return self.lm_head(x)


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
        residual = Residual(h + e.unsqueeze(1))
        self.block(residual, step, experts)
        return self.block.finish(residual)


@dataclass(eq=False)
class DeepseekV4(InParts):
    """The whole model. `load` builds it; `forward` runs a step."""

    config: DeepseekV4Config
    layout: CacheLayout
    embed: Embedding | None
    layers: list[Block]
    head: Head | None
    mtp: MTPBlock | None
    tables: RopeTables
    dtype: torch.dtype
    shard: Shard = WHOLE
    device: Device | None = None

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings

    @classmethod
    def load(
        cls,
        config: DeepseekV4Config,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
        shard: Shard = WHOLE,
        gpu: Device | None = None,
    ) -> DeepseekV4:
        """Read everything but the routed experts, as far as the shard has it.

        rounding "none" computes in fp32 and needs kv_dtype "fp32"; "deployed" rounds activations to
        bf16 and fp8. num_spec_tokens > 0 loads the draft block and makes room for its rows.

        gpu: where to; it must be there unless the arch is "reference".

        Raises ConfigError for settings that do not fit, CheckpointError for tensors that do not.
        """
        if settings.rounding == "none" and kv_dtype != "fp32":
            raise ConfigError(
                f"rounding none keeps all numbers in fp32, but the KV format is {kv_dtype}; "
                "use --kv-cache-dtype fp32 with it"
            )
        config, source = divide_deepseek_v4(config, source, shard)
        weights = Weights(source, settings, gpu=gpu)
        if num_spec_tokens and not weights.has("mtp.0.e_proj.weight"):
            raise ConfigError(
                f"{num_spec_tokens} draft tokens were asked for, but the checkpoint has no MTP "
                "block (mtp.0.e_proj.weight); use 0"
            )
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        own = deepseek_v4_layers(config, shard)
        is_first, is_last, drafts = shard.is_first, shard.is_last, num_spec_tokens > 0
        held = range(own.start, own.stop + (is_last and drafts))
        layout = CacheLayout(
            config, kv_dtype, num_spec_tokens, held if shard.num_stages > 1 else None
        )
        vocab, dim = config.vocab_size, config.hidden_size
        lm_head = draft_head = LMHead.load(weights, "head", vocab, dim) if is_last else None
        if is_last and drafts and gpu is not None:
            draft_head = LMHead.guessing(weights, "head", vocab, dim)
        reads_tokens = is_first or (is_last and drafts)
        return cls(
            config=config,
            layout=layout,
            embed=Embedding(weights.tensor("embed.weight", vocab, dim), dtype)
            if reads_tokens
            else None,
            layers=[Block(weights.under(f"layers.{i}."), config, layout, i) for i in own],
            head=None if lm_head is None else Head(weights, config, lm_head),
            mtp=MTPBlock(weights.under("mtp.0."), config, layout, draft_head)
            if drafts and draft_head is not None
            else None,
            tables=RopeTables(config, weights.device, arch=settings.arch),
            dtype=dtype,
            shard=shard,
            device=gpu,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.layout.spec()

    def rows(self, inputs: ForwardInput) -> Rows:
        """A step's rows as the ops take them, on the device."""
        device = self.tables.main.device
        return step_rows(inputs, PAGE_SIZE, max_short=self.layout.max_short, device=device)

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """Run one step. hidden_states: [num_tokens, h, dim], streams before the last collapse."""
        with torch.inference_mode():
            rows, (token_ids, chosen) = self.rows(inputs), self._placed(inputs)
            output = self.compute(token_ids, rows, chosen, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)  # may be changed in place

    def _placed(self, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
        """Token ids and the rows whose logits are wanted, on the device."""
        device = self.tables.main.device
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
        residual = Residual(self._enter(token_ids))
        for n, layer in enumerate(self.layers, 1):
            layer(residual, step, experts)
            if n < self.num_parts:
                yield
        last = self.layers[-1]
        if self.shard.is_last:
            streams = last.finish(residual)
        else:
            streams = last.hand_on(residual)
            self.shard.comm.send(streams)
        return ModelOutput(self._logits(self.head, rows_wanted(streams, logits_indices)), streams)

    def _step(self, token_ids: Tensor, rows: Rows, kv: KVTensors) -> Step:
        return Step(token_ids, rows, kv, self.tables, self.layout.ring_entries)

    def _enter(self, token_ids: Tensor) -> Tensor:
        """The streams before this process's first layer: [n, h, dim]."""
        mult, dim = self.config.hc_mult, self.config.hidden_size
        if not self.shard.is_first:
            shape = len(token_ids), mult, dim
            like = torch.empty(shape, dtype=self.dtype, device=self.tables.main.device)
            return self.shard.comm.receive(like)
        assert self.embed is not None
        return self.embed(token_ids).unsqueeze(1).expand(-1, mult, -1).contiguous()

    def _logits(self, head: Head | None, streams: Tensor) -> Tensor:
        """Those of the last stage, on every stage. streams: [n, h, dim] of the rows wanted."""
        if head is None:
            shape = len(streams), self.vocab_size
            logits = torch.empty(shape, dtype=torch.float32, device=self.tables.main.device)
        else:
            logits = head(streams)
        return self.shard.comm.from_last(logits)

    def draft(
        self, inputs: ForwardInput, streams: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """Run the draft block on rows whose streams are known.

        inputs.token_ids are those at positions + 1. streams: [num_tokens, h, dim], hidden_states
        of forward or of a previous draft. Needs num_spec_tokens > 0 at load.
        """
        with torch.inference_mode():
            rows, (token_ids, chosen) = self.rows(inputs), self._placed(inputs)
            output = self.compute_draft(token_ids, rows, chosen, streams, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        streams: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """`draft` as `compute` is `forward`."""
        assert self.mtp is not None or not self.shard.is_last, "loaded without a draft block"
        head = None
        if self.mtp is not None:
            assert self.embed is not None
            step = self._step(token_ids, rows, kv)
            streams = self.mtp(self.embed(token_ids), streams, step, experts)
            head = self.mtp.head
        return ModelOutput(self._logits(head, rows_wanted(streams, logits_indices)), streams)
