"""DeepSeek-V4-Flash, top to bottom: residual streams, decoder layer, head, MTP block, model. Its
attention has a file of its own. Tensors to logits; knows nothing of scheduling."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.errors import CheckpointError, ConfigError
from moet.kernels.comm import RankPart, added
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.gemm import streamed
from moet.kernels.hyper_connection import (
    Logits,
    Site,
    balanced,
    hc_enter,
    hc_head_norm,
    hc_pass,
    hc_post,
)
from moet.kernels.mixture import Mixture
from moet.kernels.moe import sqrt_softplus
from moet.kernels.quant import Activations
from moet.kernels.rows import Rows
from moet.models.base import (
    ExpertProvider,
    ForwardInput,
    KVCacheSpec,
    KVTensors,
    ModelOutput,
    TensorSource,
)
from moet.models.deepseek_v4_attention import Attention, RopeTables, Step
from moet.models.deepseek_v4_cache import PAGE_SIZE, CacheLayout
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.layers import Embedding, LMHead, Weights
from moet.models.moe import MoE, Router, SwigluMlp
from moet.models.pipeline_stages import deepseek_v4_layers
from moet.models.sharding import WHOLE, Shard, divide_deepseek_v4
from moet.models.stage import ModelStage
from moet.models.step import step_rows


class Residual:
    """The streams of a step, with a sublayer's output that is not mixed in before the next sublayer
    begins, so that both happen in one op."""

    def __init__(self, streams: Tensor) -> None:
        self.streams = streams
        # y, post, mix
        self.pending: tuple[Tensor | Mixture, Tensor, Tensor | Logits] | None = None


def _site(weights: Weights, config: DeepseekV4Config, name: str, norm: str) -> Site:
    """A site of a layer, or the head: fn is where the ops that collapse streams want it."""
    mult, dim, is_head = config.hc_mult, config.hidden_size, name == "head"
    rows = mult if is_head else (2 + mult) * mult
    fn = weights.fp32(f"hc_{name}_fn", rows, mult * dim)
    return Site(
        streamed(fn) if weights.gpu is None else MixMatrix(fn, weights.gpu),
        weights.fp32(f"hc_{name}_base", rows),
        weights.fp32(f"hc_{name}_scale", 1 if is_head else 3),
        weights.fp32(norm, dim),
        config.rms_norm_eps,
        config.hc_eps,
        num_iters=0 if is_head else config.hc_sinkhorn_iters,
    )


class HyperConnection:
    """One site of a layer: streams to sublayer input, sublayer output back to streams."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, name: str) -> None:
        self.site = _site(weights, config, name, f"{name}_norm.weight")
        placed, arch = weights.gpu is not None, weights.settings.arch
        facts = {"mult": config.hc_mult, "dim": config.hidden_size, "placed": placed}
        self._enter = hc_enter.bind(arch=arch, **facts)
        self._pass = hc_pass.bind(arch=arch, **facts)
        self._post = hc_post.bind(arch=arch, **facts)

    def enter(self, residual: Residual) -> tuple[Tensor | Activations, Tensor, Tensor | Logits]:
        """The sublayer's normed input [n, dim]; post [n, h] and mix [n, h, h] for its output.

        What is pending in the residual is mixed into its streams first.
        """
        if residual.pending is None:
            return self._enter(residual.streams, self.site)
        y, post, mix = residual.pending
        residual.pending = None  # a chunk's mixture is large
        residual.streams, x, post, mix = self._pass(y, residual.streams, post, mix, self.site)
        return x, post, mix

    def finish(self, residual: Residual) -> Tensor:
        """The streams with everything mixed in."""
        if residual.pending is not None:
            y, post, mix = residual.pending
            residual.streams = self._post(added(y), residual.streams, post, balanced(mix))
            residual.pending = None
        return residual.streams


