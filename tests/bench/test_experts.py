"""Policies on traces: what is known of them must show, and files must be what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet.bench.experts import ExpertBench, compare, hot_rows
from moet.errors import CapacityError, ConfigError
from moet.kernels.moe import ExpertTable, F32Experts
from moet.runtime.experts.policy import POLICIES, Clock, DecayedLfu, Lru, simulate
from moet.runtime.experts.traces import RecordedExperts, Skew, read_trace, synthetic

SMALL = ExpertBench(
    skew=Skew(0.2, 0.8), num_layers=4, num_experts=32, top_k=3, num_steps=120, shares=(0.3,), seed=2
)


def trace(**changes: object) -> list[tuple[int, list[int]]]:
    options = {"num_layers": 4, "num_experts": 32, "top_k": 3, "num_steps": 150, "seed": 4}
    calls = synthetic(Skew(0.2, 0.8), **{**options, **changes})  # type: ignore[arg-type]
    return [(layer, list(experts)) for layer, experts in calls]


def test_a_skew_is_what_it_says() -> None:
    weights = Skew(0.25, 0.9).weights(40)
    assert sum(weights) == pytest.approx(1.0)
    assert sum(weights[:10]) == pytest.approx(0.9, abs=1e-6)
    assert weights == sorted(weights, reverse=True)


def test_a_synthetic_trace_is_a_function_of_its_seed() -> None:
    assert trace() == trace()
    assert trace() != trace(seed=5)
    layer, experts = trace(num_tokens=2)[5]
    assert layer == 1
    assert len(experts) == 6
    assert len(set(experts[:3])) == len(set(experts[3:])) == 3


@pytest.mark.parametrize("name", POLICIES)
def test_a_pool_of_everything_misses_each_row_once(name: str) -> None:
    calls = trace()
    rows = {(layer, expert) for layer, experts in calls for expert in experts}
    score = simulate(calls, POLICIES[name], 4 * 32, num_experts=32)
    assert score.misses == len(rows)
    assert score.hits + score.misses == 3 * len(calls)
    with pytest.raises(CapacityError, match="asks for 3 experts; 2 slots"):
        simulate(calls, POLICIES[name], 2, num_experts=32)


def test_frequency_beats_recency_where_routing_is_skewed() -> None:
    calls = trace(num_steps=400)
    rates = {
        name: simulate(calls, make, 38, num_experts=32, warm_up=len(calls) // 2).hit_rate
        for name, make in (("clock", Clock), ("lru", Lru), ("lfu", DecayedLfu))
    }
    assert rates["lru"] < rates["clock"] < rates["lfu"]


def test_lru_gives_up_the_oldest() -> None:
    calls = [(0, [0]), (0, [1]), (0, [0]), (0, [2]), (0, [0]), (0, [1])]
    assert simulate(calls, Lru, 2, num_experts=4).hits == 2  # 0, 0; 1 had to leave for 2


def test_static_rows_always_hit() -> None:
    calls = trace()
    static = list(range(16))
    score = simulate(calls, Clock, 40, num_experts=32, static=static)
    fixed = sum(layer == 0 and expert < 16 for layer, experts in calls for expert in experts)
    assert score.hits >= fixed
    assert score.hits > simulate(calls, Clock, 40 - 16, num_experts=32).hits


def test_compare_has_a_row_for_each_policy_and_pool() -> None:
    rows = compare(SMALL)
    assert [row.case for row in rows] == [
        *(f"{name}, pool 30.0 %" for name in POLICIES),
        "half static, half lru, pool 30.0 %",
    ]
    assert all(0 < row.value < 100 for row in rows)
    with pytest.raises(ConfigError, match="'fifo'; it must be one of clock"):
        compare(ExpertBench(policies=("fifo",)))
    with pytest.raises(ConfigError, match="--pool is 7"):
        compare(ExpertBench(shares=(0.1, 7)))


class Everything:
    """All experts of every layer, resident."""

    def resolve(self, layer_idx: int, expert_ids: torch.Tensor) -> ExpertTable:
        return ExpertTable(F32Experts(1, 1), torch.zeros(8, 12, dtype=torch.uint8), torch.arange(8))


def test_a_recorded_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorded = RecordedExperts(Everything(), path, layers=(3, 7), num_experts=8)
    recorded.resolve(7, torch.tensor([[1, 2], [-1, -1]]))
    recorded.resolve(3, torch.tensor([[5, 1]]))
    recorded.close()
    found = read_trace(path)
    assert (found.num_layers, found.num_experts) == (2, 8)
    assert found.calls == [(1, [1, 2]), (0, [5, 1])]
    assert hot_rows(ExpertBench(trace=path), 2, (2, 8)) == [1, 5]
    with pytest.raises(ConfigError, match="of 2 layers of 8 experts, the pack has 2 of 16"):
        hot_rows(ExpertBench(trace=path), 2, (2, 16))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"num_experts": 8, "layers": [1]}\n[0, [9]]\n', "line 2.*9 among 8 experts"),
        ('{"num_experts": 8, "layers": [1]}\n[1, [0]]\n', "1 among 1 layers"),
        ("nonsense\n", "line 1"),
        ("", "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
