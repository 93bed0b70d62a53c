"""Where the time of a captured step goes when its kernels overlap: by how much each one ends later
than all that were launched before it. These times add up to the step's; a kernel's duration also
has its wait for the one ahead."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

NUM_TIMES = 5


@dataclass(frozen=True, slots=True)
class Moment:
    """One kernel of a step. own_us: by how much it ends later than the others so far; gap_us: of
    which nothing ran."""

    name: str
    own_us: float
    gap_us: float


def timeline(work: Callable[[], object]) -> list[Moment]:
    """The kernels of one call of some work, in the order of their ends; medians of NUM_TIMES calls.

    Calls must launch alike. Kernels of other streams count where they end last.
    """
    calls = [moments(_spans(work)) for _ in range(NUM_TIMES + 1)][1:]  # the first begins late
    shortest = min(map(len, calls))
    named = [moments for moments in calls if len(moments) == shortest]
    return [
        Moment(each[0].name, median(m.own_us for m in each), median(m.gap_us for m in each))
        for each in zip(*named, strict=True)
    ]


def middle(work: Callable[[], object], count: int = 48) -> list[str]:
    """Kernels in the middle of a call: when each began, how long it took, what it was."""
    spans = sorted(_spans(work), key=lambda span: span[1])
    some = spans[len(spans) // 2 :][:count]
    return [f"{t - some[0][1]:8.1f} us {us:7.1f} us {name[:60]}" for name, t, us in some]


def _spans(work: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, start and duration in microseconds of each kernel and copy of a call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        (str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def moments(spans: list[tuple[str, float, float]]) -> list[Moment]:
    """spans: as _spans makes them."""
    found: list[Moment] = []
    until = min((start for _, start, _ in spans), default=0.0)
    for name, start, duration in sorted(spans, key=lambda span: span[1] + span[2]):
        end = start + duration
        found.append(Moment(name, end - until, max(0.0, start - until)))
        until = end
    return found


def by_name(found: Sequence[Moment]) -> list[tuple[str, int, float, float]]:
    """Name, launches, own and gap microseconds of each kernel, the longest first."""
    sums: dict[str, tuple[int, float, float]] = {}
    for each in found:
        count, own, gap = sums.get(each.name, (0, 0.0, 0.0))
        sums[each.name] = count + 1, own + each.own_us, gap + each.gap_us
    return sorted(((name, *value) for name, value in sums.items()), key=lambda row: -row[2])


def one_layer(found: Sequence[Moment], mark: str) -> list[Moment]:
    """Those of one layer in the middle: behind a kernel of a name up to the next one of it."""
    marks = [i for i, each in enumerate(found) if mark in each.name]
    if len(marks) < 2:
        return []
    middle = (len(marks) - 1) // 2
    return list(found[marks[middle] + 1 : marks[middle + 1] + 1])
