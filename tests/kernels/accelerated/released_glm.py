"""One call of every Triton op of GLM at the released model's shapes, for rows of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from moet.kernels import (
    triton_indexer,
    triton_mla,
    triton_mla_attention,
    triton_mla_inputs,
    triton_places,
    triton_swiglu,
)
from moet.kernels.cache import Cache, PlanedFormat
from moet.kernels.mla_attention import HeadMatrices, IndexKeys
from moet.kernels.mla_cache import Fp8IndexKeys, latent_rows
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows
from moet.models.glm_moe_dsa_cache import PAGE_SIZE

DIM, HEADS, RANK, LATENT, ROPE, NOPE, VALUE = 6144, 64, 2048, 512, 64, 192, 256
INDEX_HEADS, INDEX_DIM, TOP_K, INTER = 32, 128, 2048, 12288


class ReleasedGlm:
    """Tensors of one step of num_rows rows at the end of a context."""

    def __init__(
        self, num_rows: int, context: int, kv_dtype: Literal["fp8", "nvfp4"], device: torch.device
    ) -> None:
        self.n, self.device = num_rows, device
        positions = torch.arange(context - num_rows, context, device=device)
        zero, pages = torch.zeros_like(positions), -(-context // PAGE_SIZE)
        table = torch.arange(pages, device=device).view(1, -1)
        starts, ends = positions[:1].expand(num_rows), zero + context
        self.rows = Rows(positions, starts, ends, zero, zero, table, PAGE_SIZE, True)
        self.cos_sin = rope_cos_sin(positions, torch.rand(ROPE // 2, device=device))
        form = latent_rows(kv_dtype, latent_dim=LATENT, rope_dim=ROPE, entries_per_page=PAGE_SIZE)
        self.latents = self.cache(form, pages)
        self.index_form = Fp8IndexKeys(INDEX_DIM, PAGE_SIZE)
        self.keys = self.cache(self.index_form, pages)

    def cache(self, form: PlanedFormat, num_pages: int) -> Cache:
        shape = num_pages, form.page_bytes
        return Cache(torch.zeros(shape, dtype=torch.uint8, device=self.device), form)

    def bf16(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=torch.bfloat16)

    def fp32(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)

    def matrices(self, n: int, k: int) -> HeadMatrices:
        codes = torch.zeros(HEADS, n, k, dtype=torch.uint8, device=self.device)
        return HeadMatrices(codes.view(torch.float8_e4m3fn), self.fp32(HEADS, n // 64, k // 64))

    def ops(self) -> dict[str, Callable[[], object]]:
        n, bf16, fp32 = self.n, self.bf16, self.fp32
        q_kv, projected = bf16(n, RANK + LATENT + ROPE), fp32(n, INDEX_DIM + INDEX_HEADS)
        index = IndexKeys(fp32(INDEX_DIM), fp32(INDEX_DIM), self.keys)
        inputs = q_kv, projected, fp32(RANK), fp32(LATENT), *self.cos_sin, self.latents, index
        queries = bf16(n, HEADS * (NOPE + ROPE) + INDEX_HEADS * INDEX_DIM)
        query, mixed = bf16(n, HEADS, LATENT + ROPE), bf16(n, HEADS, LATENT)
        w_uk, w_uv = self.matrices(LATENT, NOPE), self.matrices(VALUE, LATENT)
        selected = torch.zeros(n, TOP_K, dtype=torch.int32, device=self.device)
        index_query, gate_up = bf16(n, INDEX_HEADS, INDEX_DIM), bf16(n, 2 * INTER)
        return {
            "latent_inputs": lambda: triton_mla_inputs.latent_inputs(
                *inputs, self.rows.positions, eps=1e-5
            ),
            "latent_queries": lambda: triton_mla.latent_queries(
                queries,
                w_uk,
                *self.cos_sin,
                index_heads=INDEX_HEADS,
                index_dim=INDEX_DIM,
                index_form=self.index_form,
            ),
            "index_select": lambda: triton_indexer.index_select(
                index_query,
                projected[:, INDEX_DIM:],
                self.keys,
                self.rows,
                ratio=1,
                top_k=TOP_K,
                gate_scale=0.01,
            ),
            "latent_attention": lambda: triton_mla_attention.latent_attention(
                query, self.latents, selected, self.rows, scale=1 / 16, latent_dim=LATENT
            ),
            "latent_places": lambda: triton_places.latent_places(self.rows, fp32(ROPE // 2)),
            "swiglu_halves": lambda: triton_swiglu.swiglu_halves(gate_up, limit=None),
            "head_products": lambda: triton_mla.head_products(mixed, w_uv, quantised=True),
        }
