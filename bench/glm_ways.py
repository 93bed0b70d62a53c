"""Ways to run a decode step of GLM that stand side by side, and what each kernel adds to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.lone_rank import LoneComm
from bench.timeline import Moment, by_name, one_layer
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.sharding import Comm
from moet.runtime.parallel.device import DeviceComm

WAYS: dict[str, dict[str, Any]] = {
    "as bound": {},
    "sums by launches": {"unsummed": False, "on_read": False},
}


def take_way(model: object, comm: Comm, way: dict[str, Any]) -> None:
    """Bind a model's steps as a way has it; {} is as they are bound."""
    assert isinstance(model, GlmMoeDsa)
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
