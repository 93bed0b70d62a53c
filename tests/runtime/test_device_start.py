"""Where a model runs, and what of it is settled before anything is loaded; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moet.config import (
    CacheConfig,
    EngineConfig,
    ExpertConfig,
    ModelSettings,
    SchedulerConfig,
    TargetConfig,
)
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.footprint import footprint
from moet.models.synthetic import write_checkpoint
from moet.runtime import device_start
from moet.runtime.device_start import plan_device, settle_device
from moet.runtime.dummy import dummy_folder, first_layers, preset_config
from moet.runtime.experts import load
from moet.runtime.experts.load import pack_experts
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.hardware import GIB, Hardware, hardware
from moet.runtime.loader import load_core

V4, GLM = (preset_config(name, "tiny") for name in ("deepseek-v4-flash", "glm-5.2"))


class NoLauncher:
    """Of a GPU that nothing is launched on."""

    num_sms, max_shared_bytes = 132, 232448


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device.around(NoLauncher(), "sm90a", "cpu")  # type: ignore[arg-type]
    monkeypatch.setattr(device_start, "open_device", lambda: made)
    return made


def engine(device: str = "auto", **changes: object) -> EngineConfig:
    target = TargetConfig(device=device)  # type: ignore[arg-type]
    return replace(EngineConfig(model="m", target=target), **changes)  # type: ignore[arg-type]


def test_auto_takes_a_gpu_and_its_ops(gpu: Device) -> None:
    config, device = settle_device(engine(), V4)
    assert device is gpu
    assert config.settings.arch == "sm90a"
    config, device = settle_device(engine("cpu"), V4)
    assert device is None
    assert config.settings.arch == "reference"


@pytest.mark.parametrize(
    ("changes", "raw", "why"),
    [
        ({"settings": ModelSettings(rounding="none")}, V4, "--rounding none"),
        ({"cache": CacheConfig(kv_dtype="bf16")}, V4, "--kv-cache-dtype bf16"),
        ({"cache": CacheConfig(kv_dtype="bf16")}, GLM, "fp8 or nvfp4"),
    ],
)
def test_what_no_gpu_does_runs_on_the_cpu_unless_a_gpu_was_asked_for(
    gpu: Device, changes: dict[str, object], raw: dict[str, object], why: str
) -> None:
    assert settle_device(engine(**changes), raw)[1] is None
    with pytest.raises(ConfigError, match=why):
        settle_device(engine("cuda", **changes), raw)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_start, "open_device", lambda: None)
    assert settle_device(engine(), V4)[1] is None
    with pytest.raises(ConfigError, match="finds no GPU"):
        settle_device(engine("cuda"), V4)


def h200(free_gib: float) -> Hardware:
    card = hardware("h200", host_bytes=64 * GIB)
    return replace(card, memory_bytes=int(free_gib * GIB))


def test_pages_and_window_are_planned(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_start, "this_gpu", lambda device: h200(139))
    raw = preset_config("deepseek-v4-flash")
    config, made = plan_device(engine(), raw, gpu)
    assert made.resident
    assert config.cache.budget_bytes is not None
    assert config.cache.budget_bytes > 4 * GIB
    assert config.scheduler.max_model_len == made.kv.max_model_len
    asked = engine(
        cache=CacheConfig(budget_bytes=2 * GIB), scheduler=SchedulerConfig(max_model_len=4096)
    )
    config, _ = plan_device(asked, raw, gpu)
    assert 2 * GIB * 0.99 < (config.cache.budget_bytes or 0) <= 2 * GIB
    assert config.scheduler.max_model_len == 4096


def test_experts_that_do_not_fit_are_refused_with_what_to_change(
    gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_start, "this_gpu", lambda device: h200(24))
    asked, raw = engine(experts=ExpertConfig(disk=False)), preset_config("deepseek-v4-flash")
    with pytest.raises(ConfigError, match=r"72\.\d GiB and fit neither"):
        plan_device(asked, raw, gpu)
    _, made = plan_device(engine(), raw, gpu)
    assert made.experts.num_disk > 0


def test_dummy_weights_need_a_gpu_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", "/nonexistent")
    target = TargetConfig(device="cpu", weights="dummy")
    with pytest.raises(ConfigError, match="neither a folder with a config"):
        load_core(EngineConfig(model="nothing", target=target), lambda *_: None)


def test_a_preset_is_written_once_and_dummy_weights_refused_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path))
    folder = dummy_folder("deepseek-v4-flash")
    assert (folder / "tokenizer.json").is_file()
    assert dummy_folder("deepseek-v4-flash") == folder
    target = TargetConfig(device="cpu", weights="dummy")
    config = EngineConfig(model="deepseek-v4-flash", target=target)
    with pytest.raises(ConfigError, match="on a GPU"):
        load_core(config, lambda *_: None)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "glm-5.2"])
def test_the_first_layers_of_a_preset_are_a_config(name: str) -> None:
    raw = preset_config(name, "full", 5)
    assert footprint(raw).num_layers == 5
    with pytest.raises(ConfigError, match="99 layers were asked for"):
        first_layers(raw, 99)


def test_a_packs_experts_arrive_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PIECE_BYTES", 10_000)
    write_checkpoint(tmp_path / "tiny", size="tiny")
    options = ConvertOptions(num_workers=1)
    pack = convert(Checkpoint.open(tmp_path / "tiny"), tmp_path / "pack", options)
    layers = list(pack.experts.layers)[1:4]
    told: list[int] = []
    found = pack_experts(
        pack, "w2", layers, torch.device("cpu"), lambda report: told.append(report.done_bytes)
    )
    store = ResidentExpertStore(pack, "w2")
    assert told[-1] == found.rows.numel()
    for layer_idx in layers:
        table, wanted = found.resident(layer_idx), store.resolve(layer_idx, torch.zeros(0))
        assert torch.equal(table.rows[table.slot_of], wanted.rows[wanted.slot_of])
        assert table.bases is not None
        row = table.rows[table.slot_of[2]]
        assert torch.equal(pack.format("w2").row_base(row), table.bases[2])
