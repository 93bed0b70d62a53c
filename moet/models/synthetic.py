"""Synthetic checkpoints in the official layout: names, shapes, dtypes, shards, index, tokenizer.

The weights are random, scaled so that activations stay near 1 and logits near 1, and a function of
(seed, tensor name) alone. Knows nothing of the model's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from moet.errors import ConfigError
from moet.models.deepseek_v4_config import DeepseekV4Config, RopeScaling
from moet.models.deepseek_v4_tensors import ARTEFACTS, Artefact, inventory_parts
from moet.models.progress import ProgressCallback, ProgressMeter
from moet.models.synthetic_tokenizer import (
    BOS,
    EOS,
    NOISE,
    special_token_ids,
    tokenizer_config,
    tokenizer_json,
)
from moet.models.synthetic_values import tensor_bytes
from moet.models.tensor_files import INDEX_NAME
from moet.models.tensor_spec import TensorSpec
from moet.models.tensor_writer import check_free_space, write_file, write_json

MODEL_NAME = "deepseek-v4-flash"
Size = Literal["tiny", "small", "full"]
Flavour = Literal["preview", "0731", "base"]

_FULL = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    max_position_embeddings=1048576,
    rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=65536),
    rope_theta=10000,
    compress_rope_theta=160000,
    rms_norm_eps=1e-6,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    num_nextn_predict_layers=1,
)
_TINY = replace(
    _FULL,
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=7,
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0),
    index_n_heads=32,
    index_topk=32,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    max_position_embeddings=65536,
    rope_scaling=RopeScaling(factor=16, original_max_position_embeddings=4096),
)
_SMALL = replace(
    _TINY,
    vocab_size=4096,
    hidden_size=1024,
    num_hidden_layers=9,
    num_attention_heads=16,
    head_dim=256,
    q_lora_rank=256,
    o_groups=4,
    o_lora_rank=256,
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128, 4, 0),
    index_topk=128,
    n_routed_experts=32,
    moe_intermediate_size=512,
)
_SIZES: dict[Size, DeepseekV4Config] = {"tiny": _TINY, "small": _SMALL, "full": _FULL}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What would be written. `shards` maps file names to their tensors."""

    config: DeepseekV4Config
    artefact: Artefact
    shards: dict[str, list[TensorSpec]]

    @property
    def num_tensors(self) -> int:
        return sum(len(specs) for specs in self.shards.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(spec.num_bytes for specs in self.shards.values() for spec in specs)


def plan_checkpoint(
    size: Size, flavour: Flavour = "preview", *, model: str = MODEL_NAME
) -> CheckpointPlan:
    """Settle config and shards. Raises ConfigError naming what there is instead."""
    for name, value, known in (
        ("model", model, (MODEL_NAME,)),
        ("size", size, get_args(Size)),
        ("flavour", flavour, get_args(Flavour)),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; there are {', '.join(known)}")
    config, artefact = _with_flavour(_SIZES[size], flavour), ARTEFACTS[flavour]
    parts = list(inventory_parts(config, artefact).values())
    total = len(parts)
    shards = {
        f"model-{place:05}-of-{total:05}.safetensors": specs
        for place, specs in enumerate(parts, start=1)
    }
    return CheckpointPlan(config, artefact, shards)


def write_checkpoint(
    folder: str | Path,
    *,
    size: Size,
    flavour: Flavour = "preview",
    seed: int = 0,
    model: str = MODEL_NAME,
    progress: ProgressCallback | None = None,
) -> CheckpointPlan:
    """Write a checkpoint into an absent or empty folder; equal arguments give equal bytes.

    The index comes last, so that an interrupted folder is not taken for a checkpoint. Raises
    ConfigError for wrong arguments or an occupied folder, CheckpointError for a full disk.
    """
    folder = Path(folder)
    plan = plan_checkpoint(size, flavour, model=model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose a new one")
    check_free_space(folder, plan.payload_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    meter = ProgressMeter(plan.payload_bytes, progress)
    for shard, specs in plan.shards.items():
        write_file(folder / shard, specs, _pieces(specs, seed, meter))
    _write_texts(folder, plan.config)
    weight_map = {spec.name: shard for shard, specs in plan.shards.items() for spec in specs}
    index = {"metadata": {"total_size": plan.payload_bytes}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)
    return plan


def _with_flavour(config: DeepseekV4Config, flavour: Flavour) -> DeepseekV4Config:
    ids = special_token_ids(config.vocab_size)
    config = replace(config, bos_token_id=ids[BOS], eos_token_id=ids[EOS])
    if flavour == "base":
        return replace(config, expert_dtype="fp8")
    if flavour == "preview":
        return config
    layers = config.num_hidden_layers
    return replace(
        config,
        compress_ratios=(*config.compress_ratios, 0, 0),
        dspark_block_size=5,
        dspark_noise_token_id=ids[NOISE],
        dspark_target_layer_ids=tuple(range(layers - 3, layers)),
        dspark_markov_rank=config.hidden_size // 16,
    )


def _pieces(specs: list[TensorSpec], seed: int, meter: ProgressMeter) -> Iterator[memoryview]:
    part = {spec.name: spec for spec in specs}
    for spec in specs:
        for piece in tensor_bytes(spec, seed, part):
            yield piece
            meter.advance(piece.nbytes, spec.name)


def _write_texts(folder: Path, config: DeepseekV4Config) -> None:
    generation = {
        "bos_token_id": config.bos_token_id,
        "do_sample": True,
        "eos_token_id": config.eos_token_id,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    write_json(folder / "config.json", config.to_dict())
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer.json", tokenizer_json(config.vocab_size))
    write_json(folder / "tokenizer_config.json", tokenizer_config(config.max_position_embeddings))
