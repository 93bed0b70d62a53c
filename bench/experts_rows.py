"""What bench.experts found, as the rows of its result file. Knows the targets; measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moet.bench.results import Row

Case = Mapping[str, Any]

LEAST_RATE = {"W2": ("tok/s, 43 layers", "tok/s", 7500.0), "FP4": ("of link rate %", "%", 80.0)}
WITH_DRAFTS = "pool 19.3 %, 3 rows, 96.0 %"

POOL = (
    "tried: resolve and fetch in one launch (50 us a layer beyond resident and floor, then 6.5), a "
    "look at the list of the chosen by every CTA instead of a pass of the first one (2 to 2.5 us a "
    "layer less, same bits and books), half the CTAs, an early next kernel, CTAs of a quarter of "
    "the threads (no gain). Profile: 1.6 us a layer for the hop of one more kernel between the "
    "choice and the routed experts, and a row comes at 50 GB/s where the copy engine has 55. Next: "
    "the look, and the copying, at the head of the routed kernel itself, so that resident experts "
    "do not wait"
)
DISK = (
    "tried: a clock instead of age (a fifth fewer reads), requests counted, older ones less, in "
    "place of the clock (7 to 13 % fewer in theory), a row in four pieces at once (4.3 -> 4.1 ms "
    "alone), warming up for 20,000 tokens instead of 2,400 (at 99.3 to 99.5 % hits .065 -> .023 "
    "reads a step, and .77 -> .91 of the pinned rate), who reads a row says so instead of at the "
    "next poll. Profile: a step loses what the drive takes for its reads, at 1.6 GB/s 5 ms a row, "
    "and a choice that knows the future reads half as often. Next: a faster drive, or more host "
    "memory"
)
ATTEMPTS = {"step, pool": POOL, "arena of": DISK}


def missed(found: Iterable[Row]) -> list[str]:
    """What was tried for the rows that miss their target."""
    texts = []
    for row in found:
        if row.target is None:
            continue
        ok = row.value <= row.target if row.better == "lower" else row.value >= row.target
        text = next((text for start, text in ATTEMPTS.items() if row.case.startswith(start)), "")
        if not ok:
            texts.append(f"{row.case}: {row.value} for {row.target}; {text}")
    return texts


def rows(results: Mapping[str, Any]) -> list[Row]:
    """results: of all parts, in the order in which they ran."""
    found: list[Row] = []
    for part in results.values():
        if isinstance(part, Mapping):
            for name, case in part.items():
                if isinstance(case, Mapping):
                    found += _rows(name, case)
    return found


def _rows(name: str, case: Case) -> Iterator[Row]:
    if "target ms" in case:
        yield _step(name, case)
        if name.startswith(WITH_DRAFTS):
            yield Row(
                case=f"{name}, 2.6 tokens a step",
                value=case["tok/s, 43 layers"],
                unit="tok/s, 43 layers",
                better="higher",
                target=200,
                note="steps of the layers that were there, times 43 over their number",
            )
    elif "of link rate %" in case:
        yield _prompt(name, case)
    elif "of the pinned rate" in case:
        yield _arena(name, case)
    elif "of pinning" in case:
        yield Row(
            case=name,
            value=case["of pinning"],
            unit="x the time to pin alone",
            better="lower",
            target=1.3,
            note=_told(case, "GiB", "pin alone GiB/s", "start GiB/s", "same bytes"),
        )
    elif name.startswith("one row read alone"):
        for how, taken in case.items():
            yield Row(
                case=f"{name.removesuffix(', ms')}, {how}", value=taken, unit="ms", better="lower"
            )
    elif "GB/s" in case and case["us"]:
        yield Row(
            case=name, value=case["us"], unit="us", better="lower", note=f"{case['GB/s']} GB/s"
        )


def _step(name: str, case: Case) -> Row:
    told = ("hits %", "skew", "share %", "slots", "layers", "fired %", "tok/s, 43 layers")
    return Row(
        case=f"step, {name}",
        value=case["step ms"],
        unit="ms/step",
        better="lower",
        floor=round(case["resident ms"] + case["missed bytes / link ms"], 3),
        target=case["target ms"],
        note=f"resident {case['resident ms']} ms, missed bytes at the link's rate "
        f"{case['missed bytes / link ms']} ms; {_told(case, *told, 'same bits')}",
    )


def _prompt(name: str, case: Case) -> Row:
    kind = "FP4" if "FP4" in name else "W2"
    key, unit, least = LEAST_RATE[kind]
    told = ("chunk", "tok/s", "tok/s, 43 layers", "of link rate %", "resident tok/s", "same bits")
    return Row(
        case=name,
        value=case[key],
        unit=unit if unit != "%" else "% of the link's rate",
        better="higher",
        floor=100 if unit == "%" else None,
        target=least,
        note=_told(case, *told),
    )


def _arena(name: str, case: Case) -> Row:
    told = [key for key in case if key not in ("of the pinned rate", "pinned", "disk")]
    steps = case.get("pinned ms") or case["pinned"]["step ms"]
    return Row(
        case=name,
        value=case["of the pinned rate"],
        unit="of the pinned rate",
        better="higher",
        floor=1,
        target=0.9,
        note=f"pinned {steps} ms/step; {_told(case, *told)}",
    )


def _told(case: Case, *names: str) -> str:
    return "; ".join(f"{name}: {case[name]}" for name in names if name in case)
