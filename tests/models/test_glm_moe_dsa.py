"""GLM-5.2 against transformers and against itself: chunks, batch mates and page numbers do not
show. transformers attends un-absorbed over expanded keys, so parity also checks the absorption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.config import KVDtype, Rounding
from moet.errors import CheckpointError, ConfigError
from moet.models.glm_moe_dsa_cache import CacheLayout
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from tests.models.glm_configs import released, tiny
from tests.models.glm_rig import (
    DRAFTING,
    IDS,
    TINY,
    BesideNarrow,
    load_model,
    random_source,
    resident,
)
from tests.models.hash_weights import (
    DictSource,
    Piece,
    Rig,
    dirty_kv,
    forward_input,
    run_chunks,
    run_step,
)

CHUNKS = [40, 1, 1, 23, 1]
SOURCE = random_source(TINY)
PAGES = (5, 0, 7)


def rig_of(rounding: Rounding, kv_dtype: KVDtype = "fp32", source: DictSource | None = None) -> Rig:
    source = source or SOURCE
    model = load_model(TINY, source, rounding, kv_dtype)
    return Rig(model, resident(TINY, source), dirty_kv(model))


def stacked_experts(source: DictSource) -> dict[str, Tensor]:
    """The state dict as transformers keeps it in memory: experts of a layer in two tensors."""
    state = {name: t for name, t in source.tensors.items() if ".mlp.experts." not in name}
    for layer_idx in range(TINY.first_k_dense_replace, TINY.num_hidden_layers):
        prefix = f"model.layers.{layer_idx}.mlp.experts."
        gates, ups, downs = (
            [source.load(f"{prefix}{e}.{name}.weight") for e in range(TINY.n_routed_experts)]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        state[prefix + "gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), 1)
        state[prefix + "down_proj"] = torch.stack(downs)
    return state


@pytest.mark.parametrize(("eps", "bound"), [(1e-6, 2e-5), (1e-5, 1e-4)])
def test_parity_with_transformers(eps: float, bound: float) -> None:
    """transformers norms the latents with 1e-6 whatever the config says; we follow the config."""
    transformers = pytest.importorskip("transformers")
    raw = tiny(rms_norm_eps=eps)
    config = transformers.GlmMoeDsaConfig(**raw)
    config._attn_implementation = "eager"
    oracle = transformers.GlmMoeDsaForCausalLM(config).eval().float()
    oracle.load_state_dict(stacked_experts(SOURCE))
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS])).logits[0]
    assert 0.5 < expected.abs().mean() < 2
    model = load_model(GlmMoeDsaConfig.from_dict(raw), SOURCE)
    got = run_chunks(Rig(model, resident(TINY, SOURCE), dirty_kv(model)), IDS, [])
    assert (got - expected).abs().max() < bound


def test_the_selection_matters_beyond_index_topk() -> None:
    sparse = run_chunks(rig_of("none"), IDS, [])
    wide = load_model(replace(TINY, index_topk=4096), SOURCE)
    dense = run_chunks(Rig(wide, resident(TINY, SOURCE), dirty_kv(wide)), IDS, [])
    differs = (sparse - dense).abs().amax(1) > 0
    assert not differs[: TINY.index_topk].any()
    assert differs[TINY.index_topk :].all()


@pytest.mark.parametrize(
    ("rounding", "kv_dtype"),
    [("none", "fp32"), ("deployed", "bf16"), ("deployed", "fp8"), ("deployed", "nvfp4")],
)
def test_chunks_mates_and_places_do_not_show(rounding: Rounding, kv_dtype: KVDtype) -> None:
    source = SOURCE if rounding == "none" else random_source(TINY, "fp8")
    rig = rig_of(rounding, kv_dtype, source)
    whole = run_chunks(rig, IDS, [])
    assert whole.isfinite().all()
    assert torch.equal(run_chunks(rig, IDS, CHUNKS, pages=PAGES), whole)
    mate = [(5 * i + 3) % 250 for i in range(90)]
    alone = run_chunks(rig, mate, [], pages=(1, 2))
    run_step(rig, [Piece(IDS[:60], 0, 0, PAGES), Piece(mate[:70], 0, 1, (1, 2, -1))])
    mixed = [Piece(mate[70:71], 70, 1, (1, 2, -1)), Piece(IDS[60:], 60, 0, PAGES)]
    mate_logits, logits = run_step(rig, mixed)
    assert torch.equal(logits, whole[60:])
    assert torch.equal(mate_logits[0], alone[70])


def test_only_the_wanted_logits_are_made() -> None:
    rig = rig_of("none")
    inputs = replace(forward_input([Piece(IDS[:9], 0)]), logits_indices=torch.tensor([4, 8]))
    output = rig.model.forward(inputs, rig.kv, rig.experts)
    assert output.hidden_states.shape == (9, TINY.hidden_size)
    assert torch.equal(output.logits, run_chunks(rig, IDS[:9], [])[[4, 8]])


def test_layers_without_an_indexer_attend_to_their_owner_s_selection() -> None:
    rig = rig_of("none")
    seen: list[Tensor] = []
    for layer in rig.model.layers:
        original = layer.attention._attend

        def record(query, latents, selected, rows, *, _call=original, **settings):  # type: ignore[no-untyped-def]
            seen.append(selected)
            return _call(query, latents, selected, rows, **settings)

        layer.attention._attend = record
    run_chunks(rig, IDS[:60], [])
    every = torch.arange(16)
    owner = 0
    for layer_idx, chosen in enumerate(seen):
        owner = layer_idx if TINY.owns_indexer(layer_idx) else owner
        assert torch.equal(chosen[:16], torch.where(every <= every[:, None], every, -1).int())
        assert torch.equal(chosen, seen[owner])
        assert (chosen[16:] >= 0).all()
    assert not torch.equal(seen[2], seen[6])


def unabsorbed_layer(x: Tensor, source: DictSource, config: GlmMoeDsaConfig, idx: int) -> Tensor:
    """One decoder layer over a whole prompt of at most index_topk tokens, written plainly."""
    p = f"model.layers.{idx}."
    w = {name.removeprefix(p): t.double() for name, t in source.tensors.items() if p in name}
    heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def rms(y: Tensor, name: str) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name]

    def rotate(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        exponent = torch.arange(0, y.shape[-1], 2, dtype=torch.float64) / y.shape[-1]
        angles = torch.arange(len(y))[:, None] * config.rope_theta**-exponent
        turn = torch.polar(torch.ones_like(angles), angles)
        turn = turn.view(len(y), *(1,) * (y.dim() - 2), -1)
        return torch.view_as_real(pairs * turn).flatten(-2)

    def mlp(y: Tensor, name: str) -> Tensor:
        gate, up = y @ w[f"{name}.gate_proj.weight"].T, y @ w[f"{name}.up_proj.weight"].T
        return (gate * gate.sigmoid() * up) @ w[f"{name}.down_proj.weight"].T

    u = rms(x, "input_layernorm.weight")
    a = "self_attn."
    q = rms(u @ w[a + "q_a_proj.weight"].T, a + "q_a_layernorm.weight") @ w[a + "q_b_proj.weight"].T
    q = q.view(len(x), heads, -1)
    kv = u @ w[a + "kv_a_proj_with_mqa.weight"].T
    c_kv = rms(kv[:, :latent], a + "kv_a_layernorm.weight")
    k_nope, v = (
        (c_kv @ w[a + "kv_b_proj.weight"].T)
        .view(len(x), heads, -1)
        .split((nope, config.v_head_dim), -1)
    )
    k = torch.cat((k_nope, rotate(kv[:, latent:])[:, None].expand(-1, heads, -1)), -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:])), -1)
    scores = torch.einsum("thd,shd->hts", q, k) * config.qk_head_dim**-0.5
    future = torch.ones(len(x), len(x)).triu(1).bool()
    mixed = torch.einsum("hts,shv->thv", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    x = x + mixed.flatten(1) @ w[a + "o_proj.weight"].T
    u = rms(x, "post_attention_layernorm.weight")
    chosen_by = (u @ w["mlp.gate.weight"].T).sigmoid()
    best = chosen_by + w["mlp.gate.e_score_correction_bias"]
    out = mlp(u, "mlp.shared_experts")
    for t in range(len(x)):
        experts = best[t].topk(config.num_experts_per_tok).indices.tolist()
        total = chosen_by[t, experts].sum()
        for e in experts:
            weight = chosen_by[t, e] / total * config.routed_scaling_factor
            out[t] += mlp(u[t : t + 1], f"mlp.experts.{e}")[0] * weight
    return x + out


def test_draft_layer_matches_a_plain_one_and_chunks_do_not_show() -> None:
    source = random_source(DRAFTING)
    model = load_model(DRAFTING, source, num_spec_tokens=1)
    experts, kv = resident(DRAFTING, source), dirty_kv(model)
    prompt, nexts = IDS[:16], IDS[1:17]
    hidden = model.forward(forward_input([Piece(prompt, 0)]), kv, experts).hidden_states
    output = model.draft(forward_input([Piece(nexts, 0)]), hidden, kv, experts)

    def rms(y: Tensor, name: str) -> Tensor:
        y = y / (y.square().mean(-1, keepdim=True) + DRAFTING.rms_norm_eps).sqrt()
        return y * source.load(name).double()

    p = "model.layers.8."
    embedded = source.load("model.embed_tokens.weight")[nexts].double()
    joined = (rms(embedded, p + "enorm.weight"), rms(hidden.double(), p + "hnorm.weight"))
    z = torch.cat(joined, -1) @ source.load(p + "eh_proj.weight").double().T
    expected = rms(unabsorbed_layer(z, source, DRAFTING, 8), p + "shared_head.norm.weight")
    assert (output.hidden_states - expected).abs().max() < 1e-4
    logits = expected @ source.load("lm_head.weight").double().T
    assert (output.logits - logits).abs().max() < 1e-4

    kv = dirty_kv(model)
    model.forward(forward_input([Piece(prompt, 0)]), kv, experts)
    parts = [
        model.draft(forward_input([Piece(nexts[a:b], a)]), hidden[a:b], kv, experts).logits
        for a, b in ((0, 5), (5, 6), (6, 16))
    ]
    assert torch.equal(torch.cat(parts), output.logits)


def test_the_draft_layer_must_exist_to_be_used() -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0"):
        load_model(TINY, SOURCE, num_spec_tokens=2)


@pytest.mark.parametrize(
    ("kv_dtype", "main", "with_draft"),
    [("bf16", 92_628, 93_912), ("fp8", 53_940, 54_728), ("nvfp4", 30_228, 30_712)],
)
def test_bytes_per_token_of_the_released_model(
    kv_dtype: KVDtype, main: int, with_draft: int
) -> None:
    config = GlmMoeDsaConfig.from_dict(released())
    for drafting, expected in ((False, main), (True, with_draft)):
        spec = CacheLayout(config, kv_dtype, "deployed", drafting).spec()
        assert spec.bytes_per_page == 64 * expected
        assert spec.bytes_per_seq == 0
        assert spec.page_size == 64
    assert [len(group.layers) for group in spec.groups] == [79, 22]


def test_fp8_is_decided_by_dtype_and_needs_its_scale() -> None:
    source = random_source(TINY, "fp8")
    name = "model.layers.0.self_attn.q_b_proj.weight"
    missing = {n: t for n, t in source.tensors.items() if n != name + "_scale_inv"}
    with pytest.raises(CheckpointError, match=r"q_b_proj\.weight is fp8 but there is no scale"):
        load_model(TINY, DictSource(missing))
    exact = run_chunks(rig_of("none", source=source), IDS[:40], [])
    rounded = run_chunks(rig_of("deployed", "fp8", source), IDS[:40], [])
    assert 0 < (exact - rounded).abs().mean() < 0.2


@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp8", 0.04), ("nvfp4", 0.13)])
def test_attention_error_of_narrow_rows_against_bf16(kv_dtype: KVDtype, bound: float) -> None:
    """Per layer, same inputs and selections: what 8- and 4-bit rounding of the latents costs."""
    source = random_source(TINY, "bf16")
    wide, narrow = rig_of("deployed", "bf16", source), rig_of("deployed", kv_dtype, source)
    attentions = []
    for layer, other in zip(wide.model.layers, narrow.model.layers, strict=True):
        attentions.append(BesideNarrow(layer.attention, other.attention, narrow.kv))
        layer.attention = attentions[-1]
    run_chunks(wide, IDS, [])
    errors = [round(attention.error, 4) for attention in attentions]
    assert all(0.001 < error < bound for error in errors), errors
