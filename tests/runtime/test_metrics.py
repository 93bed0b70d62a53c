"""Histograms count by upper bound; what leaves the core survives the wire."""

import msgspec

from moet.runtime.metrics import CoreStats, Histogram
from tests.fakes import make_core, request, run


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    stats = histogram.stats()
    assert (stats.counts, stats.sum, stats.count) == ([2, 2, 1], 8.0, 5)


def test_stats_are_a_snapshot_that_can_travel() -> None:
    core = make_core()
    before = core.stats()
    run(core, [request("a", [1, 2, 3], max_tokens=2)])
    assert before.generation_tokens == before.step_time_s.count == 0
    assert before.finished["length"] == 0
    after = core.stats()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(after), type=CoreStats) == after
