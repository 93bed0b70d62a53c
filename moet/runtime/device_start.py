"""A core on a GPU: which device, what fits, weights from a pack or dummy ones, queue and graphs.

Knows devices and memory; knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch

from moet.config import EngineConfig
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.models import load_model
from moet.models.base import ExpertProvider, Model
from moet.models.dummy import DummyOptions, DummySource
from moet.models.footprint import Footprint, footprint
from moet.models.glm_moe_dsa_config import ARCHITECTURE as GLM
from moet.models.pack import Pack
from moet.models.pipeline_stages import held_layers
from moet.models.sharding import WHOLE, Shard
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import dummy_model, first_layers, open_device, used_layers
from moet.runtime.experts.layer_stream import NUM_BUFFERS
from moet.runtime.experts.serving import Served, formats_of
from moet.runtime.experts.serving_gpu import DeviceServed
from moet.runtime.experts.sources import DummyRows, PackRows
from moet.runtime.hardware import GIB, Hardware, hardware
from moet.runtime.host import Progress
from moet.runtime.memory import plan
from moet.runtime.plan_types import Plan, PlanSettings
from moet.runtime.queues import CudaGraphs, CudaQueue, uncaptured

logger = logging.getLogger(__name__)

_KV_DTYPES = {GLM: ("fp8", "nvfp4")}  # that kernels read; of the other model fp8
_NAMES = {"h200": "h200", "rtx 5090": "rtx-5090", "rtx pro 6000": "rtx-pro-6000"}


def settle_device(
    config: EngineConfig, raw_config: Mapping[str, Any] | None
) -> tuple[EngineConfig, Device | None]:
    """Where the model runs: the config with that device's ops, and the GPU, None for the CPU.

    raw_config: the model's config.json, if it is there yet. Raises ConfigError if a GPU was asked
    for and there is none, or it cannot do what else was asked.
    """
    wanted = config.target.device
    why = None if wanted == "cpu" else _obstacle(config, raw_config)
    if wanted == "cuda" and why is not None:
        raise ConfigError(f"--device cuda: {why}")
    gpu = None if wanted == "cpu" or why is not None else open_device()
    if gpu is None:
        if wanted == "cuda":
            raise ConfigError(
                "--device cuda: this process finds no GPU that kernels were built for (compute "
                "capability 9.0 or 12.0); use --device cpu, and see moet doctor"
            )
        if why is not None and torch.cuda.is_available():
            logger.warning("the model runs on the CPU: %s", why)
        return config, None
    return replace(config, settings=replace(config.settings, arch=gpu.arch)), gpu


def _obstacle(config: EngineConfig, raw_config: Mapping[str, Any] | None) -> str | None:
    """Why no GPU can do what is asked."""
    if config.settings.rounding == "none":
        return "--rounding none computes in fp32, which only the CPU reference does"
    architecture = (raw_config or {}).get("architectures", [None])[0]
    formats = _KV_DTYPES.get(architecture, ("fp8",))
    if config.cache.kv_dtype not in formats:
        return (
            f"--kv-cache-dtype {config.cache.kv_dtype} is the CPU reference's; a GPU keeps "
            f"{' or '.join(formats)} of this model"
        )
    return None


def plan_device(
    config: EngineConfig,
    raw_config: Mapping[str, Any],
    gpu: Device,
    shard: Shard = WHOLE,
    *,
    num_hot_rows: int = 0,
) -> tuple[EngineConfig, Plan]:
    """Place what a shard has in the memory that is free now; what the config leaves open is filled
    in. num_hot_rows: FP4 rows that stay on the GPU beside all others.

    Raises ConfigError, before anything is loaded, with what is needed, available and worth
    changing.
    """
    cache, scheduler = config.cache, config.scheduler
    model = footprint(
        _longest_stage(raw_config, shard),
        kv_dtype=cache.kv_dtype,
        num_spec_tokens=scheduler.num_spec_tokens,
    )
    page_bytes, given_bytes = model.kv.bytes_per_page, cache.budget_bytes
    if shard.num_stages > 1:
        num_spec_tokens = scheduler.num_spec_tokens
        page_bytes = footprint(
            raw_config, kv_dtype=cache.kv_dtype, num_spec_tokens=num_spec_tokens
        ).kv.bytes_per_page
        if given_bytes is not None:  # of all stages
            given_bytes = given_bytes // page_bytes * model.kv.bytes_per_page
    chosen = PlanSettings(
        precision=config.settings.precision,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_bytes=given_bytes,
        host_cache_bytes=cache.host_budget_bytes + cache.host_cache_bytes,
        snapshot_bytes=0 if cache.prefix_cache == "off" else cache.snapshot_budget_bytes,
    )
    card = replace(this_gpu(gpu.torch_device), num_devices=shard.size)
    beside_bytes = _expert_bytes(config, model) + num_hot_rows * model.row_bytes["fp4"]
    card = replace(card, memory_bytes=card.memory_bytes - beside_bytes)
    made = plan(model, card, chosen)
    if not made.resident and made.experts.num_disk and not config.experts.disk:
        need = made.experts.num_rows * made.experts.row_bytes / GIB
        raise ConfigError(
            f"{made.hardware}: the {config.settings.precision} experts are {need:.1f} GiB and fit "
            "neither beside the rest nor into host memory, and --no-disk-experts forbids to read "
            "them while serving; lower --max-model-len, --kv-cache-memory or --max-num-seqs, "
            "choose --precision w2, or run with --device cpu"
        )
    num_bytes = made.kv.num_pages * page_bytes
    window = scheduler.max_model_len or made.kv.max_model_len
    logger.info(
        "plan for %s: %s; window %d tokens, %d pages",
        made.hardware,
        ", ".join(f"{use} {size / GIB:.2f} GiB" for use, size in made.device_bytes.items()),
        window,
        made.kv.num_pages,
    )
    return (
        replace(
            config,
            cache=replace(cache, budget_bytes=num_bytes),
            scheduler=replace(scheduler, max_model_len=window),
        ),
        made,
    )


def _longest_stage(raw_config: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
    """The config of as many layers as the longest stage has: what its GPU has to hold."""
    if shard.num_stages == 1:
        return raw_config
    layers = range(int(raw_config["num_hidden_layers"]))
    stages = (replace(shard, stage=stage) for stage in range(shard.num_stages))
    return first_layers(raw_config, max(len(held_layers(raw_config, layers, s)) for s in stages))


def this_gpu(device: torch.device) -> Hardware:
    """The card of this process: its free memory, and the rates of its kind."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    known = next((preset for part, preset in _NAMES.items() if part in name.lower()), "rtx-5090")
    host_bytes = psutil.virtual_memory().available
    return replace(
        hardware(known, host_bytes=host_bytes),
        name=name,
        memory_bytes=free_bytes,
        basis=f"free memory of this card, rates of {known}",
    )


