"""Dummy weights: every tensor that a config describes, finite, seeded, and as skewed as asked."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from moet.errors import CheckpointError, ConfigError
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.models.dummy import DummyOptions, DummySource, dummy_rows
from moet.models.formats import dequantize_fp8_block
from moet.models.synthetic import plan_checkpoint
from moet.models.tensor_spec import DTYPE_BYTES


def config(model: str = "deepseek-v4-flash") -> dict[str, Any]:
    return dict(plan_checkpoint("tiny", model=model).texts["config.json"])


@pytest.mark.parametrize("model", ["deepseek-v4-flash", "glm-5.2"])
def test_every_dense_tensor_has_the_shape_and_dtype_of_the_release(model: str) -> None:
    plan = plan_checkpoint("tiny", model=model)
    specs = {spec.name: spec for part in plan.shards.values() for spec in part}
    source = DummySource(config(model), DummyOptions(), "cpu")
    names = set(source.names())
    assert names == {name for name in specs if ".experts." not in name}
    for name in names:
        value = source.load(name)
        assert tuple(value.shape) == tuple(specs[name].shape)
        assert value.element_size() == DTYPE_BYTES[specs[name].dtype]
        assert value.float().isfinite().all(), name
    with pytest.raises(CheckpointError, match=r"no tensor layers\.99"):
        source.load("layers.99.attn.wkv.weight")


def test_a_tensor_is_a_function_of_seed_and_name() -> None:
    sources = [DummySource(config(), DummyOptions(seed=n), "cpu") for n in (3, 3, 4)]
    first, again, other = (s.load("layers.1.attn.wq_a.weight").float() for s in sources)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, sources[0].load("layers.2.attn.wq_a.weight").float())


def test_matrices_keep_the_size_of_their_input() -> None:
    source = DummySource(config(), DummyOptions(), "cpu")
    weight = source.load("layers.1.attn.wo_b.weight")
    values = dequantize_fp8_block(weight, source.load("layers.1.attn.wo_b.scale"))
    assert 0.5 < float(values.std()) * sqrt(weight.shape[1]) < 2


@pytest.mark.parametrize(("skew", "least", "most"), [(0.0, 0.0, 0.4), (1.0, 0.4, 1.0)])
def test_skew_makes_experts_popular(skew: float, least: float, most: float) -> None:
    source = DummySource(config(), DummyOptions(skew=skew), "cpu")
    table = source.load("layers.0.ffn.gate.tid2eid")
    assert all(len(set(row)) == len(row) for row in table.tolist())
    counts = table.flatten().bincount(minlength=source.experts.num_experts)
    top = counts.sort(descending=True).values[:4].sum() / counts.sum()
    assert least <= float(top) <= most
    bias = source.load("layers.5.ffn.gate.bias")
    assert (float(bias.max()), float(bias.min()) < 0) == (0.0, skew > 0)


@pytest.mark.parametrize("form", [W2Rows(256, 128), Mxfp4Rows(256, 128), W2Rows(128, 2048)])
def test_rows_are_valid_experts(form: ExpertRows) -> None:
    rows, bases = dummy_rows(form, 3, seed=1, device="cpu")
    assert rows.shape == (3, form.row_bytes)
    again, _ = dummy_rows(form, 3, seed=1, device="cpu")
    assert torch.equal(rows, again)
    for row, base in zip(rows, bases, strict=True):
        for matrix in form.unpack(row):
            assert matrix.isfinite().all()
            assert 0.6 < float(matrix.std()) * sqrt(matrix.shape[1]) < 1.6
        assert torch.equal(form.row_base(row), base)


def test_formats_without_a_generator_are_refused() -> None:
    with pytest.raises(ConfigError, match="not nvfp4"):
        dummy_rows(Nvfp4Rows(256, 128), 1, seed=0, device="cpu")
