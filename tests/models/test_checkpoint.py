import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from moet.errors import CheckpointError, ConfigError
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4_release import detect_artefact
from moet.models.tensor_files import INDEX_NAME, TensorEntry, TensorFiles, read_header

SHARD = "model-00004-of-00010.safetensors"  # layers.2


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_shard(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], shard: str = SHARD
) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / shard).items()}
    change(tensors)
    save_file(tensors, folder / shard)


def replace_header(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_a_sound_checkpoint_opens_and_says_what_it_is(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert checkpoint.form() == "preview"
    assert "FP4" in checkpoint.describe()
    assert "MTP" in checkpoint.describe()
    tensor = checkpoint.load("layers.2.ffn.experts.3.w2.scale")
    assert (tensor.dtype, tensor.shape) == (torch.float8_e8m0fnu, (256, 4))


def test_reading_does_not_keep_what_was_read(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    names = sorted(checkpoint.names())
    process = psutil.Process()
    for name in names[:50]:
        checkpoint.load(name)
    before = process.memory_info().rss
    for name in names:
        checkpoint.load(name)
    total = sum(entry.num_bytes for entry in checkpoint.files.entries.values())
    assert process.memory_info().rss - before < total / 2


@pytest.mark.bug("P23")
def test_p23_missing_shards_are_named_before_any_weight_is_read(checkpoint_copy: Path) -> None:
    (checkpoint_copy / SHARD).unlink()
    message = error_of(checkpoint_copy)
    assert SHARD in message
    assert "1 of the 10 files" in message
    assert "download is incomplete" in message


@pytest.mark.bug("P23")
def test_p23_an_extra_file_is_ignored_with_one_notice(
    checkpoint_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("extra.safetensors", "more.safetensors"):
        (checkpoint_copy / name).write_bytes(b"not even a header")
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(checkpoint_copy)
    assert len(caplog.records) == 1
    assert "extra.safetensors, more.safetensors" in caplog.text


@pytest.mark.bug("P23")
def test_p23_an_index_that_names_a_tensor_no_shard_has_is_refused(checkpoint_copy: Path) -> None:
    edit_json(
        checkpoint_copy / INDEX_NAME,
        lambda index: index["weight_map"].update({"layers.2.ghost.weight": SHARD}),
    )
    message = error_of(checkpoint_copy)
    assert "layers.2.ghost.weight" in message
    assert SHARD in message


def test_an_index_without_any_file_names_them(checkpoint_copy: Path) -> None:
    for path in checkpoint_copy.glob("*.safetensors"):
        path.unlink()
    message = error_of(checkpoint_copy)
    assert "10 of the 10 files" in message
    assert "and 5 more" in message


@pytest.mark.parametrize("cut", [1, 1000, 200_000])
def test_a_truncated_shard_is_named_with_both_sizes(checkpoint_copy: Path, cut: int) -> None:
    path = checkpoint_copy / SHARD
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    message = error_of(checkpoint_copy)
    assert SHARD in message
    assert str(len(whole) - cut) in message
    assert str(len(whole)) in message
    assert "incomplete" in message


@pytest.mark.parametrize("keep", [0, 7, 8, 100])
def test_a_shard_cut_inside_its_header_is_named(checkpoint_copy: Path, keep: int) -> None:
    path = checkpoint_copy / SHARD
    path.write_bytes(path.read_bytes()[:keep])
    message = error_of(checkpoint_copy)
    assert SHARD in message
    assert "header" in message


def test_trailing_bytes_are_refused(checkpoint_copy: Path) -> None:
    with (checkpoint_copy / SHARD).open("ab") as file:
        file.write(b"\0" * 16)
    assert "damaged" in error_of(checkpoint_copy)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"{not json", "not JSON"),
        (b"[1, 2]", "not an object"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}', "malformed"),
        (b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}', "F99"),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "12 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}', "gap"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
            "overlaps",
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: bytes, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    replace_header(path, header, b"\0" * 12)
    with pytest.raises(CheckpointError, match=fault) as caught:
        read_header(path)
    assert "model.safetensors" in str(caught.value)


def test_a_missing_tensor_is_named(checkpoint_copy: Path) -> None:
    name = "layers.2.attn.kv_norm.weight"
    edit_shard(checkpoint_copy, lambda tensors: tensors.pop(name))
    edit_json(checkpoint_copy / INDEX_NAME, lambda index: index["weight_map"].pop(name))
    message = error_of(checkpoint_copy)
    assert "1 missing" in message
    assert name in message


def test_an_unknown_tensor_is_named(checkpoint_copy: Path) -> None:
    name = "layers.2.attn.k_norm.weight"
    edit_shard(checkpoint_copy, lambda tensors: tensors.update({name: torch.zeros(3)}))
    edit_json(checkpoint_copy / INDEX_NAME, lambda index: index["weight_map"].update({name: SHARD}))
    message = error_of(checkpoint_copy)
    assert "1 unexpected" in message
    assert name in message


def test_a_tensor_that_the_index_does_not_know_is_named(checkpoint_copy: Path) -> None:
    edit_shard(checkpoint_copy, lambda tensors: tensors.update({"stray": torch.zeros(3)}))
    assert "stray" in error_of(checkpoint_copy)


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(129, dtype=torch.bfloat16), "BF16 [129], not BF16 [128]"),
        (torch.zeros(128), "F32 [128], not BF16 [128]"),
    ],
)
def test_a_tensor_of_the_wrong_kind_is_named_with_both_kinds(
    checkpoint_copy: Path, tensor: torch.Tensor, found: str
) -> None:
    name = "layers.2.attn.kv_norm.weight"
    edit_shard(checkpoint_copy, lambda tensors: tensors.update({name: tensor}))
    assert f"{name} is {found}" in error_of(checkpoint_copy)


