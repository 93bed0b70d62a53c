"""The tensors of a GLM-5.2 checkpoint: names, shapes and dtypes per flavour; nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moet.models.expert_map import ExpertMap
from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.tensor_spec import TensorSpec

FP8_BLOCK = 128  # an fp8 scale covers 128 x 128 weights
NVFP4_BLOCK = 16  # an e4m3 scale covers 16 consecutive inputs of a row

_Entry = tuple[str, str, tuple[int, ...]]


def tensor_inventory(config: GlmMoeDsaConfig, flavour: Flavour) -> list[TensorSpec]:
    """Every tensor of a checkpoint, by its official name, in the order of the forward pass."""
    return [spec for part in inventory_parts(config, flavour).values() for spec in part]


def inventory_parts(config: GlmMoeDsaConfig, flavour: Flavour) -> dict[str, list[TensorSpec]]:
    """The inventory by part: "embed", "layers.N" (draft layers too), "head"."""
    parts = _parts(config, flavour)
    return {part: [TensorSpec(*entry) for entry in entries] for part, entries in parts}


def expert_map(config: GlmMoeDsaConfig, flavour: Flavour) -> ExpertMap:
    """Where the routed experts are: every layer from first_k_dense_replace on, draft layers too."""
    num_layers = config.num_hidden_layers + config.num_draft_blocks
    layers = tuple(range(config.first_k_dense_replace, num_layers))
    return ExpertMap(
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        layers,
        tuple(f"model.layers.{i}.mlp.experts." for i in layers),
        names=("gate_proj", "up_proj", "down_proj"),
        fp8_scale="weight_scale_inv",
        fp4="nvfp4" if flavour == "nvfp4" else "mxfp4",
    )


def _parts(config: GlmMoeDsaConfig, flavour: Flavour) -> Iterator[tuple[str, Iterable[_Entry]]]:
    table = (config.vocab_size, config.hidden_size)
    yield "embed", [("model.embed_tokens.weight", "BF16", table)]
    layers = config.num_hidden_layers
    for layer_idx in range(layers):
        yield f"layers.{layer_idx}", _layer(config, flavour, layer_idx)
    norm = ("model.norm.weight", "BF16", (config.hidden_size,))
    yield "head", [norm, ("lm_head.weight", "BF16", table)]
    for layer_idx in range(layers, layers + config.num_draft_blocks):
        # The NVFP4 release leaves the draft layer as it was trained.
        kept: Flavour = "bf16" if flavour == "nvfp4" else flavour
        entries = [*_layer(config, kept, layer_idx), *_draft_extras(config, layer_idx)]
        yield f"layers.{layer_idx}", entries


def _linear(quantised: bool, name: str, rows: int, cols: int) -> Iterator[_Entry]:
    """A linear that the fp8 flavour stores in blocks and the others in bf16."""
    if not quantised:
        yield f"{name}.weight", "BF16", (rows, cols)
        return
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    yield f"{name}.weight", "F8_E4M3", (rows, cols)
    yield f"{name}.weight_scale_inv", "F32", grid


def _nvfp4(name: str, rows: int, cols: int) -> Iterator[_Entry]:
    yield f"{name}.weight", "U8", (rows, cols // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (rows, cols // NVFP4_BLOCK)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def _layer(config: GlmMoeDsaConfig, flavour: Flavour, layer_idx: int) -> Iterator[_Entry]:
    prefix, hidden = f"model.layers.{layer_idx}", config.hidden_size
    yield f"{prefix}.input_layernorm.weight", "BF16", (hidden,)
    yield from _attention(config, flavour == "fp8", f"{prefix}.self_attn", layer_idx)
    yield f"{prefix}.post_attention_layernorm.weight", "BF16", (hidden,)
    if config.is_dense(layer_idx):
        yield from _mlp(config, flavour == "fp8", f"{prefix}.mlp", config.intermediate_size)
    else:
        yield from _experts(config, flavour, f"{prefix}.mlp")


def _attention(config: GlmMoeDsaConfig, fp8: bool, prefix: str, layer_idx: int) -> Iterator[_Entry]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield from _linear(fp8, f"{prefix}.q_a_proj", config.q_lora_rank, hidden)
    yield f"{prefix}.q_a_layernorm.weight", "BF16", (config.q_lora_rank,)
    yield from _linear(fp8, f"{prefix}.q_b_proj", heads * config.qk_head_dim, config.q_lora_rank)
    yield from _linear(fp8, f"{prefix}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", "BF16", (latent,)
    yield from _linear(fp8, f"{prefix}.kv_b_proj", kv_width, latent)
    yield from _linear(fp8, f"{prefix}.o_proj", hidden, heads * config.v_head_dim)
    if config.owns_indexer(layer_idx):
        yield from _indexer(config, fp8, f"{prefix}.indexer")


def _indexer(config: GlmMoeDsaConfig, fp8: bool, prefix: str) -> Iterator[_Entry]:
    heads, dim = config.index_n_heads, config.index_head_dim
    yield from _linear(fp8, f"{prefix}.wq_b", heads * dim, config.q_lora_rank)
    yield from _linear(fp8, f"{prefix}.wk", dim, config.hidden_size)
    yield f"{prefix}.k_norm.weight", "BF16", (dim,)
    yield f"{prefix}.k_norm.bias", "BF16", (dim,)
    yield f"{prefix}.weights_proj.weight", "BF16", (heads, config.hidden_size)


def _mlp(config: GlmMoeDsaConfig, fp8: bool, prefix: str, width: int) -> Iterator[_Entry]:
    yield from _linear(fp8, f"{prefix}.gate_proj", width, config.hidden_size)
    yield from _linear(fp8, f"{prefix}.up_proj", width, config.hidden_size)
    yield from _linear(fp8, f"{prefix}.down_proj", config.hidden_size, width)


def _experts(config: GlmMoeDsaConfig, flavour: Flavour, prefix: str) -> Iterator[_Entry]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}.gate.weight", "BF16", (config.n_routed_experts, hidden)
    yield f"{prefix}.gate.e_score_correction_bias", "F32", (config.n_routed_experts,)
    yield from _mlp(config, flavour == "fp8", f"{prefix}.shared_experts", width)
    for expert_id in range(config.n_routed_experts):
        name = f"{prefix}.experts.{expert_id}"
        if flavour != "nvfp4":
            yield from _mlp(config, flavour == "fp8", name, width)
            continue
        yield from _nvfp4(f"{name}.gate_proj", width, hidden)
        yield from _nvfp4(f"{name}.up_proj", width, hidden)
        yield from _nvfp4(f"{name}.down_proj", hidden, width)


def _draft_extras(config: GlmMoeDsaConfig, layer_idx: int) -> Iterator[_Entry]:
    prefix, hidden = f"model.layers.{layer_idx}", config.hidden_size
    yield f"{prefix}.enorm.weight", "BF16", (hidden,)
    yield f"{prefix}.hnorm.weight", "BF16", (hidden,)
    yield f"{prefix}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
    yield f"{prefix}.shared_head.norm.weight", "BF16", (hidden,)
