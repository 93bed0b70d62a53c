import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moet.errors import CheckpointError
from moet.models.checkpoint import Checkpoint
from moet.models.formats import dequantize_mxfp4
from moet.models.pack import Pack, is_pack


@pytest.fixture
def pack_copy(tiny_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pack, tmp_path / "pack"))


def edit_manifest(pack: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((pack / "pack.json").read_text())
    change(manifest)
    (pack / "pack.json").write_text(json.dumps(manifest))


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_dense_tensors_are_the_checkpoints_own(tiny_checkpoint: Path, tiny_pack: Path) -> None:
    source, pack = Checkpoint.open(tiny_checkpoint), Pack.open(tiny_pack)
    assert set(pack.names()) == {n for n in source.names() if ".ffn.experts." not in n}
    for name in pack.names():
        ours, theirs = pack.load(name), source.load(name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


def test_fp4_rows_hold_every_expert_exactly(tiny_checkpoint: Path, tiny_pack: Path) -> None:
    source, pack = Checkpoint.open(tiny_checkpoint), Pack.open(tiny_pack)
    for layer_idx, prefix in ((0, "layers.0"), (6, "layers.6"), (7, "mtp.0")):
        for expert_id in (0, 15):
            row = pack.expert_row("fp4", layer_idx, expert_id)
            assert row.shape == (pack.format("fp4").row_bytes,)
            matrices = pack.format("fp4").unpack(row)
            for name, matrix in zip(("w1", "w3", "w2"), matrices, strict=True):
                full = f"{prefix}.ffn.experts.{expert_id}.{name}"
                exact = dequantize_mxfp4(
                    source.load(f"{full}.weight"), source.load(f"{full}.scale")
                )
                assert torch.equal(matrix, exact)


def test_row_bases_are_those_of_the_rows(tiny_pack: Path) -> None:
    pack = Pack.open(tiny_pack)
    for tier in pack.manifest.tiers:
        row = pack.expert_row(tier, 3, 9)
        assert torch.equal(pack.row_base(tier, 3, 9), pack.format(tier).row_base(row))


def test_rows_can_be_read_by_place_and_by_layer(tiny_pack: Path) -> None:
    pack = Pack.open(tiny_pack)
    path, offset = pack.row_place("w2", 2, 5)
    row_bytes = pack.format("w2").row_bytes
    assert offset % 4096 == row_bytes % 4096 == 0
    row = pack.expert_row("w2", 2, 5)
    assert path.read_bytes()[offset : offset + row_bytes] == bytes(row.tolist())
    layer = torch.empty(16, row_bytes, dtype=torch.uint8)
    pack.read_layer("w2", 2, layer)
    assert torch.equal(layer[5], row)


def test_a_pack_serves_alone(tiny_checkpoint: Path, tiny_pack: Path) -> None:
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (tiny_pack / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert Pack.open(tiny_pack).config["model_type"] == "deepseek_v4"


def test_a_sound_pack_verifies(tiny_pack: Path) -> None:
    pieces: list[int] = []
    pack = Pack.open(tiny_pack)
    pack.verify(pieces.append)
    rows = sum(2 * pack.experts.num_rows for _ in pack.manifest.tiers)
    assert len(pieces) == rows + len(list(pack.names()))


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("experts.w2", r"layers\.0\.ffn\.experts\.0 \(w2 row\)"),
        ("experts.fp4", r"layers\.0\.ffn\.experts\.0 \(fp4 row\)"),
        ("experts.w2.base", r"layers\.0\.ffn\.experts\.0 \(w2 base\)"),
    ],
)
def test_a_flipped_bit_is_found_and_its_expert_named(
    pack_copy: Path, file: str, named: str
) -> None:
    flip_byte(pack_copy / file, 100)
    with pytest.raises(CheckpointError, match=named):
        Pack.open(pack_copy).verify()


def test_a_flipped_bit_in_the_dense_tensors_is_found(pack_copy: Path) -> None:
    dense = pack_copy / "dense.safetensors"
    flip_byte(dense, dense.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"checksums differ for mtp\.0\."):
        Pack.open(pack_copy).verify()


def test_damaged_checksums_are_found_at_opening(pack_copy: Path) -> None:
    flip_byte(pack_copy / "checksums.json", 200)
    with pytest.raises(CheckpointError, match=r"checksums\.json is damaged"):
        Pack.open(pack_copy)


@pytest.mark.parametrize("what", ["format", "layout"])
def test_another_version_is_refused_by_number(pack_copy: Path, what: str) -> None:
    edit_manifest(pack_copy, lambda manifest: manifest.update({f"{what}_version": 99}))
    with pytest.raises(CheckpointError, match=f"{what} version 99, this moet reads 1"):
        Pack.open(pack_copy)


def test_another_source_is_refused_by_identity(tiny_pack: Path) -> None:
    source = Pack.open(tiny_pack).manifest.source
    Pack.open(tiny_pack, source=source)
    with pytest.raises(CheckpointError, match=f"{source[:12]}, not from abcdefabcdef"):
        Pack.open(tiny_pack, source="abcdef" * 10)


@pytest.mark.parametrize("name", ["experts.w2", "dense.safetensors", "tokenizer.json"])
def test_missing_and_truncated_files_are_named(pack_copy: Path, name: str) -> None:
    path = pack_copy / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{name} has {len(whole) - 1} bytes"):
        Pack.open(pack_copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        Pack.open(pack_copy)


def test_a_manifest_that_is_none_is_refused(pack_copy: Path, tmp_path: Path) -> None:
    edit_manifest(pack_copy, lambda manifest: manifest.update(tiers=["w3"]))
    with pytest.raises(CheckpointError, match=r"pack\.json is damaged"):
        Pack.open(pack_copy)
    (pack_copy / "pack.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"pack\.json is damaged"):
        Pack.open(pack_copy)
    assert not is_pack(tmp_path)
    with pytest.raises(CheckpointError, match="not a finished pack"):
        Pack.open(tmp_path)


def test_a_tier_that_was_not_made_is_refused(pack_copy: Path) -> None:
    def drop_fp4(manifest: dict[str, Any]) -> None:
        manifest["tiers"] = ["w2"]
        manifest["files"] = {n: s for n, s in manifest["files"].items() if "fp4" not in n}

    edit_manifest(pack_copy, drop_fp4)
    with pytest.raises(CheckpointError, match="has no fp4 experts, only w2"):
        Pack.open(pack_copy).expert_row("fp4", 0, 0)
