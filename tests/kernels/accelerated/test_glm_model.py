"""A whole GLM model as a GPU runs it, packed weights and all, against the reference: chunks, rows
that see more than they select, drafts and fill rows."""

from __future__ import annotations

import shutil
from typing import Literal

import pytest
import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.kernels.cubin import device_arch
from moet.kernels.device_gemm import Device
from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider
from moet.models.expert_encoder import encode_expert, row_formats
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.moe import ResidentExperts, UnpackedExperts
from moet.runtime.experts.store import DeviceExperts
from tests.kernels import emulation
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.test_gpu_model import filled_rows
from tests.models.glm_configs import tiny
from tests.models.glm_rig import IDS, random_source
from tests.models.hash_weights import DictSource, Piece, Rig, dirty_kv, forward_input, run_step

CONFIG = GlmMoeDsaConfig.from_dict(
    tiny(
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        index_head_dim=128,
        index_n_heads=16,
        index_topk=8,
        index_skip_topk_offset=1,
        num_nextn_predict_layers=1,
    )
)
Dense = Literal["fp8", "bf16"]
CASES: list[tuple[Dense, KVDtype]] = [("bf16", "nvfp4"), ("fp8", "fp8"), ("fp8", "nvfp4")]


def experts_of(
    config: GlmMoeDsaConfig, source: DictSource, device: Device
) -> tuple[ExpertProvider, ExpertProvider]:
    """The W2 rows of every layer, for the reference and for a GPU."""
    form = row_formats(config.hidden_size, config.moe_intermediate_size)["w2"]
    layers = range(config.first_k_dense_replace, config.num_hidden_layers + 1)
    rows, bases = [], []
    for layer_idx in layers:
        for expert_id in range(config.n_routed_experts):
            prefix = f"model.layers.{layer_idx}.mlp.experts.{expert_id}."
            names = (f"{prefix}gate_proj", f"{prefix}up_proj", f"{prefix}down_proj")
            made = encode_expert(
                source.load, names, {"w2": form}, "mse", fp8_scale="weight_scale_inv"
            )
            rows.append(made.rows["w2"])
            bases.append(made.bases["w2"])
    stacked, count = torch.stack(rows), config.n_routed_experts
    tables = {
        idx: ExpertTable(form, stacked, torch.arange(i * count, (i + 1) * count))
        for i, idx in enumerate(layers)
    }
    where = device.torch_device
    placed = DeviceExperts(form, stacked.to(where), torch.stack(bases).to(where), list(layers))
    return UnpackedExperts(ResidentExperts(tables)), placed


def rigs(dense: Dense, kv_dtype: KVDtype, device: torch.device) -> tuple[Rig, Rig]:
    if INTERPRETED:
        if shutil.which("g++") is None:
            pytest.skip("emulation needs a compiler")
        sources = ("stream_gemm", "moe", "prefill_gemm", "join_norm", "short_stream")
        launcher = emulation.build(sources, 90, num_sms=3)
        gpu = Device.around(launcher, "sm90a", "cpu")
    else:
        gpu = Device.open(device_arch(device), device)
    source = random_source(CONFIG, dense)
    settings = ModelSettings(rounding="deployed", precision="w2")
    reference = GlmMoeDsa.load(CONFIG, source, settings, kv_dtype, 1)
    placed = ModelSettings(arch=gpu.arch, rounding="deployed", precision="w2")
    model = GlmMoeDsa.load(CONFIG, source, placed, kv_dtype, 1, gpu=gpu)
    own, others = experts_of(CONFIG, source, gpu)
    kv = {name: tensor.to(device) for name, tensor in dirty_kv(model).items()}
    return Rig(reference, own, dirty_kv(reference)), Rig(model, others, kv)


def likeness(found: Tensor, wanted: Tensor) -> float:
    """The middle cosine of rows: a choice at a border may go another way in some."""
    return float(torch.cosine_similarity(found.float().cpu(), wanted.float(), dim=1).median())


@pytest.mark.parametrize(("dense", "kv_dtype"), CASES[:1] if INTERPRETED else CASES)
def test_a_model_follows_its_reference(
    dense: Dense, kv_dtype: KVDtype, device: torch.device
) -> None:
    reference, gpu = rigs(dense, kv_dtype, device)
    found, wanted, start = [], [], 0
    for size in (10, 2):
        pieces = [Piece(IDS[start : start + size], start)]
        wanted += run_step(reference, pieces)
        found += run_step(gpu, pieces)
        start += size
    assert likeness(torch.cat(found), torch.cat(wanted)) > 0.97
    pieces = [Piece(IDS[1:4], 0, 1, (4, 5))]
    hidden = torch.randn(3, CONFIG.hidden_size).bfloat16()
    drafted = [
        rig.model.draft(forward_input(pieces), hidden.to(where), rig.kv, rig.experts).logits
        for rig, where in ((gpu, device), (reference, "cpu"))
    ]
    assert likeness(*drafted) > 0.97
    check_fill_rows(gpu)
    assert int(gpu.model.device.error) == 0


def check_fill_rows(rig: Rig) -> None:
    """A row's logits and state do not show who is beside it."""
    model, kv = rig.model, rig.kv
    inputs = forward_input([Piece(IDS[12:13], 12)])
    device = model.device.torch_device
    rows, token_ids = model.rows(inputs), inputs.token_ids.to(device)
    kept = {name: tensor.clone() for name, tensor in kv.items()}
    with torch.inference_mode():
        alone = model.compute(token_ids, rows, None, kv, rig.experts)
        after = {name: tensor.clone() for name, tensor in kv.items()}
        for name, tensor in kept.items():
            kv[name].copy_(tensor)
        longer = torch.cat([token_ids, torch.zeros(2, dtype=torch.int64, device=device)])
        filled = model.compute(longer, filled_rows(rows, 2), None, kv, rig.experts)
    assert torch.equal(filled.logits[0], alone.logits[0])
    assert filled.logits.isfinite().all()
    assert all(torch.equal(kv[name], after[name]) for name in kv)
