"""Checkpoints of a few levels: where each weight goes, and that a bias is told as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.quality_codebook import ASYMMETRIC, SYMMETRIC, write_codebook
from moet.kernels.nvfp4 import decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from moet.models.formats import quantize_mxfp4
from moet.models.w2 import quantize_w2

NAME = "layers.0.ffn.experts.0.w1"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_mxfp4(weight)
    other = pack_nibbles(encode_e2m1(weight))
    tensors = {f"{NAME}.weight": codes, f"{NAME}.scale": scale.view(torch.uint8), "other": other}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_the_symmetric_codebook_is_that_of_two_bit_experts(source: Path, tmp_path: Path) -> None:
    errors = write_codebook(source, tmp_path / "made", SYMMETRIC)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "made" / "model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(before["other"], after["other"])
    assert (tmp_path / "made" / "config.json").is_file()
    found = decode_e2m1(unpack_nibbles(after[f"{NAME}.weight"].view(torch.uint8)))
    w2 = quantize_w2(
        before[f"{NAME}.weight"], before[f"{NAME}.scale"].view(torch.float8_e8m0fnu), "inherit"
    )
    levels = torch.tensor([1.0, 4.0, -1.0, -4.0])
    assert torch.equal(found, levels[w2.codes.long()])
    assert abs(errors["bias"]) < 0.01


def test_the_asymmetric_codebook_is_about_as_near_but_biased(source: Path, tmp_path: Path) -> None:
    symmetric = write_codebook(source, tmp_path / "a", SYMMETRIC)
    asymmetric = write_codebook(source, tmp_path / "b", ASYMMETRIC)
    assert asymmetric["rel_rms"] < symmetric["rel_rms"] * 1.25
    assert abs(asymmetric["bias"]) > 10 * abs(symmetric["bias"])
    after = load_file(tmp_path / "b" / "model.safetensors")[f"{NAME}.weight"]
    values = decode_e2m1(unpack_nibbles(after.view(torch.uint8)))
    assert set(values.unique().tolist()) == set(ASYMMETRIC)
