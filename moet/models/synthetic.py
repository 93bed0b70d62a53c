"""Synthetic checkpoints in the official layout: names, shapes, dtypes, shards, index, tokenizer.

The weights are random, scaled so that activations stay near 1 and logits near 1, and a function of
(seed, tensor name) alone. Knows nothing of the model's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moet.errors import ConfigError
from moet.models import glm_moe_dsa_config, synthetic_deepseek_v4, synthetic_glm
from moet.models.progress import ProgressCallback, ProgressMeter
from moet.models.synthetic_design import Design, Size
from moet.models.synthetic_values import tensor_bytes
from moet.models.tensor_files import INDEX_NAME
from moet.models.tensor_spec import TensorSpec
from moet.models.tensor_writer import check_free_space, write_file, write_json

MODEL_NAME = synthetic_deepseek_v4.MODEL_NAME


@dataclass(frozen=True, slots=True)
class _Model:
    flavours: tuple[str, ...]  # the first one is the default
    design: Callable[..., Design]


MODELS: Mapping[str, _Model] = {
    MODEL_NAME: _Model(get_args(synthetic_deepseek_v4.Flavour), synthetic_deepseek_v4.design),
    synthetic_glm.MODEL_NAME: _Model(get_args(glm_moe_dsa_config.Flavour), synthetic_glm.design),
}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What would be written. `shards` maps file names to their tensors, `texts` to their JSON."""

    config: Any
    flavour: str
    shards: dict[str, list[TensorSpec]]
    texts: Mapping[str, Any]

    @property
    def num_tensors(self) -> int:
        return sum(len(specs) for specs in self.shards.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(spec.num_bytes for specs in self.shards.values() for spec in specs)


def plan_checkpoint(
    size: Size, flavour: str | None = None, *, model: str = MODEL_NAME
) -> CheckpointPlan:
    """Settle config and shards. Raises ConfigError naming what there is instead.

    flavour None: "preview" of DeepSeek-V4-Flash, "bf16" of GLM-5.2.
    """
    _check("model", model, tuple(MODELS))
    known = MODELS[model]
    flavour = flavour or known.flavours[0]
    _check("size", size, get_args(Size))
    _check("flavour", flavour, known.flavours)
    design = known.design(size, flavour)
    total = len(design.parts)
    shards = {
        f"model-{place:05}-of-{total:05}.safetensors": specs
        for place, specs in enumerate(design.parts.values(), start=1)
    }
    return CheckpointPlan(design.config, flavour, shards, design.texts)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; there are {', '.join(known)}")


def write_checkpoint(
    folder: str | Path,
    *,
    size: Size,
    flavour: str | None = None,
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
    for name, content in plan.texts.items():
        write_json(folder / name, content)
    weight_map = {spec.name: shard for shard, specs in plan.shards.items() for spec in specs}
    index = {"metadata": {"total_size": plan.payload_bytes}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)
    return plan


def _pieces(specs: list[TensorSpec], seed: int, meter: ProgressMeter) -> Iterator[memoryview]:
    part = {spec.name: spec for spec in specs}
    for spec in specs:
        for piece in tensor_bytes(spec, seed, part):
            yield piece
            meter.advance(piece.nbytes, spec.name)
