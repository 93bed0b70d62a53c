"""Opens the tiers of a pack's experts: sizes, arena, files, what to begin with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.runtime.experts.device import DeviceTier
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.host import Arena, HostTier
from moet.runtime.experts.sizes import TierSizes
from moet.runtime.experts.tiered import StoreSettings, TieredExpertStore

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def open_store(
    pack: Pack,
    tier: Tier,
    sizes: TierSizes,
    *,
    scan_from_rows: int = 1 << 30,
    heat: Sequence[int] = (),
    num_readers: int = 4,
    read_timeout_s: float = 30.0,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total: None,
) -> TieredExpertStore:
    """A tiered store over a pack, with what memory holds from the start already there.

    heat: rows to begin with, best first. progress: bytes done and in all. Raises ConfigError if
    memory is not to be had, CheckpointError if the pack has no such tier, ExpertReadError if it
    cannot be read.
    """
    form, experts = pack.format(tier), pack.experts
    path, _ = pack.row_place(tier, experts.layers[0], 0)
    pin = torch.device(device).type == "cuda"
    started = perf_counter()
    arena = Arena(sizes.num_places, form.row_bytes, pin=pin)
    disk = RowFile(
        path,
        form.row_bytes,
        name_of=lambda row: row_name(pack, row),
        num_readers=num_readers,
        digests=pack.row_digests(tier),
    )
    host = HostTier(arena, disk, read_timeout_s=read_timeout_s)
    ranked = list(dict.fromkeys([*heat, *range(experts.num_rows)]))
    store = TieredExpertStore(
        form,
        experts,
        DeviceTier(
            experts.num_rows,
            sizes.num_slots,
            form.row_bytes,
            num_static=sizes.num_static,
            device=device,
        ),
        host,
        StoreSettings(
            scan_from_rows=scan_from_rows,
            num_staging=sizes.num_staging,
            static_rows=tuple(ranked[: sizes.num_static]),
        ),
    )
    _warm_up(store, ranked if sizes.all_in_memory else list(heat), progress)
    logger.info(
        "experts %s: %d slots (%d static), %d in host memory, of %d rows; %.1f s",
        tier,
        sizes.num_slots,
        sizes.num_static,
        sizes.num_places,
        experts.num_rows,
        perf_counter() - started,
    )
    if not sizes.all_in_memory:
        logger.warning(
            "%d of %d %s expert rows are on disk alone and are read when a token needs them; "
            "--host-experts holds more",
            sizes.num_rows - sizes.num_static - sizes.num_places,
            sizes.num_rows,
            tier,
        )
    return store


STRIDE = 64  # rows between two reports


def _warm_up(store: TieredExpertStore, rows: list[int], progress: Progress) -> None:
    total = len(rows) * store.form.row_bytes
    for first in range(0, len(rows), STRIDE):
        store.preheat(rows[first : first + STRIDE])
        progress(min(total, (first + STRIDE) * store.form.row_bytes), total)


def row_name(pack: Pack, row: int) -> str:
    """What a row of a pack is called in messages."""
    place, expert_id = divmod(row, pack.experts.num_experts)
    return f"layer {pack.experts.layers[place]}, expert {expert_id}"
