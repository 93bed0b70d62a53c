"""The books of a core at one time, put together from those who keep them. Changes nothing."""

from __future__ import annotations

from moet.runtime.kv_disk import DiskStats
from moet.runtime.metrics import CoreStats, Counters
from moet.runtime.scheduler import Scheduler


def core_stats(scheduler: Scheduler, counters: Counters) -> CoreStats:
    """What is held and waits now, and what was counted. O(1) but for the histograms."""
    memory = scheduler.memory
    pool, cache, tiers = memory.cache.pool, memory.cache, memory.tiers
    disk = tiers.disk_stats() if tiers else DiskStats()
    held = pool.num_used - cache.num_evictable
    return CoreStats(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_used_pages=held,
        num_cached_pages=cache.num_evictable,
        num_used_host_blocks=memory.host.num_used,
        num_used_snapshots=cache.snapshots.num_used,
        kv_cache_usage=held / pool.num_pages,
        num_steps=counters.num_steps,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        cached_tokens=counters.cached_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        num_preemptions=counters.num_preemptions,
        num_recomputed=counters.num_recomputed,
        num_rejected=counters.num_rejected,
        num_queue_timeouts=counters.num_queue_timeouts,
        num_corrupted=counters.num_corrupted,
        num_failed_steps=counters.num_failed_steps,
        num_split_steps=counters.num_split_steps,
        num_host_hits=counters.num_host_hits,
        num_host_dropped=counters.num_host_dropped,
        num_disk_hits=counters.num_disk_hits,
        num_host_cache_blocks=tiers.host.pool.num_used if tiers else 0,
        disk_cache_bytes=disk.num_bytes,
        num_disk_written=disk.num_written,
        num_disk_evicted=disk.num_evicted,
        num_disk_rejected=disk.num_rejected,
        num_disk_foreign=disk.num_foreign,
        num_disk_errors=disk.num_errors,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=sum(counters.accepted_by_position),
        num_accepted_by_position=list(counters.accepted_by_position),
        num_grammar_hits=counters.num_grammar_hits,
        num_grammars_refused=counters.num_grammars_refused,
        finished=dict(counters.finished),
        step_time_s=counters.step_time_s.stats(),
        step_tokens=counters.step_tokens.stats(),
        time_to_first_token_s=counters.time_to_first_token_s.stats(),
        inter_token_latency_s=counters.inter_token_latency_s.stats(),
        time_per_output_token_s=counters.time_per_output_token_s.stats(),
        request_latency_s=counters.request_latency_s.stats(),
        queue_time_s=counters.queue_time_s.stats(),
        prefill_time_s=counters.prefill_time_s.stats(),
        decode_time_s=counters.decode_time_s.stats(),
        grammar_compile_s=counters.grammar_compile_s.stats(),
    )