class Block:
    """A decoder layer: attention, then experts, each between collapse and expansion."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, layer_idx: int
    ) -> None:
        self.hc_attn = HyperConnection(weights, config, "attn")
        self.hc_ffn = HyperConnection(weights, config, "ffn")
        self.attn = Attention(weights.under("attn."), config, layout, layer_idx)
        self.ffn = _load_moe(weights.under("ffn."), config, layer_idx)

    def __call__(self, residual: Residual, step: Step, experts: ExpertProvider) -> None:
        """Pass the residual on, this layer's last output pending in it."""
        x, post, mix = self.hc_attn.enter(residual)
        residual.pending = self.attn(x, step), post, mix
        x, post, mix = self.hc_ffn.enter(residual)
        y = self.ffn(x, step.token_ids, step.rows.positions, experts)
        assert not isinstance(y, RankPart), "sums of ranks are asked for"
        residual.pending = y, post, mix

    def finish(self, residual: Residual) -> Tensor:
        """[n, h, dim], behind this layer."""
        return self.hc_ffn.finish(residual)

    def hand_on(self, residual: Residual) -> Tensor:
        """As finish, with the bits that the next layer's first site would make."""
        self.hc_ffn.enter(residual)  # what else it makes is not read
        return residual.streams


def _load_moe(weights: Weights, config: DeepseekV4Config, layer_idx: int) -> MoE:
    dim, inter = config.hidden_size, config.moe_intermediate_size
    num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    settings, limit = weights.settings, config.swiglu_limit
    bias = table = None
    if config.is_hash_layer(layer_idx):
        table = weights.tensor("gate.tid2eid", config.vocab_size, top_k).long()
        if int(table.min()) < 0 or int(table.max()) >= num_experts:
            raise CheckpointError(
                f"{weights.prefix}gate.tid2eid names expert {int(table.max())} "
                f"(lowest {int(table.min())}); there are {num_experts}"
            )
    else:
        bias = weights.fp32("gate.bias", num_experts)
    router = Router(
        weights.operand("gate", num_experts, dim)[0],
        bias=bias,
        table=table,
        top_k=top_k,
        scaling_factor=config.routed_scaling_factor,
        scores=sqrt_softplus,
        arch=settings.arch,
    )
    shared = SwigluMlp(
        weights.linear("shared_experts.w1", inter, dim),
        weights.linear("shared_experts.w3", inter, dim),
        weights.input_linear("shared_experts.w2", dim, inter),
        limit=limit,
        arch=settings.arch,
    )
    return MoE(layer_idx, router, shared, limit=limit, settings=settings, unsummed=True)


class Head:
    """Streams to logits: last collapse, norm, vocabulary projection."""

    def __init__(self, weights: Weights, config: DeepseekV4Config, lm_head: LMHead) -> None:
        self.site = _site(weights, config, "head", "norm.weight")
        self.lm_head = lm_head
        placed, arch = weights.gpu is not None, weights.settings.arch
        facts = {"mult": config.hc_mult, "dim": config.hidden_size, "placed": placed}
        self._collapse = hc_head_norm.bind(arch=arch, **facts)

    def __call__(self, streams: Tensor) -> Tensor:
        """[n, h, dim] to [n, vocab_size] fp32."""
        return self.lm_head(self._collapse(streams, self.site))


class MTPBlock:
    """The draft block: the next token and the target's streams to logits one token further on."""

    def __init__(
        self, weights: Weights, config: DeepseekV4Config, layout: CacheLayout, lm_head: LMHead
    ) -> None:
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = weights.norm("enorm", dim, eps=eps)
        self.hnorm = weights.norm("hnorm", dim, eps=eps)
        self.e_proj = weights.linear("e_proj", dim, dim)
        self.h_proj = weights.linear("h_proj", dim, dim)
        self.block = Block(weights, config, layout, config.num_hidden_layers)
        self.head = Head(weights, config, lm_head)

    def __call__(
        self, embedded: Tensor, streams: Tensor, step: Step, experts: ExpertProvider
    ) -> Tensor:
        """embedded: [n, dim] of the tokens at positions + 1; streams: [n, h, dim] at positions."""
        e = self.e_proj(self.enorm(embedded))
        h = self.h_proj(self.hnorm(streams).flatten(0, 1)).view(streams.shape)
        residual = Residual(h + e.unsqueeze(1))
        self.block(residual, step, experts)
        return self.block.finish(residual)


