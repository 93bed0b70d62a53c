"""From a model's name to a running core: finds or makes the pack, loads it, wires the parts.

Knows where packs are kept; knows nothing of requests.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from moet.config import EngineConfig, ModelSettings, cache_dir
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.layout import LAYOUT_VERSION
from moet.models import load_model
from moet.models.base import ExpertProvider, Model
from moet.models.checkpoint import Checkpoint
from moet.models.config_json import read_config
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.moe import UnpackedExperts
from moet.models.pack import FORMAT_VERSION, Pack, is_pack
from moet.models.progress import Progress as ByteProgress
from moet.models.sharding import WHOLE, Shard
from moet.runtime.core import EngineCore
from moet.runtime.device_start import (
    load_dummy,
    load_dummy_tiers,
    load_pack,
    place,
    plan_device,
    settle_device,
)
from moet.runtime.exhausted import failed_start
from moet.runtime.experts.hot import read_hot
from moet.runtime.experts.serving import Served, ServedExperts, resident_store
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.experts.usage import CountedExperts
from moet.runtime.grammar_compiler import GrammarCompiler
from moet.runtime.host import Progress
from moet.runtime.memory import require_fit
from moet.runtime.metrics import ExpertStats
from moet.runtime.parallel.experts import rank_experts
from moet.runtime.text_side import TextSide, existing_folder, model_folder, text_folder
from moet.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0


def load_core(config: EngineConfig, progress: Progress) -> EngineCore:
    """Build the core that a config asks for, making its pack first if there is none."""
    try:
        return _load_core(config, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(failed_start(error)) from error


def _load_core(config: EngineConfig, progress: Progress) -> EngineCore:
    if config.parallel.num_ranks > 1:
        from moet.runtime.parallel.start import load_leading_core  # which builds its core here

        return load_leading_core(config, progress)
    raw_config = known_config(config)
    config, gpu = settle_device(config, raw_config)
    if config.target.weights == "dummy":
        return _dummy_core(config, raw_config, gpu, progress)
    if gpu is not None:
        return _device_core(config, gpu, progress)
    if raw_config is not None:
        _require_memory(config, raw_config)
    return build_core(config, open_pack(config.model, progress), progress)


def known_config(config: EngineConfig) -> Mapping[str, Any] | None:
    """The model's config.json, if it is there yet."""
    known = text_folder(config) / "config.json"
    return read_config(known) if known.is_file() else None


def _dummy_core(
    config: EngineConfig,
    raw_config: Mapping[str, Any] | None,
    gpu: Device | None,
    progress: Progress,
) -> EngineCore:
    """A core whose weights are random, made on a GPU."""
    raw_config = dummy_config(config, raw_config, gpu)
    assert gpu is not None
    config, made = plan_device(config, raw_config, gpu)
    identity = dummy_identity(config, raw_config)
    if made.resident and config.experts.is_plain:
        model, experts = load_dummy(config, raw_config, gpu, progress)
        return core_on(config, gpu, model, experts, identity, progress)
    model, served = load_dummy_tiers(config, raw_config, gpu, progress, made)
    experts = served.precisions.decoding
    return core_on(config, gpu, model, experts, identity, progress, served)


def dummy_config(
    config: EngineConfig, raw_config: Mapping[str, Any] | None, gpu: Device | None
) -> Mapping[str, Any]:
    """What a model with random weights is made from. Raises ConfigError if that cannot be."""
    if gpu is None:
        raise ConfigError(
            "--weights dummy makes a model of full size on a GPU, and the model would run on the "
            "CPU here; moet make-checkpoint writes small ones for it"
        )
    if raw_config is None:
        raise ConfigError(f"{config.model} has no config.json that says how large to be")
    return raw_config


def dummy_identity(config: EngineConfig, raw_config: Mapping[str, Any]) -> str:
    """Everything that KV state of random weights depends on besides tokens."""
    return json.dumps({"dummy": asdict(config.target), "config": raw_config}, sort_keys=True)


def _device_core(config: EngineConfig, gpu: Device, progress: Progress) -> EngineCore:
    """A core over a pack, on a GPU."""
    pack = open_pack(config.model, progress)
    asks_hot = "w2+hot" in {config.experts.policy, *config.experts.offered}
    num_hot = len(read_hot(pack)) if asks_hot else 0
    config, made = plan_device(config, pack.config, gpu, num_hot_rows=num_hot)
    model, served = load_pack(config, pack, gpu, progress, made)
    experts, identity = served.precisions.decoding, kv_identity(pack, config) + served.identity
    return core_on(config, gpu, model, experts, identity, progress, served)


def core_on(
    config: EngineConfig,
    gpu: Device,
    model: Model,
    experts: ExpertProvider,
    kv_identity: str,
    progress: Progress,
    served: Served | None = None,
    *,
    kind: type[EngineCore] = EngineCore,
    watch: Callable[[], None] | None = None,
) -> EngineCore:
    """Wire a core around a model on a GPU. kind: its class. watch: as CudaQueue takes it."""
    tokenizer = Tokenizer.from_folder(text_folder(config))
    core = kind(
        model,
        experts,
        cache=config.cache,
        scheduler=config.scheduler,
        precision=config.settings.precision,
        vocab_size=min(tokenizer.vocab_size, model.vocab_size),
        seed=config.seed,
        grammars=GrammarCompiler(lambda: tokenizer, model.vocab_size),
        kv_identity=kv_identity,
        placement=place(config, gpu, served, watch),
        served=served,
    )
    progress("ready", 1.0)
    return core


