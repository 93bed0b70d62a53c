"""What a model weighs and reads, from its config alone: dense bytes, expert rows, state, work.

Sums the tensors of the published form that config.json describes, in the layout of packs; opens no
checkpoint and knows no hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from moet.config import KVDtype, Rounding
from moet.errors import ConfigError
from moet.models import deepseek_v4_cache, glm_moe_dsa_cache
from moet.models.base import KVCacheSpec, KVGroup
from moet.models.deepseek_v4_config import ARCHITECTURE as DEEPSEEK_V4
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_release import DeepseekV4Release
from moet.models.deepseek_v4_tensors import BASE, PREVIEW, RELEASE_0731, Artefact
from moet.models.expert_encoder import Tier, row_formats
from moet.models.formats import FP8_BLOCK
from moet.models.glm_moe_dsa_config import ARCHITECTURE as GLM
from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.glm_moe_dsa_release import GlmMoeDsaRelease
from moet.models.release import DenseDtype, Release
from moet.models.step_memory import Phase, deepseek_v4_phases, glm_phases, step_bytes
from moet.models.tensor_spec import TensorSpec

# By the end of the name without `.weight` and scales. The rest is copied to every rank.
_SPLIT = (
    *("head", "wq_b", "wo_a", "wo_b", "w1", "w2", "w3"),
    *("lm_head", "q_b_proj", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_LOOKED_UP = ("embed.weight", "embed_tokens.weight", "tid2eid")  # some rows a step, not all
_HEADS = ("head.weight", "lm_head.weight")
_SCALES = (".scale", ".weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes that ranks divide between them, and bytes that each of them has."""

    split: int = 0
    copied: int = 0

    def on(self, num_ranks: int) -> int:
        """Bytes of one rank."""
        return -(-self.split // num_ranks) + self.copied

    def __add__(self, other: Share) -> Share:
        return Share(self.split + other.split, self.copied + other.copied)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """Weights that are not routed experts, of the decoder or of its draft block.

    resident: by dtype. read: bytes of a step, without tables that are looked up and without the
    head. num_weights: factors of matrix products, without the head. num_values: all numbers but
    scales, tables and the head included.
    """

    resident: Mapping[str, Share]
    read: Share
    num_weights: int
    num_values: int

    def bytes_on(self, num_ranks: int) -> int:
        """Resident bytes of one rank."""
        return sum(share.on(num_ranks) for share in self.resident.values())


@dataclass(frozen=True, slots=True)
class KVRead:
    """Entries that a decoded token reads: one per `ratio` tokens of context, `most` at most.

    flops: arithmetic per entry, all heads.
    """

    num_layers: int
    entry_bytes: int
    ratio: int
    most: int | None
    flops: int

    def num_entries(self, context: int) -> int:
        """Entries of one layer."""
        entries = context // self.ratio
        return entries if self.most is None else min(entries, self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """A model in numbers. Bytes of expert rows are those of packs, alignment included.

    num_spec_tokens: drafted per step, 0 if the model has no draft block that can be used; draft is
    None then. draft_head_bytes: of the head in fp8 that a GPU drafts with, which no checkpoint has.
    num_expert_layers, num_draft_expert_layers: layers that have routed experts.
    num_pack_rows: experts that a pack holds, used or not. phases: of a layer, what each has of a
    chunk at once on a GPU. step_bytes_per_token: the same of the CPU reference, an upper estimate.
    sub_rows: parts that a row divides into.
    """

    architecture: str
    config: Mapping[str, Any]
    kv_dtype: KVDtype
    dense_dtype: DenseDtype
    num_spec_tokens: int
    dense: Dense
    draft: Dense | None
    head_bytes: Share
    draft_head_bytes: Share
    num_layers: int
    num_expert_layers: int
    num_draft_expert_layers: int
    num_experts: int
    num_pack_rows: int
    top_k: int
    row_bytes: Mapping[Tier, int]
    weights_per_expert: int
    kv: KVCacheSpec
    kv_reads: tuple[KVRead, ...]
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    step_bytes_per_token: int
    phases: tuple[Phase, ...]
    sub_rows: int

    def step_bytes(self, num_tokens: int, num_ranks: int) -> int:
        """What a chunk of so many tokens takes of a rank's GPU, beside index scores and logits."""
        return step_bytes(self.phases, num_tokens, num_ranks)

    @property
    def num_rows(self) -> int:
        """Routed experts of all layers that run."""
        return (self.num_expert_layers + self.num_draft_expert_layers) * self.num_experts

    def kv_read_bytes(self, context: int) -> int:
        """Bytes of state that one decoded token reads at that context."""
        return sum(r.num_layers * r.num_entries(context) * r.entry_bytes for r in self.kv_reads)

    def attention_flops(self, context: int) -> int:
        """Arithmetic of one token on the entries it attends to or scores."""
        return sum(r.num_layers * r.num_entries(context) * r.flops for r in self.kv_reads)

    @property
    def flops_per_token(self) -> int:
        """Arithmetic of one token on weights, without the head."""
        routed = self.num_expert_layers * self.top_k * self.weights_per_expert
        return 2 * (self.dense.num_weights + routed)


def footprint(
    raw_config: Mapping[str, Any],
    *,
    kv_dtype: KVDtype = "fp8",
    rounding: Rounding = "deployed",
    dense_dtype: DenseDtype = "keep",
    num_spec_tokens: int = 0,
) -> Footprint:
    """Read a parsed config.json. num_spec_tokens: drafted per step; rings keep that much more.

    Raises ConfigError for an unknown architecture or a KV format that the model does not have,
    CheckpointError for a dense dtype that it does not offer.
    """
    architecture = (raw_config.get("architectures") or [None])[0]
    if architecture == DEEPSEEK_V4:
        return _deepseek_v4(raw_config, kv_dtype, dense_dtype, num_spec_tokens)
    if architecture == GLM:
        return _glm(raw_config, kv_dtype, rounding, dense_dtype, num_spec_tokens)
    raise ConfigError(
        f"config.json names the architecture {architecture!r}; moet runs {DEEPSEEK_V4}, {GLM}"
    )


def _deepseek_v4(
    raw: Mapping[str, Any], kv_dtype: KVDtype, dense_dtype: DenseDtype, num_spec_tokens: int
) -> Footprint:
    config = DeepseekV4Config.from_dict(raw)
    release = DeepseekV4Release(config, _artefact(config))
    has_draft = release.artefact.draft == "mtp" and config.num_draft_blocks > 0
    num_spec_tokens = num_spec_tokens if has_draft else 0
    spec = deepseek_v4_cache.CacheLayout(config, kv_dtype, num_spec_tokens).spec()
    groups = {group.name: group for group in spec.groups}
    heads, width = config.num_attention_heads, config.head_dim
    attend = 4 * heads * width  # K and V are one row
    score = 2 * config.index_n_heads * config.index_head_dim
    row_bytes = groups["window"].page_bytes // groups["window"].entries_per_page

    def read(name: str, ratio: int, most: int | None) -> KVRead:
        layers = groups[name].layers if name in groups else ()
        return KVRead(len(layers), row_bytes, ratio, most, attend)

    reads = [
        read("window", 1, config.sliding_window),
        read("csa_entries", 4, config.index_topk),
        read("hca_entries", 128, None),
    ]
    if "index_keys" in groups:
        reads.append(_read(groups["index_keys"], 4, None, score))
    streams = 3 * config.hc_mult * config.hidden_size * 2
    attention_bytes = streams + 4 * heads * width
    return _footprint(
        _Model(DEEPSEEK_V4, release, "mtp.", attention_bytes, deepseek_v4_phases(config)),
        _State(spec, tuple(reads), kv_dtype, num_spec_tokens),
        raw,
        dense_dtype,
    )


def _glm(
    raw: Mapping[str, Any],
    kv_dtype: KVDtype,
    rounding: Rounding,
    dense_dtype: DenseDtype,
    num_spec_tokens: int,
) -> Footprint:
    config = GlmMoeDsaConfig.from_dict(raw)
    release = GlmMoeDsaRelease(config, _flavour(raw))
    num_spec_tokens = num_spec_tokens if config.num_draft_blocks > 0 else 0
    spec = glm_moe_dsa_cache.CacheLayout(config, kv_dtype, rounding, num_spec_tokens > 0).spec()
    groups = {group.name: group for group in spec.groups}
    heads = config.num_attention_heads
    attend = 2 * heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    score = 2 * config.index_n_heads * config.index_head_dim
    reads = (
        _read(groups["latent"], 1, config.index_topk, attend),
        _read(groups["index"], 1, None, score),
    )
    absorbed = 2 * heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    prefix = f"model.layers.{config.num_hidden_layers}."
    attention_bytes = 8 * config.hidden_size + absorbed
    return _footprint(
        _Model(GLM, release, prefix, attention_bytes, glm_phases(config)),
        _State(spec, reads, kv_dtype, num_spec_tokens),
        raw,
        dense_dtype,
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """What a model's own words say. attention_bytes: of a token in a step, beside its experts."""

    architecture: str
    release: Release
    draft_prefix: str
    attention_bytes: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """What it keeps, and how much of that a token reads."""

    spec: KVCacheSpec
    reads: tuple[KVRead, ...]
    kv_dtype: KVDtype
    num_spec_tokens: int


def _footprint(
    model: _Model, state: _State, raw: Mapping[str, Any], dense_dtype: DenseDtype
) -> Footprint:
    release, prefix, drafts = model.release, model.draft_prefix, state.num_spec_tokens > 0
    config, experts = release.config, release.experts
    specs = release.dense_specs(dense_dtype)
    form = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)
    width, hidden = experts.moe_intermediate_size, experts.hidden_size
    decoder_layers = [i for i in experts.layers if i < config.num_hidden_layers]
    mixture = 2 * config.num_experts_per_tok * (2 * width + hidden)
    return Footprint(
        architecture=model.architecture,
        config=raw,
        kv_dtype=state.kv_dtype,
        dense_dtype=dense_dtype,
        num_spec_tokens=state.num_spec_tokens,
        dense=_dense(s for s in specs if not s.name.startswith(prefix)),
        draft=_dense(s for s in specs if s.name.startswith(prefix)) if drafts else None,
        head_bytes=_sum(s for s in specs if s.name in _HEADS),
        draft_head_bytes=Share(split=_fp8_bytes(config.vocab_size, hidden) if drafts else 0),
        num_layers=config.num_hidden_layers,
        num_expert_layers=len(decoder_layers),
        num_draft_expert_layers=len(experts.layers) - len(decoder_layers) if drafts else 0,
        num_experts=experts.num_experts,
        num_pack_rows=experts.num_rows,
        top_k=config.num_experts_per_tok,
        row_bytes={tier: rows.row_bytes for tier, rows in form.items()},
        weights_per_expert=3 * width * hidden,
        kv=state.spec,
        kv_reads=state.reads,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        step_bytes_per_token=model.attention_bytes + mixture,
        phases=model.phases,
        sub_rows=form["w2"].num_sub_rows,
    )


def release_of(raw_config: Mapping[str, Any]) -> Release:
    """The published form that a parsed config.json belongs to.

    Raises ConfigError for an unknown architecture.
    """
    architecture = (raw_config.get("architectures") or [None])[0]
    if architecture == DEEPSEEK_V4:
        config = DeepseekV4Config.from_dict(raw_config)
        return DeepseekV4Release(config, _artefact(config))
    if architecture == GLM:
        return GlmMoeDsaRelease(GlmMoeDsaConfig.from_dict(raw_config), _flavour(raw_config))
    raise ConfigError(
        f"config.json names the architecture {architecture!r}; moet runs {DEEPSEEK_V4}, {GLM}"
    )


def _artefact(config: DeepseekV4Config) -> Artefact:
    if config.has_dspark:
        return RELEASE_0731
    return BASE if config.expert_dtype == "fp8" else PREVIEW


def _flavour(raw: Mapping[str, Any]) -> Flavour:
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method == "modelopt":
        return "nvfp4"
    return "fp8" if method == "fp8" else "bf16"


def _read(group: KVGroup, ratio: int, most: int | None, flops: int) -> KVRead:
    entry_bytes = group.page_bytes // group.entries_per_page
    return KVRead(len(group.layers), entry_bytes, ratio, most, flops)


def _dense(specs: Iterable[TensorSpec]) -> Dense:
    every = list(specs)
    streamed = [s for s in every if s.name not in _HEADS and not s.name.endswith(_LOOKED_UP)]
    return Dense(
        resident={
            dtype: _sum(s for s in every if s.dtype == dtype)
            for dtype in dict.fromkeys(s.dtype for s in every)
        },
        read=_sum(streamed),
        num_weights=sum(_num_values(s) for s in streamed if len(s.shape) == 2),
        num_values=sum(map(_num_values, every)),
    )


def _fp8_bytes(num_out: int, num_in: int) -> int:
    """Of a weight with an fp32 factor per block."""
    return num_out * num_in + 4 * -(-num_out // FP8_BLOCK) * -(-num_in // FP8_BLOCK)


def _num_values(spec: TensorSpec) -> int:
    return 0 if spec.name.endswith(_SCALES) else prod(spec.shape)


def _sum(specs: Iterable[TensorSpec]) -> Share:
    split = copied = 0
    for spec in specs:
        if _is_split(spec.name):
            split += spec.num_bytes
        else:
            copied += spec.num_bytes
    return Share(split, copied)


def _is_split(name: str) -> bool:
    for suffix in (*_SCALES, ".weight"):
        name = name.removesuffix(suffix)
    return name.rpartition(".")[2] in _SPLIT and ".indexer." not in name
