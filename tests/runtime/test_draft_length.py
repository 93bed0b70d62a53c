"""How many drafts: the rule by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.runtime.draft_length import (
    GPU_COSTS,
    PROBE_INTERVAL,
    Acceptance,
    CostMeter,
    StepCosts,
    draft_length,
    fitted,
)

COSTS = StepCosts()


def _after(steps: int, num_drafts: int, num_accepted: int) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(steps):
        acceptance = acceptance.after(num_drafts, num_accepted)
    return acceptance


def test_good_drafts_are_asked_for_and_bad_ones_are_not() -> None:
    assert draft_length(4, _after(50, 4, 4), num_decoding=1, costs=COSTS) == 4
    assert draft_length(4, _after(50, 4, 0), num_decoding=1, costs=COSTS) == 0
    assert draft_length(4, _after(50, 4, 2), num_decoding=1, costs=COSTS) == 2


def test_it_falls_as_the_load_rises() -> None:
    acceptance = _after(50, 5, 3)
    chosen = [
        draft_length(5, acceptance, num_decoding=n, costs=COSTS) for n in (1, 4, 16, 64, 256, 1024)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == 3
    assert chosen[-1] <= 1


def test_with_free_rows_every_draft_pays() -> None:
    free = StepCosts(fixed=1.0, per_row=0.0, per_draft=0.0)
    assert draft_length(5, _after(50, 5, 1), num_decoding=300, costs=free) == 5


def test_after_a_while_without_drafts_one_is_tried() -> None:
    acceptance = _after(50, 4, 0)
    for num_plain_steps in (PROBE_INTERVAL - 1, PROBE_INTERVAL):
        chosen = draft_length(
            4, acceptance, num_decoding=1, costs=COSTS, num_plain_steps=num_plain_steps
        )
        assert chosen == (num_plain_steps == PROBE_INTERVAL)
    assert draft_length(0, acceptance, num_decoding=1, costs=COSTS, num_plain_steps=99) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40), st.integers(0, 6))
def test_rates_are_chances_and_old_news_fade(steps: list[tuple[int, int]], size: int) -> None:
    acceptance = Acceptance()
    for num_drafts, num_accepted in steps:
        acceptance = acceptance.after(num_drafts, min(num_drafts, num_accepted))
    rates = acceptance.rates(size)
    assert len(rates) == size
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    for _ in range(60):
        acceptance = acceptance.after(5, 5)
    assert min(acceptance.rates(5)) > 0.9


def test_costs_are_those_of_the_steps_that_ran() -> None:
    meter = CostMeter()
    assert meter.costs == GPU_COSTS
    for _ in range(60):
        meter.observe(3, 2, 9.0)
    assert meter.costs.of(3, 2) == pytest.approx(9.0)
    assert meter.costs.per_row == pytest.approx(0.1 * meter.costs.fixed)  # nothing else is known
    true = StepCosts(fixed=5.0, per_row=0.2, per_draft=1.5)
    for step in range(300):
        rows, drafts = 1 + 5 * step % 31, step % 3
        meter.observe(rows, drafts, true.of(rows, drafts))
    for rows, drafts in ((1, 0), (3, 2), (24, 1)):
        assert meter.costs.of(rows, drafts) == pytest.approx(true.of(rows, drafts), rel=0.1)


def test_costs_never_fall_to_nothing() -> None:
    costs = fitted({(1, 0): 9.0, (8, 1): 1.0, (32, 2): 0.5})
    assert min(costs.fixed, costs.per_row, costs.per_draft) > 0
