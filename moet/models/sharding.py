"""What each rank of a group holds: one table per model, and a source of weights cut by it.

Two ways of dividing go together. Tensor parallel ranks hold the same layers and a share of each;
pipeline stages hold different layers (`pipeline_stages.py`). Knows names, shapes and the order of
sums; how ranks reach each other is behind `Comm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from moet.errors import CheckpointError, ConfigError
from moet.kernels.comm import RankPart, added
from moet.kernels.gemm import MAX_SLICES, slices_of
from moet.kernels.mixture import Mixture
from moet.kernels.moe import ExpertFormat
from moet.kernels.quant import FP8_BLOCK
from moet.models.base import TensorSource
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig

Cut = Literal["whole", "outputs", "inputs"]


class Comm(Protocol):
    """How a rank reaches the others. Every call is made by all ranks concerned, in one order."""

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum over the tensor-parallel ranks by tree, (0 + 1) + (2 + 3); same bits on all.

        Added in fp32 and rounded once to dtype: bf16, or that of x.
        """
        ...

    def sum_on_read(
        self, x: Tensor | Mixture, dtype: torch.dtype | None = None
    ) -> Tensor | RankPart:
        """As sum, or x as it is for the op behind it to sum, where that op can."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' columns side by side, in rank order. x: [n, m]; returns [n, ranks * m]."""
        ...

    def receive(self, like: Tensor) -> Tensor:
        """What the stage before sent: shape and dtype of `like`."""
        ...

    def send(self, x: Tensor) -> None:
        """Hand x to the next stage."""
        ...

    def from_last(self, x: Tensor) -> Tensor:
        """The last stage's x, on every stage; elsewhere x gives shape and dtype."""
        ...


