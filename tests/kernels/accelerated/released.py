"""One call of every Triton op at the released model's shapes, as a step of few rows makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moet.kernels import (
    triton_attention,
    triton_attention_inputs,
    triton_compressor,
    triton_hyper_connection,
    triton_index_queries,
    triton_indexer,
    triton_places,
    triton_rows,
)
from moet.kernels.attention import WindowKeys
from moet.kernels.attention_inputs import CompressorSite
from moet.kernels.cache import Cache, Fp8Rows, Mxfp4Rows, PlainRows
from moet.kernels.cubin import device_arch
from moet.kernels.device_attention import attend_chunk
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.hyper_connection import Site, hc_enter, hc_head_norm, hc_pass
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows
from moet.models.deepseek_v4_cache import PAGE_SIZE

DIM, HEADS, RANK, WIDTH, ROPE, INDEX_HEADS, INDEX_DIM = 4096, 64, 1024, 512, 64, 64, 128
TOP_K, WINDOW = 512, 128
HC = {"norm_eps": 1e-6, "hc_eps": 1e-6}


class Released:
    """Tensors of one step: num_rows sequences of one row, or one chunk of as many rows."""

    def __init__(
        self, num_rows: int, context: int, device: torch.device, *, chunk: bool = False
    ) -> None:
        self.n, self.device, self.is_chunk = num_rows, device, chunk
        num_seqs = 1 if chunk else num_rows
        pages = -(-context // PAGE_SIZE)
        table = torch.randperm(num_seqs * pages, device=device).view(num_seqs, pages)
        row = torch.arange(num_rows, device=device)
        if chunk:
            positions = context - num_rows + row
            starts, ends = torch.full_like(row, context - num_rows), torch.full_like(row, context)
            seq = torch.zeros_like(row)
        else:
            positions = torch.full_like(row, context - 1)
            starts, ends, seq = positions, positions + 1, row
        self.rows = Rows(positions, starts, ends, seq, seq, table, PAGE_SIZE, not chunk)
        self.cos_sin = rope_cos_sin(positions, torch.rand(ROPE // 2, device=device))
        self.num_seqs, self.num_pages = num_seqs, num_seqs * pages

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def fp32(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def cache(self, form: Fp8Rows | Mxfp4Rows | PlainRows, num: int) -> Cache:
        """Of random bytes below 64: finite values, mostly different ones, in every format."""
        shape = num, form.page_bytes
        return Cache(torch.randint(64, shape, dtype=torch.uint8, device=self.device), form)

    def kv(self, entries: int, num: int) -> Cache:
        return self.cache(Fp8Rows(WIDTH - ROPE, ROPE, entries), num)

    def ops(self) -> dict[str, Callable[[], object]]:
        return {
            **self._streams(),
            **self._writes(),
            **self._compressors(),
            **self._index(),
            **self._attention(),
            **self._inputs(),
        }

    def _site(self, outs: int, num_scales: int, num_iters: int) -> Site:
        fn, base = self.fp32(outs, 4 * DIM), self.fp32(outs)
        return Site(fn, base, self.fp32(num_scales), self.fp32(DIM), **HC, num_iters=num_iters)

    def _streams(self) -> dict[str, Callable[[], object]]:
        x, y = self.bf16(self.n, 4, DIM), self.bf16(self.n, DIM)
        site, head = self._site(24, 3, num_iters=20), self._site(4, 1, num_iters=0)
        post, mix = self.fp32(self.n, 4), self.fp32(self.n, 4, 4)
        hc = triton_hyper_connection
        found: dict[str, Callable[[], object]] = {
            "hc_enter_triton": lambda: hc.hc_enter(x, site),
            "hc_pass_triton": lambda: hc.hc_pass(y, x, post, mix, site),
            "hc_post": lambda: hc.hc_post(y, x, post, mix),
            "hc_head_norm_triton": lambda: hc.hc_head_norm(x, head),
        }
        if self.device.type == "cuda":
            gpu = Device.open(device_arch(self.device), self.device)
            facts = {"arch": gpu.arch, "mult": 4, "dim": DIM, "placed": True}
            placed, few = (replace(s, fn=MixMatrix(s.fn, gpu)) for s in (site, head))
            enter, passes = hc_enter.bind(**facts), hc_pass.bind(**facts)
            norm = hc_head_norm.bind(**facts)
            found |= {
                "hc_enter": lambda: enter(x, placed),
                "hc_pass": lambda: passes(y, x, post, mix, placed),
                "hc_head_norm": lambda: norm(x, few),
            }
        return found

    def _writes(self) -> dict[str, Callable[[], object]]:
        qr_kv, weight = self.bf16(self.n, RANK + WIDTH), self.fp32(RANK)
        queries = self.bf16(self.n, HEADS * WIDTH + INDEX_HEADS * INDEX_DIM)
        q = queries[:, : HEADS * WIDTH]
        kv = qr_kv[:, RANK:]
        ring, scratch = self.kv(WINDOW + 2, self.num_seqs), self.kv(self.n, 1)
        slots = self.rows.ring_slots(WINDOW + 2)
        rows, frequencies = triton_rows, self.fp32(ROPE // 2)
        return {
            "window_places": lambda: triton_places.window_places(
                self.rows, frequencies, frequencies, ratios=(4, 128), num_entries=WINDOW + 2
            ),
            "rms_norm": lambda: rows.rms_norm(qr_kv[:, :RANK], weight, eps=1e-6),
            "norm_rope_heads": lambda: rows.norm_rope_heads(
                q, *self.cos_sin, num_heads=HEADS, eps=1e-6
            ),
            "query_heads": lambda: rows.query_heads(
                queries,
                *self.cos_sin,
                num_heads=HEADS,
                head_dim=WIDTH,
                index_heads=INDEX_HEADS,
                eps=1e-6,
            ),
            "write_kv": lambda: rows.write_kv(
                kv, weight[:WIDTH], *self.cos_sin, ring, slots, eps=1e-6
            ),
            "copy_entries": lambda: rows.copy_entries(scratch, ring, slots),
        }

    def _compressors(self) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {}
        for name, ratio, width in (("csa", 4, 512), ("index", 4, 128), ("hca", 128, 512)):
            channels = width * (2 if ratio == 4 else 1)
            mxfp4 = name == "index"
            form = Mxfp4Rows(width, 64) if mxfp4 else Fp8Rows(width - ROPE, ROPE, 256 // ratio)
            args = (
                self.fp32(self.n, 2 * channels + 64)[:, : 2 * channels],
                self.fp32(ratio, channels),
                self.fp32(width),
                *self.cos_sin,
                self.cache(
                    PlainRows(2 * channels, 2 * ratio + 2, torch.float32)
                    if ratio == 4
                    else PlainRows(2 * channels, ratio + 2, torch.float32),
                    self.num_seqs,
                ),
                self.cache(form, self.num_pages),
                self.rows,
            )
            settings = {"overlapped": ratio == 4, "rotate": mxfp4, "eps": 1e-6}
            found[f"compress_{name}"] = lambda args=args, settings=settings: (
                triton_compressor.compress(*args, **settings, dtype=torch.bfloat16)
            )
        return found

    def _index(self) -> dict[str, Callable[[], object]]:
        q = self.bf16(self.n, INDEX_HEADS * INDEX_DIM)
        query = self.bf16(self.n, INDEX_HEADS, INDEX_DIM)
        weights = self.fp32(self.n, INDEX_HEADS)
        keys = self.cache(Mxfp4Rows(INDEX_DIM, 64), self.num_pages)
        return {
            "index_query": lambda: triton_index_queries.index_query(
                q, *self.cos_sin, num_heads=INDEX_HEADS, quantised=True
            ),
            "index_select": lambda: triton_indexer.index_select(
                query, weights, keys, self.rows, ratio=4, top_k=TOP_K, gate_scale=0.01
            ),
        }

    def _inputs(self) -> dict[str, Callable[[], object]]:
        qr_kv, weight = self.bf16(self.n, RANK + WIDTH), self.fp32(RANK)
        window = self.kv(self.n, 1) if self.is_chunk else self.kv(WINDOW + 2, self.num_seqs)
        slots = self.rows.row_ids if self.is_chunk else self.rows.ring_slots(WINDOW + 2)

        def site(ratio: int, width: int, first: int) -> CompressorSite:
            channels = width * (2 if ratio == 4 else 1)
            form = Mxfp4Rows(width, 64) if width == INDEX_DIM else Fp8Rows(448, ROPE, 256 // ratio)
            ring = PlainRows(2 * channels, (8 if ratio == 4 else ratio) + 2, torch.float32)
            return CompressorSite(
                self.fp32(ratio, channels),
                self.fp32(width),
                *self.cos_sin,
                self.cache(ring, self.num_seqs),
                self.cache(form, self.num_pages),
                (first, first + 2 * channels),
                ratio == 4,
                width == INDEX_DIM,
            )

        csa = site(4, WIDTH, 0), site(4, INDEX_DIM, 4 * WIDTH)
        sites = {"window": (), "csa": csa, "hca": (site(128, WIDTH, 0),)}

        def call(sites: tuple[CompressorSite, ...], projected: Tensor | None) -> object:
            return triton_attention_inputs.attention_inputs(
                qr_kv,
                projected,
                weight,
                weight[:WIDTH],
                *self.cos_sin,
                window,
                slots,
                sites,
                self.rows,
                eps=1e-6,
            )

        found: dict[str, Callable[[], object]] = {}
        for name, some in sites.items():
            projected = self.fp32(self.n, some[-1].columns[1] + 64) if some else None
            found[f"inputs_{name}"] = lambda some=some, projected=projected: call(some, projected)
        return found

    def _attention(self) -> dict[str, Callable[[], object]]:
        q, sink = self.bf16(self.n, HEADS, WIDTH), self.fp32(HEADS)
        ring = self.kv(WINDOW + 2, self.num_seqs)
        chunk = self.kv(self.n, 1) if self.is_chunk else None
        visible = int(self.rows.visible(4).min())
        chosen = torch.arange(TOP_K, device=self.device, dtype=torch.int32) * max(
            1, visible // TOP_K
        )
        chosen = torch.where(chosen < visible, chosen, -1).expand(self.n, -1).contiguous()
        attend, scale = triton_attention.window_attention_q, WIDTH**-0.5

        def call(keys: WindowKeys) -> object:
            return attend(q, sink, keys, *self.cos_sin, scale=scale, num_groups=8)

        csa, hca = self.kv(64, self.num_pages), self.kv(2, self.num_pages)
        states = {
            name: WindowKeys(self.rows, ring, chunk, entries, selected, WINDOW, ratio)
            for name, entries, selected, ratio in (
                ("csa", csa, chosen, 4),
                ("window", None, None, 0),
                ("hca", hca, None, 128),
            )
        }
        found: dict[str, Callable[[], object]] = {
            f"attention_{name}": lambda state=state: call(state) for name, state in states.items()
        }
        if self.device.type == "cuda" and chunk is not None:
            launcher = Device.open(device_arch(self.device), self.device).launcher

            def tiled(keys: WindowKeys) -> object:
                given = q, sink, keys, *self.cos_sin
                return attend_chunk(launcher, *given, scale=scale, num_groups=8, tiled=True)

            found |= {
                f"attention_{name}_cuda": lambda state=state: tiled(state)
                for name, state in states.items()
            }
        return found
