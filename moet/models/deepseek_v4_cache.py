"""DeepSeek-V4-Flash's state: which entries exist and how they are encoded. Holds no weights and no
arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moet.config import KVDtype
from moet.errors import ConfigError
from moet.kernels.cache import Fp8Rows, Mxfp4Rows, PlainRows, PlanedFormat
from moet.models.base import KVCacheSpec, KVGroup
from moet.models.deepseek_v4_config import DeepseekV4Config, LayerKind
from moet.models.step import Place

PAGE_SIZE = 256  # tokens; two windows of ratio 128, so that no window is pending at a page border
RATIO_OF_KIND: dict[LayerKind, int] = {"window": 0, "csa": 4, "hca": 128}


@dataclass(frozen=True, slots=True)
class _Group:
    kind: str
    layers: tuple[int, ...]
    form: PlanedFormat
    resume: bool


class CacheLayout:
    """All state of the model under one KV format.

    kv_dtype "fp8" keeps index keys as MXFP4; "bf16" and "fp32" keep everything in that dtype.
    num_spec_tokens: drafted tokens per step; rings keep that many rows more, so that rejected rows
    never overwrite rows that are still needed, and the draft block's window is the last layer.
    held: the layers whose state this process keeps; None: all.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        kv_dtype: KVDtype,
        num_spec_tokens: int,
        held: range | None = None,
    ) -> None:
        if kv_dtype not in ("fp32", "bf16", "fp8"):
            raise ConfigError(
                f"--kv-cache-dtype {kv_dtype} does not exist for DeepSeek-V4-Flash; use fp8, "
                "bf16 or fp32"
            )
        self.kv_dtype, self._held = kv_dtype, held
        self.max_short = 1 + num_spec_tokens  # rows of a sequence that every ring has room for
        self.quantised_index = kv_dtype == "fp8"
        num_layers = config.num_hidden_layers + (1 if num_spec_tokens else 0)
        every = tuple(range(num_layers))
        csa = tuple(i for i in every if config.layer_kind(i) == "csa")
        hca = tuple(i for i in every if config.layer_kind(i) == "hca")
        self.ring_entries = window = config.sliding_window + num_spec_tokens
        head_dim, index_dim = config.head_dim, config.index_head_dim

        def state(values: int, entries: int) -> PlanedFormat:  # values and scores, fp32
            return PlainRows(2 * values, entries, torch.float32)

        csa_rows, hca_rows = 8 + num_spec_tokens, 128 + num_spec_tokens
        groups = {
            "window": _Group("ring", every, self._rows(config, window), True),
            "csa_entries": _Group("paged", csa, self._rows(config, PAGE_SIZE // 4), False),
            "hca_entries": _Group("paged", hca, self._rows(config, PAGE_SIZE // 128), False),
            "index_keys": _Group("paged", csa, self._index_rows(config), False),
            "csa_state": _Group("ring", csa, state(2 * head_dim, csa_rows), True),
            "index_state": _Group("ring", csa, state(2 * index_dim, csa_rows), True),
            "hca_state": _Group("ring", hca, state(head_dim, hca_rows), False),
        }
        self._groups = {name: group for name, group in groups.items() if group.layers}

    def _rows(self, config: DeepseekV4Config, entries: int) -> PlanedFormat:
        if self.kv_dtype == "fp8":
            return Fp8Rows(config.qk_nope_head_dim, config.qk_rope_head_dim, entries)
        return PlainRows(config.head_dim, entries, _PLAIN[self.kv_dtype])

    def _index_rows(self, config: DeepseekV4Config) -> PlanedFormat:
        if self.kv_dtype == "fp8":
            return Mxfp4Rows(config.index_head_dim, PAGE_SIZE // 4)
        return PlainRows(config.index_head_dim, PAGE_SIZE // 4, _PLAIN[self.kv_dtype])

    def _kept(self, group: _Group) -> tuple[int, ...]:
        held = self._held
        return tuple(i for i in group.layers if held is None or i in held)

    def place(self, group: str, layer_idx: int) -> Place:
        of_kind = self._groups[group]
        return Place(group, self._kept(of_kind).index(layer_idx), of_kind.form)

    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            PAGE_SIZE,
            tuple(
                KVGroup(
                    name=name,
                    kind="paged" if group.kind == "paged" else "ring",
                    layers=group.layers,
                    entries_per_page=group.form.entries_per_page,
                    page_bytes=group.form.page_bytes,
                    resume=group.resume,
                    held=None if self._held is None else self._kept(group),
                )
                for name, group in self._groups.items()
            ),
            max_short=self.max_short,
        )


_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
