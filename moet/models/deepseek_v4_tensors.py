"""The tensors of a DeepSeek-V4-Flash checkpoint: names, shapes and dtypes; nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from moet.models.deepseek_v4_config import DeepseekV4Config, LayerKind
from moet.models.expert_map import ExpertMap
from moet.models.formats import FP4_BLOCK, FP8_BLOCK
from moet.models.tensor_spec import TensorSpec

Draft = Literal["mtp", "dspark", "none"]


@dataclass(frozen=True, slots=True)
class Artefact:
    """Which of the published forms a checkpoint has.

    expert_dtype: "I8" (FP4 pairs) or "F8_E4M3". scale_dtype: "F8_E8M0", or "F32" holding powers of
    two. draft: "mtp" classic blocks, "dspark" stages, "none".
    """

    name: str
    expert_dtype: Literal["I8", "F8_E4M3"]
    scale_dtype: Literal["F8_E8M0", "F32"]
    draft: Draft


PREVIEW = Artefact("preview", "I8", "F8_E8M0", "mtp")
RELEASE_0731 = Artefact("0731", "I8", "F8_E8M0", "dspark")
BASE = Artefact("base", "F8_E4M3", "F32", "mtp")
ARTEFACTS = {artefact.name: artefact for artefact in (PREVIEW, RELEASE_0731, BASE)}


def tensor_inventory(config: DeepseekV4Config, artefact: Artefact) -> list[TensorSpec]:
    """Every tensor of a checkpoint, by its official name, in the order of the forward pass."""
    return [spec for part in inventory_parts(config, artefact).values() for spec in part]


def inventory_parts(config: DeepseekV4Config, artefact: Artefact) -> dict[str, list[TensorSpec]]:
    """The inventory by part: "embed", "layers.N", "head", "mtp.N"; releases shard along it."""
    parts = _parts(config, artefact)
    return {part: [TensorSpec(*entry) for entry in entries] for part, entries in parts}


def expert_map(config: DeepseekV4Config, artefact: Artefact) -> ExpertMap:
    """Where the routed experts are; every block has them, draft blocks too."""
    prefixes = [f"layers.{i}" for i in range(config.num_hidden_layers)]
    if artefact.draft != "none":
        prefixes += [f"mtp.{stage}" for stage in range(config.num_draft_blocks)]
    return ExpertMap(
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        tuple(range(len(prefixes))),
        tuple(f"{prefix}.ffn.experts." for prefix in prefixes),
    )


_Entry = tuple[str, str, tuple[int, ...]]


def _parts(config: DeepseekV4Config, artefact: Artefact) -> Iterator[tuple[str, Iterable[_Entry]]]:
    dim, layers = config.hidden_size, config.num_hidden_layers
    yield "embed", [("embed.weight", "BF16", (config.vocab_size, dim))]
    for layer_idx in range(layers):
        prefix = f"layers.{layer_idx}"
        yield prefix, _block(config, artefact, prefix, layer_idx)
    norm, head = ("norm.weight", "BF16", (dim,)), ("head.weight", "BF16", (config.vocab_size, dim))
    yield "head", [norm, *_hc_head(config, ""), head]
    if artefact.draft == "none":
        return
    extras = _dspark_extras if artefact.draft == "dspark" else _mtp_extras
    for stage in range(config.num_draft_blocks):
        block = _block(config, artefact, f"mtp.{stage}", layers + stage)
        yield f"mtp.{stage}", [*block, *extras(config, artefact, stage)]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _fp8(artefact: Artefact, name: str, rows: int, cols: int) -> Iterator[_Entry]:
    grid = (_ceil_div(rows, FP8_BLOCK), _ceil_div(cols, FP8_BLOCK))
    yield f"{name}.weight", "F8_E4M3", (rows, cols)
    yield f"{name}.scale", artefact.scale_dtype, grid


def _fp4(name: str, rows: int, cols: int) -> Iterator[_Entry]:
    yield f"{name}.weight", "I8", (rows, cols // 2)
    yield f"{name}.scale", "F8_E8M0", (rows, cols // FP4_BLOCK)


def _block(
    config: DeepseekV4Config, artefact: Artefact, prefix: str, layer_idx: int
) -> Iterator[_Entry]:
    dim, mult = config.hidden_size, config.hc_mult
    mix = (2 + mult) * mult
    for site in ("attn", "ffn"):
        yield f"{prefix}.hc_{site}_fn", "F32", (mix, mult * dim)
        yield f"{prefix}.hc_{site}_base", "F32", (mix,)
        yield f"{prefix}.hc_{site}_scale", "F32", (3,)
        yield f"{prefix}.{site}_norm.weight", "BF16", (dim,)
    yield from _attention(config, artefact, f"{prefix}.attn", config.layer_kind(layer_idx))
    yield from _ffn(config, artefact, f"{prefix}.ffn", config.is_hash_layer(layer_idx))


def _attention(
    config: DeepseekV4Config, artefact: Artefact, prefix: str, kind: LayerKind
) -> Iterator[_Entry]:
    dim, head_dim = config.hidden_size, config.head_dim
    q_width = config.num_attention_heads * head_dim
    o_rank = config.o_groups * config.o_lora_rank
    yield f"{prefix}.attn_sink", "F32", (config.num_attention_heads,)
    yield f"{prefix}.q_norm.weight", "BF16", (config.q_lora_rank,)
    yield f"{prefix}.kv_norm.weight", "BF16", (head_dim,)
    yield from _fp8(artefact, f"{prefix}.wq_a", config.q_lora_rank, dim)
    yield from _fp8(artefact, f"{prefix}.wq_b", q_width, config.q_lora_rank)
    yield from _fp8(artefact, f"{prefix}.wkv", head_dim, dim)
    yield from _fp8(artefact, f"{prefix}.wo_a", o_rank, q_width // config.o_groups)
    yield from _fp8(artefact, f"{prefix}.wo_b", dim, o_rank)
    if kind == "hca":
        yield from _compressor(f"{prefix}.compressor", 128, head_dim, head_dim, dim)
    if kind == "csa":
        yield from _compressor(f"{prefix}.compressor", 4, 2 * head_dim, head_dim, dim)
        index_dim, index_width = config.index_head_dim, config.index_n_heads * config.index_head_dim
        yield from _fp8(artefact, f"{prefix}.indexer.wq_b", index_width, config.q_lora_rank)
        yield f"{prefix}.indexer.weights_proj.weight", "BF16", (config.index_n_heads, dim)
        yield from _compressor(f"{prefix}.indexer.compressor", 4, 2 * index_dim, index_dim, dim)


def _compressor(prefix: str, ratio: int, width: int, out: int, dim: int) -> Iterator[_Entry]:
    yield f"{prefix}.ape", "F32", (ratio, width)
    yield f"{prefix}.wkv.weight", "BF16", (width, dim)
    yield f"{prefix}.wgate.weight", "BF16", (width, dim)
    yield f"{prefix}.norm.weight", "BF16", (out,)


def _ffn(
    config: DeepseekV4Config, artefact: Artefact, prefix: str, hashed: bool
) -> Iterator[_Entry]:
    dim, inter = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}.gate.weight", "BF16", (config.n_routed_experts, dim)
    if hashed:
        table = (config.vocab_size, config.num_experts_per_tok)
        yield f"{prefix}.gate.tid2eid", "I64", table
    else:
        yield f"{prefix}.gate.bias", "F32", (config.n_routed_experts,)
    shapes = {"w1": (inter, dim), "w2": (dim, inter), "w3": (inter, dim)}
    for matrix, (rows, cols) in shapes.items():
        yield from _fp8(artefact, f"{prefix}.shared_experts.{matrix}", rows, cols)
    for expert_id in range(config.n_routed_experts):
        for matrix, (rows, cols) in shapes.items():
            name = f"{prefix}.experts.{expert_id}.{matrix}"
            if artefact.expert_dtype == "I8":
                yield from _fp4(name, rows, cols)
            else:
                yield from _fp8(artefact, name, rows, cols)


def _hc_head(config: DeepseekV4Config, prefix: str) -> Iterator[_Entry]:
    mult = config.hc_mult
    yield f"{prefix}hc_head_fn", "F32", (mult, mult * config.hidden_size)
    yield f"{prefix}hc_head_base", "F32", (mult,)
    yield f"{prefix}hc_head_scale", "F32", (1,)


def _mtp_extras(config: DeepseekV4Config, artefact: Artefact, stage: int) -> Iterator[_Entry]:
    dim, prefix = config.hidden_size, f"mtp.{stage}"
    for name in ("e_proj", "h_proj"):
        yield from _fp8(artefact, f"{prefix}.{name}", dim, dim)
    for name in ("enorm", "hnorm", "norm"):
        yield f"{prefix}.{name}.weight", "BF16", (dim,)
    yield from _hc_head(config, f"{prefix}.")


def _dspark_extras(config: DeepseekV4Config, artefact: Artefact, stage: int) -> Iterator[_Entry]:
    dim, prefix = config.hidden_size, f"mtp.{stage}"
    if stage == 0:
        features = dim * len(config.dspark_target_layer_ids)
        yield from _fp8(artefact, f"{prefix}.main_proj", dim, features)
        yield f"{prefix}.main_norm.weight", "BF16", (dim,)
    if stage == config.num_draft_blocks - 1:
        rank = config.dspark_markov_rank or 0
        yield f"{prefix}.norm.weight", "BF16", (dim,)
        yield from _hc_head(config, f"{prefix}.")
        yield f"{prefix}.markov_head.markov_w1.weight", "BF16", (config.vocab_size, rank)
        yield f"{prefix}.markov_head.markov_w2.weight", "BF16", (config.vocab_size, rank)
        yield f"{prefix}.confidence_head.proj.weight", "BF16", (1, dim + rank)