def test_a_numeric_copy_of_scales_is_refused(checkpoint_copy: Path) -> None:
    name = "layers.2.attn.wq_a.scale"
    edit_shard(
        checkpoint_copy,
        lambda tensors: tensors.update({name: tensors[name].float().to(torch.uint8)}),
    )
    assert f"{name} is U8 [1, 2], not F8_E8M0 [1, 2]" in error_of(checkpoint_copy)


def test_many_faults_are_counted_and_a_few_listed(checkpoint_copy: Path) -> None:
    edit_json(checkpoint_copy / "config.json", lambda config: config.update(n_routed_experts=1000))
    message = error_of(checkpoint_copy)
    assert "missing" in message
    assert "more" in message
    assert len(message) < 2000


def test_a_config_value_that_the_code_depends_on_stops_the_load(checkpoint_copy: Path) -> None:
    edit_json(checkpoint_copy / "config.json", lambda config: config.update(scoring_func="sigmoid"))
    with pytest.raises(ConfigError, match="sqrtsoftplus") as caught:
        Checkpoint.open(checkpoint_copy)
    assert "scoring_func" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": "../x"}}'])
def test_an_index_that_is_none_is_refused(checkpoint_copy: Path, text: str) -> None:
    (checkpoint_copy / INDEX_NAME).write_text(text)
    assert INDEX_NAME in error_of(checkpoint_copy)


def test_shards_without_their_index_are_refused(checkpoint_copy: Path) -> None:
    (checkpoint_copy / INDEX_NAME).unlink()
    message = error_of(checkpoint_copy)
    assert INDEX_NAME in message
    assert "10" in message


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_what_is_no_checkpoint_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises((CheckpointError, ConfigError), match=name):
        Checkpoint.open(tmp_path / name)


def test_one_file_needs_no_index(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(tiny_checkpoint)
    save_file({n: source.load(n) for n in source.names()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    assert sorted(Checkpoint.open(tmp_path).names()) == sorted(source.names())


def test_identity_follows_the_bytes_and_the_config(checkpoint_copy: Path) -> None:
    first = Checkpoint.open(checkpoint_copy).identity()
    assert Checkpoint.open(checkpoint_copy).identity() == first
    edit_json(checkpoint_copy / "config.json", lambda config: config.update(rope_theta=10001))
    second = Checkpoint.open(checkpoint_copy).identity()
    edit_shard(
        checkpoint_copy, lambda t: [tensor.view(torch.uint8).zero_() for tensor in t.values()]
    )
    assert len({first, second, Checkpoint.open(checkpoint_copy).identity()}) == 3


def with_dtypes(entries: dict[str, TensorEntry], **dtypes: str) -> dict[str, TensorEntry]:
    def change(name: str, entry: TensorEntry) -> TensorEntry:
        kind = "expert" if ".experts." in name and name.endswith("weight") else "scale"
        dtype = dtypes.get(kind if kind == "expert" or name.endswith("scale") else "", entry.dtype)
        return TensorEntry(entry.path, dtype, entry.shape, entry.offset, entry.num_bytes)

    return {name: change(name, entry) for name, entry in entries.items()}


def test_dtypes_decide_and_not_what_the_config_claims(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    config, entries = checkpoint.config, dict(checkpoint.files.entries)
    assert config.expert_dtype == "fp4"
    base = detect_artefact(config, with_dtypes(entries, expert="F8_E4M3", scale="F32"))
    assert base.name == "base"
    repack = detect_artefact(config, with_dtypes(entries, expert="F8_E4M3"))
    assert (repack.expert_dtype, repack.scale_dtype) == ("F8_E4M3", "F8_E8M0")
    without_draft = {n: e for n, e in entries.items() if not n.startswith("mtp.")}
    assert detect_artefact(config, without_draft).draft == "none"
    with pytest.raises(CheckpointError, match="BF16"):
        detect_artefact(config, with_dtypes(entries, expert="BF16"))


def test_draft_stages_that_the_config_does_not_announce_are_refused(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    entries = dict(checkpoint.files.entries)
    entries["mtp.0.main_proj.weight"] = entries["mtp.0.e_proj.weight"]
    with pytest.raises(CheckpointError, match="dspark_block_size"):
        detect_artefact(checkpoint.config, entries)


def test_other_names_than_the_official_ones_are_refused(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="official names"):
        Checkpoint.open(tmp_path)


def test_an_unknown_tensor_name_is_an_error(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor layers\.99"):
        TensorFiles.open(tiny_checkpoint).load("layers.99")
