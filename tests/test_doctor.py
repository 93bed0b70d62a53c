"""The report on a machine: what is found is named, what is wrong is a problem, no owner shows."""

from __future__ import annotations

import getpass
import json
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moet import doctor, probes
from moet.kernels.cubin import ARCH_OF_CAPABILITY, folder


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.ram_copy_gb_per_s, "__defaults__", (1 << 20,))


def test_the_report_names_the_machine_and_not_its_owner() -> None:
    report = doctor.report()
    assert report["system"]["memory_copy_gb_per_s"] > 0
    text = json.dumps(report)
    for name in (str(Path.home()), platform.node(), str(Path(__file__).parents[1])):
        assert len(name) < 4 or name not in text
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


def test_a_damaged_kernel_is_named_without_its_folder(tmp_path: Path) -> None:
    if not folder().exists():
        pytest.skip("no kernels were built here")
    copied = tmp_path / "cubins"
    shutil.copytree(folder(), copied)
    before = probes.cubin_problems(copied)
    arch = sorted(ARCH_OF_CAPABILITY.values())[0]
    victim = next((copied / arch).glob("*.cubin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    [problem] = [each for each in probes.cubin_problems(copied) if each not in before]
    assert problem.startswith(f"{arch}/{victim.name}")
    assert str(tmp_path) not in problem
    for each in (copied / arch).glob("*.cubin"):
        each.unlink()
    assert f"there are no kernels for {arch}; reinstall" in probes.cubin_problems(copied)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "pip install 'moet[cuda]'" in probes.kernel_self_test(torch.device("cuda"))


def test_a_probe_that_hangs_is_killed() -> None:
    began = time.monotonic()
    outcome = probes.outcome_of([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert outcome.startswith("hangs")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('noise'); print('ok')", "ok"),
        ("raise SystemExit(3)", "failed: exit code 3"),
        ("import os; os.abort()", "failed: exit code -6"),
    ],
)
def test_a_probe_tells_by_its_last_line(code: str, outcome: str) -> None:
    assert probes.outcome_of([sys.executable, "-c", code], 60.0) == outcome


def test_every_pair_of_gpus_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(probes, "outcome_of", lambda command, limit: asked.append(command) or "ok")
    assert probes.peer_access(3) == {"0-1": "ok", "0-2": "ok", "1-2": "ok"}
    assert [command[-2:] for command in asked] == [["0", "1"], ["0", "2"], ["1", "2"]]
    assert probes.peer_access(1) == {}


def test_the_driver_version_is_found(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert probes.driver_version(file) == "580.65.06"
    assert probes.driver_version(tmp_path / "none") is None


def test_whatever_keeps_moet_from_serving_is_a_problem() -> None:
    good: dict[str, Any] = {
        "packages": dict.fromkeys(doctor.PACKAGES, "1"),
        "reference": {"rows_independent_of_batch": True},
        "kernels": {"damaged": []},
        "gpus": [{"name": "G", "kernels": "ok"}],
        "peers": {"0-1": "ok, through host memory"},
        "system": {"pinned_memory": "ok", "lockable_memory": "unlimited"},
        "cache": {"free_gib": 9.0},
    }
    assert doctor._problems(good) == []
    for section, wrong, expected in (
        ("gpus", [{"name": "G", "kernels": "no kernels for this"}], "G: no kernels"),
        ("peers", {"0-1": "hangs: no answer within 20 s"}, "GPUs 0-1 cannot reach"),
        ("system", {"pinned_memory": "out of it", "lockable_memory": "64"}, "ulimit -l"),
        ("kernels", {"damaged": ["sm90a/x.cubin has"]}, "sm90a/x.cubin"),
        ("cache", {"free_gib": 0.5}, "MOET_CACHE_DIR"),
    ):
        [problem] = doctor._problems({**good, section: wrong})
        assert expected in problem


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_and_its_kernels_are_right() -> None:
    report = doctor.report()
    assert report["system"]["driver"]
    assert all(gpu["kernels"] == "ok" for gpu in report["gpus"])
    assert all(min(gpu["link_gb_per_s"].values()) > 1 for gpu in report["gpus"])
    assert all(outcome.startswith("ok") for outcome in report["peers"].values())
