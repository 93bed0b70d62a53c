"""Engines with tiers and policies from settings alone: what is asked for is what is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moet.cli import parser, with_dashes
from moet.commands import _expert_config
from moet.config import CacheConfig, EngineConfig, ExpertConfig, ModelSettings, SchedulerConfig
from moet.errors import ConfigError, RequestError
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.core import EngineCore
from moet.runtime.experts.heat import read_heat, write_heat
from moet.runtime.experts.hot import write_hot
from moet.runtime.experts.serving import formats_of, sizes_of
from moet.runtime.experts.sizes import tier_sizes
from moet.runtime.loader import load_core
from moet.types import Request
from tests.fakes import drain, request, tokens_of

ONE = request("one", [5, 9, 42, 17], max_tokens=4)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("serving")
    write_checkpoint(folder / "checkpoint", size="tiny")
    options = ConvertOptions(num_workers=1)
    return convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", options)


def load(pack: Pack, experts: ExpertConfig, precision: str = "w2") -> EngineCore:
    config = EngineConfig(
        model=str(pack.folder),
        settings=ModelSettings(precision=precision),  # type: ignore[arg-type]
        cache=CacheConfig(budget_bytes=32 << 20, prefix_cache="off"),
        scheduler=SchedulerConfig(max_num_seqs=2, overlap=True),
        experts=experts,
    )
    return load_core(config, lambda stage, share: None)


def answer(core: EngineCore, one: Request = ONE) -> list[int]:
    core.submit(one)
    events = drain(core)[one.request_id]
    assert events[-1].error is None
    return tokens_of(events)


def rows_bytes(pack: Pack, num_rows: int, tier: str = "w2") -> int:
    return num_rows * pack.format(tier).row_bytes  # type: ignore[arg-type]


def test_a_core_in_tiers_answers_as_one_without(pack: Pack, tmp_path: Path) -> None:
    plain = load(pack, ExpertConfig())
    expected = answer(plain)
    plain.shutdown()
    experts = ExpertConfig(
        pool_bytes=rows_bytes(pack, 12),
        host_bytes=rows_bytes(pack, 20),
        heat_file=str(tmp_path / "heat"),
        trace_file=str(tmp_path / "trace"),
    )
    core = load(pack, experts)
    assert answer(core) == expected
    stats = core.expert_stats()
    (tier,) = stats.tiers
    assert (tier.num_slots, tier.num_host_places) == (12, 20)
    assert tier.num_disk_reads > 0
    assert tier.total("num_misses") > 0
    assert sum(sum(layer.rows) for layer in stats.layers) > 0
    core.tune_experts(tau=None, pool_bytes=rows_bytes(pack, 30))
    assert core.expert_stats().tiers[0].num_slots == 30
    assert answer(core) == expected
    with pytest.raises(RequestError, match="1 slots; "):
        core.tune_experts(tau=None, pool_bytes=rows_bytes(pack, 1))
    core.shutdown()
    num_rows = pack.experts.num_rows
    assert len(read_heat(tmp_path / "heat.w2", num_rows)) >= 30
    assert (tmp_path / "trace").read_text().count("\n") > 20
    core = load(pack, replace(experts, trace_file=None))
    assert core.expert_stats().tiers[0].num_resident == 12  # from the start
    core.shutdown()


def test_policies_from_settings(pack: Pack) -> None:
    write_hot(pack, range(0, pack.experts.num_rows, 2))
    outputs: dict[str, list[int]] = {}
    core = load(
        pack,
        ExpertConfig(policy="gate", offered=("w2", "fp4", "w2+hot"), tau=0.0),
    )
    assert core.info().precision == "gate"
    assert core.info().precisions == ("w2", "fp4", "w2+hot")
    for policy in ("w2", "fp4", "w2+hot", None):
        asked = request(str(policy), ONE.prompt_token_ids, max_tokens=8, precision=policy)
        outputs[str(policy)] = answer(core, asked)
    assert outputs["None"][0] == outputs["fp4"][0], "the gate reads prompts in FP4"
    assert outputs["None"] not in (outputs["w2"], outputs["fp4"])
    core.tune_experts(tau=1.0, pool_bytes=None)
    assert core.expert_stats().tau == 1.0
    again = request("gated", ONE.prompt_token_ids, max_tokens=8)
    answer(core, again)
    assert core.expert_stats().num_gated_rows == 7
    with pytest.raises(RequestError, match="there is no pool"):
        core.tune_experts(tau=None, pool_bytes=1 << 20)
    core.shutdown()
    core = load(pack, ExpertConfig(policy="w2+hot"))
    assert answer(core, request("hot", ONE.prompt_token_ids, max_tokens=8)) == outputs["w2+hot"]
    core.shutdown()


def test_all_hot_is_fp4_and_none_is_w2(pack: Pack) -> None:
    expected = {}
    for precision in ("w2", "fp4"):
        core = load(pack, ExpertConfig(), precision)
        expected[precision] = answer(core)
        core.shutdown()
    for rows, precision in (([], "w2"), (range(pack.experts.num_rows), "fp4")):
        write_hot(pack, list(rows))
        core = load(pack, ExpertConfig(policy="w2+hot"))
        assert answer(core) == expected[precision]
        core.shutdown()


def test_a_hot_set_that_is_none_is_refused(pack: Pack) -> None:
    path = pack.folder / "hot.json"
    path.write_text(json.dumps({"rows": [10_000]}))
    with pytest.raises(ConfigError, match="rows beyond"):
        load(pack, ExpertConfig(policy="w2+hot"))
    path.unlink()
    with pytest.raises(ConfigError, match="moet bench experts"):
        load(pack, ExpertConfig(policy="w2+hot"))


SIZES = {"row_bytes": 100, "num_rows": 50, "top_k": 4}


def test_sizes_in_rows() -> None:
    sizes = tier_sizes(**SIZES, pool_bytes=1050, host_bytes=None, static_bytes=250)
    assert (sizes.num_slots, sizes.num_static, sizes.num_places) == (10, 2, 48)
    assert sizes.all_in_memory
    sizes = tier_sizes(**SIZES, pool_bytes=10**9, host_bytes=900)
    assert (sizes.num_slots, sizes.num_places, sizes.all_in_memory) == (50, 9, False)
    assert sizes.num_staging <= sizes.num_places // 2


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--expert-pool gives 5 expert slots.*; 6 are needed"):
        tier_sizes(**SIZES, pool_bytes=500, host_bytes=None, static_bytes=200)
    with pytest.raises(ConfigError, match="41 of 50 expert rows have no place"):
        tier_sizes(**SIZES, pool_bytes=500, host_bytes=900, disk=False)


@pytest.mark.parametrize(
    ("experts", "precision", "expected"),
    [
        (ExpertConfig(), "w2", ("w2",)),
        (ExpertConfig(), "fp4", ("fp4",)),
        (ExpertConfig(policy="gate"), "w2", ("w2", "fp4")),
        (ExpertConfig(prefill_precision="fp4"), "w2", ("w2", "fp4")),
        (ExpertConfig(offered=("w2",)), "fp4", ("fp4", "w2")),
    ],
)
def test_formats_that_settings_need(
    experts: ExpertConfig, precision: str, expected: tuple[str, ...]
) -> None:
    settings = ModelSettings(precision=precision)  # type: ignore[arg-type]
    config = EngineConfig(model="x", settings=settings, experts=experts)
    assert formats_of(config) == expected


def test_the_second_format_has_a_pool_of_its_own() -> None:
    experts = ExpertConfig(policy="gate", pool_bytes=1000, fp4_pool_bytes=2000, host_bytes=4000)
    config = EngineConfig(model="x", experts=experts)
    found = {tier: sizes_of(config, tier, **SIZES) for tier in ("w2", "fp4")}
    assert [one and one.num_slots for one in found.values()] == [10, 20]
    assert [one and one.num_places for one in found.values()] == [20, 20]


def test_a_heat_file_of_another_model_or_none_starts_cold(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    assert read_heat(path, 10) == []
    write_heat(path, [3, 1, 3], 10)
    assert read_heat(path, 10) == [3, 1]
    assert read_heat(path, 11) == []
    path.write_text("{")
    assert read_heat(path, 10) == []
    write_heat(tmp_path / "heat" / "below a file", [1], 10)  # is logged and no more


def test_flags_become_settings() -> None:
    words = (
        "serve x --precision gate --precisions w2,fp4 --expert-pool 1.5 --host-experts auto "
        "--fp4-pool 512MiB --static-experts 1 --no-disk-experts --prefill-precision fp4 "
        "--gate_tau 0.7"
    )
    args = parser().parse_args(with_dashes(words.split()))
    assert _expert_config(args) == ExpertConfig(
        policy="gate",
        offered=("w2", "fp4"),
        pool_bytes=3 << 29,
        fp4_pool_bytes=512 << 20,
        static_bytes=1 << 30,
        disk=False,
        prefill_precision="fp4",
        tau=0.7,
    )
    assert _expert_config(parser().parse_args(["serve", "x"])).is_plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tau": 1.5}, "--gate-tau is 1.5"),
        ({"pool_bytes": 0}, "--expert-pool is 0"),
        ({"read_timeout_s": 0.0}, "--expert-read-timeout is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExpertConfig(**options)  # type: ignore[arg-type]
