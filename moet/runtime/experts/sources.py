"""Where the expert rows of a GPU come from: a pack, or random numbers of a pack's size.

Both open a format's rows wholly on the GPU or in tiers; what is served of them is decided above.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from moet.config import ExpertConfig
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.models.base import ResidentProvider
from moet.models.dummy import dummy_rows
from moet.models.expert_encoder import Tier, row_formats
from moet.models.expert_map import ExpertMap
from moet.models.pack import Pack
from moet.models.sharding import WHOLE, Shard
from moet.runtime.experts.build import Progress
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.heat import read_heat, write_heat
from moet.runtime.experts.host import Arena, touch
from moet.runtime.experts.hot import read_hot
from moet.runtime.experts.load import pack_experts
from moet.runtime.experts.open_gpu import open_cached, row_bases
from moet.runtime.experts.serving import heat_path
from moet.runtime.experts.sizes import GIB, TierSizes
from moet.runtime.experts.store import DeviceExperts
from moet.runtime.parallel.experts import share_of

logger = logging.getLogger(__name__)


class RowSource(Protocol):
    """Rows of some layers. form: what this rank has of one. top_k: experts of a token."""

    layers: Sequence[int]
    num_experts: int
    top_k: int
    gpu: Device
    shard: Shard

    def form(self, tier: Tier) -> ExpertRows: ...

    def resident(self, tier: Tier, progress: Progress) -> ResidentProvider:
        """All of them on the GPU."""
        ...

    def cached(
        self, tier: Tier, sizes: TierSizes, experts: ExpertConfig, progress: Progress
    ) -> CachedExperts:
        """Behind a pool. Raises ConfigError if that cannot be."""
        ...

    def keep(self, tier: Tier, cache: CachedExperts, experts: ExpertConfig) -> None:
        """Remember what was worth having, for the next start."""
        ...

    def hot(self) -> tuple[Mapping[int, ExpertTable], str]:
        """What HotOnDevice takes, and everything that makes it what it is. Raises ConfigError if
        nothing says which rows are hot."""
        ...


class PackRows:
    """Rows of a pack, of these layers; of each what the shard has."""

    def __init__(
        self, pack: Pack, layers: Sequence[int], gpu: Device, shard: Shard = WHOLE
    ) -> None:
        self.pack, self.layers, self.gpu, self.shard = pack, layers, gpu, shard
        self.num_experts = pack.experts.num_experts
        self.top_k = int(pack.config["num_experts_per_tok"])

    def form(self, tier: Tier) -> ExpertRows:
        """What this rank has of a row."""
        return share_of(self.pack.format(tier), self.shard)[0]

    def resident(self, tier: Tier, progress: Progress) -> ResidentProvider:
        """As RowSource.resident."""
        return pack_experts(
            self.pack,
            tier,
            self.layers,
            self.gpu.torch_device,
            lambda report: progress(report.done_bytes, report.total_bytes),
            self.shard,
        )

    def cached(
        self, tier: Tier, sizes: TierSizes, experts: ExpertConfig, progress: Progress
    ) -> CachedExperts:
        """As RowSource.cached."""
        return open_cached(
            self.pack,
            tier,
            self.layers,
            self.gpu,
            sizes,
            heat=read_heat(heat_path(experts, self.pack, tier), self.pack.experts.num_rows),
            disk=experts.disk,
            num_readers=experts.num_readers,
            read_timeout_s=experts.read_timeout_s,
            progress=progress,
            shard=self.shard,
        )

    def keep(self, tier: Tier, cache: CachedExperts, experts: ExpertConfig) -> None:
        """As RowSource.keep."""
        known = self.pack.experts
        rows = [known.row(layer, e) for layer in cache.layers for e in range(cache.num_experts)]
        path: Path = heat_path(experts, self.pack, tier)
        write_heat(path, [rows[row] for row in cache.heat()], known.num_rows)

    def hot(self) -> tuple[Mapping[int, ExpertTable], str]:
        """As RowSource.hot."""
        pack, known, device = self.pack, self.pack.experts, self.gpu.torch_device
        rows = read_hot(pack)
        form, tables = pack.format("fp4"), {}
        for layer_idx in self.layers:
            first = known.row(layer_idx, 0)
            ids = [row - first for row in rows if first <= row < first + self.num_experts]
            if not ids:
                continue
            content = torch.stack([pack.expert_row("fp4", layer_idx, e) for e in ids])
            slot_of = torch.full((self.num_experts,), -1)
            slot_of[torch.tensor(ids)] = torch.arange(len(ids))
            bases = row_bases(pack, "fp4", [layer_idx])
            tables[layer_idx] = ExpertTable(
                form, content.to(device), slot_of.to(device), bases.to(device)
            )
        return tables, json.dumps({"hot": rows})


class DummyRows:
    """Random rows, made on the GPU layer by layer; the same as those of runtime.dummy."""

    def __init__(
        self, experts: ExpertMap, layers: Sequence[int], top_k: int, gpu: Device, seed: int
    ) -> None:
        self.layers, self.num_experts, self.top_k = layers, experts.num_experts, top_k
        self.gpu, self.seed, self.shard = gpu, seed, WHOLE
        self._forms = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)
        self._made: tuple[str, int, Tensor] | None = None  # the last layer's

    def form(self, tier: Tier) -> ExpertRows:
        """As RowSource.form."""
        return self._forms[tier]

    def resident(self, tier: Tier, progress: Progress) -> ResidentProvider:
        """As RowSource.resident."""
        form, device = self.form(tier), self.gpu.torch_device
        count = len(self.layers) * self.num_experts
        rows = torch.empty(count, form.row_bytes, dtype=torch.uint8, device=device)
        self._fill(tier, 0, rows)
        return DeviceExperts(form, rows, self._bases(form), self.layers)

    def cached(
        self, tier: Tier, sizes: TierSizes, experts: ExpertConfig, progress: Progress
    ) -> CachedExperts:
        """As RowSource.cached. Raises ConfigError if memory does not hold every row."""
        form = self.form(tier)
        if sizes.num_static or sizes.num_places < sizes.num_rows:
            raise ConfigError(
                f"dummy weights are in no file and host memory has room for {sizes.num_places} of "
                f"{sizes.num_rows} rows of experts; leave out --static-experts, give more "
                "--host-experts, or serve a pack"
            )
        pin, begin = self.gpu.torch_device.type == "cuda", perf_counter()
        arena = Arena(sizes.num_rows, form.row_bytes, pin=pin, fill=touch, progress=progress)
        size, taken_s, first = sizes.num_rows * form.row_bytes / GIB, perf_counter() - begin, 0
        logger.info("experts %s: %.2f GiB of host memory in %.1f s", tier, size, taken_s)
        for chunk in arena.chunks:
            self._fill(tier, first, chunk)
            first += len(chunk)
        self._made = None
        return CachedExperts(
            self.gpu.launcher,
            form,
            HostSide(arena=arena),
            self._bases(form),
            self.layers,
            sizes.num_slots,
            error=self.gpu.error,
        )

    def keep(self, tier: Tier, cache: CachedExperts, experts: ExpertConfig) -> None:
        """Nothing: the next start makes other numbers, or asks for others."""

    def _bases(self, form: ExpertRows) -> Tensor:
        _, bases = dummy_rows(form, 1, seed=self.seed, device=self.gpu.torch_device)
        return bases.repeat(len(self.layers) * self.num_experts, 1, 1)

    def _fill(self, tier: Tier, first: int, out: Tensor) -> None:
        """Rows first.. into out."""
        done = 0
        while done < len(out):
            number, expert_id = divmod(first + done, self.num_experts)
            count = min(len(out) - done, self.num_experts - expert_id)
            made = self._layer(tier, self.layers[number])
            out[done : done + count].copy_(made[expert_id : expert_id + count])
            done += count

    def _layer(self, tier: Tier, layer_idx: int) -> Tensor:
        if self._made is None or self._made[:2] != (tier, layer_idx):
            self._made = None
            seed, device = 1000 * self.seed + layer_idx, self.gpu.torch_device
            rows, _ = dummy_rows(self.form(tier), self.num_experts, seed=seed, device=device)
            self._made = tier, layer_idx, rows
        return self._made[2]

    def hot(self) -> tuple[Mapping[int, ExpertTable], str]:
        """As RowSource.hot. Raises ConfigError."""
        raise ConfigError("--precision w2+hot needs a pack, which lists its hot rows")