@dataclass(eq=False)
class DeepseekV4(ModelStage):
    """The whole model. `load` builds it; `forward` runs a step.

    hidden_states of its outputs: [num_tokens, h, dim], the streams before the last collapse.
    """

    config: DeepseekV4Config
    layout: CacheLayout
    embed: Embedding | None
    layers: list[Block]
    head: Head | None
    mtp: MTPBlock | None
    tables: RopeTables
    dtype: torch.dtype
    shard: Shard = WHOLE
    device: Device | None = None

    def __post_init__(self) -> None:
        self.vocab_size = self.config.vocab_size
        self.max_position_embeddings = self.config.max_position_embeddings

    @classmethod
    def load(
        cls,
        config: DeepseekV4Config,
        source: TensorSource,
        settings: ModelSettings,
        kv_dtype: KVDtype,
        num_spec_tokens: int = 0,
        shard: Shard = WHOLE,
        gpu: Device | None = None,
    ) -> DeepseekV4:
        """Read everything but the routed experts, as far as the shard has it.

        rounding "none" computes in fp32 and needs kv_dtype "fp32"; "deployed" rounds activations to
        bf16 and fp8. num_spec_tokens > 0 loads the draft block and makes room for its rows.

        gpu: where to; it must be there unless the arch is "reference".

        Raises ConfigError for settings that do not fit, CheckpointError for tensors that do not.
        """
        if settings.rounding == "none" and kv_dtype != "fp32":
            raise ConfigError(
                f"rounding none keeps all numbers in fp32, but the KV format is {kv_dtype}; "
                "use --kv-cache-dtype fp32 with it"
            )
        config, source = divide_deepseek_v4(config, source, shard)
        weights = Weights(source, settings, gpu=gpu)
        if num_spec_tokens and not weights.has("mtp.0.e_proj.weight"):
            raise ConfigError(
                f"{num_spec_tokens} draft tokens were asked for, but the checkpoint has no MTP "
                "block (mtp.0.e_proj.weight); use 0"
            )
        dtype = torch.float32 if settings.rounding == "none" else torch.bfloat16
        own = deepseek_v4_layers(config, shard)
        is_first, is_last, drafts = shard.is_first, shard.is_last, num_spec_tokens > 0
        held = range(own.start, own.stop + (is_last and drafts))
        layout = CacheLayout(
            config, kv_dtype, num_spec_tokens, held if shard.num_stages > 1 else None
        )
        vocab, dim = config.vocab_size, config.hidden_size
        lm_head = draft_head = LMHead.load(weights, "head", vocab, dim) if is_last else None
        if is_last and drafts and gpu is not None:
            draft_head = LMHead.guessing(weights, "head", vocab, dim)
        reads_tokens = is_first or (is_last and drafts)
        return cls(
            config=config,
            layout=layout,
            embed=Embedding(weights.tensor("embed.weight", vocab, dim), dtype)
            if reads_tokens
            else None,
            layers=[Block(weights.under(f"layers.{i}."), config, layout, i) for i in own],
            head=None if lm_head is None else Head(weights, config, lm_head),
            mtp=MTPBlock(weights.under("mtp.0."), config, layout, draft_head)
            if drafts and draft_head is not None
            else None,
            tables=RopeTables(config, weights.device, arch=settings.arch),
            dtype=dtype,
            shard=shard,
            device=gpu,
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.layout.spec()

    def rows(self, inputs: ForwardInput) -> Rows:
        max_short = self.layout.max_short
        return step_rows(inputs, PAGE_SIZE, max_short=max_short, device=self.torch_device)

    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        step = self._step(token_ids, rows, kv)
        residual = Residual(self._enter(token_ids))
        for n, layer in enumerate(self.layers, 1):
            layer(residual, step, experts)
            if n < self.num_parts:
                yield
        last = self.layers[-1]
        if self.shard.is_last:
            streams = last.finish(residual)
        else:
            streams = last.hand_on(residual)
            self.shard.comm.send(streams)
        return ModelOutput(self._logits(self.head, streams, logits_indices), streams)

    def _step(self, token_ids: Tensor, rows: Rows, kv: KVTensors) -> Step:
        return Step(token_ids, rows, kv, self.tables, self.layout.ring_entries)

    def _enter(self, token_ids: Tensor) -> Tensor:
        """The streams before this process's first layer: [n, h, dim]."""
        mult, dim = self.config.hc_mult, self.config.hidden_size
        if not self.shard.is_first:
            return self._received(len(token_ids), mult, dim)
        assert self.embed is not None
        return self.embed(token_ids).unsqueeze(1).expand(-1, mult, -1).contiguous()

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        assert self.mtp is not None or not self.shard.is_last, "loaded without a draft block"
        head = None
        if self.mtp is not None:
            assert self.embed is not None
            step = self._step(token_ids, rows, kv)
            embedded = self.embed(token_ids)
            hidden_states = self.mtp(embedded, hidden_states, step, experts)
            head = self.mtp.head
        return ModelOutput(self._logits(head, hidden_states, logits_indices), hidden_states)
