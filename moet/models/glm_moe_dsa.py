"""GLM-5.2, top to bottom: norms beside the residual stream, decoder layer, draft layer, model. Its
attention and its state have files of their own.

Weights are read by their official names, each in the format that its dtype says.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.errors import ConfigError
from moet.kernels.comm import RankPart, added
from moet.kernels.device_gemm import Device
from moet.kernels.join_norm import NormWeight
from moet.kernels.latent_places import latent_places
from moet.kernels.mixture import Mixture
from moet.kernels.moe import sigmoid_scores
from moet.kernels.norm import add_rms_norm
from moet.kernels.quant import Activations
from moet.kernels.rope import rope_frequencies
from moet.kernels.rows import Rows
from moet.models.base import (
    ExpertProvider,
    ForwardInput,
    KVCacheSpec,
    KVTensors,
    ModelOutput,
    TensorSource,
)
from moet.models.glm_moe_dsa_attention import Attention, Indexer, Step
from moet.models.glm_moe_dsa_cache import PAGE_SIZE, CacheLayout
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.layers import Embedding, LMHead, Weights
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.pipeline_stages import glm_moe_dsa_layers
from moet.models.sharding import WHOLE, Shard, divide_glm_moe_dsa
from moet.models.stage import ModelStage
from moet.models.step import step_rows

Sublayer = Tensor | RankPart | Mixture
"""What a sublayer made: [n, hidden], maybe not summed yet."""


class AddNorm:
    """What a sublayer made joins the residual stream; the next one gets the norm of that."""

    def __init__(self, weights: Weights, name: str, config: GlmMoeDsaConfig) -> None:
        dim, gpu = config.hidden_size, weights.gpu
        weight = weights.fp32(f"{name}.weight", dim)
        self.weight = weight if gpu is None else NormWeight(weight, gpu)
        self.eps = config.rms_norm_eps
        self._op = add_rms_norm.bind(arch=weights.settings.arch, dim=dim)

    def __call__(self, x: Tensor, y: Sublayer | None) -> tuple[Tensor, Activations]:
        """x: [n, hidden], the stream; y: what joins it. Returns the stream and its norm."""
        return self._op(x, y, self.weight, eps=self.eps)


class DecoderLayer:
    """Attention and an MLP or experts, each behind a norm and beside the residual stream."""

    def __init__(
        self,
        weights: Weights,
        config: GlmMoeDsaConfig,
        layout: CacheLayout,
        layer_idx: int,
    ) -> None:
        self.input_norm = AddNorm(weights, "input_layernorm", config)
        self.post_norm = AddNorm(weights, "post_attention_layernorm", config)
        attention, indexer = weights.under("self_attn."), None
        if config.owns_indexer(layer_idx):
            keys = layout.index_place(layer_idx)
            indexer = Indexer(attention.under("indexer."), config, keys)
        self.attention = Attention(attention, config, layout.latent_place(layer_idx), indexer)
        mlp = weights.under("mlp.")
        self.mlp: SwigluMlp | None = None
        self.moe: MoE | None = None
        if config.is_dense(layer_idx):
            self.mlp = _mlp(mlp, config.hidden_size, config.intermediate_size)
        else:
            self.moe = _moe(mlp, config, layer_idx)

    @property
    def owns_indexer(self) -> bool:
        return self.attention.indexer is not None

    def __call__(
        self,
        x: Tensor,
        y: Sublayer | None,
        step: Step,
        selection: Tensor | None,
        experts: ExpertProvider,
    ) -> tuple[Tensor, Sublayer, Tensor]:
        """x: [n, hidden], the residual stream, and y, what is still to join it, if anything.

        Returns both as they are behind the layer, and the selection that was used.
        """
        x, normed = self.input_norm(x, y)
        mixed, selection = self.attention(normed, step, selection)
        x, normed = self.post_norm(x, mixed)
        if self.mlp is not None:
            return x, self.mlp(normed), selection
        assert self.moe is not None
        return x, self.moe(normed, step.token_ids, step.rows.positions, experts), selection


def _mlp(weights: Weights, hidden: int, width: int) -> SwigluMlp:
    gate = weights.linear("gate_proj", width, hidden)
    up = weights.linear("up_proj", width, hidden)
    down = weights.input_linear("down_proj", hidden, width)
    return SwigluMlp(gate, up, down, limit=None, arch=weights.settings.arch)


def _moe(weights: Weights, config: GlmMoeDsaConfig, layer_idx: int) -> MoE:
    num_experts, hidden = config.n_routed_experts, config.hidden_size
    router = Router(
        weights.operand("gate", num_experts, hidden)[0],
        bias=weights.fp32("gate.e_score_correction_bias", num_experts),
        table=None,
        top_k=config.num_experts_per_tok,
        scaling_factor=config.routed_scaling_factor,
        scores=sigmoid_scores,
        arch=weights.settings.arch,
    )
    shared = _mlp(weights.under("shared_experts."), hidden, config.moe_intermediate_size)
    return MoE(
        layer_idx,
        router,
        shared,
        limit=None,
        weigh_output=True,
        settings=weights.settings,
        on_read=True,
        unsummed=True,
    )


class DraftLayer:
    """The multi-token-prediction layer: the next token and the state before it, joined."""

    def __init__(self, weights: Weights, config: GlmMoeDsaConfig, layer: DecoderLayer) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = weights.norm("enorm", hidden, eps=eps)
        self.hnorm = weights.norm("hnorm", hidden, eps=eps)
        self.eh_proj = weights.linear("eh_proj", hidden, 2 * hidden)
        self.norm = AddNorm(weights, "shared_head.norm", config)
        self.layer = layer

    def join(self, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        """embedded: [n, hidden] of the tokens at positions + 1; hidden_states at positions."""
        joined = (self.enorm(embedded), self.hnorm(hidden_states))
        return self.eh_proj(torch.cat(joined, dim=-1))


@dataclass(eq=False)
class GlmMoeDsa(ModelStage):
    """The whole model. `load` builds it; `forward` runs a step.

    hidden_states of its outputs: [num_tokens, hidden], after the final norm.
    """

    config: GlmMoeDsaConfig
    layout: CacheLayout
    embed: Embedding | None
    layers: list[DecoderLayer]
    norm: AddNorm | None
    head: LMHead | None
    draft_head: LMHead | None
    mtp: DraftLayer | None
    frequencies: Tensor
    shard: Shard
    dtype: torch.dtype
    device: Device | None = None

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings
        arch = "reference" if self.device is None else self.device.arch
        self._places = latent_places.bind(arch=arch, rope_dim=self.config.qk_rope_head_dim)

    def _step(self, token_ids: Tensor, rows: Rows, kv: KVTensors) -> Step:
        cos, sin, slots = self._places(rows, self.frequencies)
        return Step(token_ids, rows, kv, (cos, sin), slots)

    @classmethod
    def load(
        cls,
        config: GlmMoeDsaConfig,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
        shard: Shard = WHOLE,
        gpu: Device | None = None,
    ) -> GlmMoeDsa:
        """Read everything but the routed experts; the draft layer only for num_spec_tokens > 0.

        shard: what this process holds of it. gpu: where to; it must be there unless the arch is
        "reference".

        rounding "none" computes in fp32; "deployed" rounds activations to bf16 (to e4m3 before
        fp8 weights) and index keys to e4m3. KV rows follow kv_dtype in both.

        Raises ConfigError for settings that do not fit, CheckpointError for tensors that do not.
        """
        if num_spec_tokens and config.num_draft_blocks == 0:
            raise ConfigError(
                f"{num_spec_tokens} draft tokens were asked for, but num_nextn_predict_layers is 0 "
                "in this model's config.json; use 0"
            )
        config, source = divide_glm_moe_dsa(config, source, shard)
        weights = Weights(source, settings, gpu=gpu)
        own, drafts = glm_moe_dsa_layers(config, shard), num_spec_tokens > 0 and shard.is_last
        held = range(own.start, own.stop + drafts)
        layout = CacheLayout(config, kv_dtype, settings.rounding, num_spec_tokens > 0, held)
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        table = (config.vocab_size, config.hidden_size)
        embed = norm = head = draft_head = mtp = None
        layers = [
            DecoderLayer(weights.under(f"model.layers.{idx}."), config, layout, idx) for idx in held
        ]
        if drafts:
            idx = config.num_hidden_layers
            mtp = DraftLayer(weights.under(f"model.layers.{idx}."), config, layers.pop())
        if shard.is_first or drafts:
            embed = Embedding(weights.tensor("model.embed_tokens.weight", *table), dtype)
        if shard.is_last:
            norm = AddNorm(weights, "model.norm", config)
            head = draft_head = LMHead.load(weights, "lm_head", *table)
        if drafts and gpu is not None:
            draft_head = LMHead.guessing(weights, "lm_head", *table)
        return cls(
            config=config,
            layout=layout,
            embed=embed,
            layers=layers,
            norm=norm,
            head=head,
            draft_head=draft_head,
            mtp=mtp,
            frequencies=rope_frequencies(config.qk_rope_head_dim, config.rope_theta).to(
                weights.device
            ),
            shard=shard,
            dtype=dtype,
            device=gpu,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        """Latent rows of every layer, index keys of the layers that own an indexer."""
        return self.layout.spec()

    def rows(self, inputs: ForwardInput) -> Rows:
        every = len(inputs.positions)  # no state is overwritten, so any number of rows is short
        return step_rows(inputs, PAGE_SIZE, max_short=every, device=self.torch_device)

    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        step = self._step(token_ids, rows, kv)
        x = self._enter(token_ids)
        y: Sublayer | None = None
        selection: Tensor | None = None
        for n, layer in enumerate(self.layers, 1):
            inherited = None if layer.owns_indexer else selection
            x, y, selection = layer(x, y, step, inherited, experts)
            if n < self.num_parts:
                yield
        if self.norm is None:
            x = x if y is None else x + added(y)
            self.shard.comm.send(x)
        else:
            x = self.norm(x, y)[1].plain()
        return ModelOutput(self._logits(self.head, x, logits_indices), x)

    def _enter(self, token_ids: Tensor) -> Tensor:
        """What this process's first layer gets: [n, hidden]."""
        if not self.shard.is_first:
            return self._received(len(token_ids), self.config.hidden_size)
        assert self.embed is not None
        return self.embed(token_ids)

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        assert self.mtp is not None or not self.shard.is_last, "loaded without the draft layer"
        if self.mtp is not None:
            assert self.embed is not None
            step = self._step(token_ids, rows, kv)
            x = self.mtp.join(self.embed(token_ids), hidden_states)
            x, y, _ = self.mtp.layer(x, None, step, None, experts)
            hidden_states = self.mtp.norm(x, y)[1].plain()
        logits = self._logits(self.draft_head, hidden_states, logits_indices)
        return ModelOutput(logits, hidden_states)