def _expert_bytes(config: EngineConfig, model: Footprint) -> int:
    """Memory of a card that experts take beside what the plan counts: pools of a second format, and
    of each format in tiers the two layers that prompts pass through."""
    tiers, taken = formats_of(config), 0
    for tier in tiers:
        row_bytes = model.row_bytes[tier]
        if tier != tiers[0]:
            pool_bytes = config.experts.fp4_pool_bytes
            taken += model.num_experts * row_bytes if pool_bytes is None else pool_bytes
        elif config.experts.pool_bytes is None:
            continue  # resident, or with the staging that is in the plan
        taken += NUM_BUFFERS * model.num_experts * row_bytes
    return taken


def load_pack(
    config: EngineConfig, pack: Pack, gpu: Device, progress: Progress, made: Plan
) -> tuple[Model, DeviceServed]:
    """A pack's weights on the GPU, its experts as far as they fit or are wanted there.

    Raises ConfigError if a step's experts would not fit.
    """
    progress("weights", 0.0)
    num_spec_tokens = config.scheduler.num_spec_tokens
    model = load_model(
        pack.config, pack, config.settings, config.cache.kv_dtype, num_spec_tokens, gpu=gpu
    )
    layers = used_layers(
        pack.experts.layers, int(pack.config["num_hidden_layers"]), num_spec_tokens
    )
    source = PackRows(pack, layers, gpu)
    return model, DeviceServed(source, config, made.experts, _experts_done(progress))


