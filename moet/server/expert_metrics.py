"""Where routed experts are and what it costs to bring them, as Prometheus families.

Formats of rows ("w2", "fp4") are labels; a model whose experts are all in memory has no caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moet.runtime.metrics import ExpertStats, TierStats

Value = Callable[[TierStats], float]

GAUGES: dict[str, tuple[Value, str]] = {
    "expert_cache_slots": (lambda tier: tier.num_slots, "rows that the device has room for"),
    "expert_cache_resident": (lambda tier: tier.num_resident, "rows on the device"),
    "expert_cache_coverage": (
        lambda tier: tier.num_resident / tier.num_rows,
        "share of all rows that is on the device",
    ),
    "expert_cache_static": (lambda tier: tier.num_static, "rows that never leave the device"),
    "expert_host_rows": (lambda tier: tier.num_host_rows, "rows in host memory"),
    "host_planes_bytes": (
        lambda tier: tier.num_host_places * tier.row_bytes,
        "host memory that rows have room in",
    ),
}
COUNTERS: dict[str, tuple[Value, str]] = {
    "expert_cache_hits": (lambda tier: tier.total("num_hits"), "rows found on the device"),
    "expert_cache_misses": (lambda tier: tier.total("num_misses"), "rows that had to be fetched"),
    "expert_cache_streamed": (
        lambda tier: tier.total("num_streamed"),
        "rows of long prompts that passed through without a slot",
    ),
    "expert_cache_fetch_bytes": (lambda tier: tier.total("num_bytes"), "bytes of fetched rows"),
    "expert_cache_stall_seconds": (
        lambda tier: tier.total("stall_s"),
        "time that steps waited for rows",
    ),
    "expert_host_hits": (lambda tier: tier.num_host_hits, "fetched rows that the host had"),
    "expert_disk_reads": (lambda tier: tier.num_disk_reads, "rows read from disk"),
    "expert_disk_errors": (lambda tier: tier.num_disk_errors, "rows that could not be read"),
    "expert_disk_wait_seconds": (lambda tier: tier.disk_wait_s, "time spent on reading rows"),
}


def expert_families(experts: ExpertStats, model: str) -> Iterator[Metric]:
    """The families of one model."""
    labels = ["model_name", "format"]
    for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, (value, text) in table.items():
            made = family(f"moet:{name}", text, labels=labels)
            for tier in experts.tiers:
                made.add_metric([model, tier.format], value(tier))
            yield made
    for name, number, text in (
        ("gate_checked", experts.num_gate_rows, "rows that the policy `gate` judged"),
        ("gate_fired", experts.num_gated_rows, "rows of these that were computed again in FP4"),
    ):
        counter = CounterMetricFamily(f"moet:{name}", text, labels=labels[:1])
        counter.add_metric([model], number)
        yield counter
