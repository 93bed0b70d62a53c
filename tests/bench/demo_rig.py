"""Small demo models, and moet's reference model over the same weights."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.train_demo.corpus import Renderer
from bench.train_demo.glm import Glm
from bench.train_demo.restore import GLM_NAMES
from bench.train_demo.tokenizer import Family
from bench.train_demo.v4 import V4
from moet.config import ModelSettings
from moet.models import load_model
from moet.models.base import ForwardInput, TensorSource
from moet.models.layers import Weights
from moet.models.moe import ResidentExperts

DEMO = Path(__file__).parents[2] / "moet" / "demo"
SETTINGS = ModelSettings(rounding="none")


@cache
def renderer(family: Family) -> Renderer:
    return Renderer(family, DEMO / family)


def reference_logits(model: nn.Module, source: TensorSource, ids: Tensor) -> tuple[Tensor, Tensor]:
    """moet's logits and draft logits over one sequence. ids: [T + 1]."""
    assert isinstance(model, V4 | Glm)
    config, length = model.config, len(ids) - 1
    served = load_model(config.to_dict(), source, SETTINGS, "fp32", 1)
    layers = config.num_hidden_layers
    if isinstance(model, V4):
        prefixes = {i: f"layers.{i}.ffn.experts." for i in range(layers)}
        prefixes[layers] = "mtp.0.ffn.experts."
        names = ("w1", "w3", "w2")
    else:
        first = config.first_k_dense_replace
        prefixes = {i: f"model.layers.{i}.mlp.experts." for i in range(first, layers + 1)}
        names = GLM_NAMES
    experts = ResidentExperts.load(
        Weights(source, SETTINGS),
        prefixes,
        num_experts=config.n_routed_experts,
        dim=config.hidden_size,
        inter=config.moe_intermediate_size,
        names=names,
    )
    spec = served.kv_cache_spec()
    pages = math.ceil(length / spec.page_size)
    kv = {
        group.name: torch.zeros(
            len(group.layers),
            pages if group.kind == "paged" else 1,
            group.page_bytes,
            dtype=torch.uint8,
        )
        for group in spec.groups
    }

    def step(token_ids: Tensor) -> ForwardInput:
        return ForwardInput(
            token_ids=token_ids,
            positions=torch.arange(length),
            cu_seqlens_q=(0, length),
            seq_slots=torch.zeros(1, dtype=torch.long),
            page_table=torch.arange(pages).unsqueeze(0),
            seq_lens=(length,),
            logits_indices=torch.arange(length),
        )

    out = served.forward(step(ids[:-1]), kv, experts)
    drafted = served.draft(step(ids[1:]), out.hidden_states, kv, experts)  # type: ignore[attr-defined]
    return out.logits, drafted.logits


@torch.no_grad()
def graph_logits(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the training graph, attending to the indexers' choice only."""
    inputs, after = ids[None, :-1], ids[None, 1:]
    if isinstance(model, V4):
        streams, _, _ = model.streams(inputs)
        drafted, _ = model.draft(after, streams)
        return model.logits(streams)[0], model.draft_logits(drafted)[0]
    assert isinstance(model, Glm)
    look = model.look(inputs.shape[1])
    hidden, _, _ = model.hidden(inputs, look)
    drafted, _, _ = model.draft(after, hidden, look)
    return model.lm_head(hidden)[0], model.lm_head(drafted)[0]