def load_rank(
    config: EngineConfig, pack: Pack, gpu: Device, progress: Progress, made: Plan, shard: Shard
) -> tuple[Model, DeviceServed]:
    """A rank's part of a pack on its GPU. Raises ConfigError if its experts would not fit there."""
    progress("weights", 0.0)
    num_spec_tokens, settings = config.scheduler.num_spec_tokens, config.settings
    if formats_of(config) != (settings.precision,) or config.experts.prefill_precision:
        raise ConfigError(
            "several ranks compute all rows with one format of experts as yet; leave out "
            "--precisions and --prefill-precision, and choose --precision w2 or fp4"
        )
    if config.experts.trace_file is not None:
        raise ConfigError("--expert-trace records what one GPU is asked for; leave it out")
    kv_dtype = config.cache.kv_dtype
    model = load_model(pack.config, pack, settings, kv_dtype, num_spec_tokens, gpu, shard)
    every = used_layers(pack.experts.layers, int(pack.config["num_hidden_layers"]), num_spec_tokens)
    source = PackRows(pack, held_layers(pack.config, every, shard), gpu, shard)
    return model, DeviceServed(source, config, made.experts, _experts_done(progress))


def _experts_done(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress("experts", done / total)


def load_dummy_tiers(
    config: EngineConfig, raw_config: Mapping[str, Any], gpu: Device, progress: Progress, made: Plan
) -> tuple[Model, DeviceServed]:
    """Weights of the size that config.json says, the experts as far as they fit or are wanted on
    the GPU, the others in host memory. Raises ConfigError if that does not hold them."""
    progress("weights", 0.0)
    target, num_spec_tokens = config.target, config.scheduler.num_spec_tokens
    options = DummyOptions(seed=target.dummy_seed, skew=target.dummy_skew)
    weights = DummySource(raw_config, options, gpu.torch_device)
    model = load_model(
        raw_config, weights, config.settings, config.cache.kv_dtype, num_spec_tokens, gpu=gpu
    )
    experts, num_layers = weights.experts, int(raw_config["num_hidden_layers"])
    layers = used_layers(experts.layers, num_layers, num_spec_tokens)
    top_k = int(raw_config["num_experts_per_tok"])
    source = DummyRows(experts, layers, top_k, gpu, options.seed)
    return model, DeviceServed(source, config, made.experts, _experts_done(progress))


def load_dummy(
    config: EngineConfig,
    raw_config: Mapping[str, Any],
    gpu: Device,
    progress: Progress,
    shard: Shard = WHOLE,
) -> tuple[Model, ExpertProvider]:
    """A shard's weights of the size that config.json says, made on the GPU."""
    progress("weights", 0.0)
    target = config.target
    made = dummy_model(
        raw_config,
        config.settings,
        gpu,
        kv_dtype=config.cache.kv_dtype,
        num_spec_tokens=config.scheduler.num_spec_tokens,
        options=DummyOptions(seed=target.dummy_seed, skew=target.dummy_skew),
        shard=shard,
    )
    return made.model, made.experts


def place(
    config: EngineConfig,
    gpu: Device,
    served: Served | None = None,
    watch: Callable[[], None] | None = None,
) -> Placement:
    """A stream for the steps, and how they are captured. served: explains faults of experts. watch:
    as CudaQueue takes it."""
    queue = CudaQueue(gpu.torch_device, watch)
    torch.cuda.synchronize(gpu.torch_device)  # the weights were made on another stream
    capture = uncaptured if config.target.enforce_eager else CudaGraphs(queue)
    explain = None if served is None else served.explain
    return Placement(queue, capture, gpu.error, gpu.arch, explain)
