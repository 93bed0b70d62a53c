"""GLM-5.2's config.json as a checked value. Knows nothing of tensors or arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from moet.models.config_json import check_assumed, check_known, read_config, require, typed

ARCHITECTURE = "GlmMoeDsaForCausalLM"
Flavour = Literal["bf16", "fp8", "nvfp4"]

# Values that the arithmetic assumes: another one needs other code, so it must stop the load.
_ASSUMED: Mapping[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": [ARCHITECTURE],
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_scaling": None,
    "index_topk_pattern": None,
}
_ASSUMED_ROPE: Mapping[str, Any] = {"rope_type": "default", "partial_rotary_factor": 1.0}
# Published values that contradict each other between releases and mean nothing here: head_dim is
# 192 or 64, bos_token_id is 0 although no prompt begins with it, one latent serves all KV heads.
_NO_EFFECT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "ep_size",
        "head_dim",
        "initializer_range",
        "layer_types",
        "num_key_value_heads",
        "output_router_logits",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_CHECKED_APART = frozenset({"rope_parameters", "mlp_layer_types", "qk_head_dim", "num_experts"})
_FP8: Mapping[str, Any] = {
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_NVFP4: Mapping[str, Any] = {"quant_algo": "NVFP4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GlmMoeDsaConfig:
    """The numbers of config.json, spelled as there. `rope_theta` comes from rope_parameters."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    indexer_types: tuple[str, ...] = ()  # empty: by the rule of freq and offset
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            require(getattr(self, name) > 0, name, getattr(self, name), "it must be positive")
        layers, experts = self.num_hidden_layers, self.n_routed_experts
        dense, chosen = self.first_k_dense_replace, self.num_experts_per_tok
        require(0 <= dense <= layers, "first_k_dense_replace", dense, f"there are {layers} layers")
        require(chosen <= experts, "num_experts_per_tok", chosen, f"there are {experts} experts")
        rope = self.qk_rope_head_dim
        fits = rope % 2 == 0 and rope <= self.index_head_dim
        limit = f"it must be even and at most index_head_dim {self.index_head_dim}"
        require(fits, "qk_rope_head_dim", rope, limit)
        self._check_indexers()
        for token_id in self.eos_token_id:
            inside = 0 <= token_id < self.vocab_size
            require(inside, "eos_token_id", token_id, f"vocab_size is {self.vocab_size}")

    def _check_indexers(self) -> None:
        types = self.indexer_types
        known = set(types) <= {"full", "shared"}
        require(known, "indexer_types", sorted(set(types)), "known are 'full' and 'shared'")
        if types:
            limit = f"{self.num_hidden_layers} layers need an entry each"
            require(len(types) == self.num_hidden_layers, "indexer_types", len(types), limit)
        first = "the first layer has no selection to share"
        require(self.owns_indexer(0), "indexer_types[0]", "shared", first)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_draft_blocks(self) -> int:
        """Layers after the decoder: model.layers.{num_hidden_layers}, ..."""
        return self.num_nextn_predict_layers

    def owns_indexer(self, layer_idx: int) -> bool:
        """Whether a layer chooses positions itself; the others reuse the nearest owner below.

        Draft layers (from num_hidden_layers on) always do.
        """
        if layer_idx >= self.num_hidden_layers:
            return True
        if self.indexer_types:
            return self.indexer_types[layer_idx] == "full"
        return max(layer_idx - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def is_dense(self, layer_idx: int) -> bool:
        """Whether a layer has one MLP instead of experts."""
        return layer_idx < self.first_k_dense_replace

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GlmMoeDsaConfig:
        """Check a parsed config.json. Raises ConfigError naming key, value and limit."""
        known = {field.name for field in fields(cls)}
        ignored = _NO_EFFECT | _CHECKED_APART | {"quantization_config"}
        check_known(raw, known | set(_ASSUMED) | ignored)
        require("model_type" in raw, "model_type", None, "every release states it")
        check_assumed(raw, _ASSUMED)
        _check_quantization(raw.get("quantization_config") or {})
        stated = {name: value for name, value in raw.items() if value is not None}
        stated["rope_theta"] = _rope_theta(raw)
        if isinstance(stated.get("eos_token_id"), int):
            stated["eos_token_id"] = [stated["eos_token_id"]]
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in stated:
                values[field.name] = typed(field.name, stated[field.name], str(field.type))
            else:
                absent = field.default is MISSING
                require(not absent, field.name, None, "every release states it")
        config = cls(**values)
        _check_derived(config, raw)
        return config

    @classmethod
    def from_file(cls, path: Path) -> GlmMoeDsaConfig:
        """Read config.json. Raises ConfigError if it is absent, not JSON, or not this model."""
        return cls.from_dict(read_config(path))

    def to_dict(self, flavour: Flavour = "bf16") -> dict[str, Any]:
        """The same as a config.json in the released spelling, assumed values included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rope = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
        layers = range(self.num_hidden_layers)
        values["eos_token_id"] = list(self.eos_token_id)
        values["indexer_types"] = ["full" if self.owns_indexer(i) else "shared" for i in layers]
        derived = {
            "rope_parameters": rope,
            "mlp_layer_types": ["dense" if self.is_dense(i) else "sparse" for i in layers],
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "dtype": "bfloat16",
        }
        return dict(_ASSUMED) | values | derived | _quantization_config(flavour)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_topk_freq",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _rope_theta(raw: Mapping[str, Any]) -> Any:
    """rope_parameters.rope_theta: a fallback base works on short prompts and fails on long ones."""
    rope = raw.get("rope_parameters")
    require(isinstance(rope, dict), "rope_parameters", rope, "an object is needed")
    assert isinstance(rope, dict)
    check_known(rope, {"rope_theta", *_ASSUMED_ROPE}, "rope_parameters")
    check_assumed(rope, _ASSUMED_ROPE, "rope_parameters.")
    theta = rope.get("rope_theta")
    require(theta is not None, "rope_parameters.rope_theta", None, "every release states it")
    agrees = raw.get("rope_theta", theta) == theta
    require(agrees, "rope_theta", raw.get("rope_theta"), f"rope_parameters says {theta}")
    return theta


def _check_derived(config: GlmMoeDsaConfig, raw: Mapping[str, Any]) -> None:
    """Values that follow from others, where a release states them too."""
    layers = range(config.num_hidden_layers)
    kinds = ["dense" if config.is_dense(i) else "sparse" for i in layers]
    limit = f"only the first {config.first_k_dense_replace} layers may be dense"
    stated = raw.get("mlp_layer_types")
    require(stated is None or stated == kinds, "mlp_layer_types", stated, limit)
    for name, value in (
        ("qk_head_dim", config.qk_head_dim),
        ("num_experts", config.n_routed_experts),
    ):
        require(raw.get(name, value) == value, name, raw.get(name), f"the other keys say {value}")


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    """The method only: which tensors are quantised is read from their dtypes, not from lists."""
    method = quantization.get("quant_method")
    known = method in ("fp8", "modelopt") or not quantization
    require(known, "quantization_config.quant_method", method, "known are 'fp8' and 'modelopt'")
    assumed = _FP8 if method == "fp8" else _NVFP4
    check_assumed(quantization, assumed, "quantization_config.")


def _quantization_config(flavour: Flavour) -> dict[str, Any]:
    if flavour == "bf16":
        return {}
    if flavour == "fp8":
        return {"quantization_config": {"quant_method": "fp8", **_FP8}}
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    groups = {"group_0": {"weights": group, "input_activations": group, "targets": ["Linear"]}}
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    quantization = {"quant_method": "modelopt", **_NVFP4, "config_groups": groups}
    return {"quantization_config": quantization | {"kv_cache_scheme": cache}}
