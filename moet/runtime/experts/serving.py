"""From settings to the experts that an engine serves with: policies, their stores, their books."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from moet.config import EngineConfig, ExpertConfig, Policy, cache_dir
from moet.errors import CapacityError, RequestError
from moet.models.base import ExpertProvider
from moet.models.expert_encoder import TIERS, Tier
from moet.models.moe import UnpackedExperts
from moet.models.pack import Pack
from moet.runtime.experts.build import Progress, open_store
from moet.runtime.experts.heat import read_heat, write_heat
from moet.runtime.experts.hot import HotExperts, read_hot
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.experts.sizes import TierSizes, tier_sizes
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.experts.tiered import TieredExpertStore
from moet.runtime.experts.traces import RecordedExperts
from moet.runtime.experts.usage import CountedExperts
from moet.runtime.metrics import ExpertStats

Resident = Callable[[Tier], ExpertProvider]
"""Makes a provider that has every row of a tier in memory."""


def default_policy(config: EngineConfig) -> Policy:
    """What a request gets that says nothing."""
    return config.experts.policy or config.settings.precision


def formats_of(config: EngineConfig) -> tuple[Tier, ...]:
    """The tiers of a pack that the settings need, the one of the default policy first."""
    experts = config.experts
    policies = {default_policy(config), *experts.offered}
    needed = {experts.prefill_precision, "fp4" if policies & {"fp4", "gate"} else None}
    if policies - {"fp4"}:
        needed.add("w2")
    first: Tier = "fp4" if default_policy(config) == "fp4" else "w2"
    return tuple(sorted((t for t in TIERS if t in needed), key=lambda tier: tier != first))


def sizes_of(
    config: EngineConfig, tier: Tier, *, row_bytes: int, num_rows: int, top_k: int
) -> TierSizes | None:
    """The tiers of a format's rows; None if all are to be on the device. Raises ConfigError."""
    experts, tiers = config.experts, formats_of(config)
    is_second = len(tiers) > 1 and tier == "fp4"
    pool_bytes = experts.fp4_pool_bytes if is_second else experts.pool_bytes
    if pool_bytes is None:
        return None
    num_tiered = sum(
        size is not None
        for size in (experts.pool_bytes, experts.fp4_pool_bytes if len(tiers) > 1 else None)
    )
    return tier_sizes(
        row_bytes=row_bytes,
        num_rows=num_rows,
        top_k=top_k,
        pool_bytes=pool_bytes,
        host_bytes=None if experts.host_bytes is None else experts.host_bytes // num_tiered,
        static_bytes=0 if is_second else experts.static_bytes,
        staging_bytes=experts.staging_bytes,
        disk=experts.disk,
        pool_flag="--fp4-pool" if is_second else "--expert-pool",
    )


class Served(Protocol):
    """The experts of a server, as a core sees them."""

    precisions: PrecisionSet
    identity: str

    def stats(self) -> ExpertStats: ...

    def tune(self, *, tau: float | None = None, pool_bytes: int | None = None) -> None: ...

    def take_moved(self) -> bool:
        """Whether rows have moved to other tensors since it was asked last: steps that were
        captured must be made anew then."""
        ...

    def explain(self) -> str | None:
        """Which rows could not be read lately, and why, where a device cannot say so itself."""
        ...

    def close(self) -> None: ...


