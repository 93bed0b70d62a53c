"""A model runs from its pack as from its checkpoint, bit for bit where the tier is exact."""

from pathlib import Path

import pytest
import torch

from moet.config import ModelSettings, Rounding
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.pack import Pack
from moet.runtime.experts.store import ResidentExpertStore
from tests.models.hash_weights import Rig, dirty_kv, load_rig, run_chunks

TOKEN_IDS = [(37 * i + 11) % 500 for i in range(140)]  # past the window and the first HCA entry


@pytest.mark.parametrize("rounding", ["none", "deployed"])
def test_pack_and_checkpoint_give_the_same_logits(
    tiny_checkpoint: Path, tiny_pack: Path, rounding: Rounding
) -> None:
    checkpoint, pack = Checkpoint.open(tiny_checkpoint), Pack.open(tiny_pack)
    direct = load_rig(checkpoint.config, checkpoint, rounding)
    kv_dtype = "fp32" if rounding == "none" else "fp8"
    model = DeepseekV4.load(checkpoint.config, pack, ModelSettings(rounding=rounding), kv_dtype)
    exact = Rig(model, ResidentExpertStore(pack, "fp4"), dirty_kv(model))
    logits = run_chunks(exact, TOKEN_IDS, [])
    assert torch.equal(logits, run_chunks(direct, TOKEN_IDS, []))
    assert 0.5 < logits.abs().mean() < 1.5
    coarse = Rig(model, ResidentExpertStore(pack, "w2"), dirty_kv(model))
    of_w2 = run_chunks(coarse, TOKEN_IDS, [])
    assert of_w2.isfinite().all()
    # Both tiers see the same first token through the same dense weights: close, yet not equal.
    similarity = torch.cosine_similarity(of_w2, logits, dim=-1)
    assert 0.5 < similarity.mean() < 1
