"""From settings to the experts that an engine serves with on a GPU: their tiers and their books."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch

from moet.config import EngineConfig
from moet.errors import CapacityError, ConfigError, RequestError
from moet.models.base import ResidentProvider
from moet.models.expert_encoder import Tier
from moet.runtime.experts.build import Progress
from moet.runtime.experts.device_traces import RecordedOnDevice
from moet.runtime.experts.gpu import CachedExperts
from moet.runtime.experts.hot import HotOnDevice
from moet.runtime.experts.layer_stream import ByLength, LayerStream, stream_from
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.experts.serving import default_policy, formats_of
from moet.runtime.experts.sizes import TierSizes, in_mib, tier_sizes
from moet.runtime.experts.sources import RowSource
from moet.runtime.experts.tiered import LOW_HIT_RATE, WATCHED
from moet.runtime.memory import HOST_RESERVE_BYTES
from moet.runtime.metrics import ExpertStats, TierStats
from moet.runtime.plan_types import ExpertPlan

logger = logging.getLogger(__name__)

RESIZE_RESERVE_BYTES = 1 << 30  # that a pool leaves free when it grows
MANY_READS = 0.001  # of the experts asked for: a row's reading takes about as long as a step


def device_sizes(
    config: EngineConfig,
    tier: Tier,
    plan: ExpertPlan,
    *,
    row_bytes: int,
    num_layers: int,
    top_k: int,
    free: int,
) -> TierSizes | None:
    """The tiers of a format's rows; None if all are to be on the GPU.

    plan: what fits, of the default policy's format. free: bytes of host memory. Raises ConfigError
    if a step's experts do not fit the pool or rows would have no place.
    """
    experts, tiers = config.experts, formats_of(config)
    second = tier != tiers[0]
    pool_bytes = experts.fp4_pool_bytes if second else experts.pool_bytes
    static_bytes = 0 if second else experts.static_bytes
    num_experts = plan.num_layer_rows
    num_rows = num_layers * num_experts
    if pool_bytes is None and second:
        pool_bytes = num_experts * row_bytes
    elif pool_bytes is None:
        if plan.num_static == plan.num_rows:
            return None
        static_bytes = plan.num_static * row_bytes
        pool_bytes = (plan.num_static + plan.num_cached) * row_bytes
    elif pool_bytes // row_bytes >= num_rows and plan.num_static == plan.num_rows:
        return None
    sizes = tier_sizes(
        row_bytes=row_bytes,
        num_rows=num_rows,
        top_k=top_k,
        pool_bytes=pool_bytes,
        host_bytes=free if experts.host_bytes is None else experts.host_bytes // len(tiers),
        static_bytes=static_bytes,
        disk=experts.disk,
        pool_flag="--fp4-pool" if second else "--expert-pool",
    )
    least = _least_slots(config, num_experts, top_k)
    if sizes.num_slots - sizes.num_static < least:
        raise ConfigError(
            f"{'--fp4-pool' if second else '--expert-pool'} gives {sizes.num_slots} slots of "
            f"{row_bytes} bytes, {sizes.num_static} of them static; {_decode_rows(config)} "
            f"decoding rows may ask for {least} experts of a layer: give it "
            f"{in_mib((least + sizes.num_static) * row_bytes)}, or lower --max-num-seqs"
        )
    return sizes


def _least_slots(config: EngineConfig, num_experts: int, top_k: int) -> int:
    """Slots that a decoding step may ask for at once; longer ones are streamed."""
    return min(num_experts, _decode_rows(config) * top_k)


def _decode_rows(config: EngineConfig) -> int:
    """Of a step without prompts, at most."""
    return config.scheduler.max_num_seqs * (1 + config.scheduler.num_spec_tokens)


class DeviceServed:
    """The experts of a server on a GPU. `precisions` is what the core computes with."""

    def __init__(
        self, source: RowSource, config: EngineConfig, plan: ExpertPlan, progress: Progress
    ) -> None:
        """plan: what fits of the default policy's format. Raises ConfigError, CheckpointError."""
        self.identity = ""
        self.caches: dict[Tier, CachedExperts] = {}
        self._source, self._experts = source, config.experts
        self._first = formats_of(config)[0]
        self._by_length: ByLength | None = None  # of the first format
        self._num_decode_rows = _decode_rows(config)
        self._least = 0  # slots beside static ones
        self._has_moved = False
        self._recorded: RecordedOnDevice | None = None
        # Hits, misses and reads of rows, when last looked at.
        self._counted: dict[Tier, tuple[float, float, int]] = {}
        providers: dict[str, ResidentProvider] = {}
        try:
            for tier in formats_of(config):
                providers[tier] = self._open(config, tier, plan, progress)
            if "w2+hot" in {default_policy(config), *config.experts.offered}:
                tables, self.identity = source.hot()
                providers["w2+hot"] = HotOnDevice(providers["w2"], tables)
            if config.experts.trace_file is not None:
                self._recorded = providers[self._first] = RecordedOnDevice(
                    providers[self._first],
                    Path(config.experts.trace_file),
                    source.gpu,
                    layers=source.layers,
                    num_experts=source.num_experts,
                )
        except BaseException:
            self.close()
            raise
        self.precisions = PrecisionSet(
            default_policy(config),
            providers,
            offered=config.experts.offered,
            prefill=config.experts.prefill_precision,
            tau=config.experts.tau,
        )

    def stats(self) -> ExpertStats:
        """Where rows are, what was asked for, and what the gate did."""
        precisions = self.precisions
        tiers = {tier: cache.stats() for tier, cache in self.caches.items()}
        for tier, stats in tiers.items():
            self._warn(tier, stats)
        return ExpertStats(
            layers=[],
            tiers=list(tiers.values()),
            tau=precisions.tau,
            num_gate_rows=precisions.num_judged,
            num_gated_rows=precisions.num_again,
        )

    def tune(self, *, tau: float | None = None, pool_bytes: int | None = None) -> None:
        """Change what may change while a server runs. Raises RequestError, changing nothing."""
        if tau is not None and not 0 <= tau <= 1:
            raise RequestError(f"tau is {tau}; it must be from 0 to 1", param="tau")
        if pool_bytes is not None:
            self._resize(pool_bytes)
        if tau is not None:
            self.precisions.tau = tau

    def take_moved(self) -> bool:
        """As Served.take_moved."""
        moved, self._has_moved = self._has_moved, False
        return moved

    def _resize(self, pool_bytes: int) -> None:
        """Of the default policy's format."""
        cache = self.caches.get(self._first)
        if cache is None or self._source.shard.size > 1:
            why = "all experts are on the device: there is no pool; start with --expert-pool"
            if cache is not None:
                why = "pools of several ranks keep their sizes; start with another --expert-pool"
            raise RequestError(why, param="expert_pool")
        row_bytes = cache.form.row_bytes
        num_slots = min(len(cache.bases), pool_bytes // row_bytes)
        least = cache.num_static + self._least
        if num_slots < least:
            raise RequestError(
                f"a pool of {pool_bytes} bytes has {num_slots} slots; {least} are needed, "
                f"{least * row_bytes} bytes",
                param="expert_pool",
            )
        self._require_free((num_slots - len(cache.cache.pool)) * row_bytes)
        self._has_moved = True
        try:
            cache.resize(num_slots)
        except CapacityError as error:
            raise RequestError(str(error), param="expert_pool") from None
        if self._by_length is not None:
            self._by_length.stream_from_rows = stream_from(
                cache.num_experts,
                self._source.top_k,
                num_slots - cache.num_static,
                self._num_decode_rows,
            )

    def _require_free(self, more_bytes: int) -> None:
        """Raise RequestError unless the device has so much, with room for captured steps."""
        device = self._source.gpu.torch_device
        if more_bytes <= 0 or device.type != "cuda":
            return
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(device)[0] - RESIZE_RESERVE_BYTES
        if more_bytes > free_bytes:
            raise RequestError(
                f"the pool would grow by {more_bytes} bytes; the device has {max(0, free_bytes)} "
                "to spare",
                param="expert_pool",
            )

    def _warn(self, tier: Tier, stats: TierStats) -> None:
        """Say once in a while that a pool or host memory is too small, with the flag for more."""
        counted = stats.total("num_hits"), stats.total("num_misses"), stats.num_disk_reads
        before = self._counted.get(tier, (0.0, 0.0, 0))
        hits, misses, reads = (now - then for now, then in zip(counted, before, strict=True))
        if hits + misses < WATCHED:
            return
        self._counted[tier] = counted
        if hits < LOW_HIT_RATE * (hits + misses):
            logger.warning(
                "%.0f %% of the %s experts asked for lately were in their pool of %d slots; %s "
                "makes it larger",
                100 * hits / (hits + misses),
                tier,
                stats.num_slots,
                "--expert-pool" if tier == self._first else "--fp4-pool",
            )
        if reads > MANY_READS * (hits + misses):
            logger.warning(
                "%d of the %.0f %s experts asked for lately were read from disk while steps "
                "waited; --host-experts holds more of them in memory",
                reads,
                hits + misses,
                tier,
            )

    def explain(self) -> str | None:
        """Which rows could not be read lately, and why."""
        return "; ".join(filter(None, (cache.explain() for cache in self.caches.values()))) or None

    def close(self) -> None:
        """Keep the heat for the next start, and let go of files and memory."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None
        for tier, cache in self.caches.items():
            self._source.keep(tier, cache, self._experts)
            cache.close()
        self.caches = {}

    def _open(
        self, config: EngineConfig, tier: Tier, plan: ExpertPlan, progress: Progress
    ) -> ResidentProvider:
        source, kept = self._source, config.cache.host_budget_bytes + config.cache.host_cache_bytes
        free = psutil.virtual_memory().available - HOST_RESERVE_BYTES - kept
        sizes = device_sizes(
            config,
            tier,
            plan,
            row_bytes=source.form(tier).row_bytes,
            num_layers=len(source.layers),
            top_k=source.top_k,
            free=max(0, free) // source.shard.size,
        )
        if sizes is None:
            return source.resident(tier, progress)
        cache = self.caches[tier] = source.cached(tier, sizes, config.experts, progress)
        if tier == self._first:
            self._least = _least_slots(config, cache.num_experts, source.top_k)
        stream = LayerStream(cache.form, cache.bases, cache.layers, cache.copy_rows)
        free_slots = sizes.num_slots - sizes.num_static
        from_rows = stream_from(cache.num_experts, source.top_k, free_slots, _decode_rows(config))
        by_length = ByLength(cache, stream, from_rows)
        if tier == self._first:
            self._by_length = by_length
        return by_length
