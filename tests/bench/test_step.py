"""`moet bench step` and `engine` on a tiny model: what is counted, not how fast it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moet.bench.command import without_key
from moet.bench.engine import measure
from moet.bench.results import Row, report, write
from moet.bench.rig import Shape, StepRig, load, pack_of
from moet.bench.step import OUTSIDE, OpTime, OpTimer, StepTimes, time_step
from moet.cli import main
from moet.config import CacheConfig, EngineConfig, ModelSettings
from moet.errors import ConfigError
from moet.kernels.norm import rms_norm
from moet.kernels.registry import watching

DEPLOYED = ModelSettings()


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def test_an_op_is_watched_only_if_bound_while_someone_watches() -> None:
    seen: list[str] = []

    def watch(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(name)
        return lambda *args, **kwargs: seen.append("call") or fn(*args, **kwargs)

    with watching(watch):
        watched = rms_norm.bind(arch="reference")
    bare = rms_norm.bind(arch="reference")
    assert bare is rms_norm.reference
    assert seen == ["rms_norm"]
    x = torch.ones(2, 4)
    assert torch.equal(watched(x, None, eps=1e-6), bare(x, None, eps=1e-6))
    assert seen == ["rms_norm", "call"]


def test_bytes_are_those_of_arguments_and_results() -> None:
    timer = OpTimer()
    with watching(timer.watch):
        norm = rms_norm.bind(arch="reference")
    norm(torch.ones(2, 8), torch.ones(8), eps=1e-6)
    norm(torch.ones(2, 8), None, eps=1e-6)
    entry = timer.ops["rms_norm"]
    assert entry.num_calls == 2
    assert entry.num_bytes == 4 * ((16 + 8 + 16) + (16 + 16))
    assert entry.time_s > 0
    timer.clear()
    assert timer.ops == {}


def test_a_watched_model_computes_the_same_and_repeats_itself() -> None:
    pack, shape = pack_of("demo"), Shape(num_seqs=2, num_rows=1, context=70)
    timer = OpTimer()
    plain, watched = (
        StepRig(*load(pack, DEPLOYED, "fp8", watch), shape) for watch in (None, timer.watch)
    )
    logits = plain.step()
    assert logits.shape == (2, plain.model.vocab_size)
    assert torch.equal(watched.step(), logits)
    assert torch.equal(watched.step(), logits)  # what a step writes, the next one does not notice


def test_experts_count_by_the_rows_that_were_chosen() -> None:
    pack, shape = pack_of("demo"), Shape(num_seqs=1, num_rows=1, context=2)
    timer = OpTimer()
    model, experts = load(pack, DEPLOYED, "fp8", timer.watch)
    rig = StepRig(model, experts, shape, unpacked=False)
    timer.clear()
    rig.step()
    mixture = timer.ops["expert_mixture"]
    row_bytes = pack.format("w2").row_bytes
    top_k = pack.config["num_experts_per_tok"]
    assert mixture.num_calls == pack.config["num_hidden_layers"]
    experts_alone = mixture.num_calls * top_k * row_bytes
    assert experts_alone < mixture.num_bytes < 1.2 * experts_alone


def test_rows_of_a_step_are_sorted_and_add_up() -> None:
    times = StepTimes(
        shape=Shape(num_seqs=1, num_rows=1, context=1),
        step_ms=4.0,
        read_bytes_per_s=1e9,
        ops={
            "fast": OpTime(num_calls=4, time_s=0.002, num_bytes=2_000_000),
            "slow": OpTime(num_calls=2, time_s=0.005, num_bytes=1_000_000),
            OUTSIDE: OpTime(num_calls=2, time_s=0.001),
        },
        num_steps=2,
    )
    rows = times.rows()
    assert [row.case for row in rows] == ["slow", "fast", OUTSIDE, "step"]
    assert [row.value for row in rows] == [2.5, 1.0, 0.5, 4.0]
    assert [row.floor for row in rows] == [0.5, 1.0, 0.0, 1.5]
    assert "2 calls, 1.00 MB, 25.0% of the step" in rows[1].note


def test_a_measured_step_accounts_for_all_of_its_time() -> None:
    shape = Shape(num_seqs=1, num_rows=1, context=8)
    times = time_step("demo", DEPLOYED, "fp8", shape, num_steps=2)
    spent = sum(op.time_s for op in times.ops.values())
    assert spent == pytest.approx(times.step_ms * 2 / 1000)
    assert {"linear_fp8", "expert_mixture", OUTSIDE} <= set(times.ops)


def engine(**cache: Any) -> EngineConfig:
    return EngineConfig(model="demo", cache=CacheConfig(prefix_cache="off", **cache))


def test_engine_rows_and_acceptance() -> None:
    rows = measure(engine(), batches=[2], rows=[1, 3], context=16, num_steps=3, accept=2.5)
    assert [(row.case, row.unit) for row in rows] == [
        ("2 sequences, 1 rows each", "steps/s"),
        ("2 sequences, 1 rows each", "tokens/s"),
        ("2 sequences, 3 rows each", "steps/s"),
        ("2 sequences, 3 rows each", "tokens/s"),
    ]
    assert rows[1].value == pytest.approx(2 * rows[0].value, rel=1e-3)
    assert rows[3].value == pytest.approx(2 * 2.5 * rows[2].value, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"accept": 4.0}, "--accept is 4.0"),
        ({"batches": [0]}, "--batch is 0"),
        ({"context": 0}, "--context is 0"),
        ({"context": 100_000}, "pages of 256|position"),
        ({"context": 16_384, "rows": [3]}, "positions end at 16384"),
    ],
)
def test_what_cannot_be_measured(options: dict[str, Any], part: str) -> None:
    chosen = {"batches": [1], "rows": [1], "context": 8, "num_steps": 1, "accept": None, **options}
    with pytest.raises(ConfigError, match=part):
        measure(engine(budget_bytes=1 << 20), **chosen)


def test_result_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    words = ["bench", "step", "demo", "--context", "4", "--steps", "1", "--output", str(path)]
    assert main(words) == 0
    assert "outside of ops" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert list(content) == ["hardware", "commit", "command", "date", "rows"]
    assert content["command"] == f"moet {' '.join(words)}"
    assert content["rows"][-1]["case"] == "step"
    fields = {"case", "value", "unit", "better", "floor", "target", "note"}
    assert all(set(row) == fields for row in content["rows"])
    row = Row(case="a", value=1.0, unit="ms", better="lower")
    write(path, report("moet", [row], hardware="none", more={"duration": 2}))
    assert json.loads(path.read_text())["duration"] == 2


def test_keys_do_not_reach_result_files() -> None:
    for spelling in ("--api-key sk-1", "--api-key=sk-1"):
        assert "sk-1" not in without_key(f"moet bench serve {spelling} --seed 1")
