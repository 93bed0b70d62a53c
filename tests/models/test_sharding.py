"""However many ranks and stages share a model, its logits are the same, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moet.config import ModelSettings, Rounding
from moet.errors import ConfigError
from moet.kernels.gemm import (
    linear_share,
    linear_share_fp8,
    matmul,
    slices_of,
    streamed,
    tree_sum,
)
from moet.kernels.registry import Op
from moet.models.base import ExpertProvider, TensorSource
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_tensors import ARTEFACTS
from moet.models.deepseek_v4_tensors import tensor_inventory as v4_inventory
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.glm_moe_dsa_tensors import tensor_inventory as glm_inventory
from moet.models.pack import Pack
from moet.models.pipeline_stages import stage_layers
from moet.models.sharding import (
    DEEPSEEK_V4,
    GLM_MOE_DSA,
    WHOLE,
    Shard,
    ShardedSource,
    row_of,
)
from tests.models import glm_rig
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN_IDS,
    Piece,
    Rig,
    dirty_kv,
    forward_input,
    hash_source,
    resident_experts,
    run_chunks,
)
from tests.models.ranks import WholeExperts, on_every, shards

# Wide enough that four ranks can share every product.
V4 = replace(
    DEPLOYED,
    num_hidden_layers=4,
    num_hash_layers=1,
    compress_ratios=(0, 4, 128, 4, 0),
    num_attention_heads=4,
    o_groups=4,
    o_lora_rank=128,
    moe_intermediate_size=512,
    vocab_size=260,
)
NARROW = replace(V4, moe_intermediate_size=64, vocab_size=257)  # experts and head stay whole
GROUPS = {"none": ((2, 2),), "deployed": ((4, 1), (1, 2))}
IDS = GOLDEN_IDS[:140]
CHUNKS = [131, 1, 3]


@pytest.mark.parametrize("table", ["v4", "glm"])
def test_a_table_covers_every_tensor(table: str) -> None:
    if table == "v4":
        specs = [s for a in ARTEFACTS.values() for s in v4_inventory(DEPLOYED, a)]
        rows, expert = DEEPSEEK_V4, ".ffn.experts."
    else:
        config = glm_rig.DRAFTING
        specs = [s for f in ("bf16", "fp8") for s in glm_inventory(config, f)]
        rows, expert = GLM_MOE_DSA, ".mlp.experts."
    used = {row_of(rows, spec.name) for spec in specs if expert not in spec.name}
    assert used <= set(rows)
    assert {row.cut for row in used} == {"whole", "outputs", "inputs"}


@given(st.integers(1, 4096))
def test_slices_keep_scales_whole(width: int) -> None:
    count = slices_of(width)
    assert count in (1, 2, 4)
    assert count == 1 or width % (count * 128) == 0


@pytest.mark.parametrize("op", [linear_share, linear_share_fp8])
def test_shares_sum_to_the_same_whatever_their_number(op: Op[..., Tensor]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 1024).bfloat16(), streamed(torch.randn(96, 1024))
    whole = op(x, weight, num_slices=4)
    for size in (2, 4):
        parts = zip(x.chunk(size, 1), weight.chunk(size, 1), strict=True)
        mine = [op(a, streamed(b), num_slices=4 // size) for a, b in parts]
        assert torch.equal(tree_sum(mine), whole)
    assert not torch.equal(whole, matmul(x.float(), weight))  # the order is another one


def _experts(config: DeepseekV4Config, source: TensorSource, shard: Shard) -> ExpertProvider:
    whole = resident_experts(config, source, ModelSettings(), mtp=True)
    if shard.size == 1 or not shard.divides(config.moe_intermediate_size):
        return whole
    return WholeExperts(whole, shard, config.moe_intermediate_size)


def _v4_logits(
    config: DeepseekV4Config, source: TensorSource, rounding: Rounding, shard: Shard
) -> tuple[Tensor, Tensor]:
    """Of a few chunks, and of drafts behind the last one."""
    settings = ModelSettings(rounding=rounding)
    kv_dtype = "fp8" if rounding == "deployed" else "fp32"
    model = DeepseekV4.load(config, source, settings, kv_dtype, 2, shard)
    rig = Rig(model, _experts(config, source, shard), dirty_kv(model))
    logits = run_chunks(rig, IDS, CHUNKS)
    inputs = forward_input([Piece(IDS[:5], 0, 1, (3, 4, 5))])
    output = model.forward(inputs, rig.kv, rig.experts)
    draft = model.draft(inputs, output.hidden_states, rig.kv, rig.experts)
    return logits, draft.logits


@pytest.mark.parametrize("rounding", ["none", "deployed"])
def test_v4_is_the_same_on_any_number_of_ranks(rounding: Rounding) -> None:
    source = hash_source(V4, quantised=rounding == "deployed")
    expected = _v4_logits(V4, source, rounding, WHOLE)
    assert expected[0].isfinite().all()
    for size, stages in GROUPS[rounding]:
        group = shards(size, stages)
        for found in on_every(group, lambda s: _v4_logits(V4, source, rounding, s)):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (size, stages)


def test_what_is_too_narrow_stays_whole() -> None:
    source = hash_source(NARROW, quantised=True)
    expected, _ = _v4_logits(NARROW, source, "deployed", WHOLE)
    for found, _ in on_every(shards(2), lambda s: _v4_logits(NARROW, source, "deployed", s)):
        assert torch.equal(found, expected)


GLM = glm_rig.DRAFTING.from_dict(
    glm_rig.tiny(
        num_nextn_predict_layers=1,
        num_attention_heads=4,
        v_head_dim=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        index_head_dim=64,
        hidden_size=128,
        q_lora_rank=128,
        kv_lora_rank=128,
        intermediate_size=512,
        moe_intermediate_size=512,
        vocab_size=260,
    )
)


GLM_GROUPS = {"none": ((4, 1),), "deployed": ((2, 2),)}


def _glm_logits(source: TensorSource, rounding: Rounding, shard: Shard) -> tuple[Tensor, Tensor]:
    settings = ModelSettings(rounding=rounding)
    kv_dtype = "fp8" if rounding == "deployed" else "fp32"
    model = GlmMoeDsa.load(GLM, source, settings, kv_dtype, 2, shard)
    whole = glm_rig.resident(GLM, source)
    experts: ExpertProvider = whole
    if shard.size > 1:
        experts = WholeExperts(whole, shard, GLM.moe_intermediate_size)
    kv = {
        g.name: torch.full((len(g.held_layers), 8, g.page_bytes), 0x7F, dtype=torch.uint8)
        for g in model.kv_cache_spec().groups
    }
    logits, drafts = [], []
    for start, end in ((0, 60), (60, 61), (61, 70)):
        inputs = forward_input([Piece(glm_rig.IDS[start:end], start, 0, (2, 1))])
        output = model.forward(inputs, kv, experts)
        logits.append(output.logits)
        drafts.append(model.draft(inputs, output.hidden_states, kv, experts).logits)
    return torch.cat(logits), torch.cat(drafts)


@pytest.mark.parametrize(("rounding", "form"), [("none", "fp32"), ("deployed", "fp8")])
def test_glm_is_the_same_on_any_number_of_ranks(rounding: Rounding, form: str) -> None:
    source = glm_rig.random_source(GLM, form)
    expected = _glm_logits(source, rounding, WHOLE)
    assert expected[0].isfinite().all()
    for size, stages in GLM_GROUPS[rounding]:
        for found in on_every(shards(size, stages), lambda s: _glm_logits(source, rounding, s)):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (size, stages)


def test_stages_begin_where_a_selection_is_made() -> None:
    owners = [0, 1, 2, 6, 10, 14]
    cuts = [stage_layers(owners, 18, Shard(0, 1, stage, 3)).start for stage in range(3)]
    assert cuts == [0, 6, 10]
    with pytest.raises(ConfigError, match="only layers that own an indexer"):
        stage_layers([0, 3], 8, Shard(0, 1, 0, 3))


@given(st.sets(st.integers(1, 40), min_size=3), st.integers(1, 4))
def test_every_layer_has_one_stage(owners: set[int], num_stages: int) -> None:
    spans = [
        stage_layers(sorted({0} | owners), 41, Shard(0, 1, s, num_stages))
        for s in range(num_stages)
    ]
    assert [i for span in spans for i in span] == list(range(41))
    assert all(span and span.start in {0} | owners for span in spans)


def test_heads_that_cannot_be_divided_are_told_of() -> None:
    config = replace(DEPLOYED, o_groups=2)
    with pytest.raises(ConfigError, match="-tp 4 cannot divide 4 heads in 2 groups"):
        DeepseekV4.load(config, hash_source(config), ModelSettings(), "fp8", 0, Shard(0, 4))


def test_a_rank_reads_its_part_of_a_pack(tiny_pack: Path) -> None:
    files = Pack.open(tiny_pack)
    source = ShardedSource(files, DEEPSEEK_V4, Shard(1, 2), ())
    for name, dim in (("layers.0.attn.wq_b.weight", 0), ("layers.0.attn.wo_b.weight", 1)):
        whole = files.load(name)
        half = whole.shape[dim] // 2
        assert torch.equal(
            source.load(name).view(torch.uint8),
            whole.narrow(dim, half, half).contiguous().view(torch.uint8),
        )