def build_core(
    config: EngineConfig,
    pack: Pack,
    progress: Progress,
    *,
    shard: Shard = WHOLE,
    kind: type[EngineCore] = EngineCore,
) -> EngineCore:
    """Load what a rank holds of a pack, and wire a core around it. kind: the core's class."""
    _require_memory(config, pack.config)
    progress("weights", 0.0)
    model = load_model(
        pack.config,
        pack,
        config.settings,
        config.cache.kv_dtype,
        config.scheduler.num_spec_tokens,
        shard=shard,
    )
    served: ServedExperts | None = None
    stats: Callable[[], ExpertStats]
    if config.experts.is_plain:
        experts, counted = _experts(pack, config.settings, progress, shard)
        stats = counted.stats
    else:
        served = _served(pack, config, progress, shard)
        experts, stats = served.precisions.drafting, served.stats
    tokenizer = Tokenizer.from_folder(model_folder(config.model))
    progress("ready", 1.0)
    return kind(
        model,
        experts,
        cache=config.cache,
        scheduler=config.scheduler,
        precision=config.settings.precision,
        vocab_size=min(tokenizer.vocab_size, model.vocab_size),
        seed=config.seed,
        grammars=GrammarCompiler(lambda: tokenizer, model.vocab_size),
        expert_stats=stats,
        kv_identity=kv_identity(pack, config) + (served.identity if served else ""),
        served=served,
    )


def _served(pack: Pack, config: EngineConfig, progress: Progress, shard: Shard) -> ServedExperts:
    """Experts in tiers, or of several precisions."""
    if not shard.is_alone:
        raise ConfigError(
            f"{shard.size} ranks each hold all of their experts as yet; leave out --expert-pool "
            "and --precisions, or -tp"
        )

    def tell(done: int, total: int) -> None:
        progress("experts", done / max(total, 1))

    return ServedExperts(pack, config, tell, resident_store(pack, tell))


def kv_identity(pack: Pack, config: EngineConfig) -> str:
    """Everything that a token's KV state depends on besides the tokens before it."""
    parts = {
        "pack": msgspec.to_builtins(pack.manifest),
        "config": pack.config,
        "settings": asdict(config.settings),
        "kv_dtype": config.cache.kv_dtype,
        "num_spec_tokens": config.scheduler.num_spec_tokens,
    }
    return json.dumps(parts, sort_keys=True)


def _experts(
    pack: Pack, settings: ModelSettings, progress: Progress, shard: Shard = WHOLE
) -> tuple[ExpertProvider, CountedExperts]:
    """All experts in memory; on the reference ops unpacked, if that leaves memory to others."""

    def tell(report: ByteProgress) -> None:
        progress("experts", report.done_bytes / report.total_bytes)

    store: ExpertProvider
    if shard.is_alone:
        store = ResidentExpertStore(pack, settings.precision, tell)
    else:
        store = rank_experts(pack, settings.precision, shard, tell)
    counted = CountedExperts(store)
    experts = pack.experts
    num_weights = 3 * experts.num_rows * experts.hidden_size * experts.moe_intermediate_size
    spare_bytes = psutil.virtual_memory().available // 4
    if settings.arch == "reference" and num_weights * 4 <= spare_bytes:
        return UnpackedExperts(counted), counted
    return counted, counted


def _require_memory(config: EngineConfig, raw_config: Mapping[str, Any]) -> None:
    """Refuse, before hours of conversion, what this machine's memory cannot hold."""
    if config.settings.arch == "reference":
        require_fit(config, raw_config, psutil.virtual_memory().available)


def open_pack(model: str, progress: Progress) -> Pack:
    """The pack of a model: itself, or one made of the checkpoint and kept for the next start."""
    folder = existing_folder(model)
    if is_pack(folder):
        return Pack.open(folder)
    checkpoint = Checkpoint.open(folder)
    TextSide.from_folder(folder)  # what is wrong with text is said before hours of conversion
    logger.info("%s", checkpoint.describe())
    name = folder.resolve().name
    version = f"v{FORMAT_VERSION}.{LAYOUT_VERSION}"
    kept = cache_dir() / "packs" / f"{name}-{checkpoint.identity()[:16]}-{version}"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {cache_dir()} cannot be written: {error.strerror}; set "
            "MOET_CACHE_DIR to one that can, or make a pack with moet convert and serve that"
        ) from None
    return convert(checkpoint, kept, ConvertOptions(), ConvertLog(kept, progress))


class ConvertLog:
    """Passes a conversion's progress on, and logs it now and then."""

    def __init__(self, pack: Path, progress: Progress) -> None:
        self._pack = pack
        self._progress = progress
        self._next = time.monotonic() + LOG_INTERVAL_S

    def __call__(self, report: ByteProgress) -> None:
        """Take one report."""
        self._progress("convert", report.done_bytes / report.total_bytes)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOG_INTERVAL_S
            eta = "?" if report.eta_s is None else f"{report.eta_s:.0f}"
            logger.info(
                "converting to %s: %.1f of %.1f GiB, %.0f MiB/s, %s s left",
                self._pack.name,
                report.done_bytes / 2**30,
                report.total_bytes / 2**30,
                report.bytes_per_s / 2**20,
                eta,
            )
