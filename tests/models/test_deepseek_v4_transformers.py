"""DeepSeek-V4-Flash against transformers, fp32, every position of a sequence past all borders."""

import pytest
import torch
from torch import Tensor

from moet.models.deepseek_v4_config import DeepseekV4Config
from tests.models.hash_weights import (
    GOLDEN,
    GOLDEN_IDS,
    DictSource,
    hash_source,
    load_rig,
    run_chunks,
)

transformers = pytest.importorskip("transformers")

RENAMED = [  # in order; official name -> transformers
    ("hc_head_", "hc_head.hc_"),
    ("embed.", "embed_tokens."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("attn_sink", "sinks"),
    ("indexer.compressor.", "indexer."),
    ("indexer.wq_b", "indexer.q_b_proj"),
    ("indexer.weights_proj", "indexer.scorer.weights_proj"),
    ("self_attn.indexer.", "self_attn.compressor.indexer."),
    (".wgate.", ".gate_proj."),
    (".ape", ".position_bias"),
    ("q_norm", "q_a_norm"),
    ("gate.bias", "gate.e_score_correction_bias"),
    ("shared_experts.w1", "shared_experts.gate_proj"),
    ("shared_experts.w3", "shared_experts.up_proj"),
    ("shared_experts.w2", "shared_experts.down_proj"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
]


def translated(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    for official, other in RENAMED:
        name = name.replace(official, other)
    if ".compressor." in name:
        name = name.replace(".norm.", ".kv_norm.")
    return f"model.{name}"


def state_dict(config: DeepseekV4Config, source: DictSource) -> dict[str, Tensor]:
    tensors = {
        translated(name): source.load(name)
        for name in source.names()
        if not name.startswith("mtp.") and ".experts." not in name
    }
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}.ffn.experts."
        experts = range(config.n_routed_experts)
        w1, w3, w2 = (
            torch.stack([source.load(f"{prefix}{e}.{w}.weight") for e in experts])
            for w in ("w1", "w3", "w2")
        )
        tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        tensors[f"model.layers.{i}.mlp.experts.down_proj"] = w2
    return tensors


def test_logits_agree_at_every_position() -> None:
    source = hash_source(GOLDEN)
    raw = GOLDEN.to_dict()
    raw["compress_ratios"] = raw["compress_ratios"][: GOLDEN.num_hidden_layers]
    raw["rope_scaling"] |= {"rope_type": "yarn"}
    for key in ("quantization_config", "torch_dtype", "architectures", "model_type"):
        raw.pop(key)
    config = transformers.DeepseekV4Config(**raw, attn_implementation="eager")
    oracle = transformers.DeepseekV4ForCausalLM(config).eval().float()
    result = oracle.load_state_dict(state_dict(GOLDEN, source), strict=False)
    assert not result.unexpected_keys
    assert all("rotary" in key or "inv_freq" in key for key in result.missing_keys)
    with torch.no_grad():
        expected = oracle(torch.tensor([GOLDEN_IDS]), use_cache=False).logits[0]
    got = run_chunks(load_rig(GOLDEN, source), GOLDEN_IDS, [])
    assert 0.3 < expected.abs().mean() < 3
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
