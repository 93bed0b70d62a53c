"""The cubins in the tree are what their sources say, and the audit notices when they are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moet.errors import CubinError
from moet.kernels import audit, build, cubin, nvrtc, tools


def manifest() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((build.CUBINS / "MANIFEST.json").read_text())
    return data


def test_every_source_has_a_fresh_cubin_for_every_arch() -> None:
    cubins = manifest()["cubins"]
    assert set(cubins) == {f"{arch}/{name}" for arch in build.ARCHS for name in build.sources()}
    for key, facts in cubins.items():
        assert facts["source_sha256"] == build.source_hash(key.split("/")[1]), key
        assert facts["flags"] == build.flags(key.split("/")[0])
        assert cubin.verified(key.split("/")[1], key.split("/")[0], build.CUBINS)


def test_the_audit_passes() -> None:
    assert audit.audit(build.CUBINS) == []


def test_the_audit_sees_loads_that_wait_when_a_stage_is_left() -> None:
    leave = "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR53+0x20], RZ"
    early = ["@!PT LDS RZ, [RZ]", "LDS.64 R40, [R76+0x80]", "NOP", leave, "FFMA R1, R40, R2, R1"]
    assert audit.early_leaves(early) == 1
    late = ["LDS.64 R40, [R76+0x80]", "FFMA R1, R40, R2, R1", "@P0 BRA `(.L_x_4)", "NOP", leave]
    assert audit.early_leaves(late) == 0
    assert audit.early_leaves([early[1], ".L_x_4:", leave]) == 1  # who falls in has not branched


def facts_of_a_kernel() -> dict[str, Any]:
    return {"registers": 96, "shared_bytes": 0, "threads": 256, "ctas_per_sm": 2}


@pytest.mark.parametrize(
    ("use", "ops", "complaint"),
    [
        ({"STACK": 16}, ["QGMMA.64x8x32"], "spills"),
        ({"REG": 168}, ["QGMMA.64x8x32"], "allow 1 CTAs, 2 declared"),
        ({}, ["HMMA.16816.F32"], "has no QGMMA"),
        ({}, ["QGMMA.64x8x32", "STL [R1]", "LDL R2"], "has 1 STL"),
        ({}, ["QGMMA.64x8x32", "F2FP.F16.E4M3.UNPACK_B R1"], "UNPACK_B"),
        (
            {},
            ["QGMMA", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0", "USETMAXREG.DEALLOC.CTAPOOL 0x28"],
            "want 8 registers more",
        ),
    ],
)
def test_the_audit_names_what_is_wrong(use: dict[str, int], ops: list[str], complaint: str) -> None:
    found = {"REG": 96, "SHARED": 0, "STACK": 0, "LOCAL": 0, **use}
    facts = facts_of_a_kernel() | {"registers": found["REG"]}
    problems = audit.check_kernel("sm90a", "stream_w2_n8_bf16", facts, found, ops)
    assert any(complaint in problem for problem in problems)
    good = {"REG": 96, "SHARED": 0, "STACK": 0, "LOCAL": 0}
    fine = audit.check_kernel(
        "sm90a", "stream_w2_n8_bf16", facts_of_a_kernel(), good, ["QGMMA.64x8x32"]
    )
    assert fine == []


def copy_of_cubins(to: Path) -> Path:
    shutil.copytree(build.CUBINS, to)
    return to


def test_a_damaged_cubin_is_refused(tmp_path: Path) -> None:
    root = copy_of_cubins(tmp_path / "cubins")
    path = root / "sm90a" / "bandwidth.cubin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CubinError, match="damaged"):
        cubin.verified("bandwidth", "sm90a", root)
    path.unlink()
    with pytest.raises(CubinError, match="absent"):
        cubin.verified("bandwidth", "sm90a", root)


def test_a_stale_source_fails_the_audit(tmp_path: Path) -> None:
    root = copy_of_cubins(tmp_path / "cubins")
    changed = manifest()
    changed["cubins"] = {"sm90a/bandwidth": changed["cubins"]["sm90a/bandwidth"]}
    changed["cubins"]["sm90a/bandwidth"]["source_sha256"] = "0" * 64
    (root / "MANIFEST.json").write_text(json.dumps(changed))
    assert any("sm90a/bandwidth" in problem for problem in audit.audit(root))


def test_a_missing_tool_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CubinError, match="pip install nvidia-cuda-cuobjdump"):
        tools.find_tool("cuobjdump")


def test_the_source_hash_covers_included_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    before = {name: build.source_hash(name) for name in build.sources()}
    header = tmp_path / "csrc" / "codec.cuh"
    header.write_text(header.read_text() + "// changed\n")
    after = {name: build.source_hash(name) for name in build.sources()}
    assert before["stream_gemm"] != after["stream_gemm"]
    assert before["bandwidth"] == after["bandwidth"]


@pytest.mark.parametrize("arch", sorted(build.ARCHS))
def test_a_build_is_reproducible(tmp_path: Path, arch: str) -> None:
    target = tmp_path / "bandwidth.cubin"
    build.compile_source("bandwidth", arch, target)
    assert target.read_bytes() == (build.CUBINS / arch / "bandwidth.cubin").read_bytes()


def test_builds_side_by_side_merge_their_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.record(tmp_path, {"sm90a/bandwidth": {"a": 1}, "sm90a/moe": {"a": 2}})
    build.record(tmp_path, {"sm120a/bandwidth": {"a": 3}, "sm90a/moe": {"a": 4}})
    path = tmp_path / "MANIFEST.json"
    expected = {"sm90a/bandwidth": {"a": 1}, "sm90a/moe": {"a": 4}, "sm120a/bandwidth": {"a": 3}}
    assert json.loads(path.read_text())["cubins"] == expected
    monkeypatch.setattr(build, "sources", lambda: ["moe"])  # a source that is gone leaves no entry
    build.record(tmp_path, {})
    assert json.loads(path.read_text())["cubins"] == {"sm90a/moe": {"a": 4}}


def test_a_source_that_changes_under_the_compiler_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = iter(["before", "after"])
    monkeypatch.setattr(build, "source_hash", lambda name: next(hashes))
    with pytest.raises(CubinError, match="changed while it was compiled"):
        build.build("bandwidth", "sm90a", tmp_path)
    assert not list((tmp_path / "sm90a").iterdir())


@pytest.mark.parametrize("arch", sorted(build.ARCHS))
def test_nvrtc_gives_the_kernels_of_the_compiler(tmp_path: Path, arch: str) -> None:
    made = build.build("bandwidth", arch, tmp_path, compile=nvrtc.compile_source)
    shipped = manifest()["cubins"][f"{arch}/bandwidth"]
    assert made["kernels"] == shipped["kernels"]
    build.record(tmp_path, {f"{arch}/bandwidth": made}, f"nvrtc {nvrtc.version()}")
    data = cubin.verified("bandwidth", arch, tmp_path)
    assert data[:4] == b"\x7fELF"
    assert b"read_buffer" in data


def test_a_source_that_nvrtc_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build.CSRC, tmp_path / "csrc")
    (tmp_path / "csrc" / "bandwidth.cu").write_text("this is not C++;")
    monkeypatch.setattr(nvrtc, "CSRC", tmp_path / "csrc")
    with pytest.raises(CubinError, match=r"bandwidth\.cu for sm90a.*error"):
        nvrtc.compile_source("bandwidth", "sm90a", tmp_path / "out.cubin")


def test_the_debug_flavour_traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shipped build only sets a bit of the error word, it stops, too."""
    (tmp_path / "tiny.cu").write_text(
        '#include "device.cuh"\n'
        "KERNEL(32, 1) tiny(uint32_t* error) { atomic_or(error, 1); trap_in_debug(); }\n"
    )
    shutil.copy(build.CSRC / "device.cuh", tmp_path)
    monkeypatch.setattr(build, "CSRC", tmp_path)
    found = {}
    for debug in (False, True):
        defines = ["MOET_DEBUG"] * debug
        entry = build.build("tiny", "sm90a", tmp_path, defines=defines)
        assert ("-DMOET_DEBUG" in entry["flags"]) == debug
        ops = tools.instructions(tmp_path / "sm90a" / "tiny.cubin")["tiny"]
        found[debug] = any(op.startswith("BPT.TRAP") for op in ops)
    assert found == {False: False, True: True}


def test_a_device_without_cubins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    with pytest.raises(CubinError, match=r"older GPU has compute capability 8\.0; .* 9\.0, 12\.0"):
        cubin.device_arch(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert cubin.device_arch(torch.device("cuda")) == "sm120a"
