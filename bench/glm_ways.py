"""Ways to run a decode step of GLM that stand side by side, and what each kernel adds to one.

Knows the module constants that choose forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.lone_rank import LoneComm
from bench.timeline import Moment, by_name, one_layer
from moet.kernels import paired_experts, short_stream, triton_indexer
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.sharding import Comm
from moet.runtime.parallel.device import DeviceComm

EXPERTS = "LISTS", "WHOLE", "HALVES"  # of paired_experts; HALVES only with WHOLE
WAYS: dict[str, dict[str, Any]] = {
    "as bound": {},
    "lists at once": {"experts": ("LISTS",)},
    "router ahead": {"experts": ("WHOLE",)},
    "router ahead, halves": {"experts": ("WHOLE", "HALVES")},
    "lists at once, router ahead, halves": {"experts": EXPERTS},
    "sums by launches": {"unsummed": False, "on_read": False},
    "short products": {"short": {"inputs", "codes"}},
    "short wholes": {"short": {"wholes"}},
    "short products, wholes": {"short": {"inputs", "codes", "wholes"}},
    "short products, handed": {"short": {"inputs", "codes"}, "handed": {"inputs", "codes"}},
    "short products, rehearsed": {"short": {"inputs", "codes"}, "rehearsed": {"inputs", "codes"}},
    "short products, in clusters": {"short": {"inputs", "codes"}, "clusters": {"inputs", "codes"}},
    "short, wholes, handed, rehearsed": {
        "short": {"inputs", "codes", "wholes"},
        "rehearsed": {"inputs", "codes", "wholes"},
        "handed": {"inputs", "codes"},
    },
    "all": {
        "experts": ("LISTS", "WHOLE", "HALVES"),
        "short": {"inputs", "codes", "wholes"},
        "rehearsed": {"inputs", "codes", "wholes"},
        "handed": {"inputs", "codes"},
    },
    "as bound, again": {},
}

LONG_WAYS: dict[str, dict[str, int]] = {  # of choosing positions at a long context
    "as bound": {},
    "chosen by a cluster": {"CLUSTERED": triton_indexer.CHUNK + 1},
    "pages scored in groups": {"PAGES_EACH": 2},
    "pages ahead, chosen by a cluster": {
        "PAGES_EACH": 2,
        "KEYS_AHEAD": True,
        "CLUSTERED": triton_indexer.CHUNK + 1,
    },
}
AS_BOUND = {
    name: getattr(triton_indexer, name) for name in ("CLUSTERED", "PAGES_EACH", "KEYS_AHEAD")
}


def take_long_way(way: dict[str, int]) -> None:
    """How later steps choose positions; {} is as it is bound."""
    for name, value in (AS_BOUND | way).items():
        setattr(triton_indexer, name, value)


def take_way(model: object, comm: Comm, way: dict[str, Any]) -> None:
    """Bind a model's steps as a way has it; {} is as they are bound."""
    assert isinstance(model, GlmMoeDsa)
    for name in EXPERTS:
        setattr(paired_experts, name, name in way.get("experts", ()))
    short_stream.SITES = frozenset(way.get("short", ()))
    short_stream.HANDED = frozenset(way.get("handed", ()))
    short_stream.REHEARSED = frozenset(way.get("rehearsed", ()))
    short_stream.CLUSTERS = frozenset(way.get("clusters", ()))
    layers = [*model.layers, *([] if model.mtp is None else [model.mtp.layer])]
    for layer in layers:
        if layer.moe is not None:
            layer.moe.unsummed = way.get("unsummed", True)
    if isinstance(comm, LoneComm | DeviceComm):
        comm.sums_on_read = way.get("on_read", True)


def tell_timeline(
    add: Callable[..., None], found: Sequence[Moment], case: str, most: int = 24
) -> list[str]:
    """Rows of what each kernel adds to a step in which they overlap. Returns those of one layer."""
    gaps_us = sum(each.gap_us for each in found)
    note = f"{len(found)} launches; {gaps_us:.0f} us of gaps"
    add(f"timeline of a step, {case}", sum(each.own_us for each in found), "us", note=note)
    for name, count, own_us, gap_us in by_name(found)[:most]:
        note = f"{count} launches, {own_us / count:.2f} us each; {gap_us:.1f} us of gaps"
        add(f"adds {short(name)}, {case}", own_us, "us/step", note=note)
    layer = one_layer(found, "store_inputs")
    lines = [f"{short(each.name)} {each.own_us:.2f} gap {each.gap_us:.2f}" for each in layer]
    print("\n".join(lines), flush=True)
    return lines


def short(name: str) -> str:
    return name.replace("(anonymous namespace)::", "")[:60]
