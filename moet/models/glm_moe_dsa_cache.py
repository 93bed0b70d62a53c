"""GLM-5.2's state: two paged groups, the latent rows of every layer, and index keys of the layers
that choose positions. Holds no weights and no arithmetic."""

from __future__ import annotations

import torch

from moet.config import KVDtype, Rounding
from moet.kernels.cache import PlainRows, PlanedFormat
from moet.kernels.mla_cache import Fp8IndexKeys, latent_rows
from moet.models.base import KVCacheSpec, KVGroup
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.step import Place

PAGE_SIZE = 64  # tokens


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
