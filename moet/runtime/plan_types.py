"""What a memory plan is asked and what it says. Values only."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moet.config import Precision

SHORT_CONTEXT = 8192  # tokens of the sequences that num_short_seqs counts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What a user chooses. max_model_len None: planned; kv_cache_bytes None: what is left.

    host_cache_bytes, snapshot_bytes: host memory for pages that left the device and for resume
    snapshots.
    """

    precision: Precision = "w2"
    max_model_len: int | None = None
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 8192
    kv_cache_bytes: int | None = None
    host_cache_bytes: int = 256 << 20
    snapshot_bytes: int = 64 << 20
    num_expert_rows: int | None = None  # in memory at once, of the CPU reference; None: all


class ExpertPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Rows by tier: never leaving the cards, in the cards' cache, in host memory, on disk alone.

    Cached rows are in host memory or on disk as well.
    """

    row_bytes: int
    num_rows: int
    num_static: int
    num_cached: int
    num_host: int
    num_disk: int
    num_layer_rows: int = 0  # experts of a layer

    @property
    def device_share(self) -> float:
        return (self.num_static + self.num_cached) / self.num_rows

    @property
    def memory_share(self) -> float:
        """Of rows that are on a card or in host memory."""
        return min(1.0, (self.num_static + max(self.num_host, self.num_cached)) / self.num_rows)


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """State. num_tokens: that the page pool holds. num_short_seqs: sequences of SHORT_CONTEXT
    tokens that pages and rings hold at once if --max-num-seqs asks for them."""

    bytes_per_token: float
    bytes_per_seq: int
    num_pages: int
    num_tokens: int
    max_model_len: int
    largest_model_len: int
    max_num_seqs: int
    num_short_seqs: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """device_bytes: of one card, by use; sums to its memory. host_bytes likewise, for the host."""

    hardware: str
    num_devices: int
    resident: bool
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    disk_bytes: int
    experts: ExpertPlan
    kv: KVPlan
