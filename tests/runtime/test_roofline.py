"""Predictions: floors as the specifications compute them, and the directions they must follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.models.footprint import footprint
from moet.models.synthetic import plan_checkpoint
from moet.runtime.hardware import GIB, hardware
from moet.runtime.memory import plan
from moet.runtime.plan_types import PlanSettings
from moet.runtime.roofline import HIT_CURVES, Rate, Rates, distinct_experts, hit_rate, predict

FLASH = footprint(plan_checkpoint("full").texts["config.json"], num_spec_tokens=2)
GLM = footprint(
    plan_checkpoint("full", "nvfp4", model="glm-5.2").texts["config.json"],
    kv_dtype="nvfp4",
    dense_dtype="fp8",
    num_spec_tokens=2,
)


def rates(
    model: object, cards: str, *, ram: int = 256, seqs: int = 8, prefill: int = 8192
) -> Rates:
    assert model in (FLASH, GLM)
    chosen = FLASH if model is FLASH else GLM
    given = hardware(cards, host_bytes=ram * GIB)
    made = plan(chosen, given, PlanSettings(max_num_seqs=seqs))
    return predict(chosen, given, made, prefill_tokens=prefill)


def decode(found: Rates, num_streams: int, k: int) -> Rate:
    return next(r for r in found.decode if (r.num_streams, r.num_spec_tokens) == (num_streams, k))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 6.0), (2, 11.9), (3, 17.6), (8, 44.2), (16, 80.8), (32, 136), (64, 200)],
)
def test_distinct_experts(rows: int, expected: float) -> None:
    assert distinct_experts(256, 6, rows) == pytest.approx(expected, rel=0.005)


def test_floors_of_flash_on_an_h200() -> None:
    found = rates(FLASH, "h200")
    assert decode(found, 1, 0).floor_ms == pytest.approx(2.1, abs=0.05)
    assert decode(found, 1, 2).floor_ms == pytest.approx(3.22, abs=0.05)  # drafts' head is in fp8
    assert decode(found, 8, 0).floor_ms == pytest.approx(4.6, abs=0.15)


def test_floor_of_glm_on_two_h200() -> None:
    floor = decode(rates(GLM, "h200x2"), 1, 0).floor_ms
    assert floor == pytest.approx(2.8, abs=0.25)  # indexers and routers are on both cards here


def test_steps_are_above_their_floors_and_more_cards_are_faster() -> None:
    for model in (FLASH, GLM):
        for name in ("rtx-5090", "rtx-pro-6000", "h200"):
            each = [rates(model, f"{name}x{count}") for count in (1, 2, 4)]
            for found in each:
                assert all(rate.step_ms > rate.floor_ms for rate in found.decode)
            singles = [decode(found, 1, 0).tokens_per_s for found in each]
            assert singles == sorted(singles)
            prefills = [found.prefill_tokens_per_s for found in each]
            assert prefills == sorted(prefills)


@pytest.mark.parametrize(
    ("model", "share", "expected"),
    [
        ("DeepseekV4ForCausalLM", 0.152, 0.965),
        ("DeepseekV4ForCausalLM", 0.193, 0.987),
        ("GlmMoeDsaForCausalLM", 0.506, 0.91),
        ("GlmMoeDsaForCausalLM", 0.74, 0.999),
    ],
)
def test_published_hit_rates(model: str, share: float, expected: float) -> None:
    assert hit_rate(model, share) == pytest.approx(expected)


@given(st.sampled_from(sorted(HIT_CURVES)), st.floats(0, 1), st.floats(0, 1))
def test_more_rows_on_the_card_never_hit_less(model: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 <= hit_rate(model, low) <= hit_rate(model, high) <= 1
    assert hit_rate(model, 1.0) == 1.0


def test_misses_and_disk_cost_time() -> None:
    resident, tiered = rates(FLASH, "rtx-pro-6000"), rates(FLASH, "rtx-5090")
    disk = rates(FLASH, "rtx-5090", ram=32)
    assert decode(resident, 1, 0).missed_rows == 0
    assert decode(tiered, 1, 0).missed_rows == pytest.approx(
        43 * 6 * (1 - tiered.hit_rate), rel=1e-6
    )
    assert decode(disk, 1, 0).step_ms > decode(tiered, 1, 0).step_ms
    assert disk.prefill_tokens_per_s < tiered.prefill_tokens_per_s


def test_streams_beyond_the_limit_are_not_predicted() -> None:
    assert {rate.num_streams for rate in rates(FLASH, "h200", seqs=4).decode} == {1}