class Alone:
    """The Comm of a process that has everything."""

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(dtype or x.dtype)

    def sum_on_read(self, x: Tensor | Mixture, dtype: torch.dtype | None = None) -> Tensor:
        return self.sum(added(x), dtype)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def receive(self, like: Tensor) -> Tensor:
        raise AssertionError("there is no stage before this one")

    def send(self, x: Tensor) -> None:
        raise AssertionError("there is no stage behind this one")

    def from_last(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    """A process's place: rank of `size` within a stage, stage of `num_stages`."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    comm: Comm = field(default_factory=Alone)

    def __post_init__(self) -> None:
        if self.size not in (1, 2, MAX_SLICES):
            raise ConfigError(f"-tp is {self.size}; it must be 1, 2 or {MAX_SLICES}")

    @property
    def is_alone(self) -> bool:
        return self.size == self.num_stages == 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def divides(self, width: int) -> bool:
        """Whether inputs of this number are divided: in slices that keep activation scales whole.

        What cannot be divided is held, and computed, by every rank.
        """
        return slices_of(width) >= self.size

    def slices(self, width: int) -> int:
        """Slices of a product over `width` inputs that fall to this rank."""
        return slices_of(width) // self.size

    def part(self, count: int) -> tuple[int, int]:
        """This rank's span of `count` equal things; all of them if they cannot be divided."""
        if count % self.size:
            return 0, count
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: tensors whose names end in one of `names`, and how they are cut.

    A name ending in a dot stands for everything behind it. `by`: what the parts are.
    """

    names: tuple[str, ...]
    cut: Cut
    by: str

    def covers(self, name: str) -> bool:
        return any(
            f".{each}" in f".{name}" if each.endswith(".") else f".{name}".endswith(f".{each}")
            for each in self.names
        )


DEEPSEEK_V4 = (
    Row(("attn.indexer.", "attn.compressor."), "whole", "one selection and one KV for all heads"),
    Row(("attn.wq_a", "attn.wkv", "attn.q_norm", "attn.kv_norm"), "whole", "one latent"),
    Row(("attn.wq_b", "attn.attn_sink"), "outputs", "heads"),
    Row(("attn.wo_a",), "outputs", "groups of heads"),
    Row(("attn.wo_b",), "inputs", "groups of heads"),
    Row(("ffn.shared_experts.w1", "ffn.shared_experts.w3"), "outputs", "intermediate columns"),
    Row(("ffn.shared_experts.w2",), "inputs", "intermediate columns"),
    Row(("ffn.gate", "ffn.gate.bias", "ffn.gate.tid2eid"), "whole", "every rank routes alike"),
    Row(("head",), "outputs", "vocabulary"),
    Row(("embed", "norm", "attn_norm", "ffn_norm"), "whole", "a row or less is read per token"),
    Row(("e_proj", "h_proj", "enorm", "hnorm", "main_proj", "main_norm"), "whole", "draft input"),
    Row(("markov_head.", "confidence_head."), "whole", "not used"),
    Row(
        (
            "hc_attn_fn",
            "hc_attn_base",
            "hc_attn_scale",
            "hc_ffn_fn",
            "hc_ffn_base",
            "hc_ffn_scale",
            "hc_head_fn",
            "hc_head_base",
            "hc_head_scale",
        ),
        "whole",
        "mixes streams that every rank has",
    ),
)
GLM_MOE_DSA = (
    Row(("self_attn.indexer.",), "whole", "one selection for all heads"),
    Row(
        ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"), "whole", "one latent"
    ),
    Row(("q_b_proj", "kv_b_proj"), "outputs", "heads"),
    Row(("o_proj",), "inputs", "heads"),
    Row(("mlp.gate_proj", "mlp.up_proj"), "outputs", "intermediate columns"),
    Row(("mlp.down_proj",), "inputs", "intermediate columns"),
    Row(("shared_experts.gate_proj", "shared_experts.up_proj"), "outputs", "intermediate columns"),
    Row(("shared_experts.down_proj",), "inputs", "intermediate columns"),
    Row(("mlp.gate", "mlp.gate.e_score_correction_bias"), "whole", "every rank routes alike"),
    Row(("lm_head",), "outputs", "vocabulary"),
    Row(
        ("embed_tokens", "model.norm", "input_layernorm", "post_attention_layernorm"),
        "whole",
        "a row or less is read per token",
    ),
    Row(("eh_proj", "enorm", "hnorm", "shared_head.norm"), "whole", "draft input"),
)

_SUFFIXES = (".weight", ".scale", ".weight_scale_inv")


def row_of(table: Sequence[Row], name: str) -> Row:
    """The first line of a table that covers a tensor. Raises CheckpointError if none does."""
    plain = name
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    for row in table:
        if row.covers(plain):
            return row
    raise CheckpointError(f"nobody has said how {name} is divided between ranks; use -tp 1")


class PartSource(TensorSource, Protocol):
    """A source that can read a part of a tensor without the rest."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load_part(self, name: str, dim: int, first: int, last: int) -> Tensor:
        """first:last of a dimension, contiguous, with the dtype as stored."""
        ...


class ShardedSource:
    """A rank's weights: the tensors of a source, cut by a table. Reads only its part.

    whole: parts of names that stay whole although the table cuts them.
    """

    def __init__(
        self, source: PartSource, table: Sequence[Row], shard: Shard, whole: Sequence[str]
    ) -> None:
        self.source = source
        self.table = table
        self.shard = shard
        self.whole = tuple(whole)

    def names(self) -> Iterable[str]:
        return self.source.names()

    def shard_of(self, name: str) -> Shard:
        """Whose part `load` gives; WHOLE if it gives all."""
        return self.shard if self._is_cut(row_of(self.table, name), name) else WHOLE

    def _is_cut(self, row: Row, name: str) -> bool:
        kept = any(f".{part}" in f".{name}" for part in self.whole)
        return row.cut != "whole" and not kept

    def load(self, name: str) -> Tensor:
        """The rank's part with its dtype as stored.

        Raises ConfigError if a part would end inside a block of fp8 weights with one scale.
        """
        row = row_of(self.table, name)
        if not self._is_cut(row, name):
            return self.source.load(name)
        dim = 0 if row.cut == "outputs" else 1
        length, size = self.source.shape(name)[dim], self.shard.size
        part = self.source.load_part(name, dim, *self.shard.part(length))
        ends_inside = part.dtype == torch.float8_e4m3fn and length // size % FP8_BLOCK
        if length % size or ends_inside:
            raise ConfigError(
                f"-tp {size} cannot divide the {length} {row.cut} of {name} "
                f"(by {row.by}, fp8 in blocks of {FP8_BLOCK}); use a smaller -tp"
            )
        return part


def divide_deepseek_v4(
    config: DeepseekV4Config, source: TensorSource, shard: Shard
) -> tuple[DeepseekV4Config, TensorSource]:
    """The model as one rank holds it: fewer heads and columns, and the weights for them.

    Raises ConfigError if heads or groups cannot be divided.
    """
    if shard.size == 1:
        return config, source
    groups = config.o_groups
    _require_heads(shard, config.num_attention_heads, groups * config.o_lora_rank, groups)
    inter, whole = config.moe_intermediate_size, _whole_head(config.vocab_size, "head.", shard)
    if shard.divides(inter):
        inter //= shard.size
    else:
        whole += ("shared_experts.",)
    divided = replace(
        config,
        num_attention_heads=config.num_attention_heads // shard.size,
        o_groups=groups // shard.size,
        moe_intermediate_size=inter,
    )
    return divided, ShardedSource(_parts_of(source), DEEPSEEK_V4, shard, whole)


def divide_glm_moe_dsa(
    config: GlmMoeDsaConfig, source: TensorSource, shard: Shard
) -> tuple[GlmMoeDsaConfig, TensorSource]:
    """As divide_deepseek_v4."""
    if shard.size == 1:
        return config, source
    heads = config.num_attention_heads
    _require_heads(shard, heads, heads * config.v_head_dim, heads)
    whole = _whole_head(config.vocab_size, "lm_head.", shard)
    inter, dense = config.moe_intermediate_size, config.intermediate_size
    if shard.divides(inter):
        inter //= shard.size
    else:
        whole += ("shared_experts.",)
    if shard.divides(dense):
        dense //= shard.size
    else:
        whole += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    divided = replace(
        config,
        num_attention_heads=heads // shard.size,
        moe_intermediate_size=inter,
        intermediate_size=dense,
    )
    return divided, ShardedSource(_parts_of(source), GLM_MOE_DSA, shard, whole)


def _require_heads(shard: Shard, heads: int, width: int, groups: int) -> None:
    if heads % shard.size or groups % shard.size or not shard.divides(width):
        raise ConfigError(
            f"-tp {shard.size} cannot divide {heads} heads in {groups} groups whose outputs are "
            f"{width} columns (in slices of {FP8_BLOCK}); use -tp 1 or -pp for this model"
        )


def _whole_head(vocab_size: int, name: str, shard: Shard) -> tuple[str, ...]:
    return (name,) if vocab_size % shard.size else ()


class _Narrowed:
    """A PartSource over a source that only reads whole tensors: those that are in memory."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._last = "", torch.empty(0)

    def names(self) -> Iterable[str]:
        return self.source.names()

    def load(self, name: str) -> Tensor:
        return self.source.load(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._whole(name).shape)

    def load_part(self, name: str, dim: int, first: int, last: int) -> Tensor:
        return self._whole(name).narrow(dim, first, last - first).contiguous()

    def _whole(self, name: str) -> Tensor:
        if self._last[0] != name:  # asked for its shape, and then for a part
            self._last = name, self.source.load(name)
        return self._last[1]


def _parts_of(source: TensorSource) -> PartSource:
    from moet.models.pack import Pack

    return source if isinstance(source, Pack) else _Narrowed(source)


class ColumnShare:
    """An expert format of which a rank uses the columns first:last of the intermediate size."""

    def __init__(self, form: ExpertFormat, first: int, last: int) -> None:
        self.form, self.first, self.last = form, first, last
        self.name, self.row_bytes = form.name, form.row_bytes

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rank's part of w1, w3 and w2, as ExpertFormat.unpack."""
        w1, w3, w2 = self.form.unpack(row)
        span = slice(self.first, self.last)
        return w1[span], w3[span], w2[:, span]
