"""Opens a pack's experts for a GPU: rows that stay there, in pinned host memory, or on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from moet.errors import CheckpointError, ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.layout import ExpertRows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.models.sharding import WHOLE, Shard
from moet.runtime.experts.build import Progress, row_name
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.feeder import ON_DISK, RowFeeder
from moet.runtime.experts.gpu import FETCH_TIMEOUT_S, CachedExperts, HostSide
from moet.runtime.experts.host import Arena, mapped_numbers, page_aligned
from moet.runtime.experts.numa import near, stay_on
from moet.runtime.experts.sizes import GIB, TierSizes
from moet.runtime.experts.staged import START_READERS, StagedRows, read_rows
from moet.runtime.parallel.experts import share_of

logger = logging.getLogger(__name__)

MIN_REQUESTS = 1024  # that the ring between device and feeder holds


def open_cached(
    pack: Pack,
    tier: Tier,
    layers: Sequence[int],
    gpu: Device,
    sizes: TierSizes,
    *,
    heat: Sequence[int] = (),
    disk: bool = True,
    num_readers: int = 4,
    read_timeout_s: float = FETCH_TIMEOUT_S,
    progress: Progress = lambda done, total: None,
    shard: Shard = WHOLE,
) -> CachedExperts:
    """What a tensor rank has of a pack's rows of these layers behind a pool on its GPU.

    heat: rows of the pack to begin with, best first. disk: where less memory is to be had than
    sizes say, more rows may stay on disk. progress: bytes done and in all. Raises ConfigError if
    memory is not to be had, CheckpointError if the pack has no such tier or no row bases, and
    ExpertReadError.
    """
    started, num_experts = perf_counter(), pack.experts.num_experts
    form, files = row_files(pack, tier, shard)
    rows = _Rows.ranked(pack, layers, heat, sizes)
    bases = row_bases(pack, tier, layers, shard)
    pin = gpu.torch_device.type == "cuda"
    beside = near(gpu.torch_device)  # readers are the first to write the arena's pages
    file = files(num_readers=START_READERS, direct=False, begin=partial(stay_on, beside))
    try:
        arena = Arena(
            len(rows.in_arena),
            form.row_bytes,
            pin=pin,
            fill=partial(rows.read_into_arena, file),
            progress=progress,
            least=least_places(num_experts) if disk else None,
        )
        rows = replace(rows, in_arena=rows.in_arena[: arena.num_places])
        opens = partial(files, num_readers=num_readers)
        host = _host_side(opens, num_experts, arena, rows, pin=pin)
        cached = CachedExperts(
            gpu.launcher,
            form,
            host,
            bases.to(gpu.torch_device),
            layers,
            sizes.num_slots,
            error=gpu.error,
            timeout_s=read_timeout_s,
        )
        _fill(cached, file, rows.static, [rows.in_file[n] for n in rows.static])
    finally:
        file.close()
    warm = rows.warm(sizes.num_slots - sizes.num_static)
    cached.fill(list(warm), [arena.place(place) for place in warm.values()])
    if pin:
        torch.cuda.synchronize(gpu.torch_device)
    if host.feeder is not None:
        host.feeder.start()
    logger.info(
        "experts %s: %d slots (%d static), %d in host memory, of %d rows; %.2f GiB in %.1f s",
        tier,
        sizes.num_slots,
        len(rows.static),
        len(rows.in_arena),
        len(rows.in_file),
        len(rows.in_arena) * form.row_bytes / GIB,
        perf_counter() - started,
    )
    return cached


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of some layers begin, by their numbers among those.

    in_file: the pack's number of each. hot: those to begin with, best first. static: those that
    stay on the GPU. in_arena: those in host memory, by place.
    """

    in_file: Sequence[int]
    hot: Sequence[int]
    static: Sequence[int]
    in_arena: Sequence[int]

    @classmethod
    def ranked(
        cls, pack: Pack, layers: Sequence[int], heat: Sequence[int], sizes: TierSizes
    ) -> _Rows:
        """The hottest rows static, those behind them in the arena."""
        experts = pack.experts
        in_file = [experts.row(layer, e) for layer in layers for e in range(experts.num_experts)]
        number = {row: n for n, row in enumerate(in_file)}
        hot = [number[row] for row in heat if row in number]
        ranked = list(dict.fromkeys([*hot, *range(len(in_file))]))
        static, rest = ranked[: sizes.num_static], ranked[sizes.num_static :]
        return cls(in_file, hot, static, sorted(rest[: sizes.num_places]))

    @property
    def all_in_memory(self) -> bool:
        return len(self.static) + len(self.in_arena) == len(self.in_file)

    def read_into_arena(self, file: RowFile, first: int, chunk: Tensor) -> None:
        """The rows of the arena's places from `first` on. chunk: [places, row_bytes] uint8."""
        some = self.in_arena[first : first + len(chunk)]
        read_rows(file, [self.in_file[n] for n in some], chunk)

    def warm(self, most: int) -> dict[int, int]:
        """The hottest rows of the arena, at most so many, and their places there."""
        place = {row: index for index, row in enumerate(self.in_arena)}
        return dict(islice(((row, place[row]) for row in self.hot if row in place), most))