class ServedExperts:
    """The experts of a server. `precisions` is what the core computes with."""

    def __init__(
        self, pack: Pack, config: EngineConfig, progress: Progress, resident: Resident
    ) -> None:
        """resident: for formats without tiers. Raises ConfigError, CheckpointError."""
        self._pack = pack
        self._heat_files: list[tuple[TieredExpertStore, Path]] = []
        self._recorded: RecordedExperts | None = None
        self.stores: list[TieredExpertStore] = []
        experts = config.experts
        providers: dict[str, ExpertProvider] = {}
        tiers = formats_of(config)
        self._counted = CountedExperts(self._open(config, tiers[0], progress, resident))
        for tier in tiers:
            provider: ExpertProvider = self._counted
            if tier != tiers[0]:
                provider = self._open(config, tier, progress, resident)
            tiered = any(store.form is pack.format(tier) for store in self.stores)
            providers[tier] = provider if tiered else _unpacked(pack, provider)
        policies = {default_policy(config), *experts.offered}
        self.identity = ""
        if "w2+hot" in policies:
            hot = read_hot(pack)
            self.identity = json.dumps({"hot": hot})
            raw = self._counted if tiers[0] == "w2" else providers["w2"]
            providers["w2+hot"] = HotExperts(pack, hot, raw)
        if experts.trace_file is not None:
            self._recorded = RecordedExperts(
                providers[tiers[0]],
                Path(experts.trace_file),
                layers=pack.experts.layers,
                num_experts=pack.experts.num_experts,
            )
            providers[tiers[0]] = self._recorded
        self.precisions = PrecisionSet(
            default_policy(config),
            providers,
            offered=experts.offered,
            prefill=experts.prefill_precision,
            tau=experts.tau,
        )

    def stats(self) -> ExpertStats:
        """Where rows are, what was asked for, and what the gate did."""
        precisions = self.precisions
        return ExpertStats(
            layers=self._counted.stats().layers,
            tiers=[store.stats() for store in self.stores],
            tau=precisions.tau,
            num_gate_rows=precisions.num_judged,
            num_gated_rows=precisions.num_again,
        )

    def tune(self, *, tau: float | None = None, pool_bytes: int | None = None) -> None:
        """Change what may change while a server runs; between steps.

        pool_bytes: of the default policy's format. Raises RequestError, changing nothing.
        """
        if tau is not None and not 0 <= tau <= 1:
            raise RequestError(f"tau is {tau}; it must be from 0 to 1", param="tau")
        if pool_bytes is not None:
            self._resize(pool_bytes)
        if tau is not None:
            self.precisions.tau = tau

    def take_moved(self) -> bool:
        """Never: nothing is captured."""
        return False

    def explain(self) -> str | None:
        """Nothing: rows that cannot be read end their requests with an error of their own."""
        return None

    def close(self) -> None:
        """Keep the heat for the next start, and let go of files and memory."""
        for store, path in self._heat_files:
            write_heat(path, store.heat(), store.experts.num_rows)
        for store in self.stores:
            store.close()
        if self._recorded is not None:
            self._recorded.close()

    def _resize(self, pool_bytes: int) -> None:
        if not self.stores:
            message = "all experts are on the device: there is no pool; start with --expert-pool"
            raise RequestError(message, param="expert_pool")
        store = self.stores[0]
        num_slots = min(store.experts.num_rows, pool_bytes // store.form.row_bytes)
        least = store.device.num_static + int(self._pack.config["num_experts_per_tok"])
        if num_slots < least:
            raise RequestError(
                f"a pool of {pool_bytes} bytes has {num_slots} slots; {least} are needed, "
                f"{least * store.form.row_bytes} bytes",
                param="expert_pool",
            )
        try:
            store.resize(num_slots)
        except CapacityError as error:
            raise RequestError(str(error), param="expert_pool") from None

    def _open(
        self, config: EngineConfig, tier: Tier, progress: Progress, resident: Resident
    ) -> ExpertProvider:
        pack, form = self._pack, self._pack.format(tier)
        sizes = sizes_of(
            config,
            tier,
            row_bytes=form.row_bytes,
            num_rows=pack.experts.num_rows,
            top_k=int(pack.config["num_experts_per_tok"]),
        )
        if sizes is None:
            return resident(tier)
        path = heat_path(config.experts, pack, tier)
        rows_a_step = config.scheduler.max_num_seqs * (1 + config.scheduler.num_spec_tokens)
        store = open_store(
            pack,
            tier,
            sizes,
            scan_from_rows=rows_a_step + 1,
            heat=read_heat(path, pack.experts.num_rows),
            num_readers=config.experts.num_readers,
            read_timeout_s=config.experts.read_timeout_s,
            progress=progress,
        )
        self.stores.append(store)
        self._heat_files.append((store, path))
        return store


def heat_path(experts: ExpertConfig, pack: Pack, tier: Tier) -> Path:
    """Where the heat of a pack's tier is kept."""
    if experts.heat_file is not None:
        return Path(f"{experts.heat_file}.{tier}")
    return cache_dir() / "heat" / f"{pack.manifest.checksums_sha256[:16]}.{tier}.json"


def resident_store(pack: Pack, progress: Progress) -> Resident:
    """All rows of a tier in memory."""

    def make(tier: Tier) -> ExpertProvider:
        return ResidentExpertStore(
            pack, tier, lambda report: progress(report.done_bytes, report.total_bytes)
        )

    return make


def _unpacked(pack: Pack, provider: ExpertProvider) -> ExpertProvider:
    """On the reference ops unpacked once, if that leaves memory to others."""
    experts = pack.experts
    num_weights = 3 * experts.num_rows * experts.hidden_size * experts.moe_intermediate_size
    spare_bytes = psutil.virtual_memory().available // 4
    return UnpackedExperts(provider) if num_weights * 4 <= spare_bytes else provider
