"""Mistakes that ports of DeepSeek-V4-Flash are known for: each is a test that would show it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moet.config import ModelSettings
from moet.errors import CheckpointError, ConfigError
from moet.kernels.hyper_connection import hc_pre
from moet.models import load_model
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.deepseek_v4_attention import RopeTables
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.layers import Weights
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN,
    GOLDEN_IDS,
    DictSource,
    Piece,
    forward_input,
    hash_source,
    load_rig,
    run_chunks,
)

WINDOW_ONLY = replace(GOLDEN, num_hidden_layers=2, num_hash_layers=1, compress_ratios=(0, 0, 0))
COMPRESSED = replace(GOLDEN, num_hidden_layers=2, num_hash_layers=1, compress_ratios=(4, 128, 0))


def logits_of(config: DeepseekV4Config, source: DictSource | None = None) -> Tensor:
    return run_chunks(load_rig(config, source or hash_source(config)), GOLDEN_IDS[:140], [])


def changed(source: DictSource, name: str, change: Callable[[Tensor], Tensor]) -> DictSource:
    return DictSource({**source.tensors, name: change(source.load(name))})


def test_each_layer_kind_has_its_own_rope_table() -> None:
    window, compressed = logits_of(WINDOW_ONLY), logits_of(COMPRESSED)
    assert torch.equal(logits_of(replace(WINDOW_ONLY, compress_rope_theta=500.0)), window)
    assert not torch.allclose(logits_of(replace(WINDOW_ONLY, rope_theta=500.0)), window)
    assert torch.equal(logits_of(replace(COMPRESSED, rope_theta=500.0)), compressed)
    changed_theta = logits_of(replace(COMPRESSED, compress_rope_theta=500.0))
    assert not torch.allclose(changed_theta, compressed)


def test_yarn_is_on_compressed_layers_only() -> None:
    yarn = replace(GOLDEN.rope_scaling, factor=4)
    assert torch.equal(logits_of(replace(WINDOW_ONLY, rope_scaling=yarn)), logits_of(WINDOW_ONLY))
    tables = RopeTables(GOLDEN)
    assert tables.main[-1] == pytest.approx(1e4 ** (-6 / 8))
    assert tables.compress[-1] == pytest.approx(1.6e5 ** (-6 / 8) / 16)


def test_output_is_rotated_back() -> None:
    # A query that sees nothing but itself must not know where it stands.
    config = replace(WINDOW_ONLY, sliding_window=1, num_hash_layers=0)
    rig = load_rig(config, hash_source(config))
    logits = run_chunks(rig, [42] * 60, [])
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), atol=2e-4, rtol=0)


def test_entries_are_rotated_at_the_first_token_of_their_window() -> None:
    config = replace(COMPRESSED, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(4, 0))
    source = hash_source(config)
    rig = load_rig(config, source)
    run_chunks(rig, GOLDEN_IDS[:12], [])
    entries = rig.model.layers[0].attn.compressor
    assert entries is not None
    got = entries.entries.cache(rig.kv).read(torch.arange(3))

    load = partial(_load, source, "layers.0.")
    streams = source.load("embed.weight")[GOLDEN_IDS[:12]].unsqueeze(1).expand(-1, 4, -1)
    x, _, _ = hc_pre(
        streams,
        load("hc_attn_fn"),
        load("hc_attn_base"),
        load("hc_attn_scale"),
        norm_eps=1e-6,
        hc_eps=1e-6,
        num_iters=20,
    )
    x = _rms(x) * load("attn_norm.weight")
    values = x @ load("attn.compressor.wkv.weight").T
    scores = x @ load("attn.compressor.wgate.weight").T
    scores += load("attn.compressor.ape").repeat(3, 1)
    frequencies = RopeTables(config).compress
    for j in range(3):
        own = slice(4 * j, 4 * j + 4)
        v, s = [values[own, 32:]], [scores[own, 32:]]
        if j:  # the first window has no predecessor
            before = slice(4 * j - 4, 4 * j)
            v, s = [values[before, :32], *v], [scores[before, :32], *s]
        pooled = (torch.cat(v) * torch.cat(s).softmax(0)).sum(0)
        entry = _rms(pooled) * load("attn.compressor.norm.weight")
        angles = 4 * j * frequencies
        a, b = entry[-8::2], entry[-7::2]
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        expected = torch.cat([entry[:-8], torch.stack(turned, -1).flatten()])
        torch.testing.assert_close(got[j], expected, atol=1e-5, rtol=0)


def _load(source: DictSource, prefix: str, name: str) -> Tensor:
    return source.load(prefix + name)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_hash_layers_route_by_token_and_others_by_bias() -> None:
    source = hash_source(WINDOW_ONLY)
    base = logits_of(WINDOW_ONLY, source)
    rolled = changed(source, "layers.0.ffn.gate.tid2eid", lambda t: (t + 1) % 8)
    assert not torch.allclose(logits_of(WINDOW_ONLY, rolled), base)
    assert "layers.0.ffn.gate.bias" not in source.tensors
    biased = changed(source, "layers.1.ffn.gate.bias", lambda b: b + torch.arange(8.0))
    assert not torch.allclose(logits_of(WINDOW_ONLY, biased), base)


def test_bias_chooses_and_does_not_weigh() -> None:
    source = hash_source(WINDOW_ONLY)
    higher = changed(source, "layers.1.ffn.gate.bias", lambda b: b + 3)
    assert torch.equal(logits_of(WINDOW_ONLY, higher), logits_of(WINDOW_ONLY, source))


def test_shared_expert_is_clamped() -> None:
    source = hash_source(WINDOW_ONLY)
    name = "layers.0.ffn.shared_experts.w3.weight"
    huge, huger = (changed(source, name, lambda w, f=f: w * f) for f in (1e6, 1e7))
    torch.testing.assert_close(logits_of(WINDOW_ONLY, huge), logits_of(WINDOW_ONLY, huger))


def test_index_is_rotated_on_both_sides() -> None:
    config = replace(DEPLOYED, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(4, 0))
    source = hash_source(config, quantised=True)
    ids = GOLDEN_IDS[:200]
    choices = {}
    for kv_dtype in ("fp8", "bf16"):
        rig = load_rig(config, source, "deployed", kv_dtype=kv_dtype)
        indexer = rig.model.layers[0].attn.indexer
        assert indexer is not None
        seen = choices[kv_dtype] = []
        select = indexer._select
        indexer._select = lambda *args, f=select, seen=seen, **settings: (
            seen.append(f(*args, **settings)) or seen[-1]
        )
        run_chunks(rig, ids, [])
    pairs = [zip(*map(list, pair), strict=True) for pair in zip(*choices.values(), strict=True)]
    full = [(a, b) for rows in pairs for a, b in rows if min(a[-1], b[-1]) >= DEPLOYED.index_topk]
    shared = [len(set(a.tolist()) & set(b.tolist())) / len(a) for a, b in full]
    assert len(shared) > 150
    assert sum(shared) / len(shared) > 0.75  # FP4 noise; one side alone leaves chance, about 0.3


def test_draft_block_is_never_hash_routed() -> None:
    config = replace(GOLDEN, num_hash_layers=GOLDEN.num_hidden_layers)
    rig = load_rig(config, hash_source(config), num_spec_tokens=1)
    assert rig.model.mtp is not None
    assert rig.model.mtp.block.ffn.router.table is None
    assert rig.model.layers[-1].ffn.router.table is not None


def test_final_norm_takes_out_the_size_of_the_streams() -> None:
    rig = load_rig(WINDOW_ONLY, hash_source(WINDOW_ONLY))
    output = rig.model.forward(forward_input([Piece(GOLDEN_IDS[:5], 0)]), rig.kv, rig.experts)
    scaled = rig.model.head(output.hidden_states * 1e6)
    torch.testing.assert_close(scaled, output.logits, atol=1e-3, rtol=1e-3)


def test_fp8_weights_are_scaled_by_exponent_bytes() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120]], dtype=torch.uint8)  # 2^-7
    forms = [scale.view(torch.float8_e8m0fnu), torch.tensor([[2.0**-7]])]
    for form in forms:
        source = DictSource({"a.weight": weight, "a.scale": form})
        matrix, quantised = Weights(source, ModelSettings()).matrix("a", 2, 2)
        assert quantised
        assert torch.equal(matrix, weight.float() * 2.0**-7)


def test_fp4_experts_are_nibble_pairs_and_not_signed_bytes() -> None:
    config = replace(DEPLOYED, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(0, 0))
    source = hash_source(config, quantised=True)
    table = load_rig(config, source, "deployed").experts.resolve(0, torch.zeros(1, 1).long())
    for name, matrix in zip(("w1", "w3", "w2"), table.format.unpack(table.rows[3]), strict=True):
        packed = source.load(f"layers.0.ffn.experts.3.{name}.weight").view(torch.uint8)
        scale = source.load(f"layers.0.ffn.experts.3.{name}.scale").view(torch.uint8)
        levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        for row, column in ((0, 0), (0, 1), (5, 33), (31, 62)):
            code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
            size = levels[code & 7] * 2.0 ** (int(scale[row, column // 32]) - 127)
            assert matrix[row, column] == (-size if code & 8 else size)


class TestRefusals:
    def load(self, source: DictSource, **kwargs: object) -> DeepseekV4:
        settings = ModelSettings(rounding="none")
        return DeepseekV4.load(WINDOW_ONLY, source, settings, "fp32", **kwargs)  # type: ignore[arg-type]

    def test_missing_tensor(self) -> None:
        source = hash_source(WINDOW_ONLY)
        del source.tensors["layers.1.attn.wkv.weight"]  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wkv\.weight"):
            self.load(source)

    def test_misshapen_tensor(self) -> None:
        source = changed(hash_source(WINDOW_ONLY), "norm.weight", lambda w: w[:-1])
        with pytest.raises(CheckpointError, match=r"norm\.weight is \(63,\)"):
            self.load(source)

    def test_routing_table_out_of_range(self) -> None:
        name = "layers.0.ffn.gate.tid2eid"
        with pytest.raises(CheckpointError, match="there are 8"):
            self.load(changed(hash_source(WINDOW_ONLY), name, lambda t: t + 1))

    def test_rounding_none_with_quantised_kv(self) -> None:
        settings = ModelSettings(rounding="none")
        with pytest.raises(ConfigError, match="fp32"):
            DeepseekV4.load(WINDOW_ONLY, hash_source(WINDOW_ONLY), settings, "fp8")

    def test_kv_format_of_another_model(self) -> None:
        with pytest.raises(ConfigError, match="nvfp4"):
            DeepseekV4.load(WINDOW_ONLY, hash_source(WINDOW_ONLY), ModelSettings(), "nvfp4")

    def test_drafts_without_draft_block(self) -> None:
        source = hash_source(WINDOW_ONLY)
        kept = {n: t for n, t in source.tensors.items() if not n.startswith("mtp.")}
        assert self.load(DictSource(kept)).mtp is None
        with pytest.raises(ConfigError, match="MTP"):
            self.load(DictSource(kept), num_spec_tokens=2)

    def test_unknown_architecture(self) -> None:
        raw = {"architectures": ["SomethingElse"]}
        with pytest.raises(ConfigError, match="SomethingElse"):
            load_model(raw, DictSource({}), ModelSettings(), "fp8")


def test_load_model_by_architecture() -> None:
    settings = ModelSettings(rounding="none")
    model = load_model(WINDOW_ONLY.to_dict(), hash_source(WINDOW_ONLY), settings, "fp32")
    assert model.vocab_size == 257
    assert {group.name for group in model.kv_cache_spec().groups} == {"window"}
