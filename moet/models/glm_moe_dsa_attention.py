"""Attention of GLM-5.2, top to bottom: the indexer that layers share, latent attention.

Knows a step's rows and its own layer's state; what stands before and behind it is the layer's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.comm import RankPart
from moet.kernels.device_gemm import PackedMatrix
from moet.kernels.gemm import Matrix, linear_fp32, streamed
from moet.kernels.indexer import index_select
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
from moet.kernels.quant import Activations
from moet.kernels.rows import Rows
from moet.models.base import KVTensors
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.layers import Linear, Weights
from moet.models.step import Place


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
        self._launcher = None if weights.gpu is None else weights.gpu.launcher
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
            launcher=self._launcher,
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
