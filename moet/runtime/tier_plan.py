"""Which tiers stand behind the prefix cache, and how large they are: settings in, KVTiers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moet import __version__
from moet.config import CacheConfig
from moet.errors import ConfigError
from moet.models.base import KVCacheSpec
from moet.runtime.kv_cache import resume_bytes
from moet.runtime.kv_disk import Buffers, DiskStore, fingerprint
from moet.runtime.kv_host import HostTier, ObjectSizes
from moet.runtime.kv_tiers import KVTiers
from moet.runtime.metrics import Counters

STAGING_BYTES = 4 << 30  # most host memory that a disk takes for itself
FORMAT = "1"  # of what an object's bytes mean, beside the model's own layout


def host_cache_blocks(cache: CacheConfig, spec: KVCacheSpec, window: int) -> int:
    """Blocks of one page's bytes for cached pages in host memory; 0 without tiers.

    A disk needs some of its own, through which a prompt of the window passes. Raises ConfigError
    if the memory holds no page with its snapshot.
    """
    if cache.host_cache_bytes == 0 and cache.disk_cache_folder is None:
        return 0
    page_bytes, ring_bytes = spec.bytes_per_page, resume_bytes(spec)
    least = 1 + -(-ring_bytes // page_bytes)
    if cache.host_cache_bytes == 0:
        wanted = -(-window // spec.page_size) + 4 * least
        return max(min(wanted, STAGING_BYTES // page_bytes), 4 * least)
    num_blocks = cache.host_cache_bytes // page_bytes
    if num_blocks < least:
        raise ConfigError(
            f"--kv-host-cache gives {cache.host_cache_bytes} bytes; a page and the state to resume "
            f"from it take {least * page_bytes}"
        )
    return num_blocks


def open_tiers(
    cache: CacheConfig,
    spec: KVCacheSpec,
    *,
    first_block: int,
    num_blocks: int,
    buffers: Callable[[Sequence[int], int], Buffers],
    identity: str,
    counters: Counters,
) -> KVTiers | None:
    """The tiers that are asked for, over host blocks first_block and up; None if there are none.

    identity: everything that KV state depends on besides tokens and its layout. Raises ConfigError
    if the disk's folder cannot be used.
    """
    if num_blocks == 0:
        return None
    disk = None
    if cache.disk_cache_folder is not None:
        if not identity:
            raise ConfigError("--kv-disk-cache needs to know which model its pages are of")
        parts = [FORMAT, __version__, identity, cache.prefix_cache, repr(spec)]
        folder = Path(cache.disk_cache_folder).expanduser()
        disk = DiskStore(folder, cache.disk_cache_bytes, fingerprint(parts))
    return KVTiers(
        HostTier(first_block, num_blocks),
        disk,
        ObjectSizes(spec.bytes_per_page, resume_bytes(spec)),
        buffers=buffers,
        counters=counters,
    )
