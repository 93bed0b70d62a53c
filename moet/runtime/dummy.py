"""Models with dummy weights: from a preset's name or a config folder to a model and its experts.

Knows where configs come from; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from moet.config import KVDtype, ModelSettings, cache_dir
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.layout import ExpertRows
from moet.models import load_model
from moet.models.base import ExpertProvider, Model
from moet.models.dummy import DummyOptions, DummySource, dummy_rows
from moet.models.expert_encoder import row_formats
from moet.models.pipeline_stages import held_layers
from moet.models.sharding import WHOLE, Shard
from moet.models.synthetic import MODELS, plan_checkpoint
from moet.models.synthetic_design import Size
from moet.models.tensor_writer import write_json
from moet.runtime.experts.store import DeviceExperts
from moet.runtime.parallel.experts import share_of

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DummyModel:
    """raw_config: the config.json that both were made from."""

    model: Model
    experts: ExpertProvider
    raw_config: Mapping[str, Any]


def preset_config(
    name: str,
    size: Size = "full",
    num_layers: int | None = None,
    flavour: str | None = None,
) -> dict[str, Any]:
    """config.json of a released model ("deepseek-v4-flash", ...), or of a smaller one like it.

    num_layers: take only the first ones. flavour: one of those it was published in, None: the
    first. Raises ConfigError for an unknown name.
    """
    raw = dict(plan_checkpoint(size, flavour, model=name).texts["config.json"])
    return raw if num_layers is None else first_layers(raw, num_layers)


def first_layers(raw_config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config of a model's first layers, its draft blocks kept."""
    raw, known = dict(raw_config), int(raw_config["num_hidden_layers"])
    if not 1 <= num_layers <= known:
        raise ConfigError(f"{num_layers} layers were asked for; the model has {known}")
    for key in ("compress_ratios", "indexer_types", "mlp_layer_types"):
        if key in raw:
            raw[key] = [*raw[key][:num_layers], *raw[key][known:]]
    raw["num_hidden_layers"] = num_layers
    return raw


def preset_folder(name: str) -> Path:
    """A folder with the config and tokenizer of a preset, written if there is none yet."""
    folder = cache_dir() / "presets" / name
    plan = plan_checkpoint("full", model=name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in plan.texts.items():
        if not (folder / file).is_file():
            write_json(folder / file, content)
    return folder


def dummy_folder(model: str) -> Path:
    """Where the config and tokenizer of a model with dummy weights are: its folder, or a preset's.

    Raises ConfigError naming the presets.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if model not in MODELS:
        raise ConfigError(
            f"{model} is neither a folder with a config.json nor one of {', '.join(MODELS)}"
        )
    return preset_folder(model)


def dummy_model(
    raw_config: Mapping[str, Any],
    settings: ModelSettings,
    device: Device,
    *,
    kv_dtype: KVDtype = "fp8",
    num_spec_tokens: int = 0,
    options: DummyOptions | None = None,
    shard: Shard = WHOLE,
) -> DummyModel:
    """Make every weight that a shard has on the device, resident. settings.arch must be the
    device's. Ranks of one model have parts of the same numbers."""
    options = options or DummyOptions()
    where, begin = device.torch_device, perf_counter()
    source = DummySource(raw_config, options, where)
    model = load_model(
        raw_config, source, settings, kv_dtype, num_spec_tokens, gpu=device, shard=shard
    )
    dense_s = perf_counter() - begin
    experts = source.experts
    form = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)[
        settings.precision
    ]
    layers = used_layers(experts.layers, int(raw_config["num_hidden_layers"]), num_spec_tokens)
    layers = list(held_layers(raw_config, layers, shard))
    provider = _dummy_experts(form, layers, experts.num_experts, options.seed, where, shard)
    logger.info(
        "dummy weights: seed %d, skew %.2f; %d layers of %d %s experts, %.1f GiB, dense in %.1f s, "
        "all in %.1f s",
        options.seed,
        options.skew,
        len(layers),
        experts.num_experts,
        form.name,
        provider.rows.numel() / GIB,
        dense_s,
        perf_counter() - begin,
    )
    return DummyModel(model, provider, raw_config)


def _dummy_experts(
    form: ExpertRows,
    layers: Sequence[int],
    num_experts: int,
    seed: int,
    device: torch.device,
    shard: Shard,
) -> DeviceExperts:
    """A shard's sub-rows of experts that are made layer by layer."""
    part, first, last = share_of(form, shard)
    rows = torch.empty(len(layers) * num_experts, part.row_bytes, dtype=torch.uint8, device=device)
    every_base = []
    for n, layer_idx in enumerate(layers):
        made, bases = dummy_rows(form, num_experts, seed=1000 * seed + layer_idx, device=device)
        own = rows[n * num_experts : (n + 1) * num_experts].view(num_experts, last - first, -1)
        own.copy_(made.view(num_experts, form.num_sub_rows, -1)[:, first:last])
        every_base.append(bases[:, first:last])
    return DeviceExperts(part, rows, torch.cat(every_base).contiguous(), layers)


def used_layers(layers: Sequence[int], num_layers: int, num_spec_tokens: int) -> list[int]:
    """Layers whose experts are read: the decoder's, and the first draft block's if there is one."""
    drafts = [i for i in layers if i >= num_layers]
    return [i for i in layers if i < num_layers] + (drafts[:1] if num_spec_tokens else [])


def open_device() -> Device | None:
    """The GPU of this process, if there is one that kernels were built for."""
    from moet.kernels.cubin import ARCH_OF_CAPABILITY

    if not torch.cuda.is_available():
        return None
    arch = ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability())
    if arch is None:
        return None
    return Device.open(arch, torch.device("cuda", torch.cuda.current_device()))
