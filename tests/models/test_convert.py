import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from moet.errors import CheckpointError
from moet.models import convert as convert_module
from moet.models import convert_plan
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions, plan_pack
from moet.models.pack import Pack
from moet.models.progress import Progress
from moet.models.synthetic import write_checkpoint

OPTIONS = ConvertOptions(num_workers=1)
# Converts argv[1] into argv[2] in small units and dies at the argv[3]-th progress report, or in
# front of the step of that name.
KILLED = """
import os, signal, sys
from moet.models import convert as module, convert_plan
from moet.models.checkpoint import Checkpoint

source, pack, point = sys.argv[1:]
convert_plan._UNIT_BYTES = 8 << 20
calls = 0

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(_):
    global calls
    calls += 1
    if point.isdigit() and calls == int(point):
        die()

def before(name, write):
    def step(path, value):
        if path.name == name:
            die()
        write(path, value)
    return step

module.write_json = before(point, module.write_json)
if point == "rename":
    module.Path.replace = lambda self, to: die() if str(to) == pack else os.replace(self, to)
module.convert(Checkpoint.open(source), pack, module.ConvertOptions(num_workers=1), progress)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run_until_killed(source: Path, pack: Path, point: str) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(pack), point]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    assert not pack.exists()
    assert pack.with_name(pack.name + ".partial").is_dir()


def test_killed_again_and_again_it_still_ends_in_the_same_bytes(
    tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, journal = tmp_path / "pack", tmp_path / "pack.partial" / "journal.jsonl"
    run_until_killed(tiny_checkpoint, pack, "350")
    whole = journal.read_bytes()
    assert whole.count(b"\n") > 3
    journal.write_bytes(whole[:-20])  # a torn line is work not done
    run_until_killed(tiny_checkpoint, pack, "pack.json")
    assert journal.read_bytes().startswith(whole)
    run_until_killed(tiny_checkpoint, pack, "rename")
    monkeypatch.setattr(convert_plan, "_UNIT_BYTES", 8 << 20)
    seen: list[Progress] = []
    convert(Checkpoint.open(tiny_checkpoint), pack, OPTIONS, seen.append)
    assert seen == []  # all that was left was to put it in place
    assert files_of(pack) == files_of(tiny_pack)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]


@dataclass
class Watched:
    """What one conversion did, seen from its progress reports."""

    progress: list[Progress]
    rss_bytes: list[int]
    refusal: str = ""
    written: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(
    tiny_checkpoint: Path, tiny_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> Watched:
    """A conversion beside `tiny_pack`, which has warmed everything up."""
    pack = tmp_path_factory.mktemp("watched") / "pack"
    source, process = Checkpoint.open(tiny_checkpoint), psutil.Process()
    seen = Watched([], [process.memory_info().rss])
    write = convert_module.write_json

    def watch(progress: Progress) -> None:
        if not seen.progress:
            with pytest.raises(CheckpointError) as caught:
                convert(source, pack, OPTIONS)
            seen.refusal = str(caught.value)
        seen.progress.append(progress)
        seen.rss_bytes.append(process.memory_info().rss)

    def record(path: Path, value: object) -> None:
        seen.written.append(path.name)
        write(path, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module, "write_json", record)
        convert(source, pack, OPTIONS, watch)
    return seen


def test_two_conversions_into_one_folder_exclude_each_other(watched: Watched) -> None:
    assert "another process is writing" in watched.refusal


def test_progress_has_a_rate_and_a_time_left(watched: Watched) -> None:
    middle, last = watched.progress[len(watched.progress) // 2], watched.progress[-1]
    assert middle.bytes_per_s > 0
    assert middle.eta_s is not None
    assert middle.eta_s > 0
    assert last.done_bytes == last.total_bytes


def test_memory_stays_bounded(watched: Watched, tiny_checkpoint: Path) -> None:
    size = sum(path.stat().st_size for path in tiny_checkpoint.iterdir())
    assert max(watched.rss_bytes) - watched.rss_bytes[0] < size


def test_the_last_file_written_says_that_all_is_there(watched: Watched) -> None:
    assert watched.written[-1] == "pack.json"


def test_work_begun_with_other_settings_is_not_mixed_in(
    tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    staging = tmp_path / "pack.partial"
    staging.mkdir()
    (staging / "journal.jsonl").write_text('{"source": "another"}\n')
    (staging / "experts.old").write_text("left behind")
    seen: list[Progress] = []
    convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", OPTIONS, seen.append)
    assert seen[0].resumed_bytes == 0
    assert files_of(tmp_path / "pack") == files_of(tiny_pack)


def test_workers_do_not_change_a_byte(
    tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, num_workers=3)
    convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", options)
    assert files_of(tmp_path / "pack") == files_of(tiny_pack)


def test_a_finished_pack_is_returned_as_it_is(tiny_checkpoint: Path, tiny_pack: Path) -> None:
    before = (tiny_pack / "pack.json").stat().st_mtime_ns
    source = Checkpoint.open(tiny_checkpoint)
    assert convert(source, tiny_pack, OPTIONS).manifest.source == source.identity()
    assert (tiny_pack / "pack.json").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="scale rule mse"):
        convert(source, tiny_pack, ConvertOptions(scale_rule="inherit"))


def test_a_pack_of_another_checkpoint_is_not_overwritten(tiny_pack: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", size="tiny", seed=7)
    before = files_of(tiny_pack)
    with pytest.raises(CheckpointError, match="was made from checkpoint"):
        convert(Checkpoint.open(tmp_path / "other"), tiny_pack, OPTIONS)
    assert files_of(tiny_pack) == before


def test_an_occupied_folder_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is not a pack"):
        convert(Checkpoint.open(tiny_checkpoint), tmp_path, OPTIONS)


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(CheckpointError, match="1,000,000 are free"):
        convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails_at", [1, 700])
def test_a_disk_that_fills_up_leaves_no_pack_and_can_be_resumed(
    tiny_checkpoint: Path,
    tiny_pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: int,
) -> None:
    calls = 0
    pwrite = os.pwrite

    def full(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", OPTIONS)
    assert not (tmp_path / "pack").exists()
    convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", OPTIONS)
    assert files_of(tmp_path / "pack") == files_of(tiny_pack)


def test_a_checkpoint_without_its_tokenizer_is_refused(
    checkpoint_copy: Path, tmp_path: Path
) -> None:
    (checkpoint_copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        convert(Checkpoint.open(checkpoint_copy), tmp_path / "pack", OPTIONS)
    assert not (tmp_path / "pack.partial").exists()


def test_a_shard_that_vanishes_meanwhile_is_named(checkpoint_copy: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(checkpoint_copy)
    identity = source.identity()
    source.identity = lambda: identity  # type: ignore[method-assign]
    shard = "model-00004-of-00010.safetensors"
    (checkpoint_copy / shard).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read layers.2.*{shard}"):
        convert(source, tmp_path / "pack", OPTIONS)


def test_the_report_measures_every_expert_matrix(tiny_pack: Path) -> None:
    report = json.loads((tiny_pack / "report.json").read_text())
    assert len(report["tensors"]) == 8 * 16 * 3
    for tensor in report["tensors"].values():
        assert abs(tensor["bias"]) < 0.02
        assert 0.2 < tensor["rel_rms"] < 0.45
        assert tensor["fp4_rel_rms"] == 0
    worst = report["worst_bias"]["tensor"]
    assert report["tensors"][worst]["bias"] == report["worst_bias"]["bias"]


@pytest.mark.parametrize("flavour", ["0731", "base"])
def test_other_releases_convert_too(flavour: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", size="tiny", flavour=flavour)
    source = Checkpoint.open(tmp_path / "source")
    pack = convert(source, tmp_path / "pack", OPTIONS)
    pack.verify()
    assert pack.manifest.artefact == flavour
    assert pack.experts.num_rows == 16 * (10 if flavour == "0731" else 8)
    assert set(pack.names()) | {
        f"{name}.{part}"
        for row in range(pack.experts.num_rows)
        for name in pack.experts.matrices(row)
        for part in ("weight", "scale")
    } == set(source.names())


def test_units_bound_the_memory_of_a_full_size_conversion() -> None:
    from moet.models.deepseek_v4_release import DeepseekV4Release
    from moet.models.deepseek_v4_tensors import PREVIEW
    from moet.models.synthetic import plan_checkpoint

    source = DeepseekV4Release(plan_checkpoint("full").config, PREVIEW)
    layout = plan_pack(source, OPTIONS)  # type: ignore[arg-type]
    assert layout.formats["w2"].row_bytes == 4 * 1_769_472  # 1.6875 MiB a sub-row
    assert layout.sizes()["experts.w2"] == 11_264 * 4 * 1_769_472
    sizes = [layout.unit_bytes(unit) for unit in layout.units]
    assert sum(sizes) + len(layout.dense_head) == sum(layout.sizes().values())
    largest = max(spec.num_bytes for spec in source.specs())
    assert max(sizes) < (512 << 20) + largest


def test_a_tier_can_be_left_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, tiers=("w2",))
    pack = convert(Checkpoint.open(tiny_checkpoint), tmp_path / "pack", options)
    assert not (tmp_path / "pack" / "experts.fp4").exists()
    Pack.open(tmp_path / "pack").verify()
    assert list(pack.formats) == ["w2"]