def row_files(pack: Pack, tier: Tier, shard: Shard) -> tuple[ExpertRows, Callable[..., RowFile]]:
    """The rows that a rank has, and what opens the file of them; its arguments are RowFile's.

    Parts of rows have no checksums.
    """
    whole = pack.format(tier)
    form, first, _ = share_of(whole, shard)
    path, _ = pack.row_place(tier, pack.experts.layers[0], 0)
    opens = partial(
        RowFile,
        path,
        form.row_bytes,
        name_of=lambda row: row_name(pack, row),
        stride_bytes=whole.row_bytes,
        offset_bytes=first * whole.sub_row_bytes,
        digests=pack.row_digests(tier) if shard.size == 1 else (),
    )
    return form, opens


def row_bases(pack: Pack, tier: Tier, layers: Sequence[int], shard: Shard = WHOLE) -> Tensor:
    """[rows of these layers, ...] uint8. Raises CheckpointError if the pack has none."""
    form, first, last = share_of(pack.format(tier), shard)
    bases = [
        pack.row_base(tier, layer_idx, expert_id)[first:last]
        for layer_idx in layers
        for expert_id in range(pack.experts.num_experts)
    ]
    if bases[0].numel() == 0 and not isinstance(form, Nvfp4Rows):  # whose scales need none
        raise CheckpointError(f"{pack.folder} has no row bases of its {tier} experts for a GPU")
    return torch.stack(bases)


def least_places(num_experts: int) -> int:
    """Rows that host memory must hold if others are on disk: those that a fetch may be reading and
    as many that it may be waiting for."""
    return 2 * num_experts


def _host_side(
    opens: Callable[..., RowFile],
    num_experts: int,
    arena: Arena,
    rows: _Rows,
    *,
    pin: bool,
) -> HostSide:
    """What is behind the pool: the arena alone, or with a feeder that reads what is not there."""
    num_held = len(rows.in_arena)
    if num_held == len(rows.in_file):
        return HostSide(arena=arena)
    try:
        place_of = mapped_numbers(len(rows.in_file), ON_DISK, pin=pin)
        held = torch.tensor(rows.in_arena, dtype=torch.int64)
        place_of[held] = torch.arange(num_held, dtype=torch.int32)
        if rows.all_in_memory:
            return HostSide(arena=arena, place_of=place_of)
        least = least_places(num_experts)
        if num_held < least:
            size = least * arena.chunks[0].shape[1] / GIB
            raise ConfigError(
                f"--host-experts holds {num_held} rows; with others on disk a GPU needs "
                f"{least}, {size:.2f} GiB"
            )
        num_requests = max(MIN_REQUESTS, 1 << (4 * num_experts - 1).bit_length())
        requests = mapped_numbers(1 + num_requests, 0, pin=pin)
        staged = StagedRows(opens(num_readers=START_READERS), rows.in_file, pin=pin)
    except BaseException:
        arena.close()
        raise
    feeder = RowFeeder(
        arena, opens(), place_of, requests, file_rows=rows.in_file, in_flight=num_experts
    )
    return HostSide(arena=arena, place_of=place_of, requests=requests, feeder=feeder, staged=staged)


def _fill(cached: CachedExperts, file: RowFile, static: Sequence[int], rows: Sequence[int]) -> None:
    """Static rows into their slots, a few at a time."""
    buffer = page_aligned(START_READERS * file.row_bytes).view(START_READERS, file.row_bytes)
    for first in range(0, len(rows), START_READERS):
        part = static[first : first + START_READERS]
        read_rows(file, rows[first : first + len(part)], buffer[: len(part)])
        cached.fill(part, list(buffer), static=True)
