"""GLM-5.2 from checkpoint to pack, from each flavour: what is exact is exact, the rest reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moet.config import ModelSettings, Precision
from moet.errors import CheckpointError
from moet.kernels.moe import ExpertTable, F32Experts
from moet.kernels.nvfp4 import nvfp4_dequantize
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.models import load_model
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.formats import dequantize_fp8_block, dequantize_mxfp4, quantize_mxfp4
from moet.models.glm_moe_dsa_config import Flavour
from moet.models.glm_moe_dsa_tensors import tensor_inventory
from moet.models.moe import ResidentExperts
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.models.w2 import quantize_w2_values
from moet.runtime.experts.store import ResidentExpertStore
from tests.models.hash_weights import Rig, dirty_kv, run_chunks

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
OPTIONS = ConvertOptions(num_workers=1)
DRAFT = 7  # of the tiny size


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Flavour, Checkpoint]:
    root = tmp_path_factory.mktemp("glm")
    for flavour in FLAVOURS:
        write_checkpoint(root / flavour, size="tiny", flavour=flavour, model="glm-5.2")
    return {flavour: Checkpoint.open(root / flavour) for flavour in FLAVOURS}


@pytest.fixture(scope="module")
def packs(
    checkpoints: dict[Flavour, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[Flavour, Pack]:
    root = tmp_path_factory.mktemp("packs")
    return {
        flavour: convert(checkpoint, root / flavour, OPTIONS)
        for flavour, checkpoint in checkpoints.items()
    }


def expert_values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One expert matrix in float64, by the format's own definition."""
    weight = checkpoint.load(f"{name}.weight")
    if weight.dtype == torch.bfloat16:
        return weight.double()
    if weight.dtype == torch.float8_e4m3fn:
        scale = checkpoint.load(f"{name}.weight_scale_inv")
        return dequantize_fp8_block(weight, scale, torch.float64)
    scales = checkpoint.load(f"{name}.weight_scale").view(torch.uint8)
    factor = checkpoint.load(f"{name}.weight_scale_2").item()
    return nvfp4_dequantize(weight, scales, global_scale=factor, dtype=torch.float64)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_flavour_is_recognised_by_dtype(
    flavour: Flavour, checkpoints: dict[Flavour, Checkpoint]
) -> None:
    checkpoint = checkpoints[flavour]
    assert checkpoint.form() == flavour
    assert "GLM-5.2" in checkpoint.describe()
    assert flavour.upper() in checkpoint.describe()
    assert checkpoint.experts.layers == (3, 4, 5, 6, DRAFT)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_w2_rows_are_the_reference_pipeline_in_float64(
    flavour: Flavour, checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints[flavour], packs[flavour]
    form = pack.format("w2")
    for layer_idx, expert_id in ((3, 0), (6, 15), (DRAFT, 5)):
        codes = form.unpack_codes(pack.expert_row("w2", layer_idx, expert_id))
        names = pack.experts.matrices(pack.experts.row(layer_idx, expert_id))
        for name, (found, scale) in zip(names, codes, strict=True):
            expected = quantize_w2_values(expert_values(checkpoint, name), "mse")
            assert torch.equal(found, expected.codes)
            assert torch.equal(scale, expected.scale)


def test_nvfp4_experts_keep_every_byte(
    checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints["nvfp4"], packs["nvfp4"]
    form = pack.format("fp4")
    assert isinstance(form, Nvfp4Rows)
    for layer_idx, expert_id in ((3, 0), (5, 7), (6, 15)):
        row = pack.expert_row("fp4", layer_idx, expert_id)
        names = pack.experts.matrices(pack.experts.row(layer_idx, expert_id))
        factors = [checkpoint.load(f"{name}.weight_scale_2").item() for name in names]
        assert form.global_scales(row).tolist() == factors
        for name, (codes, scales), matrix in zip(
            names, form.unpack_codes(row), form.unpack(row), strict=True
        ):
            stored = checkpoint.load(f"{name}.weight")
            assert torch.equal(codes[:, 0::2] | codes[:, 1::2] << 4, stored)
            assert torch.equal(scales, checkpoint.load(f"{name}.weight_scale").view(torch.uint8))
            assert torch.equal(matrix, expert_values(checkpoint, name).float())
    assert pack.row_base("fp4", 3, 0).numel() == 0


def test_the_wide_draft_layer_of_an_nvfp4_checkpoint_becomes_nvfp4(
    checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints["nvfp4"], packs["nvfp4"]
    row = pack.expert_row("fp4", DRAFT, 2)
    names = pack.experts.matrices(pack.experts.row(DRAFT, 2))
    report = json.loads((pack.folder / "report.json").read_text())["tensors"]
    for name, matrix in zip(names, pack.format("fp4").unpack(row), strict=True):
        wide = checkpoint.load(f"{name}.weight")
        assert wide.dtype == torch.bfloat16
        error = ((matrix - wide.float()).norm() / wide.float().norm()).item()
        assert 0.05 < error < 0.12
        assert report[name]["fp4_rel_rms"] == pytest.approx(error, rel=1e-3)
    exact = pack.experts.matrices(0)[0]
    assert report[exact]["fp4_rel_rms"] == 0


@pytest.mark.parametrize("flavour", ["bf16", "fp8"])
def test_wider_experts_become_mxfp4_once(
    flavour: Flavour, checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints[flavour], packs[flavour]
    matrices = pack.format("fp4").unpack(pack.expert_row("fp4", 4, 9))
    names = pack.experts.matrices(pack.experts.row(4, 9))
    for name, matrix in zip(names, matrices, strict=True):
        expected = dequantize_mxfp4(*quantize_mxfp4(expert_values(checkpoint, name)))
        assert torch.equal(matrix, expected)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_dense_tensors_are_kept_as_they_are(
    flavour: Flavour, checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints[flavour], packs[flavour]
    names = set(pack.names())
    assert names == {n for n in checkpoint.names() if not pack.experts.is_expert(n)}
    for name in names:
        ours, theirs = pack.load(name), checkpoint.load(name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    pack.verify()


def test_dense_linears_can_be_made_fp8(
    checkpoints: dict[Flavour, Checkpoint], tmp_path: Path
) -> None:
    checkpoint = checkpoints["nvfp4"]
    pack = convert(checkpoint, tmp_path / "p", ConvertOptions(num_workers=1, dense_dtype="fp8"))
    specs = {spec.name: spec for spec in tensor_inventory(checkpoint.config, "fp8")}
    report = json.loads((pack.folder / "report.json").read_text())
    made = [name for name in pack.names() if pack.load(name).dtype == torch.float8_e4m3fn]
    assert set(made) == {
        n for n, s in specs.items() if s.dtype == "F8_E4M3" and not pack.experts.is_expert(n)
    }
    assert set(report["dense"]) == set(made)
    for name in made:
        scale = pack.load(name + "_scale_inv")
        assert torch.equal(scale.log2(), scale.log2().round())
        weight = dequantize_fp8_block(pack.load(name), scale)
        wide = checkpoint.load(name).float()
        error = ((weight - wide).norm() / wide.norm()).item()
        assert error < 0.03
        assert report["dense"][name]["dense_rel_rms"] == pytest.approx(error, rel=1e-3)
    assert report["worst_dense_rel_rms"] == max(
        r["dense_rel_rms"] for r in report["dense"].values()
    )
    kept = ["lm_head.weight", "model.layers.3.mlp.gate.weight", "model.layers.7.eh_proj.weight"]
    assert all(pack.load(name).dtype == torch.bfloat16 for name in kept)
    pack.verify()
    with pytest.raises(CheckpointError, match="dense dtype fp8"):
        convert(checkpoint, tmp_path / "p", OPTIONS)


def test_fp8_linears_can_be_made_bf16(
    checkpoints: dict[Flavour, Checkpoint], tmp_path: Path
) -> None:
    checkpoint = checkpoints["fp8"]
    pack = convert(checkpoint, tmp_path / "p", ConvertOptions(num_workers=1, dense_dtype="bf16"))
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    exact = dequantize_fp8_block(checkpoint.load(name), checkpoint.load(name + "_scale_inv"))
    assert torch.equal(pack.load(name), exact.bfloat16())
    assert not [n for n in pack.names() if n.endswith("_scale_inv")]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_pack_runs_as_its_checkpoint_says(
    flavour: Flavour, checkpoints: dict[Flavour, Checkpoint], packs: dict[Flavour, Pack]
) -> None:
    checkpoint, pack = checkpoints[flavour], packs[flavour]
    model = load_model(pack.config, pack, ModelSettings(rounding="none"), "fp32")
    token_ids = [(37 * i + 11) % 500 for i in range(80)]  # past index_topk
    direct = run_chunks(Rig(model, wide_experts(checkpoint), dirty_kv(model)), token_ids, [])
    assert 0.5 < direct.abs().mean() < 1.5
    tiers = {}
    for tier in get_args(Precision):
        rig = Rig(model, ResidentExpertStore(pack, tier), dirty_kv(model))
        tiers[tier] = run_chunks(rig, token_ids, [])
        similarity = torch.cosine_similarity(tiers[tier], direct, dim=-1).mean()
        assert similarity > (0.5 if tier == "w2" else 0.9)
    if flavour == "nvfp4":
        assert torch.equal(tiers["fp4"], direct)
    assert not torch.equal(tiers["w2"], direct)


def wide_experts(checkpoint: Checkpoint) -> ResidentExperts:
    """The decoder's experts in fp32, from the checkpoint and not from a pack."""
    experts = checkpoint.experts
    form = F32Experts(experts.hidden_size, experts.moe_intermediate_size)
    tables = {}
    for layer_idx in experts.layers[:-1]:
        rows = []
        for expert_id in range(experts.num_experts):
            names = experts.matrices(experts.row(layer_idx, expert_id))
            gate, up, down = (expert_values(checkpoint, name).float() for name in names)
            rows.append(form.pack(gate, up, down))
        slots = torch.arange(experts.num_experts)
        tables[layer_idx] = ExpertTable(form, torch.stack(rows), slots)
    return ResidentExperts(tables)


def rewrite(folder: Path, shard: str, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a shard, and its index with it."""
    tensors = load_file(folder / shard)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / shard)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    mapped = {n: s for n, s in index["weight_map"].items() if n not in change}
    mapped |= {n: shard for n, t in change.items() if t is not None}
    index["weight_map"] = mapped
    sizes = [load_file(p).values() for p in folder.glob("*.safetensors")]
    index["metadata"]["total_size"] = sum(t.nbytes for tensors in sizes for t in tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_copies_of_the_embedding_in_the_draft_layer_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    plan = write_checkpoint(folder, size="tiny", flavour="nvfp4", model="glm-5.2")
    shard = list(plan.shards)[-1]
    copy = torch.zeros(512, 256, dtype=torch.bfloat16)
    name = f"model.layers.{DRAFT}.embed_tokens.weight"
    rewrite(folder, shard, {name: copy})
    pack = convert(Checkpoint.open(folder), tmp_path / "p", OPTIONS)
    assert name not in set(pack.names())
    rewrite(folder, shard, {name: None, "model.layers.3.self_attn.indexer.wk.weight": copy})
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*layers\.3\.self_attn\.index"):
        Checkpoint.open(folder)


def test_infinite_scales_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    plan = write_checkpoint(folder, size="tiny", flavour="nvfp4", model="glm-5.2")
    shard = next(
        s for s, specs in plan.shards.items() if specs[0].name.startswith("model.layers.3.")
    )
    name = "model.layers.3.mlp.experts.2.up_proj.weight_scale_2"
    rewrite(folder, shard, {name: torch.tensor(np.float32("nan"))})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj: .* holds NaN"):
        convert(Checkpoint.open(folder), tmp_path / "p", OPTIONS)
