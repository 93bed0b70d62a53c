"""What a core is made of: KV memory with its books, and what computes batches.

Sizes everything from the configs. Knows no request and no step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from moet.config import CacheConfig, SchedulerConfig
from moet.errors import ConfigError
from moet.models.base import DraftingModel, ExpertProvider, KVCacheSpec, Model
from moet.runtime.device_runner import DeviceModel, DeviceRunner, Placement
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.kv_cache import KVCache, resume_bytes
from moet.runtime.metrics import CoreInfo, Counters
from moet.runtime.model_runner import ModelRunner
from moet.runtime.sampler import SamplerState
from moet.runtime.sequence_memory import SequenceMemory
from moet.runtime.tier_plan import host_cache_blocks, open_tiers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreMemory:
    """KV tensors and the books about them. window: of the longest sequence, in tokens."""

    spec: KVCacheSpec
    window: int
    kv: KVCache
    sequences: SequenceMemory
    num_pages: int
    num_preempt_blocks: int
    num_cache_blocks: int


def open_memory(
    model: Model,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    device: str,
    kv_identity: str,
    counters: Counters,
) -> CoreMemory:
    """KV memory on a device, and the tiers behind it. Raises ConfigError if nothing fits."""
    spec = model.kv_cache_spec()
    num_seqs = scheduler.max_num_seqs
    if scheduler.num_spec_tokens >= spec.page_size:
        raise ConfigError(
            f"--spec-tokens is {scheduler.num_spec_tokens}; it must be below the page size, "
            f"{spec.page_size} tokens"
        )
    num_pages = cache.page_bytes // max(spec.bytes_per_page, 1)
    window = _window(model, spec, cache, scheduler, num_pages)
    snapshot_bytes = resume_bytes(spec)
    keeps_snapshots = snapshot_bytes > 0 and cache.prefix_cache != "off"
    num_preempt_blocks = cache.host_budget_bytes // max(spec.bytes_per_page, 1)
    num_cache_blocks = host_cache_blocks(cache, spec, window)
    kv = KVCache(
        spec,
        num_pages=num_pages,
        num_seq_slots=num_seqs,
        num_host_blocks=num_preempt_blocks + num_cache_blocks,
        num_snapshots=(cache.snapshot_budget_bytes // snapshot_bytes if keeps_snapshots else 0),
        device=device,
    )
    if keeps_snapshots and kv.num_snapshots == 0:
        logger.warning(
            "a resume snapshot takes %d bytes and the budget is %d: the prefix cache will "
            "find nothing",
            snapshot_bytes,
            cache.snapshot_budget_bytes,
        )
    tiers = open_tiers(
        cache,
        spec,
        first_block=num_preempt_blocks,
        num_blocks=num_cache_blocks,
        buffers=kv.buffers,
        identity=kv_identity,
        counters=counters,
    )
    sequences = SequenceMemory(
        spec,
        num_pages=num_pages,
        num_seq_slots=num_seqs,
        num_host_blocks=num_preempt_blocks,
        num_snapshots=kv.num_snapshots,
        ring_blocks=kv.ring_blocks,
        snapshot_interval=scheduler.snapshot_interval,
        prefix_cache=cache.prefix_cache,
        counters=counters,
        tiers=tiers,
    )
    return CoreMemory(spec, window, kv, sequences, num_pages, num_preempt_blocks, num_cache_blocks)


def core_info(
    memory: CoreMemory,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    precisions: PrecisionSet,
    vocab_size: int,
) -> CoreInfo:
    """What a core tells of itself."""
    spec, num_pages, num_seqs = memory.spec, memory.num_pages, scheduler.max_num_seqs
    return CoreInfo(
        vocab_size=vocab_size,
        max_model_len=memory.window,
        precision=precisions.default,
        precisions=precisions.offered,
        page_size=spec.page_size,
        num_pages=num_pages,
        kv_cache_bytes=num_pages * spec.bytes_per_page + num_seqs * spec.bytes_per_seq,
        num_seq_slots=num_seqs,
        num_host_blocks=memory.num_preempt_blocks,
        num_snapshots=memory.kv.num_snapshots,
        num_host_cache_blocks=memory.num_cache_blocks,
        disk_cache_bytes=cache.disk_cache_bytes,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        prefix_cache=cache.prefix_cache,
        overlap=scheduler.overlap,
        step_timeout_s=scheduler.step_timeout_s,
        num_spec_tokens=scheduler.num_spec_tokens,
    )


def open_runner(
    model: Model,
    experts: ExpertProvider,
    memory: CoreMemory,
    placement: Placement | None,
    precisions: PrecisionSet,
    *,
    num_token_ids: int,
    scheduler: SchedulerConfig,
) -> ModelRunner | DeviceRunner:
    """What computes batches: on the CPU, or on the placement's device."""
    num_seqs, kv = scheduler.max_num_seqs, memory.kv
    max_pages = memory.sequences.num_pages_for(memory.window)
    draft_model = cast(DraftingModel, model) if scheduler.num_spec_tokens else None
    if placement is None:
        return ModelRunner(
            model,
            experts,
            kv,
            SamplerState(num_seqs, model.vocab_size, num_token_ids=num_token_ids),
            num_seq_slots=num_seqs,
            max_pages_per_seq=max_pages,
            draft_model=draft_model,
            precisions=precisions,
        )
    device = placement.queue.device
    return DeviceRunner(
        cast(DeviceModel, model),
        experts,
        kv,
        SamplerState(num_seqs, model.vocab_size, device, num_token_ids=num_token_ids),
        placement,
        num_seq_slots=num_seqs,
        max_pages_per_seq=max_pages,
        max_rows_per_seq=1 + scheduler.num_spec_tokens,
        draft_model=draft_model,
        precisions=precisions,
    )


def _window(
    model: Model,
    spec: KVCacheSpec,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    num_pages: int,
) -> int:
    """The longest sequence, in tokens. Any one that long fits the pages alone.

    Raises ConfigError with what is needed and what there is.
    """
    room = num_pages * spec.page_size
    wanted = scheduler.max_model_len
    needed = 2 if wanted is None else wanted
    if needed > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {needed}; the model's positions end at "
            f"{model.max_position_embeddings}"
        )
    if needed > room:
        bytes_needed = -(-needed // spec.page_size) * spec.bytes_per_page
        raise ConfigError(
            f"a sequence of {needed} tokens needs {bytes_needed} bytes of pages; "
            f"--kv-cache-memory gives {cache.page_bytes}, enough for {room} tokens. Raise "
            "--kv-cache-memory or lower --max-model-len"
        )
    return min(model.max_position_embeddings, room) if wanted is None else wanted
