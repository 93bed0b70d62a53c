"""The core's books as Prometheus text, under the tails of the names that dashboards know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moet.runtime.metrics import CoreInfo, CoreStats, ExpertStats, HistogramStats
from moet.server.expert_metrics import expert_families
from moet.server.operations import ServerCounters

GAUGES = {
    "num_requests_running": ("num_running", "requests in the running batch"),
    "num_requests_waiting": ("num_waiting", "requests that wait for a place in the batch"),
    "kv_cache_usage_perc": ("kv_cache_usage", "share of KV pages held by requests, 0 to 1"),
    "kv_cache_used_pages": ("num_used_pages", "KV pages held by requests"),
    "kv_cache_cached_pages": ("num_cached_pages", "KV pages held by the prefix cache alone"),
    "kv_host_cache_used_blocks": ("num_host_cache_blocks", "host blocks of the prefix cache"),
    "kv_disk_cache_bytes": ("disk_cache_bytes", "bytes that the prefix cache has on disk"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "prompt tokens of admitted requests"),
    "generation_tokens": ("generation_tokens", "tokens generated"),
    "prompt_tokens_cached": ("cached_tokens", "prompt tokens that the prefix cache saved"),
    "prefix_cache_queries": ("prefix_queries", "tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "tokens found in the prefix cache"),
    "num_preemptions": ("num_preemptions", "times that a request had to leave the device"),
    "num_recomputed": ("num_recomputed", "preemptions after which the state was computed again"),
    "queue_timeouts": ("num_queue_timeouts", "requests that waited longer than --queue-timeout"),
    "admission_rejections": ("num_rejected", "requests refused because the queue was full"),
    "corrupted_requests": ("num_corrupted", "requests ended by logits that are not numbers"),
    "failed_steps": ("num_failed_steps", "steps that ended in a fault"),
    "kv_host_cache_hits": ("num_host_hits", "cached pages that came back from host memory"),
    "kv_host_cache_dropped": ("num_host_dropped", "cached pages that the host had no room for"),
    "kv_disk_cache_hits": ("num_disk_hits", "cached pages and states that came back from disk"),
    "kv_disk_cache_written": ("num_disk_written", "cached pages and states written to disk"),
    "kv_disk_cache_evicted": ("num_disk_evicted", "files deleted to keep the disk's budget"),
    "kv_disk_cache_rejected": ("num_disk_rejected", "damaged files that were not used"),
    "kv_disk_cache_errors": ("num_disk_errors", "failed reads and writes of the disk"),
    "grammar_cache_hits": ("num_grammar_hits", "requests whose grammar was compiled before"),
    "grammar_refusals": ("num_grammars_refused", "grammars that were not compiled, or not in time"),
    "split_steps": ("num_split_steps", "steps made in parts, as their experts did not fit"),
    "engine_steps": ("num_steps", "steps"),
}
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("num_drafts", "rows that had drafts behind them"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "tokens drafted"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "drafted tokens that held"),
}
SERVER_COUNTERS = {
    "tool_call_parser_invocations": ("num_parsed", "chat answers that the output parser read"),
    "tool_call_parser_failures": ("num_malformed", "tags and calls that were dropped or mended"),
    "request_timeouts": ("num_timeouts", "requests that took longer than --request-timeout"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token_s", "arrival to first token"),
    "inter_token_latency_seconds": ("inter_token_latency_s", "token to next token"),
    "request_time_per_output_token_seconds": (
        "time_per_output_token_s",
        "a request's mean token to next token",
    ),
    "e2e_request_latency_seconds": ("request_latency_s", "arrival to last token"),
    "request_queue_time_seconds": ("queue_time_s", "arrival to first step"),
    "request_prefill_time_seconds": ("prefill_time_s", "first step to first token"),
    "request_decode_time_seconds": ("decode_time_s", "first token to last token"),
    "iteration_tokens_total": ("step_tokens", "rows of a step"),
    "grammar_compile_seconds": ("grammar_compile_s", "compiling a grammar that was not kept"),
    "step_time_seconds": ("step_time_s", "device part of a step"),
}


WEIGHT_STAGES = ("weights", "experts")


class _Books(Collector):
    def __init__(
        self,
        stats: CoreStats,
        info: CoreInfo,
        model: str,
        server: ServerCounters,
        experts: ExpertStats,
        load_times_s: Mapping[str, float],
        age_s: float,
    ) -> None:
        self.age_s = age_s
        self.stats, self.info, self.model, self.server = stats, info, model, server
        self.experts, self.load_times_s = experts, load_times_s

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name"]
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"moet:{name}", text, labels=labels)
            gauge.add_metric([self.model], getattr(self.stats, field))
            yield gauge
        text = "since the engine gave these numbers; more than a moment while it does not answer"
        age = GaugeMetricFamily("moet:stats_age_seconds", text, labels=labels)
        age.add_metric([self.model], self.age_s)
        yield age
        yield from self._load_times(labels)
        yield from expert_families(self.experts, self.model)
        for name, (field, text) in {**COUNTERS, **DRAFT_COUNTERS}.items():
            counter = CounterMetricFamily(f"moet:{name}", text, labels=labels)
            counter.add_metric([self.model], getattr(self.stats, field))
            yield counter
        for name, (field, text) in SERVER_COUNTERS.items():
            counter = CounterMetricFamily(f"moet:{name}", text, labels=labels)
            counter.add_metric([self.model], getattr(self.server, field))
            yield counter
        accepted = CounterMetricFamily(
            "moet:spec_decode_num_accepted_tokens_per_pos",
            "drafted tokens that held, by their place among the drafts",
            labels=[*labels, "position"],
        )
        for position, number in enumerate(self.stats.num_accepted_by_position):
            accepted.add_metric([self.model, str(position)], number)
        yield accepted
        finished = CounterMetricFamily(
            "moet:request_success", "finished requests", labels=[*labels, "finished_reason"]
        )
        for reason, number in self.stats.finished.items():
            finished.add_metric([self.model, reason], number)
        yield finished
        for name, (field, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"moet:{name}", text, labels=labels)
            values: HistogramStats = getattr(self.stats, field)
            histogram.add_metric([self.model], _buckets(values), values.sum)
            yield histogram
        config = InfoMetricFamily("moet:cache_config", "sizes of the KV cache", labels=labels)
        config.add_metric(
            [self.model],
            {
                "page_size": str(self.info.page_size),
                "num_pages": str(self.info.num_pages),
                "kv_cache_bytes": str(self.info.kv_cache_bytes),
                "prefix_cache": self.info.prefix_cache,
            },
        )
        yield config

    def _load_times(self, labels: list[str]) -> Iterator[Metric]:
        times_s = self.load_times_s
        weights_s = sum(times_s.get(stage, 0.0) for stage in WEIGHT_STAGES)
        for name, text, seconds in (
            ("startup_time_seconds", "start to readiness", sum(times_s.values())),
            ("weight_load_duration_seconds", "reading weights and experts", weights_s),
        ):
            gauge = GaugeMetricFamily(f"moet:{name}", text, labels=labels)
            gauge.add_metric([self.model], seconds)
            yield gauge


def _buckets(values: HistogramStats) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [str(bound) for bound in values.bounds] + ["+Inf"]
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, number in zip(bounds, values.counts, strict=True):
        total += number
        buckets.append((bound, total))
    return buckets


def render(
    stats: CoreStats,
    info: CoreInfo,
    model: str,
    server: ServerCounters,
    experts: ExpertStats,
    load_times_s: Mapping[str, float],
    *,
    age_s: float,
) -> bytes:
    """The text of /metrics. load_times_s: seconds by stage of loading; age_s: of the books."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Books(stats, info, model, server, experts, load_times_s, age_s))
    return generate_latest(registry)
