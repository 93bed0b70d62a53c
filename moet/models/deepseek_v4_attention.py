"""Attention of DeepSeek-V4-Flash, top to bottom: rotations, compressors, indexer, attention.

Knows a step's rows and its own layer's state; what stands before and behind it is the layer's."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moet.kernels.attention import Sink, WindowKeys, chunks_fit, window_attention_q
from moet.kernels.attention_inputs import CompressorSite, attention_inputs
from moet.kernels.cache import EntryFormat, copy_entries
from moet.kernels.device_attention import PlacedSink
from moet.kernels.gemm import linear_fp32, linear_pair
from moet.kernels.indexer import index_select
from moet.kernels.quant import Activations
from moet.kernels.query_heads import query_heads
from moet.kernels.rope import Yarn, rope_frequencies
from moet.kernels.rows import Rows
from moet.kernels.window_places import CosSin, window_places
from moet.models.base import KVTensors
from moet.models.deepseek_v4_cache import RATIO_OF_KIND, CacheLayout
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.layers import GroupedLinear, Linear, Weights, joined
from moet.models.step import Place


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
        self._launcher = None if weights.gpu is None else weights.gpu.launcher
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
            launcher=self._launcher,
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
        keys = WindowKeys(
            step.rows,
            ring,
            chunk,
            self.compressor.entries.cache(step.kv) if self.compressor else None,
            self._selected(index_q, projected, step),
            self.sliding_window,
            self.ratio,
        )
        scale, groups = self.head_dim**-0.5, self.num_groups
        o = self._attend(q, self.sink, keys, *cos_sin, scale=scale, num_groups=groups)
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
