"""Counters of the engine core, and the values that leave it. Knows no exporter."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from moet.types import FinishReason

LATENCY_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
)  # fmt: skip
STEP_BOUNDS_S = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0
)  # fmt: skip
TOKEN_BOUNDS = tuple(float(2**n) for n in range(15))


class HistogramStats(msgspec.Struct, frozen=True, kw_only=True):
    """counts[i] values were at most bounds[i] and above bounds[i-1]; the last has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Observations counted by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def stats(self) -> HistogramStats:
        return HistogramStats(bounds=self._bounds, counts=list(self._counts), sum=self._sum)


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine core has settled on; constant while it lives."""

    vocab_size: int  # without the padding of the model's
    max_model_len: int
    precision: str  # the default
    precisions: tuple[str, ...] = ()  # which a request may ask for besides
    page_size: int  # tokens
    num_pages: int
    kv_cache_bytes: int  # pages and rings, on the device
    num_seq_slots: int
    num_host_blocks: int  # for preempted sequences
    num_snapshots: int  # for the prefix cache
    num_host_cache_blocks: int = 0  # for cached pages
    disk_cache_bytes: int = 0  # the budget
    max_num_batched_tokens: int
    prefix_cache: str
    overlap: bool
    step_timeout_s: float = 300.0  # after which a step is told of as late
    num_spec_tokens: int = 0  # drafted per sequence and step at most


class LayerExperts(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's routed experts. rows[i]: rows that were routed to expert i so far."""

    layer: int
    format: str
    num_resident: int
    rows: list[int]
    resident: list[bool]


class LayerTier(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer has asked a tiered store for. num_streamed: rows that passed through staging;
    num_bytes: copied to slots or through staging; stall_s: time that its step waited for them."""

    layer: int
    num_hits: int
    num_misses: int
    num_streamed: int
    num_bytes: int
    stall_s: float


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tiered store: sizes in rows, levels and counters."""

    format: str
    row_bytes: int
    num_rows: int
    num_slots: int
    num_static: int
    num_resident: int
    num_host_places: int
    num_host_rows: int
    num_host_hits: int
    num_disk_reads: int
    num_disk_errors: int
    disk_wait_s: float
    layers: list[LayerTier]

    def total(self, what: str) -> float:
        """A counter of the layers, summed."""
        return float(sum(getattr(layer, what) for layer in self.layers))


class ExpertStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where the routed experts are, and how often each was asked for. tiers: stores that have
    any; tau, num_gate_rows, num_gated_rows: of the policy `gate`, rows that it judged and those
    that were computed again."""

    layers: list[LayerExperts]
    tiers: list[TierStats] = []
    tau: float = 0.0
    num_gate_rows: int = 0
    num_gated_rows: int = 0


class CoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The books of an engine core at one moment. Counters only grow; the rest are levels."""

    num_running: int
    num_waiting: int
    num_used_pages: int  # held by sequences
    num_cached_pages: int  # held by the prefix cache alone
    num_used_host_blocks: int
    num_used_snapshots: int
    kv_cache_usage: float  # share of pages held by sequences
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int  # prompt tokens that prefix hits saved
    prefix_queries: int  # tokens looked up
    prefix_hits: int  # tokens found
    num_preemptions: int
    num_recomputed: int  # preemptions that lost their state
    num_rejected: int  # by admission limits
    num_queue_timeouts: int  # waited longer than they may
    num_corrupted: int  # requests ended by logits that are not numbers
    num_failed_steps: int
    num_split_steps: int  # whose experts were not resident together
    num_host_hits: int  # cached pages that came back from host memory
    num_host_dropped: int  # cached pages and snapshots lost, as the host had no room
    num_disk_hits: int  # cached pages and snapshots that came back from disk
    num_host_cache_blocks: int = 0  # in use
    disk_cache_bytes: int = 0
    num_disk_written: int = 0
    num_disk_evicted: int = 0
    num_disk_rejected: int = 0  # damaged
    num_disk_foreign: int = 0  # of other models or settings
    num_disk_errors: int = 0
    num_drafts: int = 0  # rows of a sequence and step that had drafts behind them
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = []  # of the first drafts, of the second ones, ...
    num_grammar_hits: int = 0  # requests whose grammar was compiled before
    num_grammars_refused: int = 0  # could not be compiled, or not in time
    finished: dict[str, int]  # by FinishReason
    step_time_s: HistogramStats  # of the device part
    step_tokens: HistogramStats
    time_to_first_token_s: HistogramStats
    inter_token_latency_s: HistogramStats
    time_per_output_token_s: HistogramStats  # a request's mean, without its first token
    request_latency_s: HistogramStats
    queue_time_s: HistogramStats
    prefill_time_s: HistogramStats
    decode_time_s: HistogramStats
    grammar_compile_s: HistogramStats


@dataclass(slots=True)
class Counters:
    """What the runtime counts as it goes; one writer, the core's thread."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_rejected: int = 0
    num_queue_timeouts: int = 0
    num_corrupted: int = 0
    num_failed_steps: int = 0
    num_split_steps: int = 0
    num_host_hits: int = 0
    num_host_dropped: int = 0
    num_disk_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    num_grammar_hits: int = 0
    num_grammars_refused: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: {reason.value: 0 for reason in FinishReason}
    )
    step_time_s: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    time_per_output_token_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    request_latency_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    prefill_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    decode_time_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    grammar_compile_s: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))

    def observe_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence's drafts were verified, and the first num_accepted held."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        missing = num_drafts - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, missing)
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1
