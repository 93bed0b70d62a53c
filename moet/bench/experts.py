"""`moet bench experts`: hit rates of replacement policies on a trace, by size of the pool.

The trace is a recorded one (--expert-trace of moet serve), or a synthetic one whose skew and seed
are stated in the result. Also writes the hot set of a pack from a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moet.bench.results import Row
from moet.errors import ConfigError
from moet.runtime.experts.policy import POLICIES, Call, hottest, simulate
from moet.runtime.experts.traces import Skew, read_trace, synthetic

STATIC_SHARE = 0.5  # of the pool, of the policy that pins the hottest rows of the first half


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBench:
    """What to compare. trace None: a synthetic one of num_steps steps with num_tokens rows each."""

    trace: Path | None = None
    shares: Sequence[float] = (0.152, 0.193, 0.5)
    policies: Sequence[str] = tuple(POLICIES)
    skew: Skew = field(default_factory=lambda: Skew(0.193, 0.987))
    num_layers: int = 43
    num_experts: int = 256
    top_k: int = 6
    num_steps: int = 400
    num_tokens: int = 1
    seed: int = 0


def load(bench: ExpertBench) -> tuple[list[Call], int, int]:
    """The calls, layers and experts of a layer. Raises ConfigError."""
    for name in bench.policies:
        if name not in POLICIES:
            raise ConfigError(f"--policy is {name!r}; it must be one of {', '.join(POLICIES)}")
    for share in bench.shares:
        if not 0 < share <= 1:
            raise ConfigError(f"--pool is {share:g}; it is a share, above 0 and at most 1")
    if bench.trace is not None:
        trace = read_trace(bench.trace)
        return trace.calls, trace.num_layers, trace.num_experts
    calls = synthetic(
        bench.skew,
        num_layers=bench.num_layers,
        num_experts=bench.num_experts,
        top_k=bench.top_k,
        num_steps=bench.num_steps,
        num_tokens=bench.num_tokens,
        seed=bench.seed,
    )
    return list(calls), bench.num_layers, bench.num_experts


def compare(bench: ExpertBench) -> list[Row]:
    """A row per pool and policy: the share of asked-for experts that were resident, in the second
    half of the trace. Beside them what a fixed set of the hottest rows of the first half does."""
    calls, num_layers, num_experts = load(bench)
    half = len(calls) // 2
    counts = Counter(
        layer * num_experts + expert for layer, experts in calls[:half] for expert in experts
    )
    rows = []
    for share in bench.shares:
        num_slots = round(share * num_layers * num_experts)
        for name in bench.policies:
            score = simulate(
                calls, POLICIES[name], num_slots, num_experts=num_experts, warm_up=half
            )
            rows.append(_row(name, share, score.hit_rate, score.calls_hit / max(1, score.calls)))
        static = hottest(counts, int(STATIC_SHARE * num_slots))
        score = simulate(
            calls, POLICIES["lru"], num_slots, num_experts=num_experts, static=static, warm_up=half
        )
        whole = score.calls_hit / max(1, score.calls)
        rows.append(_row("half static, half lru", share, score.hit_rate, whole))
    return rows


def _row(name: str, share: float, hit_rate: float, whole: float) -> Row:
    return Row(
        case=f"{name}, pool {100 * share:.1f} %",
        value=round(100 * hit_rate, 2),
        unit="% hits",
        better="higher",
        note=f"{100 * whole:.1f} % of layers' turns without a miss",
    )


def describe(bench: ExpertBench) -> Mapping[str, object]:
    """What the trace was, for the result file."""
    if bench.trace is not None:
        return {"trace": bench.trace.name}
    skew = bench.skew
    return {
        "trace": "synthetic",
        "seed": bench.seed,
        "skew": f"{100 * skew.share:g} % of a layer's experts get {100 * skew.mass:g} % of choices",
        "steps": bench.num_steps,
        "rows_a_step": bench.num_tokens,
        "places_change_after_steps": skew.steady_steps,
    }


def hot_rows(bench: ExpertBench, num_rows: int, shape: tuple[int, int]) -> list[int]:
    """The rows that a trace asks for most.

    shape: layers, and experts of each, of the model that it must be of. Raises ConfigError.
    """
    calls, num_layers, num_experts = load(bench)
    if num_rows < 1:
        raise ConfigError(f"--hot-rows is {num_rows}; it must be at least 1")
    if (num_layers, num_experts) != shape:
        raise ConfigError(
            f"--trace is of {num_layers} layers of {num_experts} experts, the pack has {shape[0]} "
            f"of {shape[1]}; record it with this pack"
        )
    counts = Counter(layer * num_experts + e for layer, experts in calls for e in experts)
    return hottest(counts, num_rows)


def show(rows: Sequence[Row], console: Console) -> None:
    """A table for people."""
    table = Table("case", "hits", "")
    for row in rows:
        table.add_row(row.case, f"{row.value:.2f} %", row.note)
    console.print(table)
